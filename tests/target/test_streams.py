"""`virtlun volume send` and `receive`: volumes as streams between two targets."""

from __future__ import annotations

import io
import json
import random
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from plugin.streams import receiving
from plugin.streams.form import Header, Reader, Writer
from pydataplane.client import Client
from pydataplane.volumes import Volumes
from tests.support.initiator import connected
from tests.support.target import Target, binary
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done, refused, run
from tests.target.test_images import contents

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE_MIB = 8
EMPTY = bytes(SIZE_MIB * MIB)


@pytest.fixture
def source(make_target: MakeTarget) -> Target:
    """A target with the volume lvs0/v, of 8 MiB in clusters of 64 KiB."""
    made = make_target().start()
    made.make_lvstore("lvs0", 64 * MIB)
    done(made, "volume", "create", "lvs0/v", f"{SIZE_MIB}M", "--thin")
    return made


@pytest.fixture
def other(make_target: MakeTarget) -> Target:
    """A target with the lvstore lvs1."""
    made = make_target().start()
    made.make_lvstore("lvs1", 96 * MIB)
    return made


def change(target: Target, volume: str, rng: random.Random) -> None:
    """Writes here and there in a volume, data and zeros, and gives a part of it back."""
    with target.exported(volume) as path, path.open("rb+", buffering=0) as file:
        size = path.stat().st_size
        for _ in range(6):
            length = rng.choice([512, 4096, 200 << 10, MIB])
            file.seek(rng.randrange(0, size - length, 512))
            file.write(rng.choice([bytes(length), rng.randbytes(length)]))
        at = rng.randrange(0, size - MIB, 64 << 10)
        subprocess.run(
            ["fallocate", "--punch-hole", "--offset", str(at), "--length", str(MIB), path],
            check=True,
        )


