"""What the VmVolume controller remembers, whoever tells it first."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from csi.kubevirt.vmvolume.cache import Cache
from csi.objects import Claim
from tests.unit.vmvolume.world import OTHER, claim, machine, pv, vm_volume

KEY, CLAIM, VM = ("ns", "extra"), ("ns", "data"), ("ns", "vm")


def test_only_a_later_version_is_news() -> None:
    cache = Cache()
    assert cache.put_volume(vm_volume(version=5))
    assert not cache.put_volume(vm_volume(version=5))
    assert not cache.put_volume(vm_volume(version=4))
    assert cache.put_volume(vm_volume(version=10)), "numbers, not texts"
    assert cache.put_volume(replace(vm_volume(version=1), uid="another")), "made anew"


def test_an_answer_does_not_bring_back_what_is_gone() -> None:
    cache = Cache()
    cache.put_volume(vm_volume(version=5))
    cache.refresh_volume(vm_volume(version=6))
    known = cache.volume(KEY)
    assert known is not None
    assert known.resource_version == "6"
    cache.refresh_volume(replace(vm_volume(version=9), uid="the one before"))
    assert cache.volume(KEY) == known
    cache.drop_volume(KEY)
    cache.refresh_volume(vm_volume(version=7))
    assert cache.volume(KEY) is None
    assert cache.of_claim(CLAIM) == cache.of_machine(VM) == cache.volumes() == []


def test_vmvolumes_are_found_by_claim_and_machine() -> None:
    cache = Cache()
    for name, claim_name in (("b", "data"), ("a", "data"), ("c", "more")):
        cache.put_volume(vm_volume(name=name, claimName=claim_name))
    assert [each.name for each in cache.of_claim(CLAIM)] == ["a", "b"]
    assert [each.name for each in cache.of_machine(VM)] == ["a", "b", "c"]
    cache.drop_volume(("ns", "a"))
    assert [each.name for each in cache.of_claim(CLAIM)] == ["b"]


def test_a_machine_is_news_when_something_changed_that_matters() -> None:
    cache = Cache()
    assert cache.put_machine(machine())
    talked = machine()
    talked.object["metadata"]["annotations"] = {"guest": "agent"}
    assert not cache.put_machine(talked)
    for other in (
        machine("Succeeded"),
        machine(node=OTHER),
        machine(deleting=True),
        replace(machine(), migrating=True),
        machine(pods={"another": "node1"}),
        machine(volumes=[{"name": "root"}]),
    ):
        assert cache.put_machine(other)
    cache.drop_machine(VM)
    assert cache.machine(VM) is None


class Asked:
    """Counts how often a claim is asked for."""

    def __init__(self, found: Claim | None) -> None:
        self.found = found
        self.times = 0

    def __call__(self) -> Claim | None:
        self.times += 1
        return self.found


@pytest.mark.parametrize("found", [claim(pv()), None])
def test_a_claim_is_asked_for_once_until_it_changes(found: Claim | None) -> None:
    cache, ask = Cache(), Asked(found)
    cache.put_volume(vm_volume())
    for _ in range(3):
        assert cache.claim(CLAIM, ask) is found
    assert ask.times == 1
    assert cache.drop_claim(CLAIM)
    cache.claim(CLAIM, ask)
    assert ask.times == 2


def test_the_watch_s_echo_of_our_own_change_is_no_news() -> None:
    cache, ask = Cache(), Asked(claim(pv(), resource_version="8"))
    cache.put_volume(vm_volume())
    cache.claim(CLAIM, ask)
    assert not cache.drop_claim(CLAIM, "8")
    assert cache.drop_claim(CLAIM, "9")


def test_a_claim_that_changes_while_it_is_read_is_read_again() -> None:
    cache = Cache()
    cache.put_volume(vm_volume())
    ask = Asked(claim(pv()))

    def changing() -> Claim | None:
        cache.drop_claim(CLAIM, "8")
        return ask()

    cache.claim(CLAIM, changing)
    cache.claim(CLAIM, ask)
    assert ask.times == 2


def test_an_answer_older_than_the_watch_s_word_is_not_kept() -> None:
    cache, ask = Cache(), Asked(claim(pv(), resource_version="9"))
    cache.put_volume(vm_volume())
    cache.drop_claim(CLAIM, "9")
    cache.keep_claim(CLAIM, claim(pv(), resource_version="8"))
    cache.claim(CLAIM, ask)
    cache.claim(CLAIM, ask)
    assert ask.times == 1
    cache.drop_claim(CLAIM, "10")  # its end
    cache.keep_claim(CLAIM, claim(pv(), resource_version="9"))
    ask.found = None
    assert cache.claim(CLAIM, ask) is None


def test_other_claims_of_the_cluster_are_no_concern() -> None:
    cache, ask = Cache(), Asked(claim(pv()))
    cache.put_volume(vm_volume())

    def busy() -> Claim | None:
        cache.drop_claim(("ns", "other"), "99")
        return ask()

    cache.claim(CLAIM, busy)
    cache.claim(CLAIM, ask)
    assert ask.times == 1
    cache.drop_claim(CLAIM, "100")
    cache.drop_volume(KEY)
    assert cache._told == {}
    assert cache._claims == {}


def test_a_deletion_is_as_old_as_it_was_seen_here() -> None:
    cache, before = Cache(), time.time()
    server = "2027-01-15T07:00:00Z"
    cache.put_volume(vm_volume(version=5))
    answer = cache.refresh_volume(vm_volume(version=6, deleted_at=server))
    assert answer.deleted_at is not None
    assert before <= answer.deleted_at <= time.time()
    cache.put_volume(vm_volume(version=7, deleted_at=server))
    known = cache.volume(KEY)
    assert known is not None
    assert known.deleted_at == answer.deleted_at
    again = vm_volume(version=7, deleted_at=server)
    fresh = Cache()
    fresh.put_volume(again)
    assert fresh.volume(KEY) == again, "the server's, where nobody saw it come"


def test_a_claim_is_not_kept_for_ever_nor_without_a_vmvolume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, ask = Cache(), Asked(claim(pv()))
    cache.claim(CLAIM, ask)
    cache.claim(CLAIM, ask)
    assert ask.times == 2, "nobody names it"
    cache.put_volume(vm_volume())
    monkeypatch.setattr("csi.kubevirt.vmvolume.cache.CLAIM_S", 0.0)
    cache.claim(CLAIM, ask)
    cache.claim(CLAIM, ask)
    assert ask.times == 4
