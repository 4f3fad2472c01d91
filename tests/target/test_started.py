"""Where root's record of a target's options lies: the target writes it, Python reads it.

The rule stands twice, in crates/target/src/started.rs and in pydataplane/inherited.py, as each runs
where the other is not. One table for both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from pydataplane import inherited
from tests.target.conftest import MakeTarget

ROOT, UID, GID = 0, 54321, 54322

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@dataclass(frozen=True)
class Case:
    """Owner and mode of the folders OUTER/INNER/OWN, and the one that the record is to be in.

    The socket is OWN/rpc.sock. `link`: it is named by way of a symbolic link in INNER to OWN.
    """

    name: str
    outer: tuple[int, int]
    inner: tuple[int, int]
    own: tuple[int, int]
    record: str
    link: bool = False

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("the next one above", (ROOT, 0o755), (ROOT, 0o755), (UID, 0o755), "outer/inner"),
    Case("not the user's own", (ROOT, 0o755), (UID, 0o755), (UID, 0o755), "outer"),
    Case("not the user's though closed", (ROOT, 0o755), (UID, 0o555), (UID, 0o755), "outer"),
    Case("not the group's", (ROOT, 0o755), (ROOT, 0o775), (UID, 0o755), "outer"),
    Case("not everybody's", (ROOT, 0o755), (ROOT, 0o757), (UID, 0o755), "outer"),
    Case("with the sticky bit", (ROOT, 0o755), (ROOT, 0o1777), (UID, 0o755), "outer/inner"),
    Case("the user's sticky one", (ROOT, 0o755), (UID, 0o1755), (UID, 0o755), "outer"),
    Case(
        "the socket's own folder", (ROOT, 0o755), (ROOT, 0o755), (ROOT, 0o1777), "outer/inner/own"
    ),
    Case("further above", (UID, 0o755), (UID, 0o755), (UID, 0o755), ""),
    Case("not by a link", (ROOT, 0o755), (ROOT, 0o755), (ROOT, 0o1777), "outer/inner", link=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_target_writes_its_record_where_root_looks_for_it(
    make_target: MakeTarget, scratch: Path, case: Case
) -> None:
    scratch.chmod(0o711)
    folders = [scratch / "outer", scratch / "outer/inner", scratch / "outer/inner/own"]
    for folder in folders:
        folder.mkdir()
    if case.link:
        (folders[1] / "link").symlink_to("own")
    target = make_target("--user", f"{UID}:{GID}")
    os.chown(target.directory, UID, GID)
    target.rpc_socket = folders[1] / ("link" if case.link else "own") / "rpc.sock"
    for folder, (uid, mode) in zip(folders, (case.outer, case.inner, case.own), strict=True):
        os.chown(folder, uid, uid)
        folder.chmod(mode)
    target.start()
    (record,) = scratch.rglob(".*.options")
    assert record.parent == scratch / case.record
    assert inherited.recorded(target.rpc_socket) == target.command()[1:]
