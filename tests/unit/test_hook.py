"""The hook: reads what the translation writes, drives a target, never hangs or breaks a domain."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings

from plugin import hook
from plugin.errors import TranslateError
from plugin.hook import script
from plugin.translate import LunPlan, Plan, Settings, VolumeRef, define, plan
from tests.unit.fake_target import HostTarget, Server
from tests.unit.translate.domains import (
    FILES,
    NAMES,
    NEW_UUID,
    domain,
    lvol,
    plain,
    pretty,
    text,
    translated,
)
from tests.unit.translate.test_define import domains

PYTHON = "/usr/bin/python3"
CONTROLLER = "vm-6d1f9c52-0000-4000-8000-00000000aaaa"


def as_plan(read: script.Plan | None) -> Plan | None:
    """Returns the hook's plan as the translation's."""
    if read is None:
        return None
    luns = [
        LunPlan(
            item.target,
            item.dev,
            VolumeRef(*item.alias.split("/")),
            item.uuid,
            item.serial,
            item.read_only,
            item.shareable,
        )
        for item in read.luns
    ]
    return Plan(read.domain, read.controller, read.socket, read.num_queues, tuple(luns))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_hook_reads_the_same_plan(path: Path) -> None:
    uuids = {"lvs0/root": "aaaaaaaa-0000-4000-8000-000000000000"}
    there = define(path.read_text(), Settings(), new_uuid=NEW_UUID, uuids=uuids)
    for xml in (there.xml, pretty(there.xml)):
        assert as_plan(script.read_plan(xml.encode())) == there.plan == plan(xml)
    assert script.read_plan(path.read_bytes()) is None


@given(domains())
@settings(max_examples=30)
def test_the_hook_reads_the_same_plan_of_any_domain(client: str) -> None:
    there = translated(client)
    assert as_plan(script.read_plan(there.xml.encode())) == there.plan


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
    ],
)
def test_hook_and_translation_agree_on_what_is_damaged(old: str, new: str) -> None:
    there = translated(domain(lvol("sda", "a") + lvol("sdb", "b"))).xml
    assert old in there
    broken = there.replace(old, new)
    with pytest.raises(TranslateError):
        plan(broken)
    with pytest.raises(script.HookError):
        script.read_plan(broken.encode())


def test_a_domain_whose_controller_is_unused_and_gone_needs_nothing() -> None:
    xml = translated(domain()).xml.replace("ua-virtlun-scsi0", "ua-else")
    assert plan(xml) is None
    assert script.read_plan(xml.encode()) is None


@dataclasses.dataclass
class Host:
    """A folder with a target's socket, a configuration and a copy of the hook."""

    folder: Path
    target: HostTarget

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
            timeout=20,
            check=False,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        )

    def configure(self, more: str = "") -> None:
        """Writes virtlun.toml."""
        (self.folder / "virtlun.toml").write_text(
            f"[target]\nrpc_socket = '{self.folder}/rpc'\n[hook]\n{more}\n"
        )

    def serve(self, *, mute: bool = False) -> Server:
        """Starts the target."""
        return Server(self.target, self.folder / "rpc", mute=mute)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    target = HostTarget(
        {"lvs0/a": "uuid-a", "lvs0/b": "uuid-b", "lvs0/c": "uuid-c"}, tmp_path / "vhost"
    )
    # A copy, far from the package: the hook is one file.
    shutil.copy(hook.SCRIPT, tmp_path / "virtlun")
    made = Host(tmp_path, target)
    made.configure()
    return made


def test_prepare_makes_the_controller_and_its_luns(host: Host) -> None:
    with host.serve():
        for _ in range(2):  # the second time there is nothing to do
            done = host.run("prepare", "begin", "-")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
        assert host.target.options[CONTROLLER, 0] == {"serial": "S"}
        assert host.target.options[CONTROLLER, 1] == {"read_only": True}
        assert host.target.calls.count("vhost_create_scsi_controller") == 1


