"""The drop-ins of examples/systemd, installed as their headers say, under Debian's systemd.

What each is for works with it, and not without it, nor with one of its lines left out. The servers
are in the machine's network, and in nobody else's.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pydataplane.errors import RpcError
from tests.support import ceph, tgt
from tests.support.examples import used
from tests.support.initiator import Initiator
from tests.support.night import at_night
from tests.support.nvme_target import Namespace, NvmeTarget
from tests.support.restarts import choose_seed
from tests.support.scratch import short_directory
from tests.support.services import RUN, TARGET, installed, main_pid, rpc, shell
from tests.support.systemd import INSTALLED, Machine
from tests.support.target import ROOT, SANDBOX_REFUSED

pytestmark = pytest.mark.root

FOLDER = ROOT / "examples/systemd"
INSTALL = re.compile(r"^# ((?:install|systemctl) .+)$", re.MULTILINE)
BLOCK = 512
MIB = 1 << 20
SIZE_MIB = 8
AT = 24
SYNCHRONIZE = bytes([0x35, *bytes(9)])
INITIATOR = "iqn.2026-11.org.virtlun:host"

Calls = list[tuple[str, dict[str, Any]]]


@dataclass
class Server:
    """Somewhere that a drop-in lets the target connect to, with a disk for it."""

    make: Calls
    """What makes a bdev of the disk."""
    bdev: str
    end: Calls
    """What takes the bdev away."""
    content: Callable[[], bytes]
    """What the disk holds, by the server."""


@contextlib.contextmanager
def iscsi(_machine: Machine) -> Iterator[Server]:
    """A real iSCSI target."""
    with short_directory("tgt-", "/var/tmp") as folder, tgt.Tgt(folder) as made:
        path = made.disk(size=SIZE_MIB * MIB)
        asked = {"name": "remote", "url": made.url(), "initiator_iqn": INITIATOR}
        yield Server(
            [("bdev_iscsi_create", asked)],
            "remote",
            [("bdev_iscsi_delete", {"name": "remote"})],
            path.read_bytes,
        )


@contextlib.contextmanager
def network(_machine: Machine) -> Iterator[Server]:
    """A model of an NVMe/TCP target."""
    space = Namespace(SIZE_MIB * MIB // BLOCK)
    with NvmeTarget({1: space}) as model:
        yield Server(
            [("bdev_nvme_attach_controller", {"name": "remote", **model.params()})],
            "remoten1",
            [("bdev_nvme_detach_controller", {"name": "remote"})],
            lambda: bytes(space.content),
        )


@contextlib.contextmanager
def rbd(machine: Machine) -> Iterator[Server]:
    """A real Ceph, whose configuration and key the machine has where Ceph's clients look."""
    with ceph.cluster(key=True) as made:
        image = made.image("disk", SIZE_MIB)
        etc = Path("/etc/ceph")
        machine.path(etc).mkdir()
        for file in (made.conf, made.keyring):
            text = file.read_text().replace(str(made.directory), str(etc))
            (machine.path(etc) / file.name).write_text(text)
        conf = str(etc / made.conf.name)
        asked = {"pool_name": ceph.POOL, "rbd_name": image, "block_size": BLOCK}
        yield Server(
            [
                ("bdev_rbd_register_cluster", {"name": "ceph0", "config_file": conf}),
                ("bdev_rbd_create", {"name": "remote", "cluster_name": "ceph0", **asked}),
            ],
            "remote",
            [
                ("bdev_rbd_delete", {"name": "remote"}),
                ("bdev_rbd_unregister_cluster", {"name": "ceph0"}),
            ],
            lambda: made.content(image),
        )


SERVERS = {"iscsi": iscsi, "network": network, "rbd": rbd}
LACKING = {"iscsi": bool(tgt.lacks()), "network": False, "rbd": bool(ceph.lacks())}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A machine on which the README's installation was done; its units refuse nothing."""
    with installed() as machine:
        yield machine
        said = machine.said()
        assert SANDBOX_REFUSED not in said and "panicked" not in said, said


@contextlib.contextmanager
def server_of(machine: Machine, name: str) -> Iterator[Server]:
    """What a drop-in is for, in the machine's network; the drop-in is gone afterwards."""
    if LACKING[name]:
        pytest.skip(f"what serves {name} is not installed: `make setup` installs it")
    with machine.network(), SERVERS[name](machine) as server:
        try:
            yield server
        finally:
            shell(machine, f"systemctl revert {TARGET} && systemctl restart {TARGET}")


def refused(machine: Machine, server: Server) -> str:
    """Makes the bdev, which is to fail; returns the sentence."""
    with pytest.raises(RpcError) as error:
        for method, params in server.make:
            rpc(machine, method, **params)
    return str(error.value)


@pytest.mark.parametrize("name", ["iscsi", "network", at_night("rbd")])
def test_a_guest_has_a_disk_by_the_drop_in_for_it(machine: Machine, name: str) -> None:
    commands = INSTALL.findall(used(FOLDER / f"{name}.conf").read_text())
    assert len(commands) == 2, commands
    with server_of(machine, name) as server:
        assert f"--{name}" in refused(machine, server)
        before = main_pid(machine)
        shell(machine, "\n".join(commands))
        assert main_pid(machine) != before
        for method, params in server.make:
            rpc(machine, method, **params)
        data = random.Random(choose_seed()).randbytes(MIB)
        write_and_read(machine, server.bdev, data)
        for method, params in server.end:
            rpc(machine, method, **params)
        assert server.content() == bytes(AT * BLOCK) + data + bytes(
            SIZE_MIB * MIB - AT * BLOCK - len(data)
        )


def write_and_read(machine: Machine, bdev: str, data: bytes) -> None:
    """A guest writes to a bdev, has it durable and reads it; its controller is gone then."""
    rpc(machine, "vhost_create_scsi_controller", ctrlr="c0")
    disk: dict[str, Any] = {"ctrlr": "c0", "scsi_target_num": 0, "bdev_name": bdev}
    rpc(machine, "vhost_scsi_controller_add_target", **disk)
    program = machine.command(f"{INSTALLED}/bin/virtlun-bench")
    with Initiator(RUN / "vhost/c0", program=program) as guest:
        guest.send("connect")
        guest.ready()
        guest.write(AT, data)
        answer = guest.cdb(SYNCHRONIZE)
        assert (answer["response"], answer["status"]) == (0, 0), answer
        assert guest.read(AT, len(data) // BLOCK) == data
        guest.send("disconnect")
    rpc(machine, "vhost_delete_controller", ctrlr="c0", force=True)


@pytest.mark.nightly
@pytest.mark.parametrize("line", ["Environment", "RestrictAddressFamilies", "PrivateNetwork"])
@pytest.mark.parametrize("name", ["iscsi", "network"])
def test_no_line_of_a_drop_in_can_be_left_out(machine: Machine, name: str, line: str) -> None:
    lines = (FOLDER / f"{name}.conf").read_text().splitlines(keepends=True)
    kept = [each for each in lines if not each.startswith(f"{line}=")]
    assert len(kept) == len(lines) - 1
    with server_of(machine, name) as server:
        folder = machine.path(f"/etc/systemd/system/{TARGET}.service.d")
        folder.mkdir()
        (folder / f"{name}.conf").write_text("".join(kept))
        shell(machine, f"systemctl daemon-reload && systemctl restart {TARGET}")
        refused(machine, server)
        assert rpc(machine, "bdev_get_bdevs") == []
