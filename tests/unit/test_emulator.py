"""Which QEMU a program is: told from its file until that changes; a wrapper is asked."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from pydataplane import emulator
from tests.support.scratch import short_directory

OLDER = b"\x7fELF..QEMU emulator version 8.1.5\0vhost-user-scsi-pci\0"
NEWER = b"\x7fELF..QEMU emulator version 8.2.0\0vhost-user-scsi-pci\0"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of any program."""
    monkeypatch.setattr(emulator, "_known", {})


def program(path: Path, content: bytes = NEWER, mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_only_8_2_and_newer_reconnect(tmp_path: Path) -> None:
    older, newer = program(tmp_path / "older", OLDER), program(tmp_path / "newer")
    assert emulator.of(older) == emulator.Qemu(older, (8, 1), True, vhost_user_blk=False)
    assert emulator.of(newer) == emulator.Qemu(newer, (8, 2), True, vhost_user_blk=False)
    assert not emulator.reconnects(older, "x86_64")
    assert emulator.reconnects(newer, "x86_64")


def test_one_without_vhost_user_scsi(tmp_path: Path) -> None:
    """Where it is not known, as of a wrapper, nobody is told that it lacks it."""
    without = program(tmp_path / "without", NEWER.replace(b"vhost-user-scsi-pci", b"x"))
    assert emulator.lacks_scsi(without, "x86_64")
    assert not emulator.lacks_scsi(program(tmp_path / "with", OLDER), None)
    assert not emulator.lacks_scsi(str(tmp_path / "nothing"), None)
    wrapper = program(
        tmp_path / "qemu-wrapper", b"#!/bin/sh\nprintf 'QEMU emulator %s 8.2.1 x' version"
    )
    found = emulator.of(wrapper)
    assert found is not None and found.is_wrapper
    assert not emulator.lacks_scsi(wrapper, None)


def test_which_lets_guests_carry_protection_information(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = program(tmp_path / "without", NEWER)
    has_it = program(tmp_path / "with", NEWER + b"t10_pi\0")
    assert emulator.protects(has_it, None) is True
    assert emulator.protects(without, None) is False
    assert emulator.protects(program(tmp_path / "like", NEWER + b"t10_pids\0"), None) is False
    # The end of one part that is read, and the beginning of the next.
    cut = b"\0" * (emulator.CHUNK_BYTES - len(NEWER) - 3)
    assert emulator.protects(program(tmp_path / "cut", NEWER + cut + b"t10_pi\0"), None) is True
    assert emulator.protects(str(tmp_path / "nothing"), None) is None
    assert emulator.protects(program(tmp_path / "else", b"\x7fELF t10_pi\0"), None) is None
    monkeypatch.setattr(emulator, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(emulator, "OUTSIDE", str(tmp_path / "none"))
    assert emulator.protects(None, None) is None
    (tmp_path / f"qemu-system-{platform.machine()}").symlink_to("with")
    assert emulator.protects(None, None) is True


def test_what_a_wrapper_starts_is_known_by_its_version() -> None:
    with short_directory("qemu-") as folder:
        path, version = wrapper(folder)
        for said, expected in (("10.0.2", True), ("7.2.22", True), ("7.1.0", None)):
            version.write_text(said)
            assert emulator.protects(path, None) is expected


def test_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    program(tmp_path / "newer")
    (tmp_path / "kvm").symlink_to("newer")
    assert emulator.reconnects(str(tmp_path / "kvm"), None)


@pytest.mark.parametrize("kind", ["nothing", "folder", "fifo", "not a program", "no QEMU"])
def test_what_cannot_be_told_does_not_reconnect(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "qemu"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o755)
    elif kind == "not a program":
        program(path, mode=0o644)
    elif kind == "no QEMU":
        program(tmp_path / "else", b"\x7fELF")
    assert not emulator.reconnects(str(path), None)
    assert emulator.of("qemu-system-x86_64") is None, "libvirt takes no relative path"
    assert emulator.of("/q\0") is None


def test_a_device_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real: Callable[..., int] = os.open

    def noted(path: str, flags: int) -> int:
        opened.append(flags)
        return real(path, flags)

    monkeypatch.setattr(emulator.os, "open", noted)  # type: ignore[attr-defined]
    assert emulator.of("/dev/zero") is None
    assert [flags & os.O_PATH for flags in opened] == [os.O_PATH]


def test_a_file_is_searched_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    real = emulator.search

    def noted(number: int, path: str) -> emulator.Qemu:
        searched.append(path)
        return real(number, path)

    monkeypatch.setattr(emulator, "search", noted)
    path = program(tmp_path / "qemu", OLDER)
    os.utime(path, ns=(1, 1))
    assert not any(emulator.reconnects(path, None) for _ in range(3))
    assert searched == [path]
    program(tmp_path / "qemu")  # as large
    assert all(emulator.reconnects(path, None) for _ in range(3))
    assert searched == [path] * 2
    changed = Path(path).stat().st_mtime_ns
    program(tmp_path / "new", OLDER + b"\0")
    os.utime(tmp_path / "new", ns=(changed, changed))
    (tmp_path / "new").rename(path)  # as old, as a package's file may be
    assert not emulator.reconnects(path, None)
    assert searched == [path] * 3


def test_few_programs_are_remembered(tmp_path: Path) -> None:
    for n in range(emulator.KNOWN_MAX + 5):
        assert emulator.reconnects(program(tmp_path / f"qemu{n}"), None)
    assert 0 < len(emulator._known) <= emulator.KNOWN_MAX


def test_the_default_is_what_libvirt_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "local", tmp_path / "bin"
    outside = tmp_path / "libexec/qemu-kvm"
    monkeypatch.setattr(emulator, "FOLDERS", (str(first), str(second)))
    monkeypatch.setattr(emulator, "OUTSIDE", str(outside))
    host = platform.machine()
    assert emulator.default(None) is None
    assert not emulator.reconnects(None, None)
    last = program(outside)
    assert emulator.default(None) == emulator.default(host) == last
    assert emulator.default("sparc") is None, "it is for the host's own architecture"
    assert emulator.reconnects(None, None)
    own = program(second / f"qemu-system-{host}", OLDER)
    assert emulator.default(None) == emulator.default(host) == own
    assert not emulator.reconnects(None, host)
    other = program(second / "qemu-system-arm")
    assert emulator.default("armv7l") == other
    newer = program(first / f"qemu-system-{host}")
    assert emulator.default(host) == newer


WRAPPER = """\
#!/bin/sh
[ "$*" = --version ] || exit 3
{more}
echo "QEMU emulator version $(cat {version}) (Debian)"
id -u > {folder}/uid
"""


def wrapper(folder: Path, more: str = "") -> tuple[str, Path]:
    """Makes one, and the file from which it has the version."""
    folder.chmod(0o777)
    version = folder / "version"
    version.write_text("10.0.2")
    text = WRAPPER.format(version=version, folder=folder, more=more)
    return program(folder / "qemu-wrapped", text.encode()), version


def test_a_wrapper_is_asked_each_time_and_as_nobody() -> None:
    with short_directory("qemu-") as folder:
        path, version = wrapper(folder)
        assert emulator.reconnects(path, None)
        uid = emulator.NOBODY if os.geteuid() == 0 else os.geteuid()
        assert int((folder / "uid").read_text()) == uid
        version.write_text("7.2.22")  # what it starts was replaced, it was not
        assert not emulator.reconnects(path, None)


@pytest.mark.parametrize("name", ["script", "qemu-system-x86_64"])
@pytest.mark.parametrize("mode", [0o755, 0o775, 0o757])
def test_nothing_else_is_run(name: str, mode: int) -> None:
    with short_directory("qemu-") as folder:
        path = Path(wrapper(folder)[0]).rename(folder / name)
        path.chmod(mode)
        assert emulator.reconnects(str(path), None) == (name != "script" and mode == 0o755)
        assert (folder / "uid").exists() == (name != "script" and mode == 0o755)


@pytest.mark.parametrize("more", ["exit 1", "sleep 1000 & sleep 1000", "exec cat /dev/zero"])
def test_a_wrapper_that_fails_is_older(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "ASK_S", 0.5)
    with short_directory("qemu-") as folder:
        assert not emulator.reconnects(wrapper(folder, more)[0], None)


def test_a_wrapper_that_cannot_be_run_is_older(tmp_path: Path) -> None:
    assert not emulator.reconnects(program(tmp_path / "qemu", b"\x7fELF"), None)
