"""Domains that are copies of one that runs: no start of a copy takes anything from the original.

Each is copied as people do it: with virt-clone, and with `virsh dumpxml | sed`; through the
gateway, and at libvirtd itself, where the copy has our metadata and carrier with the original's
names. Both ways to run the gateway: beside libvirtd, for clients that choose its socket, and in
libvirtd's place.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.agent import Agent
from tests.support.domain import domain_xml
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import at_night, by_day
from tests.support.wait import listens, until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "original"
MIB = 1 << 20
DISK = (
    "<disk type='network' device='disk'><driver name='qemu' type='raw'/>"
    "<source protocol='rbd' name='virtlun/lvs0/data'/><target dev='sda' bus='scsi'/></disk>"
)
TRANSPARENT = Path(__file__).parents[2] / "examples/libvirt/transparent/virtlun.toml"
AT_LIBVIRTD = ("virt-clone", "sed", "sed, disk detached", "sed, no metadata")
"""Ways to copy behind the gateway's back."""
THROUGH_GATEWAY = ("virt-clone", "sed")
EACH_AT_LIBVIRTD = [
    at_night(nth, how, id=how) if how == "virt-clone" else pytest.param(nth, how, id=how)
    for nth, how in enumerate(AT_LIBVIRTD)
]


class Gateway:
    """The host's gateway in one of its two places, which tests start and stop."""

    def __init__(self, host: Host, *, in_libvirtds_place: bool) -> None:
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._in_place = in_libvirtds_place
        self.gives_controllers = not in_libvirtds_place
        """Whether domains without a disk of ours get a controller: `controllers = "auto"`."""
        if in_libvirtds_place:
            host.stop_gateway()
        libvirtd = host.libvirtd
        self.uri = "qemu:///system" if in_libvirtds_place else host.uri
        # /run/libvirt in libvirtd's mount namespace; its own sockets lie elsewhere.
        self._socket = libvirtd.scratch / "run-libvirt/libvirt-sock"

    def start(self) -> None:
        """Starts it if it does not run."""
        if not self._in_place:
            if not self._host.has_gateway:
                self._host.start_gateway()
            return
        if self._process is not None:
            return
        host, libvirtd = self._host, self._host.libvirtd
        config = host.scratch / "transparent.toml"
        own = host.config.read_text().partition("[gateway]")
        config.write_text(
            own[0]
            + re.sub("(?m)^upstream.*\n", "", TRANSPARENT.read_text())
            + "\n".join(
                re.findall(
                    "(?m)^(?:upstream|upstream_ro|libvirtd_conf|state_dir) =.*",
                    own[2].partition("[hook]")[0],
                )
            )
            + own[2][own[2].index("\n[hook]") :]
        )
        self._process = subprocess.Popen(
            libvirtd.command(host.program("virtlun-gateway"), "--config", str(config)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(host.scratch / "transparent.log").open("ab"),
        )
        until(lambda: listens(self._socket), "the gateway listens in libvirtd's place")

    def stop(self) -> None:
        """Stops it if it runs."""
        if not self._in_place:
            if self._host.has_gateway:
                self._host.stop_gateway()
        elif self._process is not None:
            self._process.terminate()
            assert self._process.wait(90) == 0
            self._process = None

    def run(self, *words: str, stdin: str | None = None) -> str:
        """Runs a client program, where `qemu:///system` is what it is on such a host.

        Raises:
            VirshError: its status is not 0.
        """
        return run(self._host, *words, stdin=stdin)

    def virsh(self, *words: str) -> str:
        """Runs virsh as a person does in this place."""
        return self.run("virsh", "-q", "-c", self.uri, *words)


def run(host: Host, *words: str, stdin: str | None = None) -> str:
    """Runs a program in libvirtd's mount namespace; VirshError where its status is not 0."""
    done = subprocess.run(
        host.libvirtd.command(*words),
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if done.returncode:
        raise VirshError(done.stdout + done.stderr)
    return done.stdout.strip()


class Original:
    """The running original, with what nobody may take from it."""

    def __init__(self, host: Host, agent: Agent) -> None:
        self._host, self._agent = host, agent
        self._round = 0
        self._before = self._controller()
        self.uuid = host.virsh_direct("domuuid", NAME)

    def _controller(self) -> object:
        uuid = self._host.virsh_direct("domuuid", NAME)
        found = self._host.client.call("vhost_get_controllers")
        return [
            (lun["scsi_dev_num"], [each["bdev_name"] for each in lun["luns"]])
            for item in found
            if item["ctrlr"] == f"vm-{uuid}"
            for lun in item["backend_specific"]["scsi"]
        ]

    def is_whole(self) -> None:
        """Checks that the guest has its LUN and that what it writes there is there."""
        assert self._controller() == self._before != []
        self._round += 1
        words = f"round {self._round}"
        self._agent.run(
            f"printf '%-512s' '{words}' | dd of=/dev/sda bs=512 count=1 conv=fsync 2>/dev/null"
        )
        read = self._agent.run("dd if=/dev/sda bs=512 count=1 iflag=direct 2>/dev/null")
        assert read.strip() == words


def copied(xml: str, name: str, how: str) -> str:
    """Returns a domain's XML as somebody's sed makes another domain of it."""
    for before, after in (
        ("<name>[^<]*</name>", f"<name>{name}</name>"),
        ("<uuid>[^<]*</uuid>", f"<uuid>{uuid4()}</uuid>"),
        # The two would write into the same files.
        (f"/{NAME}-(agent|console)", rf"/{name}-\1"),
    ):
        xml = re.sub(before, after, xml)
    if how == "sed, disk detached":
        xml, found = re.subn("<virtlun:disk .*?</virtlun:disk>", "", xml, flags=re.S)
        assert found == 1
    if how == "sed, no metadata":
        xml, found = re.subn("<metadata>.*?</metadata>", "", xml, flags=re.S)
        assert found == 1
    return xml


def copy(host: Host, uri: str, name: str, how: str) -> None:
    """Makes a copy of the original, which is shut off, on a connection."""
    if how == "virt-clone":
        # It can copy no volume of ours, but leave it as it is. libvirtd knows of no sda.
        words = ["--original", NAME, "--name", name, "--auto-clone", "--skip-copy", "sda"]
        run(host, "virt-clone", "--connect", uri, *words)
        return
    xml = run(host, "virsh", "-q", "-c", uri, "dumpxml", NAME)
    path = host.scratch / f"{name}.xml"
    path.write_text(copied(xml, name, how))
    run(host, "virsh", "-q", "-c", uri, "define", str(path))


@pytest.fixture(
    scope="module",
    params=["per client", pytest.param("in libvirtd's place", marks=pytest.mark.nightly)],
)
def gateway(host: Host, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """The gateway in each of its places; afterwards no domain is left."""
    running = Gateway(host, in_libvirtds_place=request.param != "per client")
    try:
        running.start()
        yield running
    finally:
        running.stop()
        for name in host.virsh_direct("list", "--all", "--name").split():
            host.virsh_direct("destroy", name, check=False)
            host.virsh_direct("undefine", name, check=False)


@pytest.fixture(scope="module")
def original(host: Host, gateway: Gateway) -> Iterator[Original]:
    """The running original; its copies `gateway-N` and `libvirtd-N` are defined before it starts.

    The latter are made while the gateway does not run, and it does not run then.
    """
    if "data" not in {volume.name for volume in host.volumes.volumes("lvs0")}:
        host.volumes.create("lvs0/data", 8 * MIB)
    path = host.scratch / f"{NAME}.xml"
    path.write_text(domain_xml(NAME, host.image, host.scratch, devices=DISK))
    gateway.virsh("define", str(path))
    for nth, how in enumerate(THROUGH_GATEWAY):
        copy(host, gateway.uri, f"gateway-{nth}", how)
    gateway.stop()
    for nth, how in enumerate(AT_LIBVIRTD):
        copy(host, host.libvirtd.uri(), f"libvirtd-{nth}", how)
    host.virsh_direct("start", NAME)
    agent = host.agent(NAME)
    agent.wait_for("[ -b /dev/sda ]")
    yield Original(host, agent)
    agent.close()


def refused(host: Host, name: str, uri: str) -> str:
    """Starts a copy, which must not start; returns what is said."""
    with pytest.raises(VirshError) as error:
        run(host, "virsh", "-q", "-c", uri, "start", name)
    assert host.virsh_direct("domstate", name) == "shut off"
    return str(error.value)


IS_A_COPY = r"is a copy of another .*; define it again through the gateway, which gives it one of"
SAID = {
    "virt-clone": IS_A_COPY,
    "sed": IS_A_COPY,
    "sed, disk detached": IS_A_COPY,
    "sed, no metadata": "Failed to start domain",
}
"""Of a copy that was made at libvirtd. Of the last one nobody but the target knows that it is one:
it serves a controller to one QEMU, and the other ends. libvirt says why only where QEMU ends after
libvirt has connected to its monitor; QEMU's log always says so."""
QEMU_SAYS = "vhost_backend_init failed"


def is_refused(host: Host, name: str, uri: str, how: str) -> None:
    """Starts a copy that was made at libvirtd, which must not start, for the reason that it has."""
    before = host.libvirtd.qemu_log(name).count(QEMU_SAYS)
    assert re.search(SAID[how], refused(host, name, uri))
    if how == "sed, no metadata":
        until(
            lambda: host.libvirtd.qemu_log(name).count(QEMU_SAYS) > before,
            lambda: host.libvirtd.qemu_log(name),
        )


@by_day("per client-sed")
@pytest.mark.parametrize(("nth", "how"), EACH_AT_LIBVIRTD)
def test_a_copy_made_at_libvirtd_starts_nowhere(
    host: Host, gateway: Gateway, original: Original, nth: int, how: str
) -> None:
    name = f"libvirtd-{nth}"
    gateway.stop()
    is_refused(host, name, host.libvirtd.uri(), how)
    original.is_whole()
    gateway.start()
    for uri in (gateway.uri, host.libvirtd.uri()):
        if uri == gateway.uri and how == "sed, no metadata" and gateway.gives_controllers:
            # To the gateway it is a domain without a disk of ours: it has a controller of its own.
            run(host, "virsh", "-q", "-c", uri, "start", name)
            original.is_whole()
            run(host, "virsh", "-q", "-c", uri, "destroy", name)
        else:
            is_refused(host, name, uri, how)
        original.is_whole()


@by_day("per client-sed")
@pytest.mark.parametrize(("nth", "how"), [*enumerate(THROUGH_GATEWAY)], ids=THROUGH_GATEWAY)
def test_a_copy_made_through_the_gateway_has_no_disk_that_is_in_use(
    host: Host, gateway: Gateway, original: Original, nth: int, how: str
) -> None:
    name = f"gateway-{nth}"
    gateway.stop()
    assert "is in use by target 0 of controller" in refused(host, name, host.libvirtd.uri())
    original.is_whole()
    gateway.start()
    said = refused(host, name, gateway.uri)
    assert f"volume lvs0/data is in use by domain {NAME}: detach it there first" in said
    original.is_whole()
    assert "is in use by target 0 of controller" in refused(host, name, host.libvirtd.uri())
    original.is_whole()


@by_day("per client-sed")
@pytest.mark.parametrize(("nth", "how"), EACH_AT_LIBVIRTD)
def test_a_copy_that_is_defined_again_has_a_controller_of_its_own(
    host: Host, gateway: Gateway, original: Original, nth: int, how: str
) -> None:
    """What the refusal says is the way out. Copies without the disk start, and end, beside it."""
    gateway.start()
    name = f"libvirtd-{nth}"
    path = host.scratch / f"{name}.xml"
    path.write_text(gateway.virsh("dumpxml", name))
    gateway.virsh("define", str(path))
    assert original.uuid not in host.virsh_direct("dumpxml", name)
    if "sed, " not in how:
        assert "is in use by domain" in refused(host, name, gateway.uri)
        original.is_whole()
        return
    for uri in (gateway.uri, host.libvirtd.uri()):
        run(host, "virsh", "-q", "-c", uri, "start", name)
        original.is_whole()
        run(host, "virsh", "-q", "-c", uri, "destroy", name)
        original.is_whole()
