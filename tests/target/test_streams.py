"""`virtlun volume send` and `receive`: volumes as streams between two targets."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plugin.cli import main
from plugin.streams.form import Header, Reader, Writer
from plugin.streams.receiving import New, Receiver
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import Volumes
from tests.support.initiator import connected
from tests.support.target import Target, binary
from tests.support.wait import until
from tests.target.conftest import MakeTarget
from tests.target.test_cli import done, refused, run
from tests.target.test_images import contents

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE_MIB = 8
EMPTY = bytes(SIZE_MIB * MIB)
STEPS = {
    "bdev_lvol_create",
    "virtlun_export_create",
    "virtlun_lvol_set_xattr",
    "bdev_lvol_rename",
    "bdev_lvol_resize",
    "bdev_lvol_snapshot",
    "virtlun_lvol_remove_xattr",
    "virtlun_export_delete",
}
"""What `receive` calls that changes something."""
BACK = STEPS | {"bdev_lvol_delete", "virtlun_lvol_roll_back"}
"""And what takes back."""


class Killed(BaseException):
    """A command ends here."""


@pytest.fixture
def source(make_target: MakeTarget) -> Target:
    """A target with the volume lvs0/v, of 8 MiB."""
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


def half(target: Target, begin: bytes, number: signal.Signals = signal.SIGKILL) -> str:
    """Ends a command that has written the first MiB of a stream; returns what it said."""
    command = [str(binary("virtlun")), "--socket", str(target.rpc_socket), "volume", "receive"]
    with subprocess.Popen(
        [*command, "lvs1/w"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(begin)
        process.stdin.flush()

        def written() -> bool:
            for each in target.rpc("virtlun_export_list"):
                with Path(each["path"]).open("rb") as file:
                    if file.read(1) == b"2":
                        return True
            return False

        until(written, "the beginning to be written", process=process)
        process.send_signal(number)
        return process.stderr.read().decode()


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
    assert "snapshot lvs1/w@one is there already" in not_taken(other, first, "lvs1/w")
    assert "exists already" in not_taken(other, sent(source, "lvs0/v@two"), "lvs1/w")
    (known,) = other.rpc("bdev_get_bdevs", name="lvs1/w")
    said = not_taken(other, first, "lvs1/x", "--uuid", known["uuid"])
    assert "is that of volume lvs1/w already" in said
    assert "until it is whole" in not_taken(other, first, "lvs1/x.receive")
    assert "are of new volumes" in not_taken(other, step, "lvs1/w", "--thin")
    with other.exported("lvs1/w") as path, path.open("rb+", buffering=0) as file:
        file.write(bytes(512))
    assert "or made smaller, since lvs1/w@one" in not_taken(other, step, "lvs1/w")
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
        (good + good, "more follows the end"),
        (stream_of(Header(4 * MIB, since="two", to="two")), "no sender sends"),
        (stream_of(Header(4 * MIB, to="\x1b[31m\n")), r"calls a snapshot '\x1b[31m\n'"),
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
    half(other, stream[: MIB + 100])
    assert [name for name in names(other) if "@" not in name] == ["w.receive"]
    assert "there is no volume lvs1/w" in refused(other, "volume", "resize", "lvs1/w", "8M")
    with pytest.raises(RpcError, match="in use"):
        other.attach("vm-0", "lvs1/w.receive")
    taken(other, stream, "lvs1/w")
    expected = (b"2" * MIB).ljust(3 * MIB, b"\0") + b"2" * 5000
    assert contents(other, "lvs1/w") == expected.ljust(4 * MIB, b"\0")
    assert [name for name in names(other) if "@" not in name] == ["w"]


def take_after(target: Target, stream: bytes, asked: list[str]) -> None:
    """Has `lvs1/w` be received by a command after one that was killed."""
    result = take(target, stream, "lvs1/w")
    if "(virtlun_export_delete)" in result.stderr:
        # Killed before it was noted whose the export is.
        assert "virtlun_export_create" in asked[-2:]
        (export,) = target.rpc("virtlun_export_list")
        target.rpc("virtlun_export_delete", bdev_name=export["bdev_name"])
        result = take(target, stream, "lvs1/w")
    assert result.exit_code == 0 or "is there already" in result.stderr, asked
    assert not target.rpc("virtlun_export_list"), asked


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "change"])
def test_who_is_cut_off_at_any_step_is_taken_back_or_completed(
    other: Target, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Killed before, and after, each call that changes something."""
    volumes = Volumes(Client(other.rpc_socket))
    begin = b""
    if not whole:
        taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
        done(other, "volume", "resize", "lvs1/w", "3M")
        begin = b"one"
    header = Header(4 * MIB, since=None if whole else "one", to="two")
    stream = stream_of(header, (MIB, b"two" * 1000))
    after = (begin.ljust(MIB, b"\0") + b"two" * 1000).ljust(4 * MIB, b"\0")
    call = volumes.client.call
    cuts = 0
    asked: list[str] = []
    while True:
        left = cuts
        asked.clear()

        def cut(method: Any, *words: Any, **given: Any) -> Any:
            nonlocal left
            if left < 0:
                raise Killed
            if method not in STEPS:
                return call(method, *words, **given)
            asked.append(method)
            left -= 2
            if left == -1:
                call(method, *words, **given)
            if left < 0:
                raise Killed
            return call(method, *words, **given)

        with monkeypatch.context() as patched:
            patched.setattr(volumes.client, "call", cut)
            receiver = Receiver(volumes, volumes, "lvs1/w")
            try:
                receiver.receive(Reader(io.BytesIO(stream)), New(), lambda *_: None)
            except Killed:
                take_after(other, stream, asked)
            else:
                assert set(asked) == STEPS - {"bdev_lvol_resize" if whole else "bdev_lvol_create"}
                return
        assert contents(other, "lvs1/w") == after, asked
        assert [name for name in names(other) if "@" not in name] == ["w"], asked
        assert "virtlun.receive" not in volumes.xattrs("lvs1/w"), asked
        # As it was before.
        if whole:
            done(other, "volume", "delete", "lvs1/w", "--yes")
        else:
            done(other, "volume", "rollback", "lvs1/w", "@one", "--yes")
        done(other, "volume", "delete", "lvs1/w@two", "--yes")
        if not whole:
            done(other, "volume", "resize", "lvs1/w", "3M")
        cuts += 1


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "change"])
def test_who_is_cut_off_while_it_is_taken_back_is_taken_back(
    other: Target, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    before = []
    if not whole:
        taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
        done(other, "volume", "resize", "lvs1/w", "3M")
        before = [("w", contents(other, "lvs1/w"))]
    header = Header(4 * MIB, since=None if whole else "one", to="two")
    stream = stream_of(header, (0, b"2" * MIB), (3 * MIB, b"2" * 5000))
    volumes = Volumes(Client(other.rpc_socket))
    call = volumes.client.call
    ended, left, cuts = False, 0, 0

    def cut(method: Any, *words: Any, **given: Any) -> Any:
        nonlocal left
        if left < 0:
            raise Killed
        if method in BACK:
            left -= 1
        if left < 0:
            raise Killed
        return call(method, *words, **given)

    while not ended:
        half(other, stream[: MIB + 100])
        left = cuts
        with monkeypatch.context() as patched:
            patched.setattr(volumes.client, "call", cut)
            try:
                Receiver(volumes, volumes, "lvs1/w").take_back()
            except Killed:
                cuts += 1
            else:
                ended = True
        done(other, "volume", "receive", "--take-back", "lvs1/w")
        assert not other.rpc("virtlun_export_list"), cuts
        found = [name for name in names(other) if "@" not in name]
        assert [(name, contents(other, f"lvs1/{name}")) for name in found] == before, cuts
    assert cuts == (2 if whole else 6)
    taken(other, stream, "lvs1/w")


def test_a_half_volume_that_has_its_name_by_hand_is_refused(other: Target) -> None:
    taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
    stream = stream_of(Header(2 * MIB, since="one", to="two"), (0, b"2" * MIB), (MIB, b"2" * 9))
    half(other, stream[: MIB + 60])
    done(other, "volume", "rename", "lvs1/w.receive", "w")
    assert "has this name by hand: rename it to w.receive" in not_taken(other, stream, "lvs1/w")
    with pytest.raises(RpcError, match="in use"):
        other.attach("vm-0", "lvs1/w")
    done(other, "volume", "rename", "lvs1/w", "w.receive")
    # Another one takes its place meanwhile.
    done(other, "volume", "create", "lvs1/w", "2M")
    assert "which was made meanwhile" in not_taken(other, stream, "lvs1/w")
    done(other, "volume", "delete", "lvs1/w", "--yes")
    taken(other, stream, "lvs1/w")
    assert contents(other, "lvs1/w") == (b"2" * (MIB + 9)).ljust(2 * MIB, b"\0")


def test_a_volume_that_somebody_exports_or_has_made_smaller_takes_no_change(
    other: Target,
) -> None:
    taken(other, stream_of(Header(4 * MIB, to="one"), (3 * MIB, b"one")), "lvs1/w")
    stream = stream_of(Header(4 * MIB, since="one", to="two"), (0, b"2"))
    with other.exported("lvs1/w"):
        assert "is in use as" in not_taken(other, stream, "lvs1/w")
        assert len(other.rpc("virtlun_export_list")) == 1
    done(other, "volume", "resize", "lvs1/w", "2M", "--shrink")
    assert "made smaller, since" in not_taken(other, stream, "lvs1/w")
    done(other, "volume", "rollback", "lvs1/w", "@one", "--yes")
    taken(other, stream, "lvs1/w")
    assert contents(other, "lvs1/w")[3 * MIB :][:3] == b"one"
    assert not other.rpc("virtlun_export_list")


@pytest.mark.parametrize("what", ["deleted", "taken"])
def test_what_somebody_did_to_a_half_received_volume_stays(other: Target, what: str) -> None:
    taken(other, stream_of(Header(2 * MIB, to="one"), (0, b"one")), "lvs1/w")
    stream = stream_of(Header(2 * MIB, since="one", to="two"), (0, b"2" * MIB), (MIB, b"2" * 9))
    half(other, stream[: MIB + 60])
    if what == "deleted":
        done(other, "volume", "delete", "lvs1/w@one", "--yes")
    else:
        done(other, "volume", "snapshot", "lvs1/w.receive", "mine")
    before = names(other)
    assert "lvs1/w.receive is not whole" in not_taken(other, stream, "lvs1/w")
    assert names(other) == before


def test_what_lay_beyond_a_smaller_size_does_not_come_back(
    source: Target, make_target: MakeTarget
) -> None:
    """Where the clusters are larger, the volume stays larger."""
    other = make_target().start()
    other.make_lvstore("lvs1", 96 * MIB, cluster=4 * MIB)
    with source.exported("lvs0/v") as path, path.open("rb+", buffering=0) as file:
        file.write(b"x" * 8 * MIB)
    done(source, "volume", "snapshot", "lvs0/v", "one")
    taken(other, sent(source, "lvs0/v@one"), "lvs1/w")
    for name, size in (("two", "5M"), ("three", "8M")):
        done(source, "volume", "resize", "lvs0/v", size, "--shrink")
        done(source, "volume", "snapshot", "lvs0/v", name)
    taken(other, sent(source, "lvs0/v@two", "--since", "@one"), "lvs1/w")
    assert contents(other, "lvs1/w") == (b"x" * 5 * MIB).ljust(8 * MIB, b"\0")
    taken(other, sent(source, "lvs0/v@three", "--since", "@two"), "lvs1/w")
    assert contents(other, "lvs1/w") == contents(source, "lvs0/v")


def test_a_full_lvstore_takes_nothing_of_a_volume(other: Target) -> None:
    size = 200 * MIB
    parts = [(at, b"x" * MIB) for at in range(0, size, MIB)]
    said = not_taken(other, stream_of(Header(size, to="one"), *parts), "lvs1/w", "--thin")
    assert said == "Error: lvstore lvs1: No space left on device\n"
    assert names(other) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_is_told_to_end_leaves_nothing(other: Target, number: signal.Signals) -> None:
    stream = stream_of(Header(4 * MIB, to="one"), (0, b"2" * MIB), (MIB, b"2" * 5000))
    assert "is as it was before" in half(other, stream[: MIB + 100], number)
    assert names(other) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_sender_that_was_ended_leaves_nothing_in_the_way(
    source: Target, number: signal.Signals
) -> None:
    change(source, "lvs0/v", random.Random(3))
    for name in ("one", "two"):
        done(source, "volume", "snapshot", "lvs0/v", name)
    (one,) = source.rpc("bdev_get_bdevs", name="lvs0/v@one")
    command = [str(binary("virtlun")), "--socket", str(source.rpc_socket), "volume"]
    with subprocess.Popen([*command, "send", "lvs0/v@one"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        said = refused(source, "volume", "send", "lvs0/v@one")
        assert "is being sent by another command" in said
        process.send_signal(number)
    left = [f"send-{one['uuid']}"] if number == signal.SIGKILL else []
    assert names(source) == [*left, "v", "v@one", "v@two"]
    sent(source, "lvs0/v@two")  # any other
    assert names(source) == ["v", "v@one", "v@two"]


def test_a_volume_that_is_called_as_what_is_sent_stays(source: Target) -> None:
    done(source, "volume", "snapshot", "lvs0/v", "one")
    (one,) = source.rpc("bdev_get_bdevs", name="lvs0/v@one")
    done(source, "volume", "create", f"lvs0/send-{one['uuid']}", "1M")
    assert "File exists" in refused(source, "volume", "send", "lvs0/v@one")
    assert f"send-{one['uuid']}" in names(source)


def test_another_volumes_snapshot_is_no_older_one(source: Target) -> None:
    """The stream would name it as the volume's own."""
    done(source, "volume", "snapshot", "lvs0/v", "one")
    done(source, "volume", "clone", "lvs0/v@one", "c")
    done(source, "volume", "snapshot", "lvs0/c", "two")
    said = refused(source, "volume", "send", "lvs0/c@two", "--since", "lvs0/v@one")
    assert "is no older snapshot" in said


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
