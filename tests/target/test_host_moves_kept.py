"""`virtlun volume move --host`: what it does not touch, as it is of somebody else."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from plugin.hostmoves import completion
from plugin.hostmoves.remote import Remote
from plugin.moves import notes
from tests.support.other_host import HOST
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done, refused
from tests.target.test_host_moves import (
    MIB,
    Pair,
    check_as_before,
    check_moved,
    is_disk,
    make_pair,
    pair_after_a_step,
    paths,
    volumes,
)
from tests.target.test_images import contents

pytestmark = pytest.mark.root


@pytest.fixture
def pair(make_target: MakeTarget) -> Pair:
    """As that of the other tests of moves to a host."""
    return make_pair(make_target)


def test_what_a_move_within_the_host_has_noted_stays(pair: Pair) -> None:
    """Also when there is no such host: the volume counts no more, and is no disk."""
    gone = json.dumps({"to": "c0ffee00-0000-4000-8000-000000000001", "path": "lvs1/v"})
    volumes(pair.here).set_xattr("lvs0/v", notes.MOVED, gone)
    done(pair.here, "volume", "snapshot", "lvs0/v", "move-20261129")
    before = paths(pair.here)
    done(pair.here, *pair.words("--abort"))
    assert volumes(pair.here).xattrs("lvs0/v") == {notes.MOVED: gone}
    assert not is_disk(pair.here, "lvs0/v")
    assert paths(pair.here) == before


def test_snapshots_of_the_name_of_a_moves_are_somebodys(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, before a move and while one is interrupted; and there, when the volume counts."""
    data = contents(pair.here, "lvs0/v")
    done(pair.here, "volume", "snapshot", "lvs0/v", "move-20261129")
    said = pair.refused()
    assert "has 1 snapshots, which would stay behind (v@move-20261129)" in said
    done(pair.here, *pair.words("--abort"))
    assert paths(pair.here) == ["lvs0/v", "lvs0/v@move-20261129"]
    done(pair.here, "volume", "delete", "lvs0/v@move-20261129", "--yes")
    pair_after_a_step(pair, monkeypatch)
    done(pair.here, "volume", "snapshot", "lvs0/v", "move-20261129")
    assert "(v@move-20261129)" in pair.refused()
    done(pair.here, *pair.words("--abort"))
    assert paths(pair.here) == ["lvs0/v", "lvs0/v@move-20261129"]
    assert volumes(pair.here).xattrs("lvs0/v") == {}
    done(pair.here, "volume", "delete", "lvs0/v@move-20261129", "--yes")
    pair.move()
    check_moved(pair, data)


def test_a_part_of_another_key_is_not_gone_on_with(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(64)))
    done(pair.there, "key", "create", "k1", "--file", str(key))
    data = contents(pair.here, "lvs0/v")
    pair_after_a_step(pair, monkeypatch)
    assert "lvs0/v is not encrypted, and key k1 is asked for" in pair.refused("--key", "k1")
    done(pair.here, *pair.words("--abort"))
    pair_after_a_step(pair, monkeypatch, "--key", "k1")
    assert "lvs0/v is encrypted by key k1, and no key is asked for" in pair.refused()
    pair.move("--key", "k1")
    assert (paths(pair.here), paths(pair.there)) == ([], ["lvs0/v"])
    assert contents(pair.there, "lvs0/v") == data
    assert volumes(pair.there).volume("lvs0/v").key == "k1"


def test_what_is_lost_there_is_said_and_the_one_here_can_count_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = contents(pair.here, "lvs0/v")
    with monkeypatch.context() as patched:
        patched.setattr(completion.Completion, "complete", interrupted)
        said = pair.refused()
    assert f"interrupted: volume lvs0/v is {HOST}:lvs0/v now, which counts" in said
    assert not is_disk(pair.here, "lvs0/v") and not is_disk(pair.there, "lvs0/v")
    done(pair.there, "volume", "delete", "lvs0/v", "--snapshots", "--yes")
    said = pair.refused()
    assert "is not there any more: if it has gone on from there, delete the one here" in said
    for name in (notes.HOST, notes.MOVED):
        assert name in said
        volumes(pair.here).remove_xattr("lvs0/v", name)
    assert contents(pair.here, "lvs0/v") == data and is_disk(pair.here, "lvs0/v")
    pair.move()
    check_moved(pair, data)


def interrupted(*_: Any, **__: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def test_what_is_left_in_the_end_can_be_interrupted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thick volume is filled there, which takes long: the same command goes on."""
    data = contents(pair.here, "lvs0/v")
    ask = Remote.ask

    def asked(self: Remote, do: str, **values: object) -> dict[str, Any]:
        if do == "clean":
            interrupted()
        return ask(self, do, **values)

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "ask", asked)
        said = pair.refused()
    assert "now, which counts: the same command does what is left" in said
    assert (is_disk(pair.here, "lvs0/v"), is_disk(pair.there, "lvs0/v")) == (False, True)
    pair.move()
    check_moved(pair, data)


def test_the_same_target_is_no_other_host(pair: Pair) -> None:
    data = contents(pair.here, "lvs0/v")
    same = Pair(pair.here, pair.here)
    said = same.refused()
    assert f"{HOST}: that is this target: name another host" in said
    assert "that is this target" in same.refused("--abort")
    check_as_before(pair, data)


def test_one_in_use_is_to_have_room_for_what_its_guest_writes(pair: Pair) -> None:
    free = volumes(pair.here).lvstore("lvs0").free // MIB
    done(pair.here, "volume", "create", "lvs0/rest", f"{free}M")
    pair.here.attach("vm-0", "lvs0/v")
    said = pair.refused("--shutdown")
    assert "lvs0 has" in said and "free some, or shut the VM down before" in said
    done(pair.here, "volume", "delete", "lvs0/rest", "--yes")
    assert "no gateway answers" in pair.refused("--shutdown")


def test_what_the_other_host_says_is_nothing_that_a_terminal_obeys(
    pair: Pair, tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"
    said = json.dumps({"virtlun": "\x1b[31m" + 500 * "9", "protocol": 99})
    ssh.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    ssh.chmod(0o755)
    told = refused(pair.here, "volume", "move", "lvs0/v", "--host", HOST, "--ssh", str(ssh))
    assert "virtlun there is [31m999" in told
    assert "\x1b" not in told and 100 * "9" not in told
