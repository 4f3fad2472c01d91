"""`virtlun volume import`, `export` and `diff`, with the images of a real qemu-img."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from plugin.images import pieces, qemuimg, sums
from pydataplane.client import Client
from pydataplane.errors import VolumeError
from pydataplane.volumes import Volumes
from tests.support.night import by_day
from tests.support.target import Target, binary
from tests.target.test_cli import done, refused, run

pytestmark = pytest.mark.root

MIB = 1 << 20
IMAGE_MIB = 24
STORE_MIB = 256


@pytest.fixture
def store(target: Target) -> Target:
    """A target with the lvstore lvs0."""
    target.make_lvstore("lvs0", STORE_MIB * MIB)
    return target


@pytest.fixture
def raw(target: Target) -> Path:
    """A sparse raw image with data at its beginning, in the middle and at its end.

    Its name looks like options of qemu-img, and like what rich takes for markup.
    """
    path = target.directory / "source, with a comma[red].raw"
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, IMAGE_MIB * MIB)
    chance = random.Random(10)
    for at in (0, 7 * MIB + 4096, (IMAGE_MIB - 1) * MIB):
        os.pwrite(file, chance.randbytes(MIB), at)
    os.close(file)
    return path


def qcow2(raw: Path) -> Path:
    """Returns the same as a qcow2."""
    path = raw.with_suffix(".qcow2")
    command = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(path)]
    subprocess.run(command, check=True)
    return path


def sha256(data: bytes) -> str:
    """Returns a checksum in hex."""
    return hashlib.sha256(data).hexdigest()


def contents(target: Target, volume: str) -> bytes:
    """Reads a volume."""
    with target.exported(volume) as path:
        return path.read_bytes()


def change(target: Target, volume: str, at: int) -> None:
    """Writes to a volume."""
    with target.exported(volume) as path, path.open("rb+", buffering=0) as file:
        file.seek(at)
        file.write(b"changed".ljust(4096, b"."))
        os.fsync(file)


def same(one: Path, other: Path) -> bool:
    """Whether qemu-img finds the same in two images."""
    done = subprocess.run(["qemu-img", "compare", one, other], check=False, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def names(target: Target) -> list[str]:
    """Returns the volumes that there are."""
    return [volume.name for volume in Volumes(Client(target.rpc_socket)).volumes()]


def on_a_terminal(*command: str) -> str:
    """Runs a command whose stderr is a terminal; returns what that showed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs
    ) as run:
        os.close(theirs)
        shown = b""
        # The end of a terminal that nobody has open any more is an error (pty(7)).
        with suppress(OSError):
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert run.returncode == 0, shown
    return shown.decode()


def test_a_person_sees_how_far_it_has_come(store: Target, raw: Path) -> None:
    """And a program, whose stderr is no terminal, does not."""
    command = [str(binary("virtlun")), "--socket", str(store.rpc_socket), "volume"]
    shown = on_a_terminal(*command, "import", str(raw), "lvs0/v")
    assert "importing source, with a comma[red].raw" in shown
    assert f"{IMAGE_MIB}.0/{IMAGE_MIB}.0 MiB" in shown, shown
    out = str(store.directory / "out.raw")
    shown = on_a_terminal(*command, "export", "lvs0/v", out, "--verify")
    assert "exporting lvs0/v" in shown and "verifying out.raw" in shown
    told = subprocess.run(
        [*command, "export", "lvs0/v", f"{out}.2"], capture_output=True, check=True
    )
    assert told.stderr == b""


