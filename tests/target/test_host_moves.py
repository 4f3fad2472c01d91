"""`virtlun volume move --host`: volumes that nobody uses, between two targets.

In ssh's place a program runs the other side with the environment of the other target
(tests.support.other_host).
"""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugin.hostmoves import sourceside
from plugin.moves import notes
from plugin.streams import sending
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import Volumes
from tests.support.night import at_night
from tests.support.other_host import HOST, ssh_to
from tests.support.target import Target, binary
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done, refused, run
from tests.target.test_images import contents
from tests.target.test_moves import KILLED

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE_MIB = 8


class Pair:
    """The target that a volume leaves, and the one that it comes to."""

    def __init__(self, here: Target, there: Target) -> None:
        self.here, self.there = here, there
        self.ssh = ssh_to(here.directory / "ssh", {"VIRTLUN_TARGET_SOCKET": there.rpc_socket})

    def words(self, *options: str, of: str = "lvs0/v") -> tuple[str, ...]:
        return ("volume", "move", of, "--host", HOST, "--ssh", str(self.ssh), *options)

    def move(self, *options: str, of: str = "lvs0/v") -> dict[str, Any]:
        (row,) = json.loads(done(self.here, *self.words(*options, "--json", of=of)))
        return dict(row)

    def refused(self, *options: str, of: str = "lvs0/v") -> str:
        return refused(self.here, *self.words(*options, of=of))

    def back(self) -> tuple[str, ...]:
        """The words of a move the other way."""
        ssh = ssh_to(self.there.directory / "ssh", {"VIRTLUN_TARGET_SOCKET": self.here.rpc_socket})
        return ("volume", "move", "lvs0/v", "--host", HOST, "--ssh", str(ssh))


@pytest.fixture
def pair(make_target: MakeTarget) -> Pair:
    return make_pair(make_target)


def make_pair(make_target: MakeTarget) -> Pair:
    """Makes two targets with an lvstore lvs0 each; the first has the thin volume v with data."""
    both = [make_target().start() for _ in range(2)]
    for each in both:
        each.make_lvstore("lvs0", 96 * MIB)
    both[0].make_thin("v", SIZE_MIB)
    fill(both[0], "lvs0/v", 1)
    remember(both[0])
    return Pair(*both)


def fill(target: Target, volume: str, seed: int) -> None:
    """Writes here and there in a volume."""
    chance = random.Random(seed)
    with target.exported(volume) as path, path.open("rb+", buffering=0) as file:
        for _ in range(4):
            file.seek(chance.randrange(0, (SIZE_MIB - 1) * MIB, 512))
            file.write(chance.randbytes(chance.choice([512, 4096, 200 << 10])))


def volumes(target: Target) -> Volumes:
    return Volumes(Client(target.rpc_socket))


def paths(target: Target) -> list[str]:
    return [each.path for each in volumes(target).volumes()]


def is_disk(target: Target, volume: str) -> bool:
    """Whether a VM could have a volume."""
    if volume not in paths(target):
        return False
    target.rpc("vhost_create_scsi_controller", ctrlr="vm-asks")
    try:
        target.add_lun("vm-asks", volume)
    except RpcError as error:
        assert "is no disk" in str(error) or "in use" in str(error), error
        return False
    finally:
        target.rpc("vhost_delete_controller", ctrlr="vm-asks")
    return True


def check_moved(pair: Pair, data: bytes, there: str = "lvs0/v") -> None:
    """Checks that the volume is on the other host alone, whole, and that nothing else is left."""
    assert (paths(pair.here), paths(pair.there)) == ([], [there])
    assert contents(pair.there, there) == data
    assert is_disk(pair.there, there)
    assert volumes(pair.there).xattrs(there).keys() <= {notes.IDENTITY}
    for each in (pair.here, pair.there):
        assert not each.rpc("virtlun_export_list")


def check_as_before(pair: Pair, data: bytes) -> None:
    """Checks that the volume is here as it was, and that nothing else is left."""
    assert (paths(pair.here), paths(pair.there)) == (["lvs0/v"], [])
    assert contents(pair.here, "lvs0/v") == data
    assert volumes(pair.here).xattrs("lvs0/v") == {}
    assert is_disk(pair.here, "lvs0/v")


def test_a_volume_is_on_the_other_host_then(pair: Pair) -> None:
    data, before = contents(pair.here, "lvs0/v"), volumes(pair.here).volume("lvs0/v")
    moved = pair.move()
    assert (moved["path"], moved["host"], moved["uuid"]) == ("lvs0/v", HOST, before.uuid)
    assert (moved["size"], moved["pause_us"], moved["domain"]) == (SIZE_MIB * MIB, None, None)
    assert 0 < moved["sent"] == moved["last"] < SIZE_MIB * MIB, "zeros are not sent"
    check_moved(pair, data)
    there = volumes(pair.there).volume("lvs0/v")
    assert (there.uuid, there.thin) == (before.uuid, True)
    # And back: nothing here is in the way.
    done(pair.there, *pair.back())
    assert (paths(pair.here), paths(pair.there)) == (["lvs0/v"], [])
    assert contents(pair.here, "lvs0/v") == data


