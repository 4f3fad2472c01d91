"""Streams of volumes, as Ceph's own unmodified `rbd` writes and reads them."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.support.ceph import POOL, cluster, lacks
from tests.support.target import Target
from tests.target.test_cli import done
from tests.target.test_images import contents
from tests.target.test_streams import change, names, sent, taken

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"not installed: {', '.join(lacks())}"),
    pytest.mark.root,
]

MIB = 1 << 20


@pytest.mark.nightly(reason="starts a cluster")
def test_a_volume_goes_to_ceph_and_comes_back(target: Target, scratch: Path) -> None:
    rng = random.Random(6)
    target.make_lvstore("lvs0", 96 * MIB)
    done(target, "volume", "create", "lvs0/v", "8M", "--thin")
    with cluster() as ceph:
        ceph.image("image", 8)

        def imported(stream: bytes) -> None:
            command = ["rbd", "-c", str(ceph.conf), "import-diff", "-", f"{POOL}/image"]
            subprocess.run(command, input=stream, check=True)

        change(target, "lvs0/v", rng)
        done(target, "volume", "snapshot", "lvs0/v", "one")
        imported(sent(target, "lvs0/v@one"))
        assert ceph.content("image") == contents(target, "lvs0/v")
        change(target, "lvs0/v", rng)
        done(target, "volume", "resize", "lvs0/v", "12M")
        done(target, "volume", "snapshot", "lvs0/v", "two")
        imported(sent(target, "lvs0/v@two", "--since", "@one"))
        assert ceph.content("image") == contents(target, "lvs0/v")
        # And back, whole and what changed.
        file = scratch / "stream"
        for words in ((f"{POOL}/image@one",), ("--from-snap", "one", f"{POOL}/image@two")):
            file.unlink(missing_ok=True)
            ceph.rbd("export-diff", "--no-progress", *words, str(file))
            taken(target, file.read_bytes(), "lvs0/back")
        assert contents(target, "lvs0/back") == ceph.content("image")
        assert names(target) == ["back", "back@one", "back@two", "v", "v@one", "v@two"]
