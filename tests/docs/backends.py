"""The page on what each backend can do: found out by a run, or shown by a test that a cell names.

tests/target/test_backends.py has a guest try each of `TRIED` on each backend, and compares what
came out with docs/pages/reference/backends.md. The rows of `SHOWN` name a test in each cell that
says yes or no; tests/unit/test_docs.py sees that those tests are there, and that the page has them.

A backend that is added is a line of `BACKENDS` and a method that makes it in that test; what no row
says of it is *untried*.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.docs.links import ROOT
from tests.docs.reference import REFERENCE

PAGE = REFERENCE / "backends.md"
TRIAL = "tests/target/test_backends.py"
TRIAL_TEST = "test_a_guest_has_of_each_backend_what_the_page_says"

BACKENDS = {
    "memory": "`bdev_malloc_create`",
    "file": "a file or a block device: `bdev_uring_create`, `bdev_aio_create`",
    "thick": "a thick volume of an lvstore",
    "thin": "a thin one",
    "rbd": "an image of Ceph, or a volume of a pool: `bdev_rbd_create`, `virtlun pool`",
    "iscsi": "a LUN, here a thin one of tgt, or of a pool: `bdev_iscsi_create`, `virtlun pool`",
    "nbd": "an export of an NBD server, here nbdkit on a file: `virtlun_nbd_create`",
    "nvme": (
        "a namespace of an NVMe/TCP target, here of a model of one that was written beside the "
        "initiator, no peer, or of a pool: `bdev_nvme_attach_controller`, `virtlun pool`"
    ),
}
"""Columns, and what they are."""

TRIED = {
    "flush": "SYNCHRONIZE CACHE",
    "fua": "FUA of a write",
    "unmap": "UNMAP",
    "zeros": "WRITE SAME of zeros",
    "same": "WRITE SAME of data",
    "compare": "COMPARE AND WRITE",
    "reservations": "persistent reservations, among the VMs of the target",
    "growth": "growth that a guest is told of",
    "lvstore": "an lvstore on it",
    "encryption": "encryption, [by a bdev on it](../how-to/encryption.md#any-bdev)",
    "checksums": "checksums, [by a bdev on it](../how-to/checksums.md#any-bdev)",
    "protection": "protection information, [by a volume](../how-to/protection.md#on-any-disk)",
    "upgrade": "I/O goes on over an upgrade of the target",
    "kill": "I/O goes on after a kill -9 of the target, and what was written is there",
}
"""What a guest tries, by the names of tests/target/test_backends.py."""


@dataclass(frozen=True)
class Cell:
    """What a backend does, and the test that shows it: `FILE::NAME`; None where none can."""

    says: str
    test: str | None


@dataclass(frozen=True)
class Row:
    """A feature, by backends; what is not there is untried."""

    feature: str
    cells: dict[str, Cell] = field(default_factory=dict)


def _yes(test: str) -> Cell:
    return Cell("yes", test)


def _no(test: str) -> Cell:
    return Cell("no", test)


NOT_THERE = Cell("no", None)
"""There is no way to ask for it."""
NEEDLESS = Cell("-", None)
"""It cannot come to that."""

_RBD, _POOLS = "tests/target/test_rbd.py::test_", "tests/target/test_rbd_pools.py::test_"
_ISCSI, _NBD = "tests/target/test_iscsi.py::test_", "tests/target/test_nbd.py::test_"
_ANSWERS = "tests/target/test_iscsi_answers.py::test_"
_NVME = "tests/target/test_nvme.py::test_"
_TOGETHER = "tests/target/test_rbd_together.py::test_"
_KILLS = "tests/target/test_history_kills.py::test_"
_NETWORK = "tests/libvirt/test_network_disks.py::test_"
_ISCSI_DISKS = "tests/libvirt/test_iscsi_disks.py::test_"
_ISCSI_POOLS = "tests/target/test_iscsi_pools.py::test_"
_NVME_POOLS = "tests/target/test_nvme_pools.py::test_"
_NVME_DISKS = "tests/libvirt/test_nvme_disks.py::test_"
_TWO_HOSTS = "tests/target/test_two_hosts.py::test_"
_BOTH_WRITE = "both_write_and_each_reads_what_the_other_has_written"
_LOCAL = ("memory", "file", "thick", "thin")
_ARRAYS = ("iscsi", "nbd", "nvme")
_VOLUMES = ("thick", "thin")


def _of(names: tuple[str, ...], cell: Cell) -> dict[str, Cell]:
    return dict.fromkeys(names, cell)


SHOWN = (
    Row(
        "I/O waits while it is away, and goes on",
        _of(_LOCAL, NEEDLESS)
        | {
            "rbd": _yes(f"{_RBD}an_osd_that_is_stopped_or_killed_delays_its_images_alone"),
            "iscsi": _yes(f"{_ISCSI}verified_io_goes_on_over_kills_and_stops_of_the_target"),
            "nbd": _yes(f"{_NBD}verified_io_goes_on_over_kills_and_stops_of_the_server"),
            "nvme": _yes(f"{_NVME}verified_io_goes_on_over_losses_of_connections"),
        },
    ),
    Row(
        "the target starts while it is away",
        {
            "memory": NEEDLESS,
            "file": _yes(
                "tests/target/test_restart.py::test_a_missing_file_is_a_problem_and_the_rest_goes_on"
            ),
            "rbd": _yes(f"{_RBD}a_target_stops_and_starts_while_its_cluster_does_not_answer"),
            "iscsi": _yes(f"{_ISCSI}a_target_that_is_not_there_at_the_start_keeps_nobody_waiting"),
            "nbd": _yes(f"{_NBD}a_server_that_is_not_there_at_the_start_keeps_nobody_waiting"),
            "nvme": _yes(f"{_NVME}a_target_that_is_not_there_at_the_start_keeps_nobody_waiting"),
        },
    ),
    Row(
        "a failed flush is remembered until it is cleared",
        {
            "memory": NEEDLESS,
            "file": _yes(
                "tests/target/test_flush_error_lasts.py::test_it_is_told_until_it_is_cleared"
            ),
            "thin": _yes(
                "tests/target/test_flush_error.py::"
                "test_what_the_lvstore_s_own_flush_loses_is_told_to_its_volumes"
            ),
            # Nothing is cached: what was answered is durable, and a flush has nothing to lose.
            "rbd": NEEDLESS,
            "iscsi": _yes(f"{_ANSWERS}a_flush_that_fails_is_remembered_until_it_is_cleared"),
            "nbd": _yes(f"{_NBD}a_flush_that_fails_is_remembered_until_it_is_cleared"),
            "nvme": _yes(f"{_NVME}a_flush_that_fails_is_remembered_until_it_is_cleared"),
        },
    ),
    Row(
        "its own protection information, from the guest to the medium",
        {
            "file": _yes(
                "tests/target/test_protection.py::"
                "test_a_guest_reads_and_writes_blocks_with_their_tuples"
            ),
            "thin": _yes(
                "tests/target/test_protection.py::"
                "test_a_volume_carries_what_a_guest_has_and_tells_its_own_blocks"
            ),
            **_of(("rbd", "iscsi", "nbd"), NOT_THERE),
            "nvme": _no(f"{_NVME}a_controller_that_bdevs_cannot_be_on_is_refused_in_a_sentence"),
        },
    ),
    Row(
        "checksums of the store that it lies on",
        _of(("memory", "file", "rbd", "iscsi", "nbd", "nvme"), NEEDLESS)
        | {
            "thin": _yes(
                "tests/target/test_integrity.py::"
                "test_what_a_guest_wrote_is_right_after_a_crash_an_upgrade_and_a_restart"
            )
        },
    ),
    Row(
        "a key of its own",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | _of(
            _VOLUMES,
            _yes("tests/target/test_encrypted_lvols.py::test_snapshots_and_clones_have_its_key"),
        )
        | {"rbd": _no(f"{_POOLS}what_a_pool_does_not_do_is_refused_in_a_sentence")},
    ),
    Row(
        "snapshots, and clones of them",
        _of(("memory", "file", "nbd"), NOT_THERE)
        | {
            "iscsi": _no(f"{_ISCSI_POOLS}what_the_array_does_is_refused_in_a_sentence"),
            "nvme": _no(f"{_NVME_POOLS}what_the_array_does_is_refused_in_a_sentence"),
            "thick": _yes(
                "tests/target/test_encrypted_lvols.py::test_snapshots_and_clones_have_its_key"
            ),
            "thin": _yes(
                "tests/target/test_history_rpc.py::"
                "test_a_snapshot_and_a_clone_are_made_with_their_uuid_and_xattrs"
            ),
            "rbd": _yes(f"{_POOLS}snapshots_clones_and_a_way_back"),
        },
    ),
    Row(
        "snapshots by virsh",
        {
            "thin": _yes(
                "tests/libvirt/test_snapshots.py::"
                "test_the_tree_is_libvirtds_and_a_revert_goes_to_each_of_its_nodes"
            ),
            "rbd": _yes("tests/libvirt/test_ceph.py::test_a_snapshot_by_virsh_is_one_of_the_image"),
            "iscsi": _no(f"{_ISCSI_DISKS}a_lun_that_libvirt_names_is_served_by_the_target"),
            "nbd": _no(f"{_NETWORK}an_export_of_an_nbd_server"),
            "nvme": _no(
                f"{_NVME_DISKS}namespaces_are_attached_by_plain_virsh_and_stay_over_restarts"
            ),
        },
    ),
    Row(
        "snapshots of several at one instant, all or none",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thin": _yes(f"{_KILLS}it_has_happened_or_not"),
            "rbd": _yes(f"{_TOGETHER}snapshots_of_several_images_are_of_one_instant"),
        },
    ),
    Row(
        "a way back that is cut off is finished, or was not begun",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thin": _yes(f"{_KILLS}it_has_happened_or_not"),
            "rbd": _yes(f"{_TOGETHER}a_rollback_that_was_cut_off_is_noticed_and_finished"),
        },
    ),
    Row(
        "backups by virsh of what has changed",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thin": _yes(
                "tests/libvirt/test_backups.py::"
                "test_full_and_what_has_changed_since_make_the_disk_again"
            ),
            "rbd": _yes("tests/libvirt/test_ceph.py::test_a_backup_has_what_changed_in_an_image"),
        },
    ),
    Row(
        "what has changed since a snapshot, in Kubernetes",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thin": _yes(
                "tests/target/test_csi_groups.py::"
                "test_the_parts_that_hold_data_and_that_changed_are_told"
            ),
            "rbd": _yes("tests/target/test_csi_pools.py::test_what_changed_in_an_image_is_told"),
        },
    ),
    Row(
        "groups of snapshots in Kubernetes",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thin": _yes(
                "tests/target/test_csi_groups.py::test_a_group_is_taken_once_and_deleted_as_a_whole"
            ),
            "rbd": _yes(
                "tests/target/test_csi_pools.py::"
                "test_a_group_of_images_is_of_one_instant_and_gone_with_its_last"
            ),
        },
    ),
    Row(
        "`virsh attach-disk`, by the name of a volume",
        _of(("memory", "file", "nbd"), NOT_THERE)
        | {
            "iscsi": _yes(f"{_ISCSI_DISKS}luns_of_a_pool_are_attached_by_plain_virsh"),
            "nvme": _yes(
                f"{_NVME_DISKS}namespaces_are_attached_by_plain_virsh_and_stay_over_restarts"
            ),
            "thick": _yes("tests/libvirt/test_blk.py::test_attach_and_detach_with_plain_virsh"),
            "thin": _yes(
                "tests/libvirt/test_block_calls.py::"
                "test_who_listens_is_told_once_that_a_thin_volume_grows"
            ),
            "rbd": _yes(
                "tests/libvirt/test_ceph.py::"
                "test_a_disk_of_a_pool_is_attached_written_grown_and_detached"
            ),
        },
    ),
    Row(
        "`<source protocol=...>`, as QEMU's own disks have it",
        _of((*_LOCAL, "nvme"), NOT_THERE)
        | {
            "iscsi": _yes(f"{_ISCSI_DISKS}a_lun_that_libvirt_names_is_served_by_the_target"),
            "rbd": _yes(f"{_NETWORK}a_disk_of_a_cloud_is_served_by_the_target"),
            "nbd": _yes(f"{_NETWORK}an_export_of_an_nbd_server"),
        },
    ),
    Row(
        "live migration, where both hosts have it",
        _of(("memory",), NOT_THERE)
        | {
            "rbd": _yes(
                "tests/libvirt/test_ceph_migration.py::"
                "test_a_running_guest_goes_to_another_host_and_its_lock_with_it"
            ),
            "nvme": _yes(
                "tests/libvirt/test_nvme_migration.py::"
                "test_it_writes_by_one_host_and_then_by_the_other"
            ),
        },
    ),
    Row(
        "`virsh blockcopy` of a disk that its guest writes to, from it and to it",
        {
            "thin": _yes("tests/libvirt/test_block_copies.py::test_progress_limit_abort_and_pivot"),
            "rbd": _yes("tests/libvirt/test_ceph_copies.py::test_a_guest_writes_on"),
        },
    ),
    Row(
        "another host is kept from writing",
        _of(_LOCAL, NEEDLESS)
        | {
            "rbd": _yes(f"{_RBD}a_second_writer_is_refused_and_a_shared_image_has_several"),
            **_of(_ARRAYS, _no(f"{_TWO_HOSTS}{_BOTH_WRITE}")),
        },
    ),
    Row(
        "several hosts write, where each asks for it",
        _of(_LOCAL, NOT_THERE)
        | {"rbd": _yes(f"{_POOLS}several_hosts_write_to_a_volume_only_where_each_asks_for_it")}
        | _of(_ARRAYS, _yes(f"{_TWO_HOSTS}{_BOTH_WRITE}")),
    ),
    Row(
        "another host takes over from one that died",
        _of(_LOCAL, NOT_THERE)
        | {
            "rbd": _yes(
                "tests/libvirt/test_ceph_migration.py::"
                "test_a_guest_of_a_host_that_is_silent_is_started_elsewhere_and_the_old_one_fenced"
            ),
            **_of(
                _ARRAYS,
                _yes(f"{_TWO_HOSTS}the_other_has_what_was_written_by_one_that_died_and_writes_on"),
            ),
        },
    ),
    Row(
        "several connections or paths",
        _of(_LOCAL, NEEDLESS)
        | {
            "rbd": Cell("Ceph's own", None),
            "iscsi": NOT_THERE,
            "nbd": _yes(f"{_NBD}a_guest_uses_an_export"),
            "nvme": _yes(f"{_NVME}io_goes_by_the_best_path_and_by_another_when_that_is_lost"),
        },
    ),
    Row(
        "a store of volumes that people name",
        _of(("memory", "file", "nbd"), NOT_THERE)
        | _of(
            _VOLUMES,
            _yes(
                "tests/target/test_cli.py::test_lvstores_and_volumes_are_made_listed_changed_and_deleted"
            ),
        )
        | {
            "iscsi": _yes(f"{_ISCSI_POOLS}luns_are_volumes_that_are_open_while_somebody_uses_them"),
            "nvme": _yes(
                f"{_NVME_POOLS}namespaces_are_volumes_that_are_open_while_somebody_uses_them"
            ),
            "rbd": _yes(f"{_POOLS}the_command_adds_a_pool_and_makes_volumes_in_it"),
        },
    ),
    Row(
        "a StorageClass of Kubernetes",
        _of(("memory", "file", "iscsi", "nbd", "nvme"), NOT_THERE)
        | {
            "thick": _yes(
                "tests/target/test_csi_snapshots.py::"
                "test_a_volume_of_a_thick_class_has_all_of_its_own"
            ),
            "thin": _yes(
                "tests/target/test_csi_snapshots.py::"
                "test_a_file_system_of_a_snapshot_is_mounted_beside_its_source_and_grows"
            ),
            "rbd": _yes(
                "tests/target/test_csi_pools.py::test_a_volume_of_a_pool_from_its_claim_to_its_end"
            ),
        },
    ),
)

INTRODUCTION = f"""\
<!-- Made by {TRIAL}; do not edit. -->

