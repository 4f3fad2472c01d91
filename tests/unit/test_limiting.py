"""The limits of a disk's volume come with the disk and go with it, and nobody else's do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limiting import XATTR, by_hand, carry, found, gone, put, tune
from pydataplane.domain.limits import NONE, Limits
from pydataplane.domain.model import LunPlan, Plan, VolumeRef
from pydataplane.domain.observed import observe
from pydataplane.domain.reconcile import ensure, release_domain
from pydataplane.errors import BUSY, METHOD_NOT_FOUND, RpcError
from tests.support.fake_target import MIB, FakeTarget

A, B = (f"vm-{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")
SLOW = Limits(total_iops_sec=100, total_iops_sec_max=200)
BY_HAND = Limits(read_bytes_sec=MIB)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget({"lvs0/a": "uuid-a", "lvs0/b": "uuid-b"})


def plan(*luns: LunPlan, controller: str = A) -> Plan:
    return Plan("d", controller, f"/run/virtlun/vhost/{controller}", 1, luns)


def lun(
    name: str = "a", limits: Limits = NONE, *, blk: bool = False, shareable: bool = False
) -> LunPlan:
    return LunPlan(
        0,
        "sda",
        VolumeRef("lvs0", name),
        f"uuid-{name}",
        limits=limits,
        front="blk" if blk else "scsi",
        shareable=shareable,
    )


def spdks(target: FakeTarget) -> None:
    """Takes from a target what SPDK's own has not."""
    for method in ("virtlun_bdev_set_limits", "virtlun_bdev_get_limits"):
        target.refuse[method] = RpcError(METHOD_NOT_FOUND, "Method not found")
    for method in ("get_xattrs", "set_xattr", "remove_xattr"):
        target.refuse[f"virtlun_lvol_{method}"] = RpcError(METHOD_NOT_FOUND, "Method not found")