def test_what_a_volume_is_goes_with_it(pair: Pair, tmp_path: Path) -> None:
    """Its key, its limits, its notes; what is thick stays so, and another name may be had."""
    for number, each in enumerate((pair.here, pair.there)):
        key = tmp_path / f"key{number}"
        key.write_bytes(bytes(range(number, 64 + number)))
        done(each, "key", "create", f"k{number}", "--file", str(key))
    done(pair.here, "volume", "create", "lvs0/thick", "8M", "--key", "k0")
    fill(pair.here, "lvs0/thick", 2)
    done(pair.here, "volume", "limits", "lvs0/thick", "--total-iops-sec", "5000")
    volumes(pair.here).set_xattr("lvs0/thick", "somebody", "says")
    data = contents(pair.here, "lvs0/thick")
    said = pair.refused(of="lvs0/thick")
    assert f"{HOST}: there is no key k0" in said
    pair.move("--key", "k1", "--to", "lvs0/other", of="lvs0/thick")
    there = volumes(pair.there).volume("lvs0/other")
    assert (there.thin, there.key, there.parent) == (False, "k1", None)
    assert contents(pair.there, "lvs0/other") == data
    limits = json.loads(done(pair.there, "volume", "limits", "lvs0/other", "--json"))
    assert limits["total_iops_sec"] == 5000
    assert volumes(pair.there).xattrs("lvs0/other")["somebody"] == "says"


def test_a_kept_one_is_no_disk(pair: Pair) -> None:
    data = contents(pair.here, "lvs0/v")
    pair.move("--keep")
    assert paths(pair.here) == paths(pair.there) == ["lvs0/v"]
    assert (is_disk(pair.here, "lvs0/v"), is_disk(pair.there, "lvs0/v")) == (False, True)
    assert contents(pair.there, "lvs0/v") == data
    fill(pair.there, "lvs0/v", 3)
    after = contents(pair.there, "lvs0/v")
    assert f"has moved to {HOST}:lvs0/v, and was kept" in pair.refused()
    assert "was kept" in pair.refused("--abort")
    assert contents(pair.there, "lvs0/v") == after
    done(pair.here, "volume", "delete", "lvs0/v", "--yes")
    check_moved(pair, after)


def test_what_cannot_move_is_refused_and_nothing_is_left(pair: Pair) -> None:
    data = contents(pair.here, "lvs0/v")
    done(pair.there, "volume", "create", "lvs0/taken", "8M", "--thin")
    there = paths(pair.there)
    assert "lvs0/taken exists already, and is another one" in pair.refused("--to", "lvs0/taken")
    assert "there is no lvstore lvs9" in pair.refused("--to", "lvs9")
    assert paths(pair.there) == there
    done(pair.there, "volume", "delete", "lvs0/taken", "--yes")
    (known,) = pair.here.rpc("bdev_get_bdevs", name="lvs0/v")
    done(pair.there, "volume", "create", "lvs0/copy", "8M", "--thin", "--uuid", known["uuid"])
    assert "is that of volume lvs0/copy there" in pair.refused()
    done(pair.there, "volume", "delete", "lvs0/copy", "--yes")
    free = volumes(pair.there).lvstore("lvs0").free // MIB
    done(pair.there, "volume", "create", "lvs0/rest", f"{free}M")
    assert "bytes, and lvs0 has" in pair.refused()
    done(pair.there, "volume", "delete", "lvs0/rest", "--yes")
    check_as_before(pair, data)
    # What is wrong on this side is told before the other one is asked.
    for of, says in (
        ("lvs0/claim", "is a claim's of Kubernetes"),
        ("lvs0/dif", "keeps protection information"),
        ("lvs0/old", "has 1 snapshots, which would stay behind (old@monday)"),
        ("lvs0/old@monday", "is a snapshot"),
        ("lvs0/used", "in use by VM 0: shut that down, or add --shutdown"),
        ("lvs0/busy", "in use by controller other"),
        ("lvs0/" + 50 * "x", "is longer than 49 characters"),
        ("lvs0/none", "there is no volume lvs0/none"),
    ):
        name = of.removeprefix("lvs0/").partition("@")[0]
        if name != "none" and f"lvs0/{name}" not in paths(pair.here):
            kind = ("--dif-type", "1") if name == "dif" else ()
            done(pair.here, "volume", "create", f"lvs0/{name}", "4M", "--thin", *kind)
        if name == "claim":
            volumes(pair.here).set_xattr(of, "csi.volume", "{}")
        if of == "lvs0/old":
            done(pair.here, "volume", "snapshot", of, "monday")
        if name in ("used", "busy"):
            pair.here.attach("vm-0" if name == "used" else "other", of)
        said = refused(
            pair.here, "volume", "move", of, "--host", HOST, "--ssh", "/nonexistent/program"
        )
        assert says in said, said
    with pair.here.exported("lvs0/v"):
        assert "is exported, and in use by" in pair.refused()
    assert paths(pair.there) == []


