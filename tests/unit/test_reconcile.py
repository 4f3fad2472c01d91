"""Reconciliation: state in, actions out; and the shell around it against a made-up target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydataplane.domain.actions import (
    AddTarget,
    CreateBlk,
    CreateController,
    DeleteController,
    ReleaseController,
    SetLimits,
    SetOwner,
    actions,
    clearance,
    leftovers,
    unasked,
)
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.model import Characteristics, DiskAddress, ErrorPolicy, FrontEnd
from pydataplane.domain.observed import Bdev, ObservedDisk, State, disks_of, is_right, observe
from pydataplane.domain.reconcile import ensure, perform, release, release_domain
from pydataplane.domain.translate import LunPlan, Plan, VolumeRef
from pydataplane.errors import BAD_PARAMETERS, RpcError
from tests.support.fake_target import FakeTarget

A, B = (f"vm-{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


def lun(target: int, lvol: str, uuid: str | None = None, **more: Any) -> LunPlan:
    return LunPlan(target, f"sd{chr(97 + target)}", VolumeRef("lvs0", lvol), uuid, **more)


def plan(controller: str, *luns: LunPlan) -> Plan:
    return Plan("d", controller, f"/run/virtlun/vhost/{controller}", 1, luns)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget({f"lvs0/v{n}": f"uuid-{n}" for n in range(6)})


def ensured(target: FakeTarget, wanted: Plan, *, whole: bool = False) -> str | None:
    """Returns why a controller could not be made what it should be."""
    try:
        ensure(target, wanted, whole=whole)
    except ReconcileError as error:
        return str(error)
    return None


def test_nothing_to_do_is_no_action() -> None:
    state = State({A: {0: ObservedDisk("uuid-0")}}, {"lvs0/v0": Bdev("uuid-0", 512)})
    # At a start, what an earlier run has left of limits is looked for.
    limits = SetLimits(A, lun(0, "v0"))
    assert actions(plan(A, lun(0, "v0")), state, whole=True) == [SetOwner(A, None), limits]
    assert actions(plan(A, lun(0, "v0")), state, whole=False) == []


def test_what_a_lun_shows_of_itself_is_corrected_too(target: FakeTarget) -> None:
    plain = lun(0, "v0", "uuid-0")
    named, fixed = (lun(0, "v0", "uuid-0", serial=serial) for serial in ("S", None))
    safe = lun(0, "v0", "uuid-0", read_only=True)
    for before, after, calls in (
        (plain, named, 1),
        (named, fixed, 1),
        (plain, safe, 1),
        (named, named, 0),
        (safe, plain, 0),  # the volume itself may be read-only
    ):
        target.controllers = {}
        assert ensured(target, plan(A, before)) is None
        shown = dict(target.options)
        target.calls.clear()
        # Not of a guest that runs,
        assert (ensured(target, plan(A, after)) is None) == (calls == 0)
        assert target.options == shown
        # but of one that starts.
        assert ensured(target, plan(A, after), whole=True) is None
        assert target.calls.count("vhost_delete_controller") == calls
        assert target.calls.count("vhost_scsi_controller_add_target") == calls


def test_blocks_are_corrected_and_asked_for_only_where_they_are_not_the_volumes_own(
    target: FakeTarget,
) -> None:
    def made(volume: str, size: int | None) -> tuple[list[str], dict[str, Any]]:
        target.calls.clear()
        wanted = plan(A, lun(0, volume, f"uuid-{volume[1]}", block_size=size))
        why = ensured(target, wanted, whole=True)
        words = {"vhost_delete_controller": "delete", "vhost_scsi_controller_add_target": "add"}
        changes = [words[call] for call in target.calls if call in words]
        options = dict(target.options.get((A, 0), {}))
        options.pop("write_error_policy", None)
        return [*changes, *([why] if why else [])], options

    target.block_sizes["uuid-1"] = 4096
    assert made("v0", None) == (["add"], {})
    assert made("v0", 512) == ([], {})
    assert made("v0", 4096) == (["delete", "add"], {"block_size": 4096})
    assert made("v0", 4096) == ([], {"block_size": 4096})
    assert made("v0", None) == (["delete", "add"], {})
    assert made("v1", 4096) == (["delete", "add"], {})
    assert made("v1", None) == ([], {})
    # What is there stays, and what cannot be is refused by the target.
    assert made("v1", 512) == ([], {})
    target.controllers.clear()
    target.options.clear()
    refusal = "disk sda (volume lvs0/v1): bdev uuid-1 has larger blocks"
    assert made("v1", 512) == (["add", "delete", refusal], {})


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_a_physical_block_is_asked_for_and_corrected_at_a_start(
    target: FakeTarget, front: FrontEnd
) -> None:
    def wanted(size: int | None) -> Plan:
        chosen = Characteristics(physical_block_size=size)
        return plan(A, lun(0, "v0", "uuid-0", front=front, characteristics=chosen))

    def told() -> object:
        options = target.options[A, 0] if front == "scsi" else target.blk[f"{A}.0"]
        return options.get("physical_block_size")

    assert ensured(target, wanted(8192), whole=True) is None
    assert told() == 8192
    target.calls.clear()
    assert ensured(target, wanted(8192), whole=True) is None
    assert not {"vhost_delete_controller", "vhost_create_blk_controller"} & set(target.calls)
    assert ensured(target, wanted(None)) is not None, "a running guest keeps it"
    assert told() == 8192
    assert ensured(target, wanted(None), whole=True) is None
    assert told() is None


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_a_physical_block_is_no_smaller_than_the_blocks_that_a_disk_has(
    target: FakeTarget, front: FrontEnd
) -> None:
    def told(logical: int | None) -> object:
        chosen = Characteristics(physical_block_size=512)
        more = {"front": front, "characteristics": chosen, "block_size": logical}
        wanted = plan(A, lun(0, "v0", "uuid-0", **more))
        assert ensured(target, wanted, whole=True) is None
        target.calls.clear()
        assert ensured(target, wanted, whole=True) is None
        assert not {"vhost_delete_controller", "vhost_create_blk_controller"} & set(target.calls)
        options = target.options[A, 0] if front == "scsi" else target.blk[f"{A}.0"]
        return options.get("physical_block_size")

    assert told(None) == 512
    assert told(4096) == 4096
    target.block_sizes["uuid-0"] = 4096
    assert told(None) == 4096


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_an_older_target_is_to_be_upgraded_first(target: FakeTarget, front: FrontEnd) -> None:
    method = {"scsi": "vhost_scsi_controller_add_target", "blk": "vhost_create_blk_controller"}
    words = 'unknown parameter "physical_block_size" of it; it takes ctrlr'
    target.refuse[method[front]] = RpcError(BAD_PARAMETERS, words)
    chosen = Characteristics(physical_block_size=4096)
    why = ensured(target, plan(A, lun(0, "v0", "uuid-0", front=front, characteristics=chosen)))
    assert why is not None and 'unknown parameter "physical_block_size"' in why
    assert why.endswith("than what asks it: upgrade it first (`virtlun target upgrade`)")


def test_a_target_that_does_not_know_physical_blocks_is_believed() -> None:
    told = {"bdev_name": "uuid-0", "serial": "uuid-0", "read_only": False, "block_size": 512}
    told |= dict.fromkeys(("wwn", "vendor", "product", "rotation_rate"))
    told |= {"removable": False, "discard": True, "write_cache": True}
    scsi = {"backend_specific": {"scsi": [{"scsi_dev_num": 0, "luns": [told]}]}}
    blk = {"backend_specific": {"block": {"bdev": "uuid-0", "discard": True}}}
    for controller in (scsi, blk):
        state = State({}, {"uuid-0": Bdev("uuid-0", 512)})
        shown = disks_of(controller)[0]
        assert is_right(lun(0, "v0", "uuid-0"), shown, state)
        chosen = Characteristics(physical_block_size=4096)
        assert not is_right(lun(0, "v0", "uuid-0", characteristics=chosen), shown, state)


def test_a_target_that_does_not_tell_is_believed(target: FakeTarget) -> None:
    assert ensured(target, plan(A, lun(0, "v0"))) is None
    target.tells_options = False
    target.calls.clear()
    wanted = plan(A, lun(0, "v0", serial="S", read_only=True, block_size=4096))
    assert ensured(target, wanted) is None
    assert set(target.calls) == {"vhost_get_controllers", "bdev_get_bdevs"}


def test_what_is_missing_is_made() -> None:
    one, two = lun(0, "v0"), lun(3, "v1")
    for whole in (False, True):
        assert actions(plan(A, one, two), State({}), whole=whole) == [
            CreateController(A),
            *([SetOwner(A, None)] if whole else []),
            AddTarget(A, one),
            AddTarget(A, two),
        ]


def test_a_domain_that_starts_gets_a_new_controller_in_the_place_of_a_wrong_one() -> None:
    names = {f"lvs0/v{n}": Bdev(f"uuid-{n}", 512) for n in range(4)}
    state = State(
        {A: {0: ObservedDisk("uuid-0"), 1: ObservedDisk("uuid-9"), 7: ObservedDisk("uuid-3")}},
        names,
    )
    zero, one = lun(0, "v0"), lun(1, "v1")
    # Whoever is connected is a stranger then, and has to go first.
    owner = SetOwner(A, None)
    assert actions(plan(A, zero, one), state, whole=True) == [
        owner,
        ReleaseController(A),
        CreateController(A),
        owner,
        AddTarget(A, zero),
        AddTarget(A, one),
    ]


def test_from_a_domain_that_runs_nothing_is_taken() -> None:
    """Neither a LUN that is not in the metadata, nor one that it says otherwise."""
    names = {f"lvs0/v{n}": Bdev(f"uuid-{n}", 512) for n in range(4)}
    luns = {0: ObservedDisk("uuid-0"), 1: ObservedDisk("uuid-9"), 7: ObservedDisk("uuid-3")}
    wanted = plan(A, lun(0, "v0"), lun(1, "v1"), lun(2, "v2"))
    for connected in (frozenset({A}), frozenset[str]()):  # its QEMU may be about to come back
        state = State({A: luns}, names, connected)
        assert actions(wanted, state, whole=False) == [AddTarget(A, lun(2, "v2"))]
        assert unasked(wanted, state) == {
            DiskAddress(A, 1): ObservedDisk("uuid-9"),
            DiskAddress(A, 7): ObservedDisk("uuid-3"),
        }
        named = replace(wanted, luns=(lun(0, "v0", serial="S"),))
        shown = State({A: {0: ObservedDisk("uuid-0", serial="T")}}, names, connected)
        assert actions(named, shown, whole=False) == []
        assert unasked(named, shown).keys() == {DiskAddress(A, 0)}


def test_what_a_running_domain_keeps_is_said(target: FakeTarget) -> None:
    target.controllers = {A: {0: "uuid-0", 3: "uuid-3"}}
    target.connected = {A}
    why = ensured(target, plan(A, lun(0, "v0", "uuid-0"), lun(1, "v1", "uuid-1")))
    assert target.controllers == {A: {0: "uuid-0", 1: "uuid-1", 3: "uuid-3"}}
    assert why is not None and why.startswith(f"target 3 of controller {A} is kept")


def test_a_start_waits_for_who_is_connected_and_takes_no_lun_from_it(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == leaves_after:
            target.connected.clear()

    monkeypatch.setattr("pydataplane.domain.reconcile.time.sleep", wait)
    wanted, leaves_after = plan(A, lun(0, "v0")), 0
    target.controllers = {A: {0: "uuid-1"}}
    target.connected = {A}
    why = ensured(target, wanted, whole=True)
    assert why is not None and "a process is connected to it" in why
    assert target.controllers == {A: {0: "uuid-1"}} and len(waits) > 2
    waits.clear()
    leaves_after = 2
    assert ensured(target, wanted, whole=True) is None
    assert target.controllers == {A: {0: "uuid-0"}} and len(waits) == 2


@pytest.mark.parametrize("there", [False, True])
def test_before_a_start_the_owner_comes_before_any_lun(there: bool) -> None:
    state = State({A: {}} if there else {})
    one, owner = lun(0, "v0"), SetOwner(A, None)
    assert actions(plan(A, one), state, whole=True) == [
        *([owner, ReleaseController(A)] if there else []),
        CreateController(A),
        owner,
        AddTarget(A, one),
    ]


def test_a_renamed_volume_is_found_by_its_uuid(target: FakeTarget) -> None:
    target.controllers = {A: {0: "uuid-0"}}
    target.calls.clear()
    assert ensured(target, plan(A, lun(0, "old-name", "uuid-0"))) is None
    assert set(target.calls) == {"vhost_get_controllers", "bdev_get_bdevs"}


def test_only_the_bdevs_of_the_plan_are_asked_for(target: FakeTarget) -> None:
    state = observe(target, [lun(0, "v1"), lun(1, "gone")])
    assert state.bdevs == {"lvs0/v1": Bdev("uuid-1", 512, limited=False)}


def test_options_reach_the_target(target: FakeTarget) -> None:
    disk = lun(0, "v0", serial="S", read_only=True, shareable=True)
    assert ensured(target, plan(A, disk, lun(1, "v1"))) is None
    enospc = {"write_error_policy": "enospc"}
    assert target.options[A, 0] == {"serial": "S", "read_only": True, "shareable": True, **enospc}
    assert target.options[A, 1] == enospc


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_an_image_of_a_guest_that_comes_is_left_to_the_host_that_has_it(
    target: FakeTarget, front: FrontEnd
) -> None:
    target.locked["uuid-0"] = True
    luns = (lun(0, "v0", front=front), lun(1, "v1", front=front))
    coming = replace(plan(A, *luns), incoming=True)
    assert ensured(target, coming, whole=True) is None

    def given(number: int) -> bool | None:
        address = luns[number].address(A)
        options = target.options[address] if front == "scsi" else target.blk[address.controller]
        return options.get("incoming")

    assert (given(0), given(1)) == (True, None), "SPDK's own target knows nothing of it"
    # A start is no arrival: what waits for a guest may be another host's.
    target.locked["uuid-0"] = False
    assert ensured(target, coming, whole=True) is None
    assert given(0) is True, "it is prepared already"
    assert ensured(target, plan(A, *luns), whole=True) is None
    assert given(0) is None


MADE_BY = {"scsi": "vhost_scsi_controller_add_target", "blk": "vhost_create_blk_controller"}


@pytest.mark.parametrize("front", MADE_BY)
def test_what_becomes_of_errors_is_the_targets_where_it_can_be(
    target: FakeTarget, front: FrontEnd
) -> None:
    made_by = MADE_BY[front]
    disk = replace(lun(0, "v0"), front=front)

    def made(write: str, read: str) -> tuple[str | None, dict[str, Any]]:
        target.controllers = {}
        target.options = {}
        target.blk = {}
        said = ensured(target, plan(A, replace(disk, error_policy=ErrorPolicy(write, read))))
        return said, target.options.get((A, 0), {}) | target.blk.get(f"{A}.0", {})

    assert made("report", "report") == (None, {})
    both = {"write_error_policy": "stop", "read_error_policy": "stop"}
    assert made("stop", "stop") == (None, both)
    # One that knows of none tells the guest, unless somebody chose.
    real = getattr(target, made_by)

    def older(**params: Any) -> Any:
        if "write_error_policy" in params:
            raise RpcError(-32602, "Invalid parameters")
        return real(**params)

    setattr(target, made_by, older)
    assert made("enospc", "report") == (None, {})
    assert made("stop", "report") == ("disk sda (volume lvs0/v0): Invalid parameters", {})
    # A running guest's disk is not taken away for it.
    setattr(target, made_by, real)
    target.calls.clear()
    assert made("enospc", "report")[0] is None
    assert ensured(target, plan(A, replace(disk, error_policy=ErrorPolicy("stop")))) is None
    assert target.calls.count(made_by) == 1


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_refusal_takes_all_back_or_does_not_stop_the_rest(
    target: FakeTarget, whole: bool, there: bool
) -> None:
    if there:
        target.controllers = {A: {5: "uuid-5"}}
    wanted = plan(A, lun(0, "v0"), lun(1, "gone"), lun(2, "v2"), lun(5, "v5"))
    why = ensured(target, wanted, whole=whole)
    assert why == "disk sdb (volume lvs0/gone): bdev lvs0/gone does not exist"
    if not whole:
        assert target.controllers == {A: {0: "uuid-0", 2: "uuid-2", 5: "uuid-5"}}
    else:
        assert target.controllers == {}


def test_what_somebody_else_took_away_is_no_failure(target: FakeTarget) -> None:
    stale = State({A: {0: ObservedDisk("uuid-0")}, B: {1: ObservedDisk("uuid-1")}})
    target.controllers = {A: {}}
    for controller in (A, B):
        for action in clearance(controller, stale):
            perform(target, action, stale)
    assert target.controllers == {}


@pytest.mark.parametrize("whole", [True, False], ids=["ours", "SPDK's"])
def test_a_controller_goes_only_where_no_qemu_is_connected(target: FakeTarget, whole: bool) -> None:
    target.deletes_whole = whole
    before = {A: {0: "uuid-0"}, B: {1: "uuid-1"}}
    target.controllers = {name: dict(luns) for name, luns in before.items()}
    target.connected = {A, B}
    assert release(target, A) == "busy"
    assert target.controllers == before
    target.connected = {B}
    assert release(target, A) == "released"
    assert release(target, A) == "none"
    assert target.controllers == {B: {1: "uuid-1"}}


def test_a_qemu_that_connects_during_a_release_keeps_its_luns(target: FakeTarget) -> None:
    """The target looks and deletes in one call: there is no time between."""
    real = target.call_raw

    def connects(method: str, **params: Any) -> Any:
        result = real(method, **params)
        target.connected.add(A)  # after the first answer, whatever was asked
        return result

    target.controllers = {A: {0: "uuid-0"}}
    target.call_raw = connects  # type: ignore[method-assign]
    outcome = release(target, A)
    left = target.controllers.get(A)
    assert (outcome, left) in (("busy", {0: "uuid-0"}), ("released", None))


def test_what_stays_although_it_was_to_go_is_a_failure(target: FakeTarget) -> None:
    target.controllers = {A: {0: "uuid-0"}}
    target.connected = {A}  # since it was looked at
    state = State({A: {}})
    (action,) = clearance(A, state)
    assert action == DeleteController(A)
    with pytest.raises(RpcError, match="busy"):
        perform(target, action, state)
    assert clearance(B, state) == []


LUNS = st.dictionaries(st.integers(0, 4), st.integers(0, 5), max_size=4)


@given(LUNS, LUNS)
def test_from_any_state_to_any_other_and_then_nothing(
    before: dict[int, int], after: dict[int, int]
) -> None:
    target, wanted = target_and_plan(before, after)
    assert ensured(target, wanted, whole=True) is None
    wanted_luns = {lun.target: f"uuid-{lun.volume.lvol[1:]}" for lun in wanted.luns}
    assert target.controllers == {A: wanted_luns, B: {}}
    target.calls.clear()
    assert ensured(target, wanted) is None
    assert set(target.calls) <= {"vhost_get_controllers", "bdev_get_bdevs"}


@given(LUNS, LUNS)
def test_whatever_a_running_domain_has_it_keeps(
    before: dict[int, int], after: dict[int, int]
) -> None:
    target, wanted = target_and_plan(before, after)
    ensured(target, wanted)
    kept = {number: f"uuid-{volume}" for number, volume in before.items()}
    assert kept.items() <= target.controllers[A].items()
    assert set(target.calls) <= {
        "vhost_get_controllers",
        "bdev_get_bdevs",
        "virtlun_lvol_get_xattrs",
        "vhost_scsi_controller_add_target",
    }


def target_and_plan(before: dict[int, int], after: dict[int, int]) -> tuple[FakeTarget, Plan]:
    """Returns a target with some LUNs (number to volume), and what a domain is to have."""
    target = FakeTarget({f"lvs0/v{n}": f"uuid-{n}" for n in range(6)})
    target.controllers = {A: {t: f"uuid-{v}" for t, v in before.items()}, B: {}}
    unique = {v: t for t, v in after.items()}
    return target, plan(A, *(lun(t, f"v{v}") for v, t in sorted(unique.items())))


def blk(number: int, lvol: str, **more: Any) -> LunPlan:
    return LunPlan(number, f"vd{chr(97 + number)}", VolumeRef("lvs0", lvol), front="blk", **more)


def test_a_virtio_blk_disk_has_a_controller_of_its_own(target: FakeTarget) -> None:
    wanted = plan(A, lun(0, "v0"), blk(1, "v1", serial="S", read_only=True))
    assert [each.dev for each in ensure(target, wanted, whole=True)] == ["sda", "vdb"]
    assert target.controllers == {A: {0: "uuid-0"}, f"{A}.1": {0: "uuid-1"}}
    enospc = {"write_error_policy": "enospc"}
    assert target.blk[f"{A}.1"] == {"serial": "S", "readonly": True, **enospc}
    assert target.owners.keys() == {A, f"{A}.1"}
    assert ensure(target, wanted, whole=True) == [], "safe to repeat"
    assert ensure(target, wanted, whole=False) == []
    target.connected.add(f"{A}.1")
    assert release_domain(target, A) == "busy"
    target.connected.clear()
    ensure(target, wanted, whole=False)
    assert release_domain(target, A) == "released"
    assert target.controllers == {}
    assert release_domain(target, A) == "none"


def test_a_domain_of_virtio_blk_disks_alone_has_no_other_controller(target: FakeTarget) -> None:
    wanted = replace(plan(A, blk(0, "v0")), has_scsi=False)
    ensure(target, wanted, whole=True)
    assert target.controllers == {f"{A}.0": {0: "uuid-0"}}
    target.controllers.clear()
    target.blk.clear()
    assert [each.dev for each in ensure(target, wanted, whole=False)] == ["vda"]


@pytest.mark.parametrize("more", [{"serial": "T"}, {"read_only": True}, {"block_size": 4096}])
def test_another_disk_in_its_place_is_replaced_at_a_start_alone(
    target: FakeTarget, more: dict[str, Any]
) -> None:
    wanted = replace(plan(A, blk(0, "v0")), has_scsi=False)
    ensure(target, wanted, whole=True)
    other = replace(wanted, luns=(blk(0, "v0", **more),))
    assert "is kept, with bdev uuid-0" in str(ensured(target, other))
    assert ensured(target, other, whole=True) is None
    assert ensured(target, other) is None


@pytest.mark.parametrize("deletes_whole", [True, False], ids=["ours", "SPDK's"])
def test_a_virtio_blk_controller_that_is_not_shown_is_released_before_a_start_alone(
    target: FakeTarget, deletes_whole: bool
) -> None:
    target.deletes_whole = deletes_whole
    disk, name = blk(0, "v0"), f"{A}.0"
    wanted, owner = replace(plan(A, disk), has_scsi=False), SetOwner(name, None)
    create = CreateBlk(A, disk)
    assert actions(wanted, State({}), whole=True) == [ReleaseController(name), create, owner]
    assert actions(wanted, State({}), whole=False) == [create]
    assert ensured(target, wanted, whole=True) is None, "that there is none is no failure"
    assert target.controllers == {name: {0: "uuid-0"}}


@pytest.mark.parametrize("front", MADE_BY)
@pytest.mark.parametrize("whole", [True, False])
def test_a_start_alone_goes_past_what_is_recorded_of_a_volume_that_is_lost(
    target: FakeTarget, front: FrontEnd, whole: bool
) -> None:
    wanted = replace(plan(A, lun(0, "v0", front=front)), has_scsi=front == "scsi")
    (address,) = (each.address(A) for each in wanted.luns)
    target.controllers = {A: {}} if front == "scsi" else {}
    target.hidden[address] = "lost"
    for _ in range(2):
        why = ensured(target, wanted, whole=whole)
        if whole:
            assert (why, target.hidden) == (None, {})
            assert target.controllers == {address.controller: {address.target: "uuid-0"}}
        else:
            assert why is not None and "by what is recorded" in why
            assert target.hidden == {address: "lost"}


def test_a_start_that_fails_leaves_no_controller(target: FakeTarget) -> None:
    wanted = plan(A, lun(0, "v0"), blk(1, "v1"), blk(2, "none"))
    said = ensured(target, wanted, whole=True)
    assert said is not None and said.startswith("disk vdc (volume lvs0/none):")
    assert target.controllers == {}


def test_what_is_left_of_a_disk_that_went_late_is_told_from_the_rest(target: FakeTarget) -> None:
    wanted = plan(A, lun(0, "v0"), blk(1, "v1"))
    ensure(target, wanted, whole=True)
    for number, volume in ((2, "v2"), (3, "v3"), (4, "v4")):
        target.call("vhost_create_blk_controller", ctrlr=f"{A}.{number}", dev_name=f"lvs0/{volume}")
    target.connected.add(f"{A}.3")  # the guest has it still
    named = replace(wanted, others=(f"{A}.4",))  # a device has its socket
    assert leftovers(named, observe(target)) == {f"{A}.2"}


@pytest.mark.parametrize("front", ["scsi", "blk"])
def test_a_disk_is_counted_that_wants_it_and_has_its_volume_for_itself(
    target: FakeTarget, front: FrontEnd
) -> None:
    bins = (("read", (0, 1000)),)
    counted = lun(0, "v0", "uuid-0", histograms=bins, front=front)
    shared = lun(1, "v1", "uuid-1", histograms=bins, front=front, shareable=True)
    ensure(target, plan(A, counted, shared, lun(2, "v2", "uuid-2", front=front)), whole=True)
    assert target.counted == {"uuid-0"}


def test_a_disk_that_cannot_be_counted_is_shown_all_the_same(target: FakeTarget) -> None:
    target.refuse["bdev_enable_histogram"] = RpcError(-95, "uuid-0 has no statistics")
    ensure(target, plan(A, lun(0, "v0", "uuid-0", histograms=(("read", (0,)),))), whole=True)
    assert set(target.controllers[A]) == {0}