@pytest.mark.parametrize("blk", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_they_are_there_before_the_guest_sees_the_disk_and_go_with_it(
    target: FakeTarget, blk: bool, whole: bool
) -> None:
    ensure(target, plan(lun(limits=SLOW, blk=blk)), whole=whole)
    adds = ("vhost_scsi_controller_add_target", "vhost_create_blk_controller")
    added = next(n for n, name in enumerate(target.calls) if name in adds)
    assert "virtlun_bdev_set_limits" in target.calls[:added]
    assert found(target, "uuid-a") == SLOW
    assert release_domain(target, A) == "released"
    assert found(target, "uuid-a") == NONE
    assert target.volume("lvs0/a").xattrs == {}
    # And to do it again is no harm.
    assert release_domain(target, A) == "none"
    gone(target, ["uuid-a", "uuid-none"], A, observe(target))


def test_one_volume_that_cannot_be_asked_keeps_no_other_limited(target: FakeTarget) -> None:
    first, second = lun(limits=SLOW), replace(lun("b", SLOW), target=1, dev="sdb")
    ensure(target, plan(first, second), whole=True)
    target.fail["virtlun_lvol_get_xattrs"] = RpcError(-126, "Required key not available")
    assert release_domain(target, A) == "released"
    assert (found(target, "uuid-a"), found(target, "uuid-b")) == (SLOW, NONE)
    ensure(target, plan(first, second), whole=True)
    target.fail["virtlun_bdev_set_limits"] = RpcError(-5, "Input/output error")
    with pytest.raises(RpcError, match="Input/output"):
        release_domain(target, A)
    assert (found(target, "uuid-a"), found(target, "uuid-b")) == (SLOW, NONE)


def test_a_disk_that_a_guest_has_still_keeps_them(target: FakeTarget) -> None:
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    target.connected = {A}
    assert release_domain(target, A) == "busy"
    assert found(target, "uuid-a") == SLOW


def test_a_start_has_what_the_definition_says_now_and_a_running_guest_what_it_had(
    target: FakeTarget,
) -> None:
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    other = Limits(total_iops_sec=7)
    ensure(target, plan(lun(limits=other)), whole=False)
    assert found(target, "uuid-a") == SLOW, "it may have been changed since it started"
    ensure(target, plan(lun(limits=other)), whole=True)
    assert found(target, "uuid-a") == other


def test_what_somebody_has_limited_by_hand_stays(target: FakeTarget) -> None:
    put(target, "uuid-a", BY_HAND)
    ensure(target, plan(lun()), whole=True)
    assert found(target, "uuid-a") == BY_HAND
    release_domain(target, A)
    assert found(target, "uuid-a") == BY_HAND


def test_what_an_earlier_disk_has_left_goes_with_the_next(target: FakeTarget) -> None:
    """The gateway died between the end of a domain and that of its limits."""
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    del target.controllers[A]
    ensure(target, plan(lun(), controller=B), whole=True)
    assert found(target, "uuid-a") == NONE
    assert target.volume("lvs0/a").xattrs == {}


def test_a_start_that_fails_leaves_none(target: FakeTarget) -> None:
    target.refuse["vhost_scsi_controller_add_target"] = RpcError(BUSY, "no")
    with pytest.raises(ReconcileError, match="disk sda"):
        ensure(target, plan(lun(limits=SLOW)), whole=True)
    assert found(target, "uuid-a") == NONE and A not in target.controllers


def test_the_volume_of_another_domain_is_not_touched(target: FakeTarget) -> None:
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    for limits in (NONE, Limits(total_iops_sec=1)):
        with pytest.raises(ReconcileError, match="in use"):
            ensure(target, plan(lun(limits=limits), controller=B), whole=True)
        assert found(target, "uuid-a") == SLOW
        assert target.volume("lvs0/a").xattrs == {XATTR: A}
    release_domain(target, B)
    assert found(target, "uuid-a") == SLOW


def test_what_the_target_refuses_fails_the_start(target: FakeTarget) -> None:
    with pytest.raises(ReconcileError, match=r"disk sda \(volume lvs0/a\): value 'size_iops_sec'"):
        ensure(target, plan(lun(limits=Limits(size_iops_sec=512))), whole=True)
    assert A not in target.controllers


def test_they_move_with_the_disk_to_its_copy(target: FakeTarget) -> None:
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    for _ in range(2):
        carry(target, "uuid-a", "uuid-b", A)
        assert found(target, "uuid-b") == SLOW
    gone(target, ["uuid-a"], A, observe(target))
    assert found(target, "uuid-a") == NONE
    carry(target, "uuid-a", "uuid-b", A)
    carry(target, "uuid-none", "uuid-b", A)
    assert found(target, "uuid-b") == SLOW
    gone(target, ["uuid-b"], A, observe(target))
    assert found(target, "uuid-b") == NONE


def test_limits_by_hand_do_not_move(target: FakeTarget) -> None:
    put(target, "uuid-a", BY_HAND)
    carry(target, "uuid-a", "uuid-b", A)
    assert found(target, "uuid-b") == NONE


def test_whose_they_are_is_noted_before_they_are_there(target: FakeTarget) -> None:
    target.refuse["virtlun_bdev_set_limits"] = RpcError(-5, "I/O error")
    with pytest.raises(RpcError):
        tune(target, "uuid-a", A, SLOW)
    assert target.volume("lvs0/a").xattrs == {XATTR: A}


def test_spdks_own_target_has_four_of_them(target: FakeTarget) -> None:
    spdks(target)
    limits = Limits(total_iops_sec=3000, read_bytes_sec=MIB, write_bytes_sec=5 * MIB)
    ensure(target, plan(lun(limits=limits)), whole=True)
    assert found(target, "uuid-a") == limits
    release_domain(target, A)
    assert found(target, "uuid-a") == NONE


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(read_iops_sec=1000), "read_iops_sec: this target, which is SPDK's or an older one"),
        (Limits(total_bytes_sec=MIB + 1), "limits whole MiB a second: use a multiple of 1048576"),
        (Limits(total_iops_sec=100), "would round that up: use a multiple of 1000"),
    ],
)
def test_what_spdks_cannot_say_is_refused(target: FakeTarget, limits: Limits, says: str) -> None:
    spdks(target)
    with pytest.raises(ReconcileError, match=says):
        ensure(target, plan(lun(limits=limits)), whole=True)
    assert target.volume("lvs0/a").limits == {} and A not in target.controllers


def test_a_target_without_limits_says_so(target: FakeTarget) -> None:
    spdks(target)
    target.refuse["bdev_set_qos_limit"] = RpcError(METHOD_NOT_FOUND, "Method not found")
    with pytest.raises(ReconcileError, match="this target has no I/O limits"):
        ensure(target, plan(lun(limits=Limits(total_iops_sec=1000))), whole=True)
    ensure(target, plan(lun()), whole=True)
    assert release_domain(target, A) == "released"


def test_what_is_set_by_hand_is_not_taken_for_what_a_disk_of_before_has_left(
    target: FakeTarget,
) -> None:
    ensure(target, plan(lun(limits=SLOW)), whole=True)
    by_hand(target, "uuid-a", BY_HAND, observe(target))
    assert target.volume("lvs0/a").xattrs == {XATTR: A}, "the disk is there: they are its"
    release_domain(target, A)
    # As if whoever ended the VM had been killed before it saw to its limits.
    tune(target, "uuid-a", A, SLOW)
    by_hand(target, "uuid-a", BY_HAND, observe(target))
    assert target.volume("lvs0/a").xattrs == {}
    ensure(target, plan(lun(), controller=B), whole=True)
    assert found(target, "uuid-a") == BY_HAND


@pytest.mark.parametrize("left", [SLOW, NONE])
def test_a_start_finds_what_the_run_before_has_left_on_a_controller_that_is_still_there(
    target: FakeTarget, left: Limits
) -> None:
    ensure(target, plan(lun(limits=left)), whole=True)
    ensure(target, plan(lun(limits=NONE)), whole=True)
    assert (found(target, "uuid-a"), target.volume("lvs0/a").xattrs) == (NONE, {})