def test_the_other_hosts_errors_are_one_sentence_with_its_name(pair: Pair, tmp_path: Path) -> None:
    def with_ssh(program: str, *words: str) -> str:
        ssh = tmp_path / "ssh"
        ssh.write_text(f"#!/bin/sh\n{program}\n")
        ssh.chmod(0o755)
        return refused(
            pair.here, "volume", "move", "lvs0/v", "--host", HOST, "--ssh", str(ssh), *words
        )

    said = with_ssh("echo 'Permission denied (publickey).' >&2; exit 255")
    assert f"{HOST}: the connection ended (exit status 255): Permission denied" in said
    assert f"{HOST}: what came is no answer: 'Welcome!'" in with_ssh("echo Welcome!")
    said = with_ssh("""echo '{"virtlun": "9.9", "protocol": 99}'""")
    assert f"{HOST}: virtlun there is 9.9, here " in said
    assert "exit status 127" in pair.refused("--remote", "no-such-virtlun")
    pair.there.stop()
    assert f"{HOST}: no target answers" in pair.refused()
    pair.there.start()
    for host in ("-oProxyCommand=x", "a b", "a;b", "", "root@-x", "$(x)"):
        told = run(pair.here, "volume", "move", "lvs0/v", "--host", host, "--ssh", str(pair.ssh))
        assert told.exit_code == 1 and "names no host" in told.stderr, told.output
    assert "--to is of a move to another host" in run(
        pair.here, "volume", "move", "lvs0/v", "--to", "lvs1"
    ).stderr.replace("\n", " ")
    check_as_before(pair, contents(pair.here, "lvs0/v"))


