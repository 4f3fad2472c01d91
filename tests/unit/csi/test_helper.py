"""What the helper refuses, whoever asks: paths, devices, users, more than one thing at a time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csi import DRIVER_NAME, kernel, mountoptions, mounts
from csi.host import server, wire
from csi.host.confined import Confined
from csi.host.local import LocalHost
from csi.host.remote import Helper
from csi.host.rootedpaths import CSI_VOLUMES, RootedPaths
from csi.host.server import Server
from csi.hostdevice import loopctl
from csi.hosterrors import HelperUnavailable, HostError, OfflineOnly
from csi.mounts import Mount

VOLUME = "11111111-1111-8111-8111-111111111111"
OTHER = "22222222-2222-8222-8222-222222222222"
IN_POD = "pods/uid/volumes/kubernetes.io~csi/pv/mount"
HASH = "0" * 64
HERE = (0, 0)
"""Stands for the file system of the target's folder of sockets."""
ROOT = Path(__file__).resolve().parents[3]


class World:
    """The folders of a node, and a helper that may mount there."""

    def __init__(self, directory: Path) -> None:
        self.kubelet = directory / "kubelet"
        self.exports = directory / "export"
        self.vhost = directory / "vhost"
        self.outside = directory / "outside"
        for folder in (self.kubelet, self.exports, self.vhost, self.outside):
            folder.mkdir()
        self.other_target = directory / "other"
        self.target = self.kubelet / IN_POD
        self.target.parent.mkdir(parents=True)
        self.confined = Confined(
            self.kubelet,
            [self.exports, self.other_target / "export"],
            [self.vhost, self.other_target / "vhost"],
        )
        self.note(self.target.parent)

    def note(self, folder: Path, volume: str = VOLUME, driver: str = DRIVER_NAME) -> None:
        """Notes whose a mount point is, as kubelet does before it calls a driver."""
        folder.mkdir(parents=True, exist_ok=True)
        words = {"driverName": driver, "volumeHandle": volume, "specVolID": "pv"}
        (folder / "vol_data.json").write_text(json.dumps(words))

    def refused(self, word: str, do: str, **arguments: Any) -> None:
        """Asks for something that is to be refused with a sentence that has this word."""
        volume = str(arguments.pop("volume", VOLUME))
        given = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
        with pytest.raises(HostError, match=word):
            self.confined.do(do, volume, given)


@pytest.fixture
def node(tmp_path: Path) -> World:
    """A node without any volume."""
    return World(tmp_path)


@pytest.mark.parametrize(
    "below",
    [
        "",
        "pods",
        "pods/uid/volumes/kubernetes.io~csi/pv",
        f"{IN_POD}/more",
        "pods/uid/volumes/kubernetes.io~secret/token/mount",
        "pods/uid/etc-hosts",
        "plugins/kubernetes.io/csi/other.example.org/hash/globalmount",
        "plugins/kubernetes.io/csi/volumeDevices/publish/pv",
        "plugins/kubernetes.io/csi/volumeDevices/staging/pv/more",
        "plugins_registry/x",
        "config.yaml",
    ],
)
def test_nothing_is_mounted_but_where_kubelet_has_csi_volumes(node: World, below: str) -> None:
    target = node.kubelet / below
    for do, more in (
        ("unmount", {}),
        ("remove", {}),
        ("bind_folder", {"folder": node.vhost / f"csi-{VOLUME}"}),
    ):
        (node.vhost / f"csi-{VOLUME}").mkdir(exist_ok=True)
        word = "not where kubelet has CSI volumes|not below"
        node.refused(word, do, target=target, **more)
    assert not (node.kubelet / below / "new").exists()


@pytest.mark.parametrize(
    "path",
    [
        "relative",
        "/a/../etc",
        "//etc",
        "/etc/",
        "/etc/./x",
        "/x\0y",
        7,
        None,
        ["/etc"],
    ],
)
def test_a_path_is_absolute_and_plain(node: World, path: Any) -> None:
    node.refused("no absolute path|not below", "unmount", target=path)


