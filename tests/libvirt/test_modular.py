"""The gateway where modular daemons are, and clients look for virtqemud's socket.

Neither Debian 12 nor its backports have virtqemud or virtproxyd: the packages leave libvirt's split
daemons out ("don't ship split daemons just yet", their changelog). So libvirtd stands here at
virtqemud's socket. What is real is what differs for the gateway: the clients' way there (libvirt's
own, in direct mode) and virtqemud's configuration.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.host import Host
from tests.support.wait import listens, until

pytestmark = [pytest.mark.root]

NAME = "modular"
DIRECT = "qemu:///system?mode=direct"
MEMBER = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=libvirt", "--reset-env"]
DOMAIN = (
    f"<domain type='qemu'><name>{NAME}</name><memory unit='MiB'>32</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices/></domain>"
)


def run(host: Host, *words: str) -> str:
    """Runs a program where /run/libvirt is that of this host; returns what it prints."""
    done = subprocess.run(
        host.libvirtd.command(*words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def modular(host: Host) -> Iterator[Host]:
    """A host whose only sockets in /run/libvirt are the gateway's, with virtqemud's names."""
    real = host.scratch / "real"
    real.mkdir()
    (real / "virtqemud-sock").symlink_to(host.libvirtd.socket)
    (real / "virtqemud-sock-ro").symlink_to(host.libvirtd.socket_ro)
    etc = host.scratch / "modular"
    etc.mkdir()
    (etc / "virtqemud.conf").write_text('auth_unix_rw = "none"\nauth_unix_ro = "none"\n')
    values = {
        "listen": "/run/libvirt/virtqemud-sock",
        "listen_ro": "/run/libvirt/virtqemud-sock-ro",
        "upstream": real / "virtqemud-sock",
        "upstream_ro": real / "virtqemud-sock-ro",
        "libvirtd_conf": etc / "libvirtd.conf",  # there is none
    }
    lines = [
        f'{key} = "{values[key]}"' if (key := line.partition(" =")[0]) in values else line
        for line in host.config.read_text().splitlines()
    ]
    config = host.scratch / "modular.toml"
    config.write_text("\n".join(lines))
    host.stop_gateway()
    gateway = subprocess.Popen(
        host.libvirtd.command(host.program("virtlun-gateway"), "--config", str(config)),
        stdin=subprocess.DEVNULL,
        stderr=(host.scratch / "modular.log").open("ab"),
    )
    try:
        place = host.libvirtd.scratch / "run-libvirt"  # /run/libvirt in there
        until(lambda: listens(place / "virtqemud-sock"), "the gateway listens")
        assert not (place / "libvirt-sock").exists()
        path = host.scratch / "modular.xml"
        path.write_text(DOMAIN)
        run(host, "virsh", "-q", "-c", DIRECT, "define", str(path))
        yield host
    finally:
        gateway.terminate()
        assert gateway.wait(90) == 0


@pytest.mark.parametrize("daemon", ["virtqemud", "virtproxyd"])
def test_debian_has_no_modular_daemons(daemon: str) -> None:
    """Where this fails, they have come: let the two be what this module runs."""
    assert shutil.which(daemon, path="/usr/sbin:/usr/bin:/sbin:/bin") is None
    assert not list(Path("/lib/systemd/system").glob(f"{daemon}*"))


@pytest.mark.nightly
@pytest.mark.parametrize("uri", [DIRECT, "qemu:///system"], ids=["direct", "auto"])
def test_attach_and_detach_by_virtqemuds_socket(modular: Host, uri: str) -> None:
    """In the mode `auto`, too, libvirt's clients take virtqemud's socket where there is one."""
    virsh = ("virsh", "-q", "-c", uri)
    made = modular.volumes.create("lvs0/modular", 8 << 20)
    path = "/dev/virtlun/lvs0/modular"
    run(modular, *virsh, "attach-disk", NAME, path, "sda", "--config")
    run(modular, *virsh, "start", NAME, "--paused")
    shown = ElementTree.fromstring(run(modular, *virsh, "dumpxml", NAME))
    (disk,) = shown.findall("devices/disk")
    source = disk.find("source")
    assert source is not None and source.get("file") == path
    assert "Capacity:       8388608" in run(modular, *virsh, "domblkinfo", NAME, "sda")
    run(modular, *virsh, "detach-disk", NAME, "sda", "--live", "--config")
    for side in ((), ("--inactive",)):
        assert run(modular, *virsh, "domblklist", NAME, *side) == ""
    run(modular, *virsh, "destroy", NAME)
    modular.volumes.delete(made.uuid)


@pytest.mark.parametrize("uri", [DIRECT, "qemu:///system"], ids=["direct", "auto"])
def test_pools_by_virtqemuds_socket(modular: Host, uri: str) -> None:
    """virtqemud passes what is of its own pools on to virtstoraged; ours never come to it."""
    virsh, pool = ("virsh", "-q", "-c", uri), "virtlun-lvs0"
    assert run(modular, *virsh, "pool-list", "--name") == pool
    run(modular, *virsh, "vol-create-as", pool, "v", "8M", "--allocation", "0")
    run(modular, *virsh, "vol-upload", "v", "/etc/hostname", "--pool", pool)
    assert run(modular, *virsh, "vol-list", pool).split() == ["v", "/dev/virtlun/lvs0/v"]
    run(modular, *virsh, "vol-delete", "v", "--pool", pool)


def test_what_clients_must_pass_is_said_in_virtqemuds_configuration(modular: Host) -> None:
    """There is no libvirtd.conf, and what cannot be read would count as polkit."""
    assert NAME in run(modular, *MEMBER, "virsh", "-q", "-c", DIRECT, "list", "--all", "--name")
