"""Reconciliation: state in, actions out; and the shell around it against a made-up target."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.hook import script
from plugin.reconcile import (
    AddTarget,
    CreateController,
    DeleteController,
    RemoveTarget,
    Shown,
    State,
    actions,
    clearance,
    execute,
    observe,
    reconcile,
)
from plugin.translate import LunPlan, Plan, VolumeRef
from pydataplane.errors import RpcError
from tests.unit.fake_target import FakeTarget

A, B = (f"vm-{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


def lun(target: int, lvol: str, uuid: str | None = None, **more: Any) -> LunPlan:
    return LunPlan(target, f"sd{chr(97 + target)}", VolumeRef("lvs0", lvol), uuid, **more)


def plan(controller: str, *luns: LunPlan) -> Plan:
    return Plan("d", controller, f"/run/virtlun/vhost/{controller}", 1, luns)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget({f"lvs0/v{n}": f"uuid-{n}" for n in range(6)})


def test_nothing_to_do_is_no_action() -> None:
    state = State({A: {0: Shown("uuid-0")}}, {"lvs0/v0": "uuid-0", "uuid-0": "uuid-0"})
    assert actions([plan(A, lun(0, "v0"))], state, complete=True) == []


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
        assert reconcile(target, [plan(A, before)], complete=False) == []  # type: ignore[arg-type]
        target.calls.clear()
        assert reconcile(target, [plan(A, after)], complete=False) == []  # type: ignore[arg-type]
        assert target.calls.count("vhost_scsi_controller_remove_target") == calls
        assert target.calls.count("vhost_scsi_controller_add_target") == calls


def test_blocks_are_corrected_and_asked_for_only_where_they_are_not_the_volumes_own(
    target: FakeTarget,
) -> None:
    def made(volume: str, size: int | None) -> tuple[list[str], dict[str, Any]]:
        target.calls.clear()
        wanted = [plan(A, lun(0, volume, f"uuid-{volume[1]}", block_size=size))]
        failures = reconcile(target, wanted, complete=False)  # type: ignore[arg-type]
        changes = [call.split("_")[3] for call in target.calls if call.endswith("_target")]
        return [*changes, *(failure.why for failure in failures)], target.options.get((A, 0), {})

    target.block_sizes["uuid-1"] = 4096
    assert made("v0", None) == (["add"], {})
    assert made("v0", 512) == ([], {})
    assert made("v0", 4096) == (["remove", "add"], {"block_size": 4096})
    assert made("v0", 4096) == ([], {"block_size": 4096})
    assert made("v0", None) == (["remove", "add"], {})
    assert made("v1", 4096) == (["remove", "add"], {})
    assert made("v1", None) == ([], {})
    # What is there stays, and what cannot be is refused by the target.
    assert made("v1", 512) == ([], {})
    target.controllers[A] = {}
    assert made("v1", 512) == (["add", "bdev uuid-1 has larger blocks"], {})


def test_a_target_that_does_not_tell_is_believed(target: FakeTarget) -> None:
    assert reconcile(target, [plan(A, lun(0, "v0"))], complete=False) == []  # type: ignore[arg-type]
    target.tells_options = False
    target.calls.clear()
    wanted = [plan(A, lun(0, "v0", serial="S", read_only=True, block_size=4096))]
    assert reconcile(target, wanted, complete=False) == []  # type: ignore[arg-type]
    assert set(target.calls) == {"vhost_get_controllers", "bdev_get_bdevs"}


def test_what_is_missing_is_made() -> None:
    one, two = lun(0, "v0"), lun(3, "v1")
    assert actions([plan(A, one, two)], State({}, {}), complete=False) == [
        CreateController(A),
        AddTarget(A, one),
        AddTarget(A, two),
    ]


def test_what_is_wrong_is_corrected_and_what_is_right_stays() -> None:
    names = {f"lvs0/v{n}": f"uuid-{n}" for n in range(4)}
    state = State({A: {0: Shown("uuid-0"), 1: Shown("uuid-9"), 7: Shown("uuid-3")}}, names)
    wanted = plan(A, lun(0, "v0"), lun(1, "v1"))
    assert actions([wanted], state, complete=False) == [
        RemoveTarget(A, 1),
        RemoveTarget(A, 7),
        AddTarget(A, lun(1, "v1")),
    ]


def test_a_volume_is_let_go_before_another_controller_takes_it(target: FakeTarget) -> None:
    target.controllers = {A: {0: "uuid-0"}, B: {}}
    wanted = [plan(B, lun(0, "v0")), plan(A, lun(0, "v1"))]
    assert reconcile(target, wanted, complete=True) == []  # type: ignore[arg-type]
    assert target.controllers == {A: {0: "uuid-1"}, B: {0: "uuid-0"}}


def test_a_renamed_volume_is_found_by_its_uuid() -> None:
    state = State({A: {0: Shown("uuid-0")}}, {"lvs0/new-name": "uuid-0", "uuid-0": "uuid-0"})
    assert actions([plan(A, lun(0, "old-name", "uuid-0"))], state, complete=True) == []


def test_strays_go_only_when_the_list_is_complete() -> None:
    state = State({A: {0: Shown("x"), 1: Shown("y")}, "by-hand": {0: Shown("z")}}, {})
    assert actions([], state, complete=False) == []
    assert actions([], state, complete=True) == [
        RemoveTarget(A, 0),
        RemoveTarget(A, 1),
        DeleteController(A),
    ]


def test_options_reach_the_target(target: FakeTarget) -> None:
    disk = lun(0, "v0", serial="S", read_only=True, shareable=True)
    assert reconcile(target, [plan(A, disk, lun(1, "v1"))], complete=True) == []  # type: ignore[arg-type]
    assert target.options[A, 0] == {"serial": "S", "read_only": True, "shareable": True}
    assert target.options[A, 1] == {}


def test_one_refusal_does_not_stop_the_rest(target: FakeTarget) -> None:
    gone, there = lun(0, "gone"), lun(1, "v1")
    failures = reconcile(target, [plan(A, gone, there)], complete=True)  # type: ignore[arg-type]
    assert [(f.action, f.why) for f in failures] == [
        (AddTarget(A, gone), "bdev lvs0/gone does not exist")
    ]
    assert target.controllers == {A: {1: "uuid-1"}}


PLANS = st.dictionaries(
    st.sampled_from([A, B]),
    st.dictionaries(st.integers(0, 4), st.integers(0, 5), max_size=4),
)


class HookTarget(FakeTarget):
    """A FakeTarget as the hook sees it: with the hook's own errors."""

    def call(self, method: str, **params: Any) -> Any:
        try:
            return super().call(method, **params)
        except RpcError as error:
            raise script.RpcFailure(method, error.code, error.message) from error

    def retry(self, while_code: int, method: str, **params: Any) -> Any:
        """Calls once: this target does everything at once."""
        assert while_code < 0
        return self.call(method, **params)


