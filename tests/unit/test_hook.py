"""The hook: reads what the translation writes, drives a target, never hangs or breaks a domain."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from plugin import hook
from plugin.config import (
    DEFAULT_PATH,
    DisksSection,
    GatewaySection,
    HookSection,
    TargetSection,
)
from plugin.gateway.journal import CopyEntry, Journal
from plugin.hook import archive, config
from pydataplane.domain import images, records
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.model import ANY
from pydataplane.domain.names import NAMESPACE
from pydataplane.domain.translate import (
    Plan,
    Settings,
    define,
    plan,
    refitted,
    with_target,
    without_target,
)
from pydataplane.domain.xml.view import given as given_by_libvirtd
from pydataplane.errors import METHOD_NOT_FOUND, RpcError
from tests.support.fake_socket import SocketTarget
from tests.support.fake_target import Volume
from tests.support.night import by_day
from tests.support.wait import until
from tests.unit.translate.domains import (
    FILES,
    NEW_UUID,
    domain,
    lvol,
    plain,
    pretty,
    text,
    translated,
)

PYTHON = "/usr/bin/python3"
CONTROLLER = "vm-6d1f9c52-0000-4000-8000-00000000aaaa"


def test_libvirtd_may_lay_out_the_xml_anew() -> None:
    for path in FILES:
        uuids = {"lvs0/root": "aaaaaaaa-0000-4000-8000-000000000000"}
        there = define(path.read_text(), Settings(), new_uuid=NEW_UUID, uuids=uuids)
        for xml in (there.xml, pretty(there.xml)):
            assert planned(xml.encode()) == there.plan == plan(xml)
        assert planned(path.read_bytes()) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('target="0"', 'target="255"'),
        ('target="0"', ""),
        ('dev="sda"', 'dev=""'),
        ('lvol="a"', ""),
        ('target="1"', 'target="0"'),
        ('dev="sdb"', 'dev="sda"'),
        ('version="1"', 'version="9"'),
        ('controller="vm-', 'controller="vm-../'),
        ("ua-virtlun-scsi0", "ua-else"),
        ('blocksize="4096"', 'blocksize="1024"'),
    ],
)
def test_what_is_damaged_is_refused(old: str, new: str) -> None:
    large = "<blockio logical_block_size='4096'/>"
    there = translated(domain(lvol("sda", "a") + lvol("sdb", "b", more=large))).xml
    assert old in there
    broken = there.replace(old, new)
    with pytest.raises(TranslateError):
        plan(broken)
    with pytest.raises(TranslateError):
        planned(broken.encode())


def test_a_domain_whose_controller_is_unused_and_gone_needs_nothing() -> None:
    xml = translated(domain()).xml.replace("ua-virtlun-scsi0", "ua-else")
    assert plan(xml) is None
    assert planned(xml.encode()) is None


def planned(xml: bytes) -> Plan | None:
    """Returns what the hook reads of a domain."""
    view = given_by_libvirtd(xml)
    return view.plan() if view is not None else None


@dataclasses.dataclass
class Host:
    """A folder with a target's socket, a configuration and a copy of the hook."""

    folder: Path
    target: SocketTarget

    @property
    def xml(self) -> str:
        """A domain with two disks, translated for this host."""
        client = domain(
            lvol("sda", "a", more="<serial>S</serial>") + lvol("sdb", "b", more="<readonly/>")
        )
        return translated(client, Settings(vhost_dir=str(self.folder / "vhost"))).xml

    def run(self, *words: str, xml: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the copied hook as libvirtd would, in the system's Python."""
        return subprocess.run(
            [self.folder / "virtlun", "--config", self.folder / "virtlun.toml", "small", *words],
            input=self.xml if xml is None else xml,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )

    def configure(self, more: str = "", reconnect_s: str = "0") -> None:
        """Writes virtlun.toml; `reconnect_s` is not as the machine's own QEMU has it."""
        (self.folder / "virtlun.toml").write_text(
            f"[target]\nrpc_socket = '{self.folder}/rpc'\n"
            f"[disks]\nreconnect_s = {reconnect_s}\n"
            f"[hook]\nstate_dir = '{self.folder}/state'\n{more}\n"
        )

    def serve(self, *, mute: bool = False) -> AbstractContextManager[None]:
        """Starts the target."""
        return self.target.serve(mute=mute)


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="vh-") as name:  # short, for socket paths
        folder = Path(name)
        target = SocketTarget(
            folder / "rpc",
            {f"lvs0/{name}": f"uuid-{name}" for name in "abc"},
            piece_bytes=7,
            vhost_dir=folder / "vhost",
        )
        archive.install(str(folder / "virtlun"))
        made = Host(folder, target)
        made.configure()
        yield made