def sent(target: Target, *words: str) -> bytes:
    """Returns a stream."""
    result = run(target, "volume", "send", *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout_bytes


def take(target: Target, stream: bytes, *words: str) -> Result:
    """Has a target receive one."""
    command = ["--socket", str(target.rpc_socket), "volume", "receive", *words]
    return CliRunner().invoke(main, command, input=stream)


def taken(target: Target, stream: bytes, *words: str) -> None:
    result = take(target, stream, *words)
    assert result.exit_code == 0, result.output


def not_taken(target: Target, stream: bytes, *words: str) -> str:
    result = take(target, stream, *words)
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (1, 1), result.output
    return result.stderr


def names(target: Target) -> list[str]:
    """Returns the volumes that there are."""
    return [volume.name for volume in Volumes(Client(target.rpc_socket)).volumes()]


def stream_of(header: Header, *parts: tuple[int, bytes], end: bool = True) -> bytes:
    """Returns a stream with this data."""
    out = io.BytesIO()
    writer = Writer(out, header)
    for offset, data in parts:
        writer.data(offset, data)
    if end:
        writer.end()
    return out.getvalue()


def test_a_volume_goes_to_another_host_and_follows(source: Target, other: Target) -> None:
    rng = random.Random(1)
    states = []
    for name in ("one", "two", "three"):
        change(source, "lvs0/v", rng)
        if name == "three":
            done(source, "volume", "resize", "lvs0/v", f"{SIZE_MIB + 4}M")
        done(source, "volume", "snapshot", "lvs0/v", name)
        states.append(contents(source, "lvs0/v"))
    before = names(source)
    taken(other, sent(source, "lvs0/v@one"), "lvs1/w", "--thin")
    assert contents(other, "lvs1/w") == states[0]
    stream = sent(source, "lvs0/v@two", "--since", "@one")
    shown = json.loads(take(other, stream, "lvs1/w", "--json").stdout)
    assert [row["path"] for row in shown] == ["lvs1/w"]
    assert contents(other, "lvs1/w") == states[1]
    taken(other, sent(source, "lvs0/v@three", "--since", "lvs0/v@two"), "lvs1/w")
    assert contents(other, "lvs1/w") == states[2]
    assert names(other) == ["w", "w@one", "w@three", "w@two"]
    assert names(source) == before
    # From the middle of the history, and whole; to a guest it is the same disk.
    (known,) = source.rpc("bdev_get_bdevs", name="lvs0/v")
    taken(other, sent(source, "lvs0/v@two"), "lvs1/x", "--uuid", known["uuid"])
    assert other.rpc("bdev_get_bdevs", name="lvs1/x")[0]["uuid"] == known["uuid"]
    taken(other, sent(source, "lvs0/v@three", "--since", "@two"), "lvs1/x")
    assert contents(other, "lvs1/x") == states[2]


def test_little_is_sent_of_a_volume_with_little_in_it(source: Target, other: Target) -> None:
    with source.exported("lvs0/v") as path, path.open("rb+", buffering=0) as file:
        file.seek(5 * MIB)
        file.write(b"x" * 4096)
    done(source, "volume", "snapshot", "lvs0/v", "one")
    with source.exported("lvs0/v") as path, path.open("rb+", buffering=0) as file:
        file.seek(5 * MIB)
        file.write(bytes(4096))
    done(source, "volume", "snapshot", "lvs0/v", "two")
    whole, change = sent(source, "lvs0/v@one"), sent(source, "lvs0/v@two", "--since", "@one")
    assert (len(whole) < 70_000, len(change) < 200) == (True, True)
    taken(other, whole, "lvs1/w", "--thin")
    taken(other, change, "lvs1/w")
    assert contents(other, "lvs1/w") == EMPTY


def test_what_is_no_snapshot_and_no_history_is_refused(source: Target, other: Target) -> None:
    assert "is no snapshot" in refused(source, "volume", "send", "lvs0/v")
    for name in ("one", "two"):
        change(source, "lvs0/v", random.Random(name))
        done(source, "volume", "snapshot", "lvs0/v", name)
    for since in ("@one", "@two"):
        said = refused(source, "volume", "send", "lvs0/v@one", "--since", since)
        assert f"lvs0/v{since} is no older snapshot" in said
    step = sent(source, "lvs0/v@two", "--since", "@one")
    assert "receive that first" in not_taken(other, step, "lvs1/w")
    first = sent(source, "lvs0/v@one")
    assert "there is no lvstore" in not_taken(other, first, "lvs7/w")
    assert "is a snapshot" in not_taken(other, first, "lvs1/w@one")
    assert "longer than 63 characters" in not_taken(other, first, "lvs1/" + 62 * "w")
    taken(other, first, "lvs1/w")
    assert "exists already" in not_taken(other, first, "lvs1/w")
    assert "are of new volumes" in not_taken(other, step, "lvs1/w", "--thin")
    with other.exported("lvs1/w") as path, path.open("rb+", buffering=0) as file:
        file.write(bytes(512))
    assert "was written to since lvs1/w@one" in not_taken(other, step, "lvs1/w")
    done(other, "volume", "rollback", "lvs1/w", "@one", "--yes")
    other.attach("vm-0", "lvs1/w")
    with connected(other):
        not_taken(other, step, "lvs1/w")
    other.rpc("vhost_scsi_controller_remove_target", ctrlr="vm-0", scsi_target_num=0)
    done(other, "volume", "snapshot", "lvs1/w", "mine")
    assert "not the last snapshot" in not_taken(other, step, "lvs1/w")
    assert names(other) == ["w", "w@mine", "w@one"]
    assert contents(other, "lvs1/w") == contents(source, "lvs0/v@one")


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "change"])
def test_a_stream_that_ends_early_or_lies_changes_nothing(other: Target, whole: bool) -> None:
    before = []
    header = Header(4 * MIB, to="two")
    if not whole:
        taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
        header = Header(4 * MIB, since="one", to="two")
        before = [("w", contents(other, "lvs1/w"))]
    good = stream_of(header, (MIB, b"two" * 1000))
    for stream, why in (
        (good[:-1], "ended before its end"),
        (good[:-2000], "ended before its end"),
        (good[:-1] + b"x", "in place of data"),
        (stream_of(header, (4 * MIB - 1, b"two")), "and its volume 4194304"),
        (good.replace(b"v1", b"v2", 1), "of version 2"),
        (b"QFI\xfb" + good, "no stream of a volume"),
        (b"", "no stream of a volume"),
    ):
        assert why in not_taken(other, stream, "lvs1/w")
        found = [
            (name, contents(other, f"lvs1/{name}")) for name in names(other) if "@" not in name
        ]
        assert found == before
    taken(other, good, "lvs1/w")
    assert contents(other, "lvs1/w")[MIB:][:3000] == b"two" * 1000
    assert "w.receive" not in names(other)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "change"])
