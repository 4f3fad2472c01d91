"""Authentication that libvirtd would ask for if it did not see root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugin.gateway import libvirtdconf
from plugin.gateway.errors import Code
from plugin.gateway.libvirtdconf import configured
from plugin.gateway.procs import Proc
from plugin.gateway.upstream import open_arguments
from plugin.gateway.xdr import Reader
from tests.unit.gateway.world import NOBODY, ReplyError, World, play

OPEN = open_arguments("qemu:///system")


def pkcheck(folder: Path, status: int) -> str:
    """Makes a program that stands for polkit's: notes its arguments and exits with `status`."""
    program = folder / "pkcheck"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexit {status}\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.usefixtures("as_nobody")
def test_polkit_is_asked_before_anything_is_opened(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        types = Reader(await client.call(Proc.AUTH_LIST))
        assert types.array(types.u32, 20) == [2], "the client is told to authenticate by polkit"
        with pytest.raises(ReplyError, match="authentication required"):
            await client.call(Proc.CONNECT_OPEN, OPEN)
        assert Reader(await client.call(Proc.AUTH_POLKIT)).i32() == 1
        await client.call(Proc.CONNECT_OPEN, OPEN)
        asked = (tmp_path / "asked").read_text()
        assert f"--process {NOBODY.pid},{NOBODY.start_time},{NOBODY.uid}" in asked
        assert "--action-id org.libvirt.unix.manage" in asked
        read_only = world.raw_client(read_only=True)
        await read_only.call(Proc.AUTH_POLKIT)
        assert "org.libvirt.unix.monitor" in (tmp_path / "asked").read_text()
        assert Proc.AUTH_POLKIT not in world.libvirtd.calls()

    play(tmp_path, body, auth="polkit", auth_ro="polkit", pkcheck=pkcheck(tmp_path, 0))


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (1, Code.AUTH_FAILED),
        (2, Code.AUTH_UNAVAILABLE),
        (3, Code.AUTH_CANCELLED),
        (127, Code.AUTH_FAILED),
    ],
)
def test_polkits_no_is_a_no(tmp_path: Path, status: int, code: Code) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        with pytest.raises(ReplyError) as error:
            await client.call(Proc.AUTH_POLKIT)
        assert error.value.code == code
        with pytest.raises(ReplyError, match="authentication required"):
            await client.call(Proc.CONNECT_OPEN, OPEN)
        assert Proc.CONNECT_OPEN not in world.libvirtd.calls()

    play(tmp_path, body, auth="polkit", pkcheck=pkcheck(tmp_path, status))


@pytest.mark.usefixtures("as_nobody")
def test_polkit_that_cannot_be_asked_is_a_no(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        client = world.raw_client()
        with pytest.raises(ReplyError) as error:
            await client.call(Proc.AUTH_POLKIT)
        assert error.value.code == Code.AUTH_FAILED

    play(tmp_path, body, auth="polkit", pkcheck=str(tmp_path / "none"))


def test_root_is_not_asked_for_as_at_libvirtd(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root's connections are exempt, and this is not root")

    async def body(world: World) -> None:
        await world.client()

    play(tmp_path, body, auth="polkit", pkcheck=pkcheck(tmp_path, 1))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('auth_unix_rw = "none"', "none"),
        ("auth_unix_rw = 'sasl'  # why", "sasl"),
        ('#auth_unix_rw = "none"', "polkit"),
        ('auth_unix_rw = "nonsense"', "polkit"),
        ('auth_unix_ro = "none"', "polkit"),
        ('auth_unix_rw = "none"\nauth_unix_rw = "polkit"', "polkit"),
    ],
)
def test_what_libvirtd_conf_asks_for(tmp_path: Path, line: str, expected: str) -> None:
    conf = tmp_path / "libvirtd.conf"
    conf.write_text(f"# comment\n{line}\n")
    assert configured(conf, read_only=False) == expected
    assert configured(tmp_path / "missing", read_only=False) == "polkit"


def test_a_daemon_of_its_own_for_qemu_has_a_configuration_of_its_own(tmp_path: Path) -> None:
    libvirtd, virtqemud = tmp_path / "libvirtd.conf", tmp_path / "virtqemud.conf"
    run = Path("/run/libvirt")
    assert libvirtdconf.configuration_of(libvirtd, run / "libvirt-sock-ro") == libvirtd
    assert libvirtdconf.configuration_of(libvirtd, run / "virtqemud-sock") == virtqemud
    assert not libvirtdconf.judges_calls(libvirtd)
    libvirtd.write_text("")
    virtqemud.write_text('access_drivers = [ "polkit" ]\n')  # also behind virtproxyd
    assert libvirtdconf.judges_calls(libvirtd)
    virtqemud.write_text("")
    assert not libvirtdconf.judges_calls(libvirtd)
    libvirtd.write_text('access_drivers = [ "polkit" ]\n')
    assert libvirtdconf.judges_calls(libvirtd)