@by_day("False-raw", "True-qcow2")
@pytest.mark.parametrize("form", ["raw", "qcow2"])
@pytest.mark.parametrize("thin", [False, True])
def test_an_image_becomes_a_volume_and_that_an_image(
    store: Target, raw: Path, form: str, thin: bool
) -> None:
    source = raw if form == "raw" else qcow2(raw)
    words = ["--thin"] if thin else []
    (made,) = json.loads(done(store, "volume", "import", str(source), "lvs0/v", "--json", *words))
    assert (made["path"], made["size"], made["thin"]) == ("lvs0/v", IMAGE_MIB * MIB, thin)
    assert made["allocated"] == (4 * MIB if thin else IMAGE_MIB * MIB), "clusters with data"
    assert contents(store, "lvs0/v") == raw.read_bytes()
    assert store.rpc("virtlun_lvol_get_xattrs", name="lvs0/v") == {}
    copy = store.directory / f"copy.{form}"
    words = ["volume", "export", "lvs0/v", str(copy), "--format", form, "--verify", "--json"]
    (written,) = json.loads(done(store, *words))
    assert (written["format"], written["size"]) == (form, IMAGE_MIB * MIB)
    assert written["allocated"] < 6 * MIB, "it is sparse"
    assert qemuimg.probe(copy).format == form
    assert same(copy, raw)
    assert names(store) == ["v"]
    assert "exists already" in refused(store, *words)
    assert "exists already" in refused(store, "volume", "import", str(source), "lvs0/v")


def test_names_may_be_as_long_as_any(store: Target, raw: Path) -> None:
    name, other = "n" * 62 + "a", "n" * 62 + "b"
    for each in (name, other):
        done(store, "volume", "import", str(raw), f"lvs0/{each}", "--thin")
    copy = store.directory / "copy.qcow2"
    done(store, "volume", "export", f"lvs0/{name}", str(copy), "--verify")
    assert same(copy, raw)
    assert sorted(names(store)) == [name, other]


def test_a_snapshot_is_exported_while_its_volume_goes_on(store: Target, raw: Path) -> None:
    done(store, "volume", "import", str(raw), "lvs0/v", "--thin", "--size", "32M")
    done(store, "volume", "snapshot", "lvs0/v", "s1")
    store.rpc("vhost_create_scsi_controller", ctrlr="vm")
    change(store, "lvs0/v", 20 * MIB)
    store.add_lun("vm", "lvs0/v")
    for of in ("v@s1", "v"):
        done(store, "volume", "export", f"lvs0/{of}", str(store.directory / f"{of}.raw"))
    assert sorted(names(store)) == ["v", "v@s1"]
    assert not same(*(store.directory / f"{of}.raw" for of in ("v@s1", "v")))
    shown = json.loads(done(store, "volume", "diff", "lvs0/v@s1", "lvs0/v", "--json"))
    assert shown == [{"offset": 20 * MIB, "length": MIB}]
    assert json.loads(done(store, "volume", "diff", "lvs0/v@s1", "lvs0/v@s1", "--json")) == []


INTERRUPTED = """
import os, sys
from plugin.cli import main
from plugin.images import pieces, qemuimg

pieces.PIECE = 1 << 20
left = int(sys.argv.pop(1))
copy = qemuimg.copy

def counted(*words):
    global left
    copy(*words)
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)

qemuimg.copy = counted
main()
"""


