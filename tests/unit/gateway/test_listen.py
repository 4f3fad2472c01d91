"""Who may connect to the gateway's sockets in libvirtd's place, by what libvirtd.conf says."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin.gateway.listen import Admission, in_place_of

UPSTREAM = Path("/run/libvirt-real/libvirt-sock")
USUAL = (Admission(0o660, "libvirt"), Admission(0o666, "libvirt"))


@pytest.mark.parametrize(
    ("conf", "rw", "ro"),
    [
        ("", *USUAL),
        ('# unix_sock_group = "adm"\n', *USUAL),
        ('unix_sock_group = "adm"\n', Admission(0o660, "adm"), Admission(0o666, "adm")),
        (
            "unix_sock_group = 'adm'  # ours\nunix_sock_rw_perms = \"0770\"\n"
            'unix_sock_ro_perms = "0770"',
            Admission(0o660, "adm"),
            Admission(0o660, "adm"),
        ),
        ('unix_sock_rw_perms = "0777"\nunix_sock_ro_perms = "0777"', *USUAL),
        ('unix_sock_rw_perms = "0770"\n', Admission(0o660, ""), USUAL[1]),
        ('unix_sock_rw_perms = "0700"\n', Admission(0o600, ""), USUAL[1]),
        ('unix_sock_ro_perms = "0700"\n', USUAL[0], Admission(0o600, "")),
        ('unix_sock_rw_perms = "u=rw"\n', Admission(0o600, ""), USUAL[1]),
        # libvirtd's own was moved to where nobody else comes: the modes are that one's.
        (
            'unix_sock_dir = "/run/libvirt-real"\nunix_sock_rw_perms = "0700"\n'
            'unix_sock_ro_perms = "0700"\nunix_sock_group = "adm"',
            Admission(0o660, "adm"),
            Admission(0o666, "adm"),
        ),
        (
            'unix_sock_dir = "/elsewhere"\nunix_sock_rw_perms = "0700"\n',
            Admission(0o600, ""),
            USUAL[1],
        ),
    ],
)
def test_who_was_to_use_libvirtds_socket(
    tmp_path: Path, conf: str, rw: Admission, ro: Admission
) -> None:
    file = tmp_path / "libvirtd.conf"
    file.write_text(conf)
    assert in_place_of(UPSTREAM, file, read_only=False) == rw
    assert in_place_of(UPSTREAM, file, read_only=True) == ro


def test_a_configuration_that_is_not_there_or_not_readable(tmp_path: Path) -> None:
    file = tmp_path / "libvirtd.conf"
    assert in_place_of(UPSTREAM, file, read_only=False) == USUAL[0]
    file.write_bytes(b"\xff")
    assert in_place_of(UPSTREAM, file, read_only=True) == Admission(0o600, "")
    file.unlink()
    file.mkdir()
    assert in_place_of(UPSTREAM, file, read_only=False) == Admission(0o600, "")
