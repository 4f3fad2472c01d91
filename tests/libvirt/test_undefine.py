"""Undefining and renaming domains with checkpoints and snapshots of disks of ours.

libvirtd answers in the same words for checkpoints of its own disks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import at_night, by_day
from tests.support.relay import Step
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "leaving"
VOLUMES = ("a", "b")
METADATA = "--checkpoints-metadata"


@pytest.fixture(scope="module")
def volumes(host: Host) -> Host:
    """A defined domain with the volumes sda and sdb, and its XML in a file."""
    host.start_without_guest(NAME, *VOLUMES)
    (host.scratch / "again.xml").write_text(host.virsh("dumpxml", NAME, "--inactive"))
    return host


@pytest.fixture
def off(volumes: Host) -> Iterator[Host]:
    """The domain, off, with the checkpoints c1 and c2."""
    volumes.virsh("destroy", NAME, check=False)
    volumes.virsh("define", str(volumes.scratch / "again.xml"))
    for name in ("c1", "c2"):
        volumes.virsh("checkpoint-create-as", NAME, name)
    yield volumes
    volumes.virsh("destroy", NAME, check=False)
    flags = (METADATA, "--snapshots-metadata", "--managed-save")
    volumes.virsh("undefine", NAME, *flags, check=False)
    until(lambda: not list((volumes.scratch / "notes").iterdir()), "the journal is empty")
    for name in sorted(lvols(volumes)):
        if "@" in name:
            volumes.volumes.delete(f"lvs0/{name}")


def lvols(host: Host) -> set[str]:
    return {volume.name for volume in host.volumes.volumes("lvs0")}


def held(*checkpoints: str) -> set[str]:
    return {f"{volume}@checkpoint-{name}" for volume in VOLUMES for name in checkpoints}


def checkpoints(host: Host, name: str = NAME) -> list[str]:
    return host.virsh("checkpoint-list", name, "--name").split()


def domains(host: Host) -> list[str]:
    return host.virsh_direct("list", "--all", "--name").split()


def refused(host: Host, *words: str) -> str:
    with pytest.raises(VirshError) as caught:
        host.virsh(*words)
    return str(caught.value)


def define_again(host: Host) -> None:
    host.virsh("define", str(host.scratch / "again.xml"))


@by_day("flags0", "flags4")
@pytest.mark.parametrize(
    "flags", [[], ["--managed-save"], ["--nvram"], ["--keep-nvram"], ["--snapshots-metadata"]]
)
def test_without_its_flag_a_domain_that_is_off_keeps_its_checkpoints(
    off: Host, flags: list[str]
) -> None:
    said = refused(off, "undefine", NAME, *flags)
    assert (
        "Requested operation is not valid: cannot delete inactive domain with 2 checkpoints" in said
    )
    assert NAME in domains(off)
    assert checkpoints(off) == ["c1", "c2"]


@by_day("flags1")
@pytest.mark.parametrize("flags", [[], ["--managed-save", "--nvram", "--snapshots-metadata"]])
def test_with_its_flag_the_volumes_snapshots_stay(off: Host, flags: list[str]) -> None:
    shown = off.scratch / "c1.xml"
    shown.write_text(off.virsh("checkpoint-dumpxml", NAME, "c1"))
    off.virsh("undefine", NAME, METADATA, *flags)
    assert NAME not in domains(off)
    assert lvols(off) == {*VOLUMES, *held("c1", "c2")}
    define_again(off)
    assert checkpoints(off) == []
    off.virsh("checkpoint-create", NAME, str(shown), "--redefine")
    assert checkpoints(off) == ["c1"], "as after `checkpoint-delete --metadata`"
    for name in held("c2"):
        off.volumes.delete(f"lvs0/{name}")
    off.virsh("checkpoint-delete", NAME, "c1")
    assert lvols(off) == set(VOLUMES)


def test_what_libvirtd_refuses_takes_no_checkpoint(off: Host) -> None:
    off.virsh("start", NAME)
    off.virsh("managedsave", NAME)
    assert "managed save image exists" in refused(off, "undefine", NAME, METADATA)
    assert checkpoints(off) == ["c1", "c2"]
    assert "with 2 checkpoints" in refused(off, "undefine", NAME, "--managed-save")
    off.virsh("undefine", NAME, METADATA, "--managed-save")
    assert NAME not in domains(off)


def test_snapshots_are_looked_at_first_and_their_volumes_snapshots_stay(off: Host) -> None:
    off.virsh("snapshot-create-as", NAME, "s")
    for flags in ([], [METADATA]):
        said = refused(off, "undefine", NAME, *flags)
        assert "cannot delete inactive domain with 1 snapshots" in said
        assert checkpoints(off) == ["c1", "c2"], "libvirtd refused it"
    assert "with 2 checkpoints" in refused(off, "undefine", NAME, "--snapshots-metadata")
    assert off.virsh("snapshot-list", NAME, "--name").split() == ["s"]
    off.virsh("undefine", NAME, METADATA, "--snapshots-metadata")
    assert lvols(off) == {*VOLUMES, "a@s", "b@s", *held("c1", "c2")}
    define_again(off)
    assert off.virsh("snapshot-list", NAME, "--name").split() == []
    assert checkpoints(off) == []


def test_a_running_domain_becomes_transient_and_keeps_them(off: Host) -> None:
    off.virsh("start", NAME)
    off.virsh("undefine", NAME)
    assert checkpoints(off) == ["c1", "c2"]
    assert "cannot undefine transient domain" in refused(off, "undefine", NAME, METADATA)
    off.virsh("destroy", NAME)
    assert NAME not in domains(off)
    define_again(off)
    assert checkpoints(off) == ["c1", "c2"], "they last as long as the volumes' snapshots"


def test_a_renamed_domain_keeps_them(off: Host) -> None:
    try:
        off.virsh("domrename", NAME, "other")
        assert checkpoints(off, "other") == ["c1", "c2"]
        off.virsh("checkpoint-create-as", "other", "c3")
        assert "with 3 checkpoints" in refused(off, "undefine", "other")
        off.virsh("checkpoint-delete", "other", "c3")
    finally:
        off.virsh("domrename", "other", NAME)
    assert checkpoints(off) == ["c1", "c2"]


def test_a_volume_that_is_gone_keeps_no_definition(off: Host) -> None:
    off.virsh("checkpoint-delete", NAME, "c1", "--children")
    off.volumes.delete("lvs0/a")
    try:
        assert checkpoints(off) == []
        off.virsh("undefine", NAME)
    finally:
        off.volumes.create("lvs0/a", 8 << 20, thin=True)


def test_while_the_target_is_away(off: Host) -> None:
    off.stop_target()
    try:
        assert "target" in refused(off, "undefine", NAME, METADATA)
        assert NAME in domains(off)
        off.virsh("undefine", NAME)
    finally:
        off.start_target()
    assert lvols(off) == {*VOLUMES, *held("c1", "c2")}
    define_again(off)
    assert checkpoints(off) == ["c1", "c2"]


@pytest.mark.parametrize(
    ("step", "undefined"),
    [
        at_night(Step("answered", "bdev_lvol_get_lvols"), False, id="asked"),
        at_night(Step("before", "virtlun_lvol_remove_xattr"), True, id="before"),
        pytest.param(Step("unanswered", "virtlun_lvol_remove_xattr"), True, id="unanswered"),
        at_night(Step("answered", "virtlun_lvol_remove_xattr"), True, id="answered"),
    ],
)
def test_killed_in_between(off: Host, step: Step, undefined: bool) -> None:
    with off.relayed() as relay:
        relay.end_at(step, lambda: off.stop_gateway(signal.SIGKILL))
        off.virsh("undefine", NAME, METADATA, check=False)
        until(lambda: not off.has_gateway, "the step")
        assert relay.hit()
        assert (NAME in domains(off)) is not undefined
        off.start_gateway()
        until(lambda: not list((off.scratch / "notes").iterdir()), "the journal is empty")
        if undefined:
            define_again(off)
            assert checkpoints(off) == []
        else:
            assert checkpoints(off) == ["c1", "c2"]
            off.virsh("undefine", NAME, METADATA)
            assert NAME not in domains(off)


@pytest.mark.nightly
def test_finished_when_the_target_is_back(off: Host) -> None:
    with off.relayed() as relay:
        relay.end_at(Step("before", "virtlun_lvol_remove_xattr"))
        off.virsh("undefine", NAME, METADATA)
        assert relay.hit()
        assert list((off.scratch / "notes").iterdir())
        off.start_target()
        until(lambda: not list((off.scratch / "notes").iterdir()), "the journal is empty")
        define_again(off)
        assert checkpoints(off) == []
