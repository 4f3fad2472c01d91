"""`virtlun volume move --host`: what it does not touch, as it is of somebody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugin.moves import notes
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done
from tests.target.test_host_moves import (
    Pair,
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
