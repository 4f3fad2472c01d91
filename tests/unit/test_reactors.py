"""Which reactors serve a domain, as its vCPUs are bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pydataplane.domain import reactors
from pydataplane.domain.reactors import Cpu, nearest, topology
from pydataplane.domain.xml.document import Document
from pydataplane.domain.xml.vcpus import MAX_SETS, cpus_of, pinned_to
from pydataplane.errors import METHOD_NOT_FOUND, RpcError
from pydataplane.methods import Rpc


@pytest.mark.parametrize(
    ("cpuset", "cpus"),
    [
        ("3", {3}),
        ("0-3", {0, 1, 2, 3}),
        ("1-4,^3,6", {1, 2, 4, 6}),
        (" 1 , 2 - 3 ", {1, 2, 3}),
        ("4-2", set()),
        ("", set()),
        ("all", set()),
        ("1,x", set()),
        ("0-99999999", set()),
        ("0-16383,^1-16383", {0}),
        ("0-16383," * 100_000, set()),
    ],
)
def test_a_set_of_cpus_as_libvirt_writes_it(cpuset: str, cpus: set[int]) -> None:
    assert cpus_of(cpuset) == cpus


@pytest.mark.parametrize(
    ("inner", "sets"),
    [
        ("", []),
        ("<vcpu>2</vcpu>", []),
        ("<vcpu cpuset='4-5'>2</vcpu>", [{4, 5}]),
        ("<vcpu placement='auto'>2</vcpu><cputune><shares>5</shares></cputune>", []),
        (
            "<vcpu>2</vcpu><cputune><vcpupin vcpu='0' cpuset='4'/>"
            "<vcpupin vcpu='1' cpuset='6-7'/><emulatorpin cpuset='0'/></cputune>",
            [{4}, {6, 7}],
        ),
        # The other one may run on any.
        ("<vcpu>2</vcpu><cputune><vcpupin vcpu='0' cpuset='4'/></cputune>", []),
        ("<vcpu cpuset='8'>2</vcpu><cputune><vcpupin vcpu='0' cpuset='4'/></cputune>", [{4}, {8}]),
        # There is no such vCPU.
        ("<vcpu cpuset='8'>2</vcpu><cputune><vcpupin vcpu='2' cpuset='4'/></cputune>", [{8}]),
        ("<vcpu cpuset='8'>99999999999999999999</vcpu>", [{8}]),
    ],
)
def test_what_the_vcpus_of_a_domain_are_bound_to(inner: str, sets: list[set[int]]) -> None:
    found = pinned_to(Document(f"<domain>{inner}</domain>").root)
    assert found == {frozenset(each) for each in sets}


def test_a_domain_with_more_sets_than_anybody_has_is_bound_to_none() -> None:
    def bound(count: int) -> frozenset[frozenset[int]]:
        pins = "".join(f"<vcpupin vcpu='{n}' cpuset='{n}'/>" for n in range(count))
        text = f"<domain><vcpu>{count}</vcpu><cputune>{pins}</cputune></domain>"
        return pinned_to(Document(text).root)

    assert len(bound(MAX_SETS)) == MAX_SETS
    assert bound(MAX_SETS + 1) == frozenset()
    wide = "".join(f"<vcpupin vcpu='{n}' cpuset='0-16383,^{n}'/>" for n in range(20))
    text = f"<domain><vcpu>20</vcpu><cputune>{wide}</cputune></domain>"
    assert pinned_to(Document(text).root) == frozenset()


def host(*nodes: list[set[int]], threads: Mapping[int, int] | None = None) -> dict[int, Cpu]:
    """Returns a host of these NUMA nodes, each of caches with CPUs; threads that share a core."""
    found = {}
    for number, caches in enumerate(nodes):
        for cache in caches:
            for cpu in cache:
                core = frozenset({cpu, (threads or {}).get(cpu, cpu)})
                found[cpu] = Cpu(core, frozenset(cache), f"node{number}")
    return found


TWO_NODES = host([{0, 1, 2, 3}, {4, 5, 6, 7}], [{8, 9, 10, 11}, {12, 13, 14, 15}])


@pytest.mark.parametrize(
    ("of_target", "vcpus", "chosen"),
    [
        ({0, 4, 8, 12}, [{1}, {2}], {0}),  # on the same cache
        ({0, 8}, [{5}], {0}),  # on the same node
        ({0, 4, 8}, [{5}, {9}], {4, 8}),  # each vCPU has its own
        ({0, 1}, [{9}], {0, 1}),  # all are as far
        ({0, 1}, [{1}], {0}),  # not on the vCPU's own
        ({1, 8}, [{1}], {8}),
        ({0, 1}, [{0}, {1}], {0, 1}),  # nowhere else
        ({0, 8}, [set(range(8))], {0}),  # with room beside it
        ({0, 4}, [{0, 1}, {2, 3}], {0}),
        ({0, 8}, [{99}], {0, 8}),  # a CPU that is not there
    ],
)
def test_the_nearest_reactors_serve_it(
    of_target: set[int], vcpus: list[set[int]], chosen: set[int]
) -> None:
    assert nearest(of_target, [frozenset(each) for each in vcpus], TWO_NODES) == chosen


def test_a_reactor_does_not_share_a_core_with_a_vcpu() -> None:
    threads = host([{0, 1, 2, 3}], threads={0: 2, 2: 0, 1: 3, 3: 1})
    assert nearest({2, 3}, [frozenset({0})], threads) == {3}
    assert nearest({2, 3}, [frozenset({0, 2})], threads) == {3}


def test_the_kernel_is_asked_where_cpus_are(tmp_path: Path) -> None:
    def cpu(number: int, core: str, caches: list[tuple[int, str]], node: int | None) -> None:
        folder = tmp_path / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{core}\n")
        for index, (level, shared) in enumerate(caches):
            (folder / f"cache/index{index}").mkdir(parents=True)
            (folder / f"cache/index{index}/level").write_text(f"{level}\n")
            (folder / f"cache/index{index}/shared_cpu_list").write_text(f"{shared}\n")
        if node is not None:
            (folder / f"node{node}").mkdir()

    cpu(0, "0,4", [(1, "0,4"), (1, "0,4"), (2, "0,4"), (3, "0-7")], 1)
    cpu(9, "9", [], None)
    assert topology({0, 9, 12}, str(tmp_path)) == {
        0: Cpu(frozenset({0, 4}), frozenset(range(8)), "node1"),
        9: Cpu(frozenset({9}), frozenset({9}), ""),
    }
    assert set(topology({0})) == {0}, "this machine has one"


class Reactors(Rpc):
    """A target whose reactors are on these CPUs."""

    def __init__(self, *cpus: int) -> None:
        self.cpus = cpus
        self.asked = 0

    def call_raw(self, method: str, **params: Any) -> Any:
        assert method == "framework_get_reactors"
        self.asked += 1
        return {"reactors": [{"lcore": cpu} for cpu in self.cpus]}


class Silent(Rpc):
    """A target that does not tell of its reactors."""

    def call_raw(self, method: str, **params: Any) -> Any:
        raise RpcError(METHOD_NOT_FOUND, "no such method", method)


def test_what_a_controller_is_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactors, "topology", lambda cpus: TWO_NODES)

    def bound(*cpus: int) -> list[frozenset[int]]:
        return [frozenset({cpu}) for cpu in cpus]

    target = Reactors(0, 3, 8)
    assert reactors.mask_for(target, ()) is None
    assert target.asked == 0, "one more call for each VM that is not bound"
    assert reactors.mask_for(target, bound(1)) == "[0,3]"
    assert reactors.mask_for(target, bound(1, 9)) is None, "that are all"
    assert reactors.mask_for(Reactors(0), bound(9)) is None
    assert reactors.mask_for(Silent(), bound(9)) is None