# What each backend can do

*yes* and *no* are what a test has found; *no* without a test: there is no way to ask for it.
*untried* is what no test says, and *-* what cannot be.

| | |
| --- | --- |
"""


def page(outcomes: dict[tuple[str, str], str]) -> str:
    """Returns the page; `outcomes` are what came of each of `TRIED`, by backend."""
    kinds = "".join(f"| {name} | {what} |\n" for name, what in BACKENDS.items())
    return "\n".join(
        [
            INTRODUCTION + kinds,
            f"## What a guest has of it\n\nTried by a guest on each, by SCSI: `{TRIAL}`.\n",
            _head(),
            *(
                _line(what, [outcomes[name, each] for each in BACKENDS])
                for name, what in TRIED.items()
            ),
            "\n## What else is done with it\n",
            *shown(),
            "",
        ]
    )


def shown() -> list[str]:
    """Returns the lines on the rows whose cells name tests."""
    untried = Cell("untried", None)
    return [
        _head(),
        *(
            _line(row.feature, [row.cells.get(name, untried).says for name in BACKENDS])
            for row in SHOWN
        ),
        "\n### By which test\n",
        "| | of | test |\n| --- | --- | --- |",
        *(line for row in SHOWN for line in _tests_of(row)),
    ]


def _tests_of(row: Row) -> Iterator[str]:
    """Yields a line for each test that shows what a row says."""
    by: dict[str, list[str]] = {}
    for name in BACKENDS:
        cell = row.cells.get(name)
        if cell is not None and cell.test is not None:
            by.setdefault(cell.test, []).append(name)
    for test, names in by.items():
        yield _line(row.feature, [", ".join(names), f"`{test}`"])


def missing() -> Iterator[str]:
    """Yields a sentence for each cell whose test is not there."""
    for row in SHOWN:
        for name, cell in row.cells.items():
            assert name in BACKENDS, f"{row.feature}: there is no backend {name}"
            if cell.test is None:
                continue
            file, _, test = cell.test.partition("::")
            if test not in _tests(file):
                yield f"{row.feature}, {name}: {file} has no {test}"


@cache
def _tests(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.exists():
        return frozenset()
    parts = ast.parse(path.read_text()).body
    return frozenset(part.name for part in parts if isinstance(part, ast.FunctionDef))


def _head() -> str:
    return f"| | {' | '.join(BACKENDS)} |\n| --- |{' --- |' * len(BACKENDS)}"


def _line(what: str, cells: list[str]) -> str:
    return f"| {what} | {' | '.join(cells)} |"