def test_prepare_makes_the_controller_and_its_luns(host: Host) -> None:
    with host.serve():
        for _ in range(2):  # the second time there is nothing to do
            done = host.run("prepare", "begin", "-")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
        assert host.target.options[CONTROLLER, 0] == {"serial": "S", "write_error_policy": "enospc"}
        assert host.target.options[CONTROLLER, 1] == {
            "read_only": True,
            "write_error_policy": "enospc",
        }
        assert host.target.calls.count("vhost_create_scsi_controller") == 1


def test_prepare_keeps_the_controller_for_the_qemu_that_will_start(host: Host) -> None:
    label = (
        "<seclabel type='dynamic' model='selinux'><label>system_u:svirt_t</label></seclabel>"
        "<seclabel type='dynamic' model='dac' relabel='yes'><label>{}</label></seclabel></domain>"
    )
    with host.serve():
        for given, uid in (("+64055:+107", 64055), ("+0:+0", 0), ("qemu:kvm", None)):
            xml = host.xml.replace("</domain>", label.format(given))
            assert host.run("prepare", "begin", "-", xml=xml).stderr == ""
            assert host.target.owners == {CONTROLLER: (uid, True)}
        # It runs: nobody is disconnected.
        host.target.owners.clear()
        assert host.run("reconnect", "begin", "-").returncode == 0
        assert host.target.owners == {}
    made, named = "vhost_create_scsi_controller", "virtlun_controller_set_owner"
    assert host.target.calls.index(made) + 1 == host.target.calls.index(named)