def test_prepare_corrects_what_is_wrong(host: Host) -> None:
    host.target.vhost_create_scsi_controller(CONTROLLER)
    host.target.controllers[CONTROLLER] = {0: "uuid-c", 1: "uuid-b", 9: "uuid-a"}
    with host.serve():
        assert host.run("prepare", "begin", "-").returncode == 0
    assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
    assert host.target.calls.count("vhost_scsi_controller_remove_target") == 2


def test_release_removes_the_controller(host: Host) -> None:
    with host.serve():
        host.run("prepare", "begin", "-")
        host.target.controllers["vm-other"] = {}
        for _ in range(2):
            done = host.run("release", "end", "-")
            assert (done.returncode, done.stderr) == (0, "")
    assert host.target.controllers == {"vm-other": {}}


def test_reconnect_repairs_and_never_fails(host: Host) -> None:
    with host.serve():
        assert host.run("reconnect", "begin", "-").returncode == 0
        assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "uuid-b"}}
    (host.folder / "rpc").unlink()
    for xml in (host.xml, host.xml.replace('version="1"', 'version="2"')):
        done = host.run("reconnect", "begin", "-", xml=xml)
        assert done.returncode == 0  # libvirtd would kill the running domain
        assert done.stderr.startswith("virtlun: domain small: ")


def test_without_a_target_the_start_fails_with_a_sentence(host: Host) -> None:
    done = host.run("prepare", "begin", "-")
    assert done.returncode == 1
    assert done.stderr == (
        f"virtlun: domain small: the virtlun target does not answer on {host.folder}/rpc (No such"
        " file or directory); start it with `virtlun target start`\n"
    )


def test_a_missing_volume_fails_the_start_unless_configured(host: Host) -> None:
    del host.target.bdevs["lvs0/b"]
    with host.serve():
        done = host.run("prepare", "begin", "-")
        assert done.returncode == 1
        assert "disk sdb: there is no volume lvs0/b; create it with" in done.stderr
        assert host.target.controllers == {}  # nothing was begun
        host.configure("create_missing_mib = 64")
        assert host.run("prepare", "begin", "-").returncode == 0
    assert host.target.controllers == {CONTROLLER: {0: "uuid-a", 1: "made-64-True"}}


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
        ("migrate", "begin", "-"),
        ("restore", "begin", "-"),
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


@pytest.mark.parametrize("xml", [f"<{script.NAMESPACE}", f"<a b='{script.NAMESPACE}'/>"])
def test_xml_that_is_no_domain_is_no_crash(host: Host, xml: str) -> None:
    done = host.run("prepare", "begin", "-", xml=xml)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if "/>" not in xml else 0)


def test_a_start_without_our_disks_imports_nothing_heavy() -> None:
    code = f"""
import sys
sys.argv = ["virtlun", "d", "prepare", "begin", "-"]
before = set(sys.modules)
try:
    exec(compile(open({str(hook.SCRIPT)!r}).read(), "hook", "exec"), {{"__name__": "__main__"}})
except SystemExit as end:
    assert end.code == 0
heavy = {{"json", "socket", "xml", "tomllib", "re", "typing", "dataclasses", "pathlib"}}
print(sorted(heavy & (set(sys.modules) - before)))
"""
    done = subprocess.run(
        [PYTHON, "-ISc", code], input=text("plain"), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_hook_knows_the_same_names_as_the_translation() -> None:
    from plugin.translate import model  # noqa: PLC0415

    for name in ("NAMESPACE", "QEMU_NAMESPACE", "CARRIER_ALIAS", "MAX_TARGETS"):
        assert getattr(script, name) == getattr(model, name)
    first = hook.SCRIPT.read_text().splitlines()[0]
    assert re.fullmatch(r"#!/usr/bin/python3 -IS", first)
    assert os.access(hook.SCRIPT, os.X_OK)