def test_a_path_outside_of_kubelet_s_folder_is_refused(node: World) -> None:
    for path in (node.outside / IN_POD, Path("/etc"), Path(f"{node.kubelet}x") / IN_POD):
        node.refused("not below", "unmount", target=path)


def test_a_link_in_a_path_leads_nowhere(node: World) -> None:
    """Neither above a mount point nor in its place, in the source nor in the target's folder."""
    folder = node.vhost / f"csi-{VOLUME}"
    folder.mkdir()
    node.target.symlink_to(node.outside)
    node.refused("is no folder", "bind_folder", target=node.target, folder=folder)
    node.target.unlink()
    shutil.rmtree(node.target.parent)
    node.target.parent.symlink_to(node.outside)
    node.note(node.outside)
    node.refused("without following links", "bind_folder", target=node.target, folder=folder)
    assert not (node.outside / "mount").exists()
    node.target.parent.unlink()
    node.note(node.target.parent)
    folder.rmdir()
    folder.symlink_to(node.outside)
    node.refused("without following links", "bind_folder", target=node.target, folder=folder)
    node.target.symlink_to(node.outside)
    node.confined.do("remove", VOLUME, {"target": str(node.target)})
    assert not node.target.is_symlink() and node.outside.exists()


@pytest.mark.parametrize("name", ["x", "csi-x", f"csi-{VOLUME}/x", f"own-{VOLUME}", ".."])
def test_only_folders_of_the_driver_s_own_controllers_are_shown(node: World, name: str) -> None:
    word = "no folder of a controller|no absolute path"
    node.refused(word, "bind_folder", target=node.target, folder=f"{node.vhost}/{name}")
    other = node.outside / f"csi-{VOLUME}"
    node.refused(word, "bind_folder", target=node.target, folder=other)


def test_a_file_is_the_export_of_its_volume(node: World) -> None:
    """By its path, without links, and by its file system, which only the target can serve."""
    words = {"read_only": False, "block_size": 512}
    word = "is not the export of volume"
    for file in ("/etc/shadow", node.exports / "x" / OTHER, node.exports / VOLUME):
        node.refused(word, "attach", file=file, **words)
    others = node.other_target / "export" / "session" / VOLUME
    file = node.exports / "session" / VOLUME
    for each in (others, file):
        each.parent.mkdir(parents=True)
        each.write_bytes(bytes(4096))
    node.refused("no file of a file system of type fuse.virtlun", "attach", file=others, **words)
    node.refused("no file of a file system of type fuse.virtlun", "attach", file=file, **words)
    file.unlink()
    file.symlink_to("/etc/shadow")
    node.refused("is no file", "attach", file=file, **words)
    for wrong in ({"block_size": 1}, {"block_size": True}, {"read_only": 1}):
        node.refused("is no size|neither true", "attach", file=file, **{**words, **wrong})


@pytest.mark.parametrize("device", ["/dev/vda", "/dev/loop", "/dev/loop0/../vda", "loop0", 3, None])
def test_a_device_is_a_loop_device(node: World, device: Any) -> None:
    for do in ("answers", "resize", "flush", "release", "detach", "holds"):
        node.refused("is no loop device", do, device=device)