def test_a_target_that_knows_no_owners_is_good_enough(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(**_: object) -> bool:
        raise RpcError(METHOD_NOT_FOUND, "Method not found")

    monkeypatch.setattr(host.target, "virtlun_controller_set_owner", unknown)
    with host.serve():
        assert host.run("prepare", "begin", "-").returncode == 0


def test_prepare_makes_the_blocks_that_the_disk_asks_for(host: Host) -> None:
    large = "<blockio logical_block_size='4096'/>"
    client = domain("".join(lvol(f"sd{name}", name, more=large) for name in "abc"))
    xml = translated(client, Settings(vhost_dir=str(host.folder / "vhost"))).xml
    host.target.block_sizes["uuid-b"] = 4096
    del host.target.volumes["lvs0/c"]
    host.configure("create_missing_mib = 64")
    with host.serve():
        for _ in range(2):  # the second time there is nothing to do
            assert host.run("prepare", "begin", "-", xml=xml).stderr == ""
    assert host.target.options[CONTROLLER, 0] == {
        "block_size": 4096,
        "write_error_policy": "enospc",
    }
    assert host.target.options[CONTROLLER, 1].keys() == {"write_error_policy"}, "they are its own"
    assert host.target.options[CONTROLLER, 2]["block_size"] == 4096, "of a volume made just now"
    assert host.target.calls.count("vhost_scsi_controller_add_target") == 3


def test_prepare_corrects_what_is_wrong(host: Host) -> None:
    host.target.vhost_create_scsi_controller(CONTROLLER)
    host.target.controllers[CONTROLLER] = {0: "uuid-c", 1: "uuid-b", 9: "uuid-a"}
    with host.serve():
        assert host.run("prepare", "begin", "-").returncode == 0
    assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
    assert host.target.options[CONTROLLER, 1] == {"read_only": True, "write_error_policy": "enospc"}
    assert "vhost_scsi_controller_remove_target" not in host.target.calls


def test_release_removes_the_controller(host: Host) -> None:
    with host.serve():
        host.run("prepare", "begin", "-")
        host.target.controllers["vm-other"] = {}
        for _ in range(2):
            done = host.run("release", "end", "-")
            assert (done.returncode, done.stderr) == (0, "")
    assert host.target.controllers == {"vm-other": {}}


def test_what_is_recorded_of_a_pivot_stays_for_the_gateway(host: Host) -> None:
    """It may be all that says which volume has what the guest wrote last."""
    folder = host.folder / "journal"
    host.configure(f"[gateway]\nstate_dir = '{folder}'\n")
    entry = CopyEntry(
        "copy", CONTROLLER.removeprefix("vm-"), "small", "sda", 0, "uuid-a", "", "uuid-c", "", ""
    )
    journal = Journal(folder)
    with host.serve():
        host.run("prepare", "begin", "-")
        before = {CONTROLLER: dict(host.target.controllers[CONTROLLER])}
        noted = journal.append(replace(entry, asked=True))
        (folder / "damaged.json").write_text("{")
        done = host.run("release", "end", "-")
        assert (done.returncode, done.stderr, host.target.controllers) == (0, "", before)
        done = host.run("prepare", "begin", "-")
        assert done.returncode == 1
        assert "nobody knows yet which volume disk sda went on with" in done.stderr
        assert host.run("reconnect", "begin", "-").returncode == 0
        # One that cannot have been pivoted yet, and one of another domain.
        noted = journal.replace(noted, entry)
        journal.append(replace(entry, asked=True, uuid=str(UUID(int=1))))
        # And one that no gateway of this version resolves.
        other = json.dumps(dataclasses.asdict(replace(entry, asked=True)) | {"version": 2})
        (folder / "other.json").write_text(other)
        assert host.run("prepare", "begin", "-").stderr == ""
        assert host.run("release", "end", "-").stderr == ""
    assert host.target.controllers == {}


def test_a_disks_limits_are_there_before_its_domain_and_go_with_it(host: Host) -> None:
    """The gateway need not run for that."""
    tune = "<iotune><read_iops_sec>100</read_iops_sec></iotune>"
    client = domain(lvol("sda", "a", more=tune) + lvol("sdb", "b"))
    xml = translated(client, Settings(vhost_dir=str(host.folder / "vhost"))).xml
    with host.serve():
        for _ in range(2):
            assert host.run("prepare", "begin", "-", xml=xml).stderr == ""
            assert host.target.volumes["lvs0/a"].limits == {"read_iops_sec": 100}
        asked = host.target.calls
        assert asked.index("virtlun_bdev_set_limits") < asked.index(
            "vhost_scsi_controller_add_target"
        )
        # A running domain has what it was given since.
        host.target.virtlun_bdev_set_limits("lvs0/a", read_iops_sec=7)
        assert host.run("reconnect", "begin", "-", xml=xml).returncode == 0
        assert host.target.volumes["lvs0/a"].limits == {"read_iops_sec": 7}
        for _ in range(2):
            assert host.run("release", "end", "-", xml=xml).stderr == ""
            assert host.target.volumes["lvs0/a"].limits == {}


def test_release_leaves_a_controller_that_a_qemu_is_connected_to(host: Host) -> None:
    with host.serve():
        host.run("prepare", "begin", "-")
        before = {CONTROLLER: dict(host.target.controllers[CONTROLLER])}
        host.target.connected.add(CONTROLLER)
        done = host.run("release", "end", "-")
        assert (done.returncode, done.stderr) == (0, "")
        assert host.target.controllers == before
        # One that has just ended is waited for.
        asked = host.target.calls.count("vhost_delete_controller")
        leaving = threading.Thread(target=leave, args=(host, asked + 2))
        leaving.start()
        assert host.run("release", "end", "-").returncode == 0
        leaving.join()
    assert host.target.controllers == {}


def leave(host: Host, asked: int) -> None:
    """Lets the QEMU go once the target was asked so often."""
    until(lambda: host.target.calls.count("vhost_delete_controller") >= asked, "it is asked")
    host.target.connected.clear()


def test_a_copy_does_not_touch_the_originals_controller(host: Host) -> None:
    """Its XML was copied at libvirtd itself, under another UUID."""
    copy = host.xml.replace(CONTROLLER.removeprefix("vm-"), str(UUID(int=1)), 1)
    assert CONTROLLER in copy
    with host.serve():
        host.run("prepare", "begin", "-")
        before = dict(host.target.controllers)
        for words in (("prepare", "begin", "-"), ("release", "end", "-")):
            done = host.run(*words, xml=copy)
            assert done.returncode == 1 and "is a copy of another" in done.stderr
        assert host.target.controllers == before != {}


def test_reconnect_repairs_and_never_fails(host: Host) -> None:
    with host.serve():
        assert host.run("reconnect", "begin", "-").returncode == 0
        assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
    for xml in (host.xml, host.xml.replace('version="1"', 'version="2"')):
        done = host.run("reconnect", "begin", "-", xml=xml)
        assert done.returncode == 0  # libvirtd would kill the running domain
        assert done.stderr.startswith("virtlun: domain small: ")


def test_reconnect_takes_no_lun_from_a_running_guest(host: Host) -> None:
    with host.serve():
        host.run("prepare", "begin", "-")
        host.target.controllers[CONTROLLER][7] = "uuid-c"
        host.target.connected.add(CONTROLLER)
        done = host.run("reconnect", "begin", "-")
    assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b", 7: "uuid-c"}}
    assert done.returncode == 0
    assert f"target 7 of controller {CONTROLLER} is kept, with bdev uuid-c" in done.stderr


def test_without_a_target_the_start_fails_with_a_sentence(host: Host) -> None:
    done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert done.stderr == (
        f"virtlun: domain small: the virtlun target does not answer on {host.folder}/rpc (No such"
        " file or directory); start it with `virtlun target start`\n"
    )


def record(host: Host) -> dict[str, str]:
    """Returns what the hook recorded of the domain's volumes."""
    return records.read(str(host.folder / "state"), CONTROLLER)


def test_a_volume_that_never_was_is_made_if_configured_and_recorded(host: Host) -> None:
    del host.target.volumes["lvs0/b"]
    host.configure("create_missing_mib = 64")
    with host.serve():
        for _ in range(2):
            done = host.run("prepare", "begin", "-")
            assert (done.returncode, done.stderr) == (0, "")
    volume = host.target.volumes["lvs0/b"]
    made = volume.uuid
    assert (volume.mib, volume.thin) == (64, True)
    assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: made}}
    assert host.target.calls.count("bdev_lvol_create") == 1
    assert record(host) == {"lvs0/a": "uuid-a", "lvs0/b": made}