def test_who_is_killed_leaves_nothing_in_the_way(other: Target, whole: bool) -> None:
    if not whole:
        taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
    header = Header(4 * MIB, since=None if whole else "one", to="two")
    stream = stream_of(header, (0, b"2" * MIB), (3 * MIB, b"2" * 5000))
    command = [str(binary("virtlun")), "--socket", str(other.rpc_socket), "volume"]
    with subprocess.Popen([*command, "receive", "lvs1/w"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(stream[: MIB + 100])
        process.stdin.flush()
        part = Path()
        while not part.name:
            for each in other.rpc("virtlun_export_list"):
                with Path(each["path"]).open("rb") as file:
                    part = Path(each["path"]) if file.read(1) == b"2" else Path()
        process.kill()
    assert [name for name in names(other) if "@" not in name] == ["w.receive"]
    said = refused(other, "volume", "resize", "lvs1/w", "8M")
    assert "there is no volume lvs1/w" in said
    taken(other, stream, "lvs1/w")
    expected = (b"2" * MIB).ljust(3 * MIB, b"\0") + b"2" * 5000
    assert contents(other, "lvs1/w") == expected.ljust(4 * MIB, b"\0")
    assert [name for name in names(other) if "@" not in name] == ["w"]


@pytest.mark.parametrize("step", ["snapshot", "rename", "remove_xattr"])
def test_who_is_cut_off_at_the_end_is_done_when_it_is_repeated(
    other: Target, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The volume is whole then, and has been used, perhaps."""
    stream = stream_of(Header(2 * MIB, to="one"), (0, b"one"))
    volumes = Volumes(Client(other.rpc_socket))

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if step == "snapshot":
            patched.setattr(receiving, "_finish", killed)
            patched.setattr(receiving, "_take_back", killed)
        else:
            patched.setattr(volumes, step, killed)
        with pytest.raises(Killed):
            receiving.receive(
                volumes,
                "lvs1/w",
                Reader(io.BytesIO(stream)),
                receiving.New(thin=True),
                lambda *_: None,
            )
    taken(other, stream, "lvs1/w")
    assert names(other) == ["w", "w@one"]
    assert contents(other, "lvs1/w")[:3] == b"one"
    assert "virtlun.receive" not in volumes.xattrs("lvs1/w")


def test_a_sender_that_was_killed_leaves_nothing_in_the_way(source: Target) -> None:
    change(source, "lvs0/v", random.Random(3))
    done(source, "volume", "snapshot", "lvs0/v", "one")
    command = [str(binary("virtlun")), "--socket", str(source.rpc_socket), "volume"]
    with subprocess.Popen([*command, "send", "lvs0/v@one"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        assert "is being sent by another command" in refused(source, "volume", "send", "lvs0/v@one")
        process.kill()
    assert len(names(source)) == 3
    whole = sent(source, "lvs0/v@one")
    data = bytearray(EMPTY)
    for part in Reader(io.BytesIO(whole)).parts():
        assert part.data is not None
        data[part.offset : part.offset + part.length] = part.data
    assert data == contents(source, "lvs0/v")
    assert names(source) == ["v", "v@one"]


def test_what_was_encrypted_is_encrypted_again_where_a_key_is_named(
    source: Target, other: Target, scratch: Path
) -> None:
    change(source, "lvs0/v", random.Random(4))
    done(source, "volume", "snapshot", "lvs0/v", "one")
    other.rpc("accel_crypto_key_create", name="k0", cipher="AES_XTS", key="1" * 32, key2="2" * 32)
    taken(other, sent(source, "lvs0/v@one"), "lvs1/w", "--key", "k0")
    (row,) = json.loads(done(other, "volume", "list", "--json"))[:1]
    assert (row["path"], row["key"]) == ("lvs1/w", "k0")
    assert contents(other, "lvs1/w") == contents(source, "lvs0/v")