@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="there are no loop devices")
def test_a_device_is_the_volume_s(node: World, tmp_path: Path) -> None:
    """One of somebody else is not read, formatted, mounted or freed, nor another volume's."""
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    made = subprocess.run(
        ["losetup", "--find", "--show", image], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device can be made: {made.stderr}")
    device = made.stdout.strip()
    try:
        word = f"{device} is not of volume"
        for do in ("answers", "resize", "flush", "release", "detach", "holds"):
            node.refused(word, do, device=device)
        node.refused(word, "make", device=device, fs_type="ext4")
        node.refused(word, "bind_device", device=device, target=node.target)
        words = {"device": device, "target": node.target, "fs_type": "ext4"}
        node.refused(word, "mount", options=[], **words)
        node.refused(word, "grow", **words)
        assert node.confined.do("loops", VOLUME, {}) == []
        assert image.read_bytes() == bytes(1 << 20)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_what_others_have_mounted_stays(tmp_path: Path) -> None:
    target = tmp_path / IN_POD
    target.mkdir(parents=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "x", target], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this process may not mount: {error.stderr}")
    try:
        confined = Confined(tmp_path, [tmp_path / "export"], [tmp_path / "vhost"])
        with pytest.raises(HostError, match="is not this driver's"):
            confined.do("unmount", VOLUME, {"target": str(target)})
        with pytest.raises(HostError, match="is not this driver's"):
            confined.do("remove", VOLUME, {"target": str(target)})
        with pytest.raises(HostError, match="is not this driver's"):
            confined.do("seal", VOLUME, {"target": str(target)})
        (folder := tmp_path / "vhost" / f"csi-{VOLUME}").mkdir(parents=True)
        words = {"driverName": DRIVER_NAME, "volumeHandle": VOLUME}
        (target.parent / "vol_data.json").write_text(json.dumps(words))
        with pytest.raises(HostError, match="is not covered"):
            confined.do("bind_folder", VOLUME, {"target": str(target), "folder": str(folder)})
        (found,) = (mount for mount in mounts.table() if mount.target == str(target))
        assert not found.read_only and found.fs_type == "tmpfs"
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize("vhost", ["vhost", "other/vhost"])
def test_a_folder_is_mounted_sealed_and_removed(tmp_path: Path, vhost: str) -> None:
    """As the driver asks for it, at a path that kubelet made for it; of each target."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    node = World(tmp_path)
    (folder := tmp_path / vhost / f"csi-{VOLUME}").mkdir(parents=True)
    words = {"target": str(node.target)}
    try:
        node.confined.do("bind_folder", VOLUME, {"folder": str(folder), **words})
        found = mounts.at(node.target)
        assert found is not None and found.read_only and found.root.endswith(folder.name)
        node.refused("is not covered", "bind_folder", folder=folder, **words)
        node.confined.do("seal", VOLUME, words)
        node.confined.do("remove", VOLUME, words)
        assert mounts.at(node.target) is None and not node.target.exists()
        node.confined.do("remove", VOLUME, words)
    finally:
        subprocess.run(["umount", node.target], check=False, capture_output=True)


@pytest.mark.parametrize(
    ("mount", "ours"),
    [
        (Mount("/t", HERE, f"/virtlun/vhost/csi-{VOLUME}", True, "tmpfs"), True),
        (Mount("/t", HERE, f"/virtlun/vhost/pod-{VOLUME}//deleted", True, "tmpfs"), True),
        (Mount("/t", HERE, "/virtlun/vhost/x", True, "tmpfs"), False),
        (Mount("/t", (0, 9999), f"/exports/csi-{VOLUME}", True, "nfs4"), False),
        (Mount("/t", (0, 9), "/", True, "tmpfs"), False),
        (Mount("/t", (7, 999999), "/", False, "ext4"), True),  # of a device that is gone
        (Mount("/t", (8, 1), "/", False, "ext4"), False),
        (Mount("/t", (7, 999999), "/", False, "iso9660"), False),
        (Mount("/t", (0, 5), "/loop999999", False, "devtmpfs"), True),
        (Mount("/t", (0, 5), "/sda", False, "devtmpfs"), False),
        (Mount("/t", (0, 5), "/x/loop999999", False, "devtmpfs"), False),
    ],
)
def test_which_mounts_are_the_driver_s(node: World, mount: Mount, ours: bool) -> None:
    if mount.device == HERE:
        number = node.vhost.stat().st_dev
        mount = replace(mount, device=(os.major(number), os.minor(number)))
    assert node.confined._is_ours(mount) is ours


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        ("{exports}/session/{volume}", True),
        ("/{volume}", True),  # the export's mount is gone
        ("/{volume} (deleted)", True),
        ("/var/lib/other-driver/{volume}", False),
        ("{exports}/session/x", False),
        ("/x", False),
    ],
)
def test_a_loop_device_of_another_driver_is_not_ours(
    node: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, ours: bool
) -> None:
    """There are others that call the files below theirs by a UUID."""
    monkeypatch.setattr(loopctl, "SYS_BLOCK", tmp_path)
    (tmp_path / "loop7/loop").mkdir(parents=True)
    path = file.format(exports=node.exports, volume=VOLUME)
    (tmp_path / "loop7/loop/backing_file").write_text(f"{path}\n")
    assert node.confined._is_ours(Mount("/t", (7, 7), "/", False, "xfs")) is ours
    assert node.confined._is_ours(Mount("/t", (0, 5), "/loop7", False, "devtmpfs")) is ours


def test_a_path_of_another_volume_or_driver_is_not_mounted_at(node: World) -> None:
    """Else what the pod relies on, secrets of another driver perhaps, would be of who asks."""
    folder = node.vhost / f"csi-{VOLUME}"
    folder.mkdir()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("bind_folder", {"folder": folder}),
        ("bind_device", {"device": "/dev/loop9999"}),
        ("bind_mount", {"device": "/dev/loop9999", "staging": node.target, "read_only": False}),
        ("mount", {"device": "/dev/loop9999", "fs_type": "ext4", "options": []}),
    ]
    devices = "plugins/kubernetes.io/csi/volumeDevices"
    places = {
        IN_POD: "pods/uid/volumes/kubernetes.io~csi/pv",
        f"plugins/kubernetes.io/csi/{DRIVER_NAME}/{HASH}/globalmount": (
            f"plugins/kubernetes.io/csi/{DRIVER_NAME}/{HASH}"
        ),
        f"{devices}/publish/pv/uid": f"{devices}/pv/data",
    }
    for target, beside in places.items():
        note = node.kubelet / beside / "vol_data.json"
        for do, more in asked:

            def refused(word: str, do: str = do, more: Any = more, target: str = target) -> None:
                node.refused(word, do, target=node.kubelet / target, **more)

            note.unlink(missing_ok=True)
            note.parent.mkdir(parents=True, exist_ok=True)
            refused("kubelet's note .* cannot be read")
            for words in ("[" * 100_000, "[]", "{", '{"driverName": "x"'):
                note.write_text(words)
                refused("cannot be read|not for a volume of this driver")
            node.note(note.parent, driver="secrets.example.org")
            refused("not for a volume of this driver")
            node.note(note.parent, volume=OTHER)
            refused(f"not for volume {VOLUME}")
            node.note(note.parent)
            note.rename(node.outside / "note")
            note.symlink_to(node.outside / "note")
            refused("kubelet's note .* cannot be read")
            note.unlink()
            node.note(note.parent)
    node.note(node.target.parent, volume=OTHER)
    node.refused(
        "is not the folder of volume",
        "bind_folder",
        volume=OTHER,
        folder=folder,
        target=node.target,
    )
    pod = node.vhost / f"pod-{OTHER}"
    pod.mkdir()
    node.note(node.target.parent)
    node.refused("is not the folder of volume", "bind_folder", folder=pod, target=node.target)


@pytest.mark.parametrize(
    ("do", "arguments", "word"),
    [
        ("run", {"command": "id"}, "no operation"),
        ("_is_ours", {}, "no operation"),
        ("unmount", {}, "has the arguments"),
        ("unmount", {"target": "/x", "lazy": True}, "has the arguments"),
        ("make", {"device": "/dev/loop0", "fs_type": "btrfs"}, "not one of the file systems"),
        ("make", {"device": "/dev/loop0", "fs_type": ["ext4"]}, "not one of the file systems"),
        (
            "mount",
            {"device": "/dev/loop0", "fs_type": "ext4", "target": "/x", "options": "ro"},
            "are a list",
        ),
        (
            "mount",
            {"device": "/dev/loop0", "fs_type": "ext4", "target": "/x", "options": [1]},
            "is a text",
        ),
    ],
)
def test_what_is_no_operation_is_refused(
    node: World, do: str, arguments: dict[str, Any], word: str
) -> None:
    node.refused(word, do, **arguments)


@pytest.mark.parametrize("volume", ["", "../x", "x" * 129, "not-a-uuid", VOLUME.upper() + "A"])
def test_a_device_is_asked_for_by_a_handle(node: World, volume: str) -> None:
    node.refused("no volume of the target|handle of 1 to", "loops", volume=volume)


@pytest.mark.parametrize("fs_type", ["ext4", "xfs"])
def test_options_that_name_other_devices_or_stop_the_node_are_refused(fs_type: str) -> None:
    for option in (
        *("journal_path=/dev/sda", "journal_dev=0x801", "logdev=/dev/sda", "rtdev=/dev/sda"),
        *("errors=panic", "loop", "bind", "remount", "subvol=x", "sb=1", "usrjquota=/etc/x"),
        *("commit=", "commit=1\ndata", "data=x"),
    ):
        with pytest.raises(HostError, match="is not allowed"):
            mountoptions.parse(fs_type, ["noatime", option])
    with pytest.raises(HostError, match="is not one of"):
        mountoptions.parse("overlay", [])


def test_options_become_flags_and_data() -> None:
    assert mountoptions.parse("ext4", []) == (0, "")
    flags, data = mountoptions.parse("xfs", ["nouuid", "noatime,ro", "logbsize=256k"])
    assert (flags, data) == (kernel.MS_NOATIME | kernel.MS_RDONLY, "nouuid,logbsize=256k")
    assert mountoptions.parse("ext4", ["ro", "rw", "commit=30"]) == (0, "commit=30")


def test_places_without_a_shape_are_as_the_path_says(tmp_path: Path) -> None:
    """So the driver mounts by itself: kubelet's folder may be a link then."""
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with RootedPaths().point(tmp_path / "link/a/b", folder=True) as place:
        assert Path(place).samefile(real / "a/b")
    confined = RootedPaths(tmp_path, CSI_VOLUMES).folder(tmp_path / "link")
    with pytest.raises(HostError, match="without following links"), confined:
        pass


class Recording:
    """Operations that note what is underway, and wait."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_end = threading.Event()
        self.begun = threading.Semaphore(0)
        self.answer: Callable[[], object] = lambda: None

    def do(self, name: str, volume: str, arguments: dict[str, Any]) -> object:
        self.asked.append(f"{name} {volume}")
        self.begun.release()
        assert self.may_end.wait(60)
        return self.answer()


@pytest.fixture
def operations() -> Recording:
    """Operations that do nothing."""
    return Recording()


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="vt-") as directory:
        yield Path(directory) / "helper.sock"


def serve(path: Path, operations: Recording, uid: int) -> Helper:
    """Serves in a thread; returns a helper to ask."""
    made = Server(path, operations, uid)
    threading.Thread(target=made.serve, daemon=True).start()
    return Helper(path)


def test_another_user_is_refused(socket_path: Path, operations: Recording) -> None:
    """By what the kernel says of the other end, whatever the socket's mode."""
    if os.geteuid() == 0:
        helper = serve(socket_path, operations, 12345)
        assert (socket_path.stat().st_uid, socket_path.stat().st_mode & 0o777) == (12345, 0o600)
    else:
        pytest.skip("only root gives a socket to another user")
    operations.may_end.set()
    with pytest.raises(HostError):
        helper.unmount(VOLUME, Path("/x"))
    assert operations.asked == []


def test_a_volume_s_operations_are_one_after_the_other(
    socket_path: Path, operations: Recording
) -> None:
    """Those of another volume, and reads, do not wait for them."""
    helper = serve(socket_path, operations, os.geteuid())
    operations.answer = lambda: []
    asks: list[Callable[[], object]] = [
        lambda: helper.unmount(VOLUME, Path("/a")),
        lambda: helper.unmount(OTHER, Path("/b")),
        lambda: helper.loops(VOLUME),
    ]
    threads = [threading.Thread(target=ask) for ask in asks]
    for thread in threads:
        thread.start()
        assert operations.begun.acquire(timeout=60)
    second = threading.Thread(target=lambda: helper.remove(VOLUME, Path("/a")))
    second.start()
    assert not operations.begun.acquire(timeout=0.2)
    operations.may_end.set()
    for thread in (*threads, second):
        thread.join(60)
    assert operations.asked[-1] == f"remove {VOLUME}"


def test_what_nobody_waits_for_is_not_begun(socket_path: Path, operations: Recording) -> None:
    """As of a driver that was killed: the next one would not expect it."""
    helper = serve(socket_path, operations, os.geteuid())
    first = threading.Thread(target=lambda: helper.unmount(VOLUME, Path("/a")))
    first.start()
    assert operations.begun.acquire(timeout=60)
    with wire.new_socket() as connection:
        connection.connect(str(socket_path))
        question = {"do": "make", "volume": VOLUME, "with": {}}
        connection.send(json.dumps(question).encode())
    operations.may_end.set()
    first.join(60)
    helper.remove(VOLUME, Path("/a"))
    assert operations.asked == [f"unmount {VOLUME}", f"remove {VOLUME}"]


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"[]",
        b"\xff",
        b"{}",
        b'{"do": "x", "volume": 7}',
        b'{"do": "x", "volume": "v", "with": 1}',
        b"[" * 5000,
        b" " * (wire.PACKET_BYTES + 1),
    ],
)
def test_a_packet_that_is_no_question_ends_nothing_but_its_connection(
    socket_path: Path, operations: Recording, packet: bytes
) -> None:
    helper = serve(socket_path, operations, os.geteuid())
    operations.may_end.set()
    with wire.new_socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        connection.connect(str(socket_path))
        connection.send(packet)
        answer = connection.recv(wire.PACKET_BYTES)
    assert answer == b"" or "failed" in json.loads(answer)
    assert operations.asked == []
    helper.unmount(VOLUME, Path("/x"))
    assert operations.asked == [f"unmount {VOLUME}"]