@pytest.mark.parametrize("more", ["", "create_missing_mib = 0"])
def test_a_volume_that_is_not_there_fails_the_start_with_the_command(host: Host, more: str) -> None:
    del host.target.volumes["lvs0/b"]
    host.configure(more)
    with host.serve():
        done = host.run("prepare", "begin", "-")
    assert (done.returncode, done.stderr) == (
        1,
        "virtlun: domain small: disk sdb: there is no volume lvs0/b; if it was renamed or lost,"
        " bring it back; make an empty one with `virtlun volume create lvs0/b SIZE`\n",
    )
    assert host.target.controllers == {}  # nothing was begun
    assert "lvs0/b" not in host.target.volumes


@pytest.mark.parametrize(("kind", "disk"), [("iscsi", "LUN"), ("nvme", "namespace")])
@pytest.mark.parametrize("more", ["", "create_missing_mib = 64"])
def test_a_volume_that_an_array_lacks_is_to_be_made_there(
    host: Host, kind: str, disk: str, more: str
) -> None:
    del host.target.volumes["lvs0/b"]
    host.target.arrays = {"lvs0": kind}
    host.configure(more)
    with host.serve():
        never = host.run("prepare", "begin", "-").stderr
        lost = host.run("prepare", "begin", "-", xml=known_by_uuid(host)).stderr
        host.target.volumes["lvs0/b"] = Volume("uuid-new")
        other = host.run("prepare", "begin", "-", xml=known_by_uuid(host)).stderr
    assert other.endswith(f" or else bring the lost {disk} back at the array\n")
    assert f"make the {disk} there and show it to this host (`virtlun volume list lvs0`)" in never
    assert f"the array of pool lvs0 has no {disk} that is it; bring it back there" in lost
    assert "disk sdb: volume lvs0/b (UUID uuid-b) is lost" in lost
    for said in (never, lost):
        assert "volume create" not in said
    assert "bdev_lvol_create" not in host.target.calls


def known_by_uuid(host: Host) -> str:
    """Returns the domain with the second volume's UUID in its metadata."""
    return host.xml.replace('lvol="b"', 'lvol="b" uuid="uuid-b"')


def known_by_record(host: Host) -> str:
    """Returns the domain without UUIDs, after a start that recorded them."""
    assert host.run("prepare", "begin", "-").returncode == 0
    host.run("release", "end", "-")
    assert record(host) == {"lvs0/a": "uuid-a", "lvs0/b": "uuid-b"}
    return host.xml


@by_day("migrate")
@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_a_guest_without_a_volume_gets_what_there_is(host: Host, operation: str) -> None:
    """Its controller where a target answers, QEMU's own device in its place where none does."""
    settings = Settings(vhost_dir=str(host.folder / "vhost"))
    real = translated(domain(), settings).xml
    alone = without_target(real)
    assert alone is not None
    for given, expected in ((real, alone), (alone, "")):
        done = host.run(operation, "begin", "-", xml=given)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
    host.configure(reconnect_s="5")
    text = (host.folder / "virtlun.toml").read_text()
    (host.folder / "virtlun.toml").write_text(
        text.replace("[target]\n", f"[target]\nvhost_dir = '{host.folder}/vhost'\n")
    )
    with host.serve():
        fitted = host.run(operation, "begin", "-", xml=real).stdout
        again = host.run(operation, "begin", "-", xml=alone).stdout
        assert host.target.controllers == {}, "prepare comes next"
    settings = dataclasses.replace(settings, reconnect_s=5)
    assert again == with_target(alone, settings)
    assert fitted == refitted(real, settings)
    assert "<reconnect enabled='yes' timeout='5'/>" in again
    # One with a volume needs its target.
    done = host.run(operation, "begin", "-")
    assert done.returncode == 1 and done.stdout == ""
    assert "does not answer" in done.stderr


@by_day(
    "None-prepare-known_by_record", "uuid-new-restore-known_by_record", "None-migrate-known_by_uuid"
)
@pytest.mark.parametrize("known", [known_by_uuid, known_by_record])
@pytest.mark.parametrize("operation", ["prepare", "migrate", "restore"])
@pytest.mark.parametrize("instead", [None, "uuid-new"])
def test_a_lost_volume_is_never_replaced(
    host: Host, known: Callable[[Host], str], operation: str, instead: str | None
) -> None:
    """A volume that was there fails the start; neither a new one nor a namesake replaces it."""
    with host.serve():
        xml = known(host)
        del host.target.volumes["lvs0/b"]
        if instead is not None:
            host.target.volumes["lvs0/b"] = Volume(instead)
        before = dict(host.target.volumes)
        for _ in range(2):
            done = host.run(operation, "begin", "-", xml=xml)
            assert done.returncode == 1
            assert done.stdout == ""
            assert "disk sdb: volume lvs0/b (UUID uuid-b) is lost" in done.stderr
            assert ("UUID uuid-new" in done.stderr) == (instead is not None)
            assert done.stderr.count("\n") == 1
    assert host.target.controllers == {}
    assert host.target.volumes == before