def test_another_command_is_refused_meanwhile(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this host, by the volume."""
    told: list[str] = []
    send = sending.send

    def second(*words: Any) -> None:
        out = subprocess.run(
            [str(binary("virtlun")), "--socket", str(pair.here.rpc_socket), *pair.words()],
            capture_output=True,
            text=True,
            check=False,
        )
        told.append(out.stderr)
        send(*words)

    monkeypatch.setattr(sending, "send", second)
    pair.move()
    assert len(told) == 1 and "is being moved by another command" in told[0]


def test_given_up_it_is_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ^C, while it is sent: there is nothing of it anywhere."""
    data = contents(pair.here, "lvs0/v")
    with monkeypatch.context() as patched:

        def interrupted(*words: Any) -> None:
            words[3].write(b"rbd diff v1\n" + bytes(MIB))
            signal.raise_signal(signal.SIGINT)

        patched.setattr(sending, "send", interrupted)
        said = pair.refused()
    assert "interrupted: volume lvs0/v counts, as before" in said
    check_as_before(pair, data)


def test_with_a_part_there_it_goes_on_or_is_aborted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ^C after all was sent once, which is not sent again."""
    whole = pair_after_a_step(pair, monkeypatch)
    before = contents(pair.here, "lvs0/v")
    assert is_disk(pair.here, "lvs0/v") and not is_disk(pair.there, "lvs0/v")
    local = refused(pair.here, "volume", "move", "lvs0/v", "lvs1")
    assert "there is no lvstore lvs1" in local
    pair.here.make_lvstore("lvs1", 64 * MIB)
    local = refused(pair.here, "volume", "move", "lvs0/v", "lvs1")
    assert "is on its way to another host" in local
    assert f"is on its way to {HOST}:lvs0/v" in pair.refused("--to", "lvs0/w")
    with pair.here.exported("lvs0/v") as path, path.open("rb+", buffering=0) as file:
        file.write(b"x" * 512)
    after = contents(pair.here, "lvs0/v")
    assert before != after
    assert pair.move()["sent"] < whole / 2
    check_moved(pair, after)


def pair_after_a_step(pair: Pair, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Has the other host have all of the volume, and the command end before it counts there.

    Returns the bytes that were sent.
    """
    sent = 0

    def interrupted(self: sourceside.HostMover, *_: Any) -> None:
        nonlocal sent
        sent = self._sent
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(sourceside.HostMover, "_check_unchanged", interrupted)
        said = pair.refused(*words)
    assert "counts, as before; root@there.example:lvs0/v has what was sent, and is no disk" in said
    return sent


def test_abort_takes_away_what_there_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    data = contents(pair.here, "lvs0/v")
    pair_after_a_step(pair, monkeypatch)
    assert done(pair.here, *pair.words("--abort")) == ""
    check_as_before(pair, data)
    done(pair.here, *pair.words("--abort"))  # of nothing
    check_as_before(pair, data)


def test_a_copy_of_before_is_not_gone_on_with(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snapshot is not here any more: all is sent anew, in its place."""
    pair_after_a_step(pair, monkeypatch)
    (snapshot,) = (path for path in paths(pair.here) if "@" in path)
    done(pair.here, "volume", "delete", snapshot, "--yes")
    fill(pair.here, "lvs0/v", 9)
    data = contents(pair.here, "lvs0/v")
    pair.move()
    check_moved(pair, data)


def test_what_is_written_meanwhile_is_not_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes to what is no disk, while the last of it is sent: the move is refused."""
    send = sending.send

    def writes(*words: Any) -> None:
        send(*words)
        volumes(pair.here).remove_xattr("lvs0/v", notes.MOVED)
        fill(pair.here, "lvs0/v", 4)

    with monkeypatch.context() as patched:
        patched.setattr(sending, "send", writes)
        assert "was changed while the last of it was sent" in pair.refused()
    data = contents(pair.here, "lvs0/v")
    assert is_disk(pair.here, "lvs0/v") and not is_disk(pair.there, "lvs0/v")
    pair.move()
    check_moved(pair, data)


@pytest.mark.parametrize(
    ("stride", "has_part"), [(4, False), (4, True), at_night(1, False), at_night(1, True)]
)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_who_is_killed_leaves_one_that_counts_and_the_same_command_goes_on(
    pair: Pair, side: str, stride: int, has_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL before each call of its target that changes something: every `stride`th.

    With a part the other host has all of an earlier state already.
    """
    at = stride
    if has_part:
        add_part(pair, at, monkeypatch)
    while kill_at(pair, side, at):
        data = contents_of(pair.here)
        both = [is_disk(each, "lvs0/v") for each in (pair.here, pair.there)]
        assert both != [True, True], at
        assert both[1] or "lvs0/v" in paths(pair.here), at
        if "lvs0/v" in paths(pair.here):
            pair.move()
        check_moved(pair, data)
        at += stride
        begin_anew(pair, at)
        if has_part:
            add_part(pair, at, monkeypatch)
    assert at >= 12, "there are so many steps at least"
    check_moved(pair, contents_of(pair.here))


def contents_of(target: Target) -> bytes:
    """Returns what the volume of a move had when that began."""
    return (target.directory / "expected").read_bytes()


def begin_anew(pair: Pair, seed: int) -> None:
    done(pair.there, "volume", "delete", "lvs0/v", "--yes")
    pair.here.make_thin("v", SIZE_MIB)
    fill(pair.here, "lvs0/v", seed)
    remember(pair.here)


def add_part(pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the other host have all, and the volume change then."""
    pair_after_a_step(pair, monkeypatch)
    fill(pair.here, "lvs0/v", -seed)
    remember(pair.here)


def remember(target: Target) -> None:
    (target.directory / "expected").write_bytes(contents(target, "lvs0/v"))


def kill_at(pair: Pair, side: str, at: int) -> bool:
    """Kills one side before its `at`th step; returns whether it had so many."""
    fuse = pair.here.directory / "fuse"
    fuse.write_text(f"before {at}")
    killed = [sys.executable, "-c", KILLED, str(fuse)]
    own = [str(binary("virtlun"))]
    remote: tuple[str, ...] = ()
    if side == "source":
        own = killed
    else:
        remote = ("--remote", shlex.join(killed))
    command = [*own, "--socket", str(pair.here.rpc_socket), *pair.words(*remote)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if fuse.exists():
        fuse.unlink()
        assert ended.returncode == 0, ended.stderr
        return False
    assert ended.returncode == (-signal.SIGKILL if side == "source" else 1), ended.stderr
    if side == "destination":
        assert f"Error: {HOST}: the connection ended" in ended.stderr
    return True


def test_a_stream_that_changes_on_its_way_is_refused(pair: Pair, tmp_path: Path) -> None:
    data = contents(pair.here, "lvs0/v")
    through = tmp_path / "changes"
    through.write_text(
        "import os, sys\n"
        "while some := os.read(0, 65536):\n"
        "    os.write(1, some.replace(b'rbd diff v1', b'rbd diff v1', 1)[:-1]"
        " + bytes([some[-1] ^ 1]) if len(some) > 60000 else some)\n"
    )
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\npython3 {through} | {pair.ssh} "$@"\n')
    ssh.chmod(0o755)
    said = refused(pair.here, "volume", "move", "lvs0/v", "--host", HOST, "--ssh", str(ssh))
    assert "was changed on its way" in said or "damaged" in said, said
    check_as_before(pair, data)