def test_errors_come_as_what_they_are(socket_path: Path, operations: Recording) -> None:
    helper = serve(socket_path, operations, os.geteuid())
    operations.may_end.set()
    for raised, kind in (
        (OfflineOnly("x"), OfflineOnly),
        (HostError("x"), HostError),
        (OSError(5, "x"), HostError),
        (UnicodeError("x"), HostError),
    ):

        def fail(error: Exception = raised) -> object:
            raise error

        operations.answer = fail
        with pytest.raises(HostError, match="x") as caught:
            helper.unmount(VOLUME, Path("/x"))
        assert type(caught.value) is kind
    away = Helper(socket_path.with_name("nobody"))
    with pytest.raises(HelperUnavailable, match="virtlun-csi-helper does not answer"):
        away.unmount(VOLUME, Path("/x"))
    assert helper.check() is None
    assert "does not answer" in (away.check() or "")


def test_no_two_helpers_have_one_socket(socket_path: Path, operations: Recording) -> None:
    serve(socket_path, operations, os.geteuid())
    with pytest.raises(OSError, match="another helper listens"):
        Server(socket_path, operations, os.geteuid())


def test_no_more_connections_than_there_may_be(
    socket_path: Path, operations: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 1)
    helper = serve(socket_path, operations, os.geteuid())
    first = threading.Thread(target=lambda: helper.unmount(VOLUME, Path("/a")))
    first.start()
    assert operations.begun.acquire(timeout=60)
    with pytest.raises(HostError):
        helper.unmount(OTHER, Path("/b"))
    operations.may_end.set()
    first.join(60)
    assert operations.asked == [f"unmount {VOLUME}"]