def test_a_volume_restored_under_its_uuid_is_the_disks_again(host: Host) -> None:
    with host.serve():
        xml = known_by_uuid(host)
        del host.target.volumes["lvs0/b"]
        assert host.run("prepare", "begin", "-", xml=xml).returncode == 1
        host.target.volumes["lvs0/restored"] = Volume("uuid-b")
        assert host.run("prepare", "begin", "-", xml=xml).returncode == 0
    assert host.target.controllers[CONTROLLER][1] == "uuid-b"


@pytest.mark.parametrize("uuid", [False, True])
def test_an_lvstore_that_is_not_loaded_fails_the_start(host: Host, uuid: bool) -> None:
    host.target.volumes.clear()
    host.target.lvstores.clear()
    with host.serve():
        done = host.run("prepare", "begin", "-", xml=known_by_uuid(host) if uuid else None)
    assert done.returncode == 1
    assert "lvstore lvs0 with volume lvs0/" in done.stderr
    assert "is not loaded" in done.stderr
    assert "bdev_lvol_create" not in host.target.calls


@pytest.mark.parametrize("operation", ["migrate", "restore", "reconnect"])
def test_a_guest_that_has_run_before_gets_no_empty_volume(host: Host, operation: str) -> None:
    del host.target.volumes["lvs0/b"]
    with host.serve():
        done = host.run(operation, "begin", "-")
    assert done.returncode == (0 if operation == "reconnect" else 1)
    assert "there is no volume lvs0/b" in done.stderr
    assert "bdev_lvol_create" not in host.target.calls


@by_day("migrate")
@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_a_guest_that_comes_connects_again_as_its_qemu_here_can(host: Host, operation: str) -> None:
    """Its XML is of another host, or of another QEMU's time."""
    for version, interval in ((b"8.1.5", None), (b"8.2.0", 1)):
        program = host.folder / "qemu"
        program.write_bytes(b"QEMU emulator version " + version)
        program.chmod(0o755)
        here = host.xml.replace("/usr/bin/qemu-system-x86_64", str(program))
        there = refitted(here, Settings(reconnect_s=9))
        assert there is not None
        with host.serve():
            for setting, expected in (('"auto"', interval), ("0", None), ("4", 4)):
                host.configure(reconnect_s=setting)
                for xml in (here, there):
                    done = host.run(operation, "begin", "-", xml=xml)
                    assert (done.returncode, done.stderr) == (0, "")
                    wanted = refitted(xml, Settings(reconnect_s=expected or 0))
                    assert done.stdout == (wanted or "")
                # What else it does changes nothing of the domain.
                done = host.run("prepare", "begin", "-", xml=there)
                assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("disks", [lvol("sda", "a"), ""])
@pytest.mark.parametrize("operation", ["prepare", "migrate", "restore"])
def test_a_guest_that_carries_protection_information_needs_what_it_was_offered(
    host: Host, operation: str, disks: str
) -> None:
    """A QEMU with the property, and a target, as nothing can stand in for its controller."""
    program = host.folder / "qemu"
    settings = Settings(
        vhost_dir=str(host.folder / "vhost"), protection=True, qemu_protects=lambda *_: True
    )
    client = domain(disks).replace("/usr/bin/qemu-system-x86_64", str(program))
    xml = translated(client, settings).xml
    without = translated(client, dataclasses.replace(settings, protection=False)).xml
    for said, lacks in ((b"", True), (b"t10_pi\0", False)):
        program.write_bytes(b"QEMU emulator version 9.1.0" + said)
        program.chmod(0o755)
        with host.serve():
            done = host.run(operation, "begin", "-", xml=xml)
            assert done.returncode == int(lacks) and done.stdout == ""
            assert (f"t10_pi; its QEMU ({program}) has none" in done.stderr) == lacks
            assert done.stderr.count("\n") == int(lacks)
            assert host.run(operation, "begin", "-", xml=without).returncode == 0
    silent = host.run(operation, "begin", "-", xml=xml)
    assert silent.returncode == 1 and silent.stdout == "", "nothing stands in for it"
    assert "does not answer" in silent.stderr or "no target answers" in silent.stderr
    if not disks and operation != "prepare":
        assert "without which it cannot go on: start the target" in silent.stderr