@given(PLANS, PLANS)
def test_the_hook_makes_what_reconciliation_makes(
    before: dict[str, dict[int, int]], after: dict[str, dict[int, int]]
) -> None:
    bdevs = {f"lvs0/v{n}": f"uuid-{n}" for n in range(6)}
    ours, hooks = FakeTarget(bdevs), HookTarget(bdevs)
    for target in (ours, hooks):
        target.block_sizes["uuid-1"] = 4096
        target.controllers = {
            c: {t: f"uuid-{v}" for t, v in luns.items()} for c, luns in before.items()
        }
    luns = [
        lun(
            t,
            f"v{v}",
            serial=f"S{v}" if v % 2 else None,
            read_only=v == 2,
            block_size={1: 4096, 2: 4096, 3: 512}.get(v),
        )
        for t, v in sorted(after.get(A, {}).items())
    ]
    failures = reconcile(ours, [plan(A, *luns)], complete=False)  # type: ignore[arg-type]
    node = ElementTree.Element
    theirs = script.Plan(
        "d",
        A,
        "/",
        1,
        [
            script.Lun(
                node(
                    "disk",
                    {"target": str(item.target), "dev": item.dev, "lvstore": "lvs0"}
                    | {"lvol": item.volume.lvol}
                    | ({"serial": item.serial} if item.serial else {})
                    | ({"readonly": "yes"} if item.read_only else {})
                    | ({"blocksize": str(item.block_size)} if item.block_size else {}),
                )
            )
            for item in luns
        ],
    )
    try:
        found = script.find_volumes(hooks, theirs, {}, 0)  # type: ignore[arg-type]
        script.ensure(hooks, theirs, found)  # type: ignore[arg-type]
    except script.HookError:
        assert failures  # the volume is another controller's
        return
    assert failures == []
    assert (hooks.controllers, hooks.options) == (ours.controllers, ours.options)
    script.release(hooks, theirs)  # type: ignore[arg-type]
    state = observe(ours)  # type: ignore[arg-type]
    assert execute(ours, clearance(A, state), state) == []  # type: ignore[arg-type]
    assert A not in ours.controllers
    assert hooks.controllers == ours.controllers


def test_what_somebody_else_took_away_is_no_failure(target: FakeTarget) -> None:
    stale = State({A: {0: Shown("uuid-0")}, B: {1: Shown("uuid-1")}}, {})
    target.controllers = {A: {}}
    todo = [*clearance(A, stale), *clearance(B, stale)]
    assert execute(target, todo, stale) == []  # type: ignore[arg-type]
    assert target.controllers == {}


def test_what_stays_although_it_was_to_go_is_a_failure(target: FakeTarget) -> None:
    target.controllers = {A: {0: "uuid-0"}}
    state = State({A: {}}, {})
    failures = execute(target, clearance(A, state), state)  # type: ignore[arg-type]
    assert [(f.action, f.why) for f in failures] == [
        (DeleteController(A), "Device or resource busy")
    ]


@given(PLANS, PLANS)
def test_from_any_state_to_any_other_and_then_nothing(
    before: dict[str, dict[int, int]], after: dict[str, dict[int, int]]
) -> None:
    target = FakeTarget({f"lvs0/v{n}": f"uuid-{n}" for n in range(6)})
    target.controllers = {
        c: {t: f"uuid-{v}" for t, v in luns.items()} for c, luns in before.items()
    }
    seen: set[int] = set()
    wanted = []
    for controller, luns in after.items():
        unique = {t: v for t, v in luns.items() if v not in seen and not seen.add(v)}  # type: ignore[func-returns-value]
        wanted.append(plan(controller, *(lun(t, f"v{v}") for t, v in sorted(unique.items()))))
    assert reconcile(target, wanted, complete=True) == []  # type: ignore[arg-type]
    assert target.controllers == {
        p.controller: {disk.target: f"uuid-{disk.volume.lvol[1:]}" for disk in p.luns}
        for p in wanted
    }
    target.calls.clear()
    assert reconcile(target, wanted, complete=True) == []  # type: ignore[arg-type]
    assert set(target.calls) == {"vhost_get_controllers", "bdev_get_bdevs"}


def test_nothing_is_done_without_actions(target: FakeTarget) -> None:
    assert execute(target, [], State({}, {})) == []  # type: ignore[arg-type]
    assert target.calls == []