def test_what_the_system_has_not_now_ends_no_helper(
    socket_path: Path, operations: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither descriptors nor threads: with it would end what is underway, such as a mkfs."""
    helper = serve(socket_path, operations, os.geteuid())
    operations.may_end.set()
    helper.unmount(VOLUME, Path("/a"))
    made, fails = socket.socket.accept, threading.Event()

    def accept(listener: socket.socket) -> object:
        found = made(listener)
        if fails.is_set():
            fails.clear()
            found[0].close()
            raise OSError(24, "Too many open files")
        return found

    monkeypatch.setattr(socket.socket, "accept", accept)
    helper.unmount(VOLUME, Path("/b"))  # by the accept that began before
    fails.set()
    with pytest.raises(HelperUnavailable):
        helper.unmount(VOLUME, Path("/c"))
    helper.unmount(VOLUME, Path("/d"))
    thread = threading.Thread

    def none(*_: object, **__: object) -> None:
        monkeypatch.setattr(threading, "Thread", thread)
        raise RuntimeError("can't start new thread")

    for _ in range(3):
        monkeypatch.setattr(threading, "Thread", none)
        with pytest.raises(HelperUnavailable):
            helper.unmount(VOLUME, Path("/e"))
    helper.unmount(VOLUME, Path("/f"))
    assert operations.asked == [f"unmount {VOLUME}"] * 4


def test_a_link_in_the_socket_s_place_gives_nothing_away(
    socket_path: Path, operations: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may write to the folder: what it puts there meanwhile gets no other owner."""
    if os.geteuid() != 0:
        pytest.skip("only root gives a socket to another user")
    secret = socket_path.with_name("secret")
    secret.touch()
    made = os.umask

    def umask(mask: int) -> int:
        if mask != 0o777 & ~server.SOCKET_MODE:  # it was bound just now
            socket_path.unlink()
            socket_path.symlink_to(secret)
        return made(mask)

    monkeypatch.setattr(os, "umask", umask)
    Server(socket_path, operations, 12345)
    assert secret.stat().st_uid == 0


@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="there are no loop devices")
def test_a_device_is_attached_once(tmp_path: Path) -> None:
    """Also when a driver was killed while it was: the next one did not see it, and asks again."""
    file = tmp_path / VOLUME
    file.write_bytes(bytes(1 << 20))
    host = LocalHost()
    try:
        device = host.attach(VOLUME, file, read_only=False, block_size=512)
    except HostError as error:
        pytest.skip(f"no loop device can be made: {error}")
    try:
        assert host.attach(VOLUME, file, read_only=False, block_size=512) == device
        second = host.attach(VOLUME, file, read_only=True, block_size=512)
        assert second != device
        assert host.attach(VOLUME, file, read_only=True, block_size=512) == second
        target = tmp_path / "mount"
        target.mkdir()
        with pytest.raises(HostError, match=f"what is mounted at {target} is not {device}"):
            host.grow(VOLUME, device, target, "xfs")
    finally:
        for loop in host.loops(VOLUME):
            host.detach(VOLUME, loop.device)