@by_day("2")
@pytest.mark.parametrize("after", [1, 2, 3])
def test_one_that_is_killed_goes_on(
    store: Target, raw: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    monkeypatch.setattr(pieces, "PIECE", MIB)
    copy = qemuimg.copy

    def noted(source: qemuimg.Image, target: qemuimg.Image, offset: int, length: int) -> None:
        copies.append(offset)
        copy(source, target, offset, length)

    monkeypatch.setattr(qemuimg, "copy", noted)

    def killed(*words: str) -> None:
        command = [sys.executable, "-c", INTERRUPTED, str(after)]
        ended = subprocess.run(
            [*command, "--socket", str(store.rpc_socket), *words], check=False, timeout=60
        )
        assert ended.returncode == -9

    words = ["volume", "import", str(raw), "lvs0/v", "--thin"]
    killed(*words)
    assert names(store) == ["v.import"]
    done(store, *words)
    assert contents(store, "lvs0/v") == raw.read_bytes()
    first = sorted({at // MIB for at in copies})
    file = store.directory / "copy.qcow2"
    words = ["volume", "export", "lvs0/v", str(file), "--verify"]
    killed(*words)
    assert not file.exists()
    copies.clear()
    done(store, *words)
    assert same(file, raw)
    assert names(store) == ["v"]
    assert [path.name for path in store.directory.glob("copy.qcow2*")] == ["copy.qcow2"]
    if after > 1:  # what was noted is not copied again
        assert 0 not in first
        assert 0 not in {at // MIB for at in copies}


@pytest.mark.parametrize("step", ["rename", "remove_xattr"])
def test_one_that_ends_at_its_last_steps_is_finished_by_the_next(
    store: Target, raw: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise VolumeError("the end")

    words = ["volume", "import", str(raw), "lvs0/v", "--thin", "--verify"]
    with monkeypatch.context() as patched:
        patched.setattr(Volumes, step, fail)
        assert "the end" in refused(store, *words)
    (made,) = json.loads(done(store, *words, "--json"))
    assert made["sha256"] == sha256(raw.read_bytes())
    assert names(store) == ["v"]
    assert store.rpc("virtlun_lvol_get_xattrs", name="lvs0/v") == {}
    assert "exists already" in refused(store, *words)


@by_day("qcow2")
@pytest.mark.parametrize("form", ["raw", "qcow2"])
def test_a_checksum_is_of_all_that_the_disk_holds(store: Target, raw: Path, form: str) -> None:
    os.truncate(raw, IMAGE_MIB * MIB - 100)  # within a sector
    source = raw if form == "raw" else qcow2(raw)
    words = ["volume", "import", str(source), "lvs0/v", "--size", "40M", "--verify"]
    (made,) = json.loads(done(store, *words, "--thin", "--json"))
    whole = contents(store, "lvs0/v")
    assert len(whole) == 40 * MIB
    assert made["sha256"] == sha256(whole) == sha256(raw.read_bytes().ljust(40 * MIB, b"\0"))
    out = store.directory / "out"
    table = done(store, "volume", "export", "lvs0/v", str(out), "--format", form, "--verify")
    assert made["sha256"] in table.split()
    plain = done(store, "volume", "export", "lvs0/v", f"{out}.2", "--format", form)
    assert "SHA" in table and "SHA" not in plain


@by_day("12-qcow2", "0-raw")
@pytest.mark.parametrize("form", ["raw", "qcow2"])
@pytest.mark.parametrize("at_mib", [0, 12, IMAGE_MIB - 1])
def test_what_was_written_otherwise_is_found(
    store: Target, raw: Path, form: str, at_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the source has a hole."""
    monkeypatch.setattr(sums, "BLOCK", MIB)
    copy = qemuimg.copy

    def spoilt(source: qemuimg.Image, target: qemuimg.Image, offset: int, length: int) -> None:
        copy(source, target, offset, length)
        write = f"write -P 7 {at_mib * MIB + 512} 512"
        subprocess.run(["qemu-io", "-f", target.format, "-c", write, target.path], check=True)

    right = raw.read_bytes()
    at = at_mib * MIB + 512
    wrong = right[:at] + b"\7" * 512 + right[at + 512 :]
    source = raw if form == "raw" else qcow2(raw)
    words = ["volume", "import", str(source), "lvs0/v", "--thin", "--verify"]
    with monkeypatch.context() as patched:
        patched.setattr(qemuimg, "copy", spoilt)
        said = refused(store, *words)
    assert f"volume lvs0/v.import is not as {source} is" in said
    assert f"it has the SHA-256 {sha256(wrong)}, the image {sha256(right)}; delete it" in said
    done(store, "volume", "delete", "lvs0/v.import", "--yes")
    done(store, *words)
    out = store.directory / "out"
    words = ["volume", "export", "lvs0/v", str(out), "--format", form, "--verify"]
    with monkeypatch.context() as patched:
        patched.setattr(qemuimg, "copy", spoilt)
        said = refused(store, *words)
    assert f"{out}.part is not as volume lvs0/v was" in said
    assert f"it has the SHA-256 {sha256(wrong)}, the volume {sha256(right)}; delete it" in said
    Path(f"{out}.part").unlink()
    done(store, *words)
    assert same(out, source)


def test_a_file_that_is_not_the_published_one_is_refused(store: Target, raw: Path) -> None:
    source = qcow2(raw)
    published = sha256(source.read_bytes())
    words = ["volume", "import", str(source), "lvs0/v", "--thin", "--sha256"]
    said = refused(store, *words, "0" * 64)
    assert f"{source} has the SHA-256 {published}, not {'0' * 64}: nothing was written" in said
    assert names(store) == []
    wrong = run(store, *words, published[1:])
    assert wrong.exit_code == 2 and "64 hexadecimal digits" in wrong.stderr
    done(store, *words, published.upper())
    assert contents(store, "lvs0/v") == raw.read_bytes()


def test_a_changed_image_is_imported_anew(store: Target, raw: Path) -> None:
    words = ["volume", "import", str(raw), "lvs0/v", "--thin"]
    subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "2", "--socket", str(store.rpc_socket), *words],
        check=False,
        timeout=60,
    )
    time.sleep(0.01)
    with raw.open("r+b") as file:
        file.write(b"another beginning")
    done(store, *words)
    assert contents(store, "lvs0/v") == raw.read_bytes()


def test_an_image_that_is_changed_while_it_is_imported_is_refused(
    store: Target, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = qcow2(raw)
    secret = store.directory / "secret"
    secret.write_bytes(b"of this host" * 100_000)
    copy = qemuimg.copy

    def changed(image: qemuimg.Image, target: qemuimg.Image, offset: int, length: int) -> None:
        times = source.stat()
        command = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", str(secret)]
        subprocess.run([*command, str(source)], check=True)
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        copy(image, target, offset, length)

    words = ["volume", "import", str(source), "lvs0/v", "--thin"]
    with monkeypatch.context() as patched:
        patched.setattr(qemuimg, "copy", changed)
        assert "that was changed meanwhile; import it again" in refused(store, *words)
    assert names(store) == ["v.import"]
    assert "needs another file" in refused(store, *words)
    subprocess.run(["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "", source], check=True)
    done(store, *words)
    assert contents(store, "lvs0/v") == raw.read_bytes()


def test_what_is_no_file_is_refused(store: Target) -> None:
    pipe, link = store.directory / "pipe", store.directory / "copy.qcow2.part"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), store.directory):
        said = refused(store, "volume", "import", str(path), "lvs0/v")
        assert "is neither a file nor a block device" in said
    done(store, "volume", "create", "lvs0/v", "8M", "--thin")
    kept = store.directory / "kept"
    kept.write_text("of somebody else")
    link.symlink_to(kept)
    done(store, "volume", "export", "lvs0/v", str(store.directory / "copy.qcow2"))
    assert kept.read_text() == "of somebody else"


def test_an_image_that_names_other_files_is_refused(store: Target, raw: Path) -> None:
    overlay = store.directory / "overlay.qcow2"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(raw)]
    subprocess.run([*command, str(overlay)], check=True)
    said = refused(store, "volume", "import", str(overlay), "lvs0/v")
    assert "needs another file to be whole" in said
    data = store.directory / "data.qcow2"
    options = f"data_file={store.directory}/elsewhere"
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, str(data), "4M"]
    subprocess.run(command, check=True)
    assert "needs another file" in refused(store, "volume", "import", str(data), "lvs0/v")
    vdi = store.directory / "disk.vdi"
    subprocess.run(["qemu-img", "create", "-q", "-f", "vdi", str(vdi), "4M"], check=True)
    assert "has the format vdi" in refused(store, "volume", "import", str(vdi), "lvs0/v")
    assert "No such file" in refused(store, "volume", "import", "/nowhere/disk.raw", "lvs0/v")
    assert "fewer" in refused(store, "volume", "import", str(raw), "lvs0/v", "--size", "4M")
    assert names(store) == []


def test_an_import_for_which_there_is_no_room_says_so(store: Target, raw: Path) -> None:
    os.truncate(raw, 4 * STORE_MIB * MIB)
    said = refused(store, "volume", "import", str(raw), "lvs0/v")
    assert "bytes are free" in said
    assert names(store) == []