@pytest.mark.parametrize("operation", ["migrate", "restore"])
def test_a_guest_that_comes_with_all_its_volumes_is_let_in(host: Host, operation: str) -> None:
    with host.serve():
        done = host.run(operation, "begin", "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert host.target.controllers == {}, "prepare comes next"


def test_what_prepare_makes_for_a_guest_that_comes_is_left_to_the_other_host(host: Host) -> None:
    host.target.locked["uuid-a"] = True
    with host.serve():
        for comes in (True, False):  # the note of one arrival is for one start
            if comes:
                assert host.run("migrate", "begin", "-").returncode == 0
            assert host.run("prepare", "begin", "-").returncode == 0
            assert host.target.options[CONTROLLER, 0].get("incoming") == (True if comes else None)
            assert "incoming" not in host.target.options[CONTROLLER, 1]
            assert host.run("release", "end", "-").returncode == 0
        # Nor is it for a start after an arrival that failed before its own.
        host.run("migrate", "begin", "-")
        host.run("release", "end", "-")
        host.run("prepare", "begin", "-")
        assert "incoming" not in host.target.options[CONTROLLER, 0]
        # Nor for one that is no part of it, as libvirt asks for both at once.
        host.run("release", "end", "-")
        host.run("migrate", "begin", "-")
        (note,) = (host.folder / "state").glob("*.incoming")
        before = time.time() - 11
        os.utime(note, (before, before))
        host.run("prepare", "begin", "-")
        assert "incoming" not in host.target.options[CONTROLLER, 0]


def test_the_record_goes_when_the_metadata_says_it(host: Host) -> None:
    with host.serve():
        known_by_record(host)
        xml = known_by_uuid(host).replace('lvol="a"', 'lvol="a" uuid="uuid-a"')
        assert host.run("prepare", "begin", "-", xml=xml).returncode == 0
    assert record(host) == {}
    assert list((host.folder / "state").iterdir()) == []


def test_without_a_record_there_is_no_start(host: Host) -> None:
    """A volume made by a start that fails then is found, not made again, by the next."""
    del host.target.volumes["lvs0/b"]
    host.configure("create_missing_mib = 64")
    (host.folder / f"state/{CONTROLLER}.json.new").mkdir(parents=True)
    with host.serve():
        done = host.run("prepare", "begin", "-")
        assert done.returncode == 1
        assert "cannot be recorded" in done.stderr
        assert host.target.controllers == {}
        (host.folder / f"state/{CONTROLLER}.json.new").rmdir()
        assert host.run("prepare", "begin", "-").returncode == 0
    assert host.target.calls.count("bdev_lvol_create") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"volumes": 1}', "{"])
def test_a_damaged_record_fails_the_start(host: Host, text: str) -> None:
    (host.folder / "state").mkdir()
    (host.folder / f"state/{CONTROLLER}.json").write_text(text)
    with host.serve():
        done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert f"{CONTROLLER}.json, which records the volumes" in done.stderr
    assert host.target.controllers == {}


def test_a_store_that_is_full_is_one_sentence(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise RpcError(-28, "No space left on device")

    del host.target.volumes["lvs0/b"]
    host.configure("create_missing_mib = 64")
    monkeypatch.setattr(host.target, "bdev_lvol_create", full)
    with host.serve():
        done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert "disk sdb: volume lvs0/b of 64 MiB cannot be made: " in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_renamed_volume_is_found_by_its_uuid(host: Host) -> None:
    xml = host.xml.replace('lvol="b"', 'lvol="old" uuid="uuid-b"')
    with host.serve():
        assert host.run("prepare", "begin", "-", xml=xml).returncode == 0
    assert host.target.controllers[CONTROLLER][1] == "uuid-b"


def test_a_volume_in_use_fails_the_start_with_the_targets_sentence(host: Host) -> None:
    host.target.controllers["vm-other"] = {0: "uuid-a"}
    with host.serve():
        done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert host.target.calls.count("vhost_scsi_controller_add_target") == 1
    assert "disk sda (volume lvs0/a): " in done.stderr
    assert "bdev uuid-a is in use" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_target_with_another_folder_fails_the_start(host: Host) -> None:
    xml = host.xml.replace(f"{host.folder}/vhost", f"{host.folder}/elsewhere")
    with host.serve():
        done = host.run("prepare", "begin", "-", xml=xml)
    assert done.returncode == 1
    assert "vhost_dir" in done.stderr


def test_a_target_that_does_not_answer_costs_the_deadline_only(host: Host) -> None:
    host.configure("deadline_s = 0.3")
    with host.serve(mute=True):
        done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert "did not answer within 0.3 s" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("start", "begin", "-"),
        ("started", "begin", "-"),
        ("stopped", "end", "-"),
        ("migrate", "end", "-"),
        ("prepare", "end", "-"),
    ],
)
def test_other_operations_are_none_of_its_business(host: Host, words: tuple[str, ...]) -> None:
    done = host.run(*words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("operation", [("prepare", "begin"), ("release", "end")])
def test_other_domains_start_without_a_target_and_a_configuration(
    host: Host, operation: tuple[str, str]
) -> None:
    (host.folder / "virtlun.toml").unlink()
    done = host.run(*operation, "-", xml=domain(plain("vda", "virtio")))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("= x", "virtlun.toml"),
        ("[hook]\ndeadline_s = 'a'", "hook"),
        ("[hook]\ndeadline_s = 0", "deadline_s"),
        ("[hook]\ncreate_missing_mib = -1", "create_missing_mib"),
        ("hook = 1", "hook"),
        (None, "no such file"),
    ],
)
def test_a_bad_configuration_is_one_sentence(host: Host, config: str | None, words: str) -> None:
    file = host.folder / "virtlun.toml"
    file.unlink()
    if config is not None:
        file.write_text(config)
    done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("xml", [f"<{NAMESPACE}", f"<a b='{NAMESPACE}'/>"])