def test_it_gives_up_what_it_does_not_need(socket_path: Path) -> None:
    """And what it runs never gets more: the bounding set is as small, and no_new_privs is set."""
    if os.geteuid() != 0:
        pytest.skip("only root has what it could give up")
    helper = subprocess.Popen(
        [sys.executable, "-m", "csi.host.cli", "--socket", str(socket_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    try:
        assert helper.stderr is not None and b"serving" in helper.stderr.readline()
        lines = Path(f"/proc/{helper.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        allowed = 1 << kernel.CAP_DAC_OVERRIDE | 1 << kernel.CAP_SYS_ADMIN
        allowed |= 1 << kernel.CAP_SYS_RESOURCE
        for kind in ("CapPrm", "CapEff", "CapBnd"):
            assert int(status[kind], 16) & ~allowed == 0, kind
            assert int(status[kind], 16) >> kernel.CAP_SYS_ADMIN & 1, kind
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert set(_imported(helper.pid)) & {"grpc", "google", "httpx"} == set()
    finally:
        helper.kill()
        helper.wait(60)
        if helper.stderr is not None:
            helper.stderr.close()


def _imported(pid: int) -> Iterator[str]:
    """Yields the packages with libraries of their own that a process has loaded."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, found, rest = line.partition("/site-packages/")
        if found:
            yield rest.split("/")[0]


def test_the_helper_imports_python_s_own_library_alone() -> None:
    """What has rights is short to read: no gRPC, no protobuf, no client of the API server."""
    code = "import sys, csi.host.cli; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    strangers = set(said) - set(sys.stdlib_module_names) - {"csi", "__main__", "sitecustomize"}
    assert not {name for name in strangers if not name.startswith("_")}, strangers