def test_xml_that_is_no_domain_is_no_crash(host: Host, xml: str) -> None:
    done = host.run("prepare", "begin", "-", xml=xml)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if "/>" not in xml else 0)


#: What the hook may cost at the start of a domain with a disk of ours: modules that it imports, and
#: calls that it makes, of Python's functions and of C's. With 89 and 65,000 it takes 52 ms; it is
#: to have 60. And the calls at the start of any other domain, which takes 13 ms: 1,200.
MODULES_MAX = 95
CALLS_MAX = 71_000
OTHERS_CALLS_MAX = 1_500


def cost(host: Host, xml: str) -> tuple[set[str], int]:
    """Returns what the hook costs a domain's start: modules that it imports, and calls.

    Beyond what any zip archive needs.
    """
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import runpy, zipimport
before = set(sys.modules)
calls = [0]
def count(frame, event, arg):
    calls[0] += event in ("call", "c_call")
sys.setprofile(count)
from plugin.hook.entry import main
main(["--config", sys.argv[2], "d", "prepare", "begin", "-"])
sys.setprofile(None)
print(calls[0], *sorted(set(sys.modules) - before))
"""
    files = (str(host.folder / name) for name in ("virtlun", "virtlun.toml"))
    words = [PYTHON, "-ISc", code, *files]
    done = subprocess.run(words, input=xml, capture_output=True, text=True, check=True)
    calls, *names = done.stdout.split()
    return set(names), int(calls)


def test_a_start_without_our_disks_imports_nothing_heavy(host: Host) -> None:
    heavy = {"json", "socket", "xml", "tomllib", "re", "typing", "dataclasses", "pathlib"}
    names, calls = cost(host, text("plain"))
    assert not names & heavy
    assert calls <= OTHERS_CALLS_MAX
    assert "dataclasses" in cost(host, host.xml)[0]


def test_a_start_imports_only_what_it_needs_and_does_little(host: Host) -> None:
    """Each takes its part of the time that libvirtd waits, and is the same on each machine."""
    with host.serve():
        names, calls = cost(host, host.xml)
    slow = {"pathlib", "uuid", "logging", "subprocess", "pydataplane.domain.translate"}
    assert not names & (slow | {"pydataplane.emulator"})
    assert len(names) <= MODULES_MAX
    assert calls <= CALLS_MAX


def test_the_hooks_defaults_are_the_configurations() -> None:
    section, target = HookSection(), TargetSection()
    assert section.create_missing_mib == config.DEFAULT_CREATE_MISSING_MIB
    assert str(section.state_dir) == config.DEFAULT_STATE_DIR
    assert str(GatewaySection().state_dir) == config.DEFAULT_JOURNAL_DIR
    assert section.deadline_s == config.DEFAULT_DEADLINE_S
    assert DisksSection().reconnect_s == config.DEFAULT_RECONNECT_S
    assert str(target.rpc_socket) == config.DEFAULT_RPC_SOCKET
    assert str(target.vhost_dir) == config.DEFAULT_VHOST_DIR
    assert str(DEFAULT_PATH) == config.DEFAULT_CONFIG


def test_the_archive_is_one_file_that_knows_its_version(host: Host, tmp_path: Path) -> None:
    file = host.folder / "virtlun"
    assert file.read_bytes() == archive.build() and os.access(file, os.X_OK)
    assert file.read_bytes().startswith(b"#!/usr/bin/python3 -IS\n")
    assert archive.is_current(file)
    other = tmp_path / "other"
    with zipfile.ZipFile(other, "w") as changed:
        changed.writestr("plugin/hook/entry.py", "")
    assert archive.is_current(other) is False
    other.write_text("#!/bin/sh\n")
    assert archive.is_current(other) is None


def test_install_writes_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qemu.d/virtlun"
    assert hook.main(["--install", str(file)]) == 0
    assert archive.is_current(file)
    assert hook.main(["--install", str(file / "below")]) == 1
    assert str(file / "below") in capsys.readouterr().err


def test_the_archive_has_all_that_it_imports() -> None:
    """Of ours; the rest is the standard library's."""
    inside = {name.removesuffix(".py").replace("/", ".") for name in archive.sources()}
    inside = {name.removesuffix(".__init__") for name in inside}
    for name, source in archive.sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                given = [f"{node.module}.{alias.name}" for alias in node.names]
                used = {each if each in inside else str(node.module) for each in given}
            elif isinstance(node, ast.Import):
                used = {alias.name for alias in node.names}
            else:
                continue
            ours = {each for each in used if each.split(".")[0] not in sys.stdlib_module_names}
            assert ours <= inside | {"plugin.hook.archive"}, name


def test_help_is_for_whoever_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert hook.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: virtlun-hook ")
    assert hook.main(["vm", "prepare"]) == 2
    assert capsys.readouterr().err.startswith("usage: virtlun-hook ")


def test_an_image_that_cannot_be_had_keeps_no_other_disk_from_a_guest_that_runs(
    host: Host,
) -> None:
    image = (
        "<disk type='network' device='disk'><source protocol='rbd' name='volumes/v'/>"
        "<auth username='u'><secret type='ceph' usage='s'/></auth>"
        "<target dev='sdz' bus='scsi'/></disk>"
    )
    settings = Settings(vhost_dir=str(host.folder / "vhost"), network=frozenset({"rbd"}))
    xml = translated(domain(image + lvol("sda", "a")), settings).xml
    with host.serve():
        done = host.run("prepare", "begin", "-", xml=xml)
        assert (done.returncode, host.target.controllers) == (1, {})
        done = host.run("reconnect", "begin", "-", xml=xml)
        assert "disk sdz (image rbd:volumes/v): libvirt has the secret" in done.stderr
        assert host.target.controllers == {CONTROLLER: {1: "uuid-a"}}


def test_an_image_that_is_open_for_another_domain_is_no_right_to_it(host: Host) -> None:
    image = (
        "<disk type='network' device='disk'><source protocol='rbd' name='volumes/v'/>"
        "<auth username='u'><secret type='ceph' usage='s'/></auth>"
        "<target dev='sda' bus='scsi'/><shareable/></disk>"
    )
    settings = Settings(vhost_dir=str(host.folder / "vhost"), network=frozenset({"rbd"}))
    made = translated(domain(image), settings)
    assert made.plan is not None
    (lun,) = made.plan.luns
    with host.serve():
        images.open_image(host.target, "vm-other", lun, "key")
        assert lun.uuid is not None
        host.target.controllers["vm-other"] = {0: lun.uuid}
        done = host.run("prepare", "begin", "-", xml=made.xml)
        assert "libvirt has the secret" in done.stderr
        assert host.target.users(lun.uuid) == ["vm-other"]
        # The gateway has asked for the secret, and made the disk.
        host.target.call("vhost_create_scsi_controller", ctrlr=CONTROLLER)
        host.target.controllers[CONTROLLER][0] = lun.uuid
        for operation in ("prepare", "reconnect"):
            done = host.run(operation, "begin", "-", xml=made.xml)
            assert (done.returncode, done.stderr) == (0, "")
        assert sorted(host.target.users(lun.uuid)) == [CONTROLLER, "vm-other"]


def test_an_image_of_a_guest_that_comes_is_left_to_the_other_host(host: Host) -> None:
    image = (
        "<disk type='network' device='disk'><source protocol='rbd' name='volumes/v'/>"
        "<target dev='sda' bus='scsi'/></disk>"
    )
    vhost = str(host.folder / "vhost")
    settings = Settings(vhost_dir=vhost, network=frozenset({"rbd"}), allowed=ANY)
    xml = translated(domain(image), settings).xml
    file = host.folder / "virtlun.toml"
    file.write_text(file.read_text().replace("[disks]", "[disks]\nown_keyring = true"))
    with host.serve():
        for comes in (True, False):
            if comes:
                assert host.run("migrate", "begin", "-", xml=xml).stderr == ""
                assert host.target.images["volumes/v"]["incoming"] is True
            assert host.run("prepare", "begin", "-", xml=xml).stderr == ""
            expected = True if comes else None
            assert host.target.images["volumes/v"].get("incoming") is expected
            assert host.target.options[CONTROLLER, 0].get("incoming") is expected
            assert host.run("release", "end", "-", xml=xml).stderr == ""
            # As the target does by itself.
            host.target.virtlun_guest_disk_close(host.target.volumes["volumes/v"].uuid)
    # One that comes is asked for anew each time: the target knows whether it is up to date.
    assert host.target.calls.count("bdev_rbd_create") == 3
