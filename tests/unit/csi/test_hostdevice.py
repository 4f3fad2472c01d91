"""Which device a volume gets, and that it keeps it; whose a device of ublk is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from csi import sysblock
from csi.errors import Code, describe
from csi.host import Host
from csi.host.local import LocalHost
from csi.hostdevice import loopctl, ublkctl
from csi.hostdevice.choice import Choice, ChosenDevices
from csi.hostdevice.loop import LoopDevices
from csi.hostdevice.loopctl import Loop
from csi.hostdevice.ublkctl import Links
from csi.hosterrors import HostError, OfflineOnly
from csi.targets import Targets
from pydataplane.errors import METHOD_NOT_FOUND, RpcError
from tests.support.fake_target import MIB, FakeTarget

VOLUME = "6a1d3c52-0000-4000-8000-000000000001"
OTHER = "6a1d3c52-0000-4000-8000-000000000002"
VERSION = {
    "version": "SPDK v1",
    "fields": {"major": 1, "minor": 0, "patch": 0, "suffix": ""},
}
CAN = {
    "all": {"ublk": True, "resizes": True, "why": ""},
    "fixed": {"ublk": True, "resizes": False, "why": "Linux 6.16 changes it"},
    "none": {"ublk": False, "resizes": False, "why": "the kernel has no ublk"},
}


class FakeLoops(LocalHost):
    """Loop devices as dictionaries: NOT a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[str, list[Loop]] = {}
        self.flushed: list[Path] = []

    def loops(self, volume: str) -> list[Loop]:
        return list(self.there.get(volume, []))

    def attach(self, volume: str, file: Path, *, read_only: bool, block_size: int) -> Path:
        name = f"virtlun:{volume}{':ro' if read_only else ''}"
        number = sum(map(len, self.there.values()))
        made = Loop(Path(f"/dev/loop{number}"), name, (1, 2), read_only, True, False)
        self.there.setdefault(volume, []).append(made)
        return made.device

    def release(self, volume: str, device: Path) -> None:
        assert any(each.device == device for each in self.there[volume])

    def detach(self, volume: str, device: Path) -> None:
        self.there[volume] = [each for each in self.there[volume] if each.device != device]

    def resize(self, volume: str, device: Path) -> None:
        assert any(each.device == device for each in self.there[volume])

    def flush(self, volume: str, device: Path) -> None:
        self.flushed.append(device)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget({"lvs0/v": VOLUME, "lvs0/w": OTHER})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLoops:
    """The exports' files are not looked at: there are none."""
    found = os.stat(tmp_path)  # noqa: PTH116 - Path.stat is what is replaced
    monkeypatch.setattr(Path, "stat", lambda _: found)
    monkeypatch.setattr(loopctl, "encoded", lambda _: 1)
    monkeypatch.setattr(LoopDevices, "_answers", lambda *_: True)
    monkeypatch.setattr(FakeTarget, "spdk_get_version", lambda _: VERSION, raising=False)
    return FakeLoops()


def chosen(target: FakeTarget, host: Host, choice: str = "auto") -> ChosenDevices:
    return ChosenDevices(Targets([target]), host, Choice(choice))


@pytest.mark.parametrize(
    ("choice", "can", "kind"),
    [
        ("auto", "all", "ublkb"),
        ("auto", "fixed", "loop"),
        ("auto", "none", "loop"),
        ("ublk", "all", "ublkb"),
        ("ublk", "fixed", "ublkb"),
        ("ublk", "none", "loop"),
        ("loop", "all", "loop"),
    ],
)
def test_a_new_device_is_what_the_kernel_can(
    target: FakeTarget, host: FakeLoops, choice: str, can: str, kind: str
) -> None:
    target.devices = dict(CAN[can])
    devices = chosen(target, host, choice)
    device = devices.attach(VOLUME, block_size=4096)
    assert device.name.startswith(kind)
    assert devices.device(VOLUME) == device
    assert devices.attached() == [VOLUME]
    assert devices.attach(VOLUME, block_size=4096) == device or kind == "loop"
    devices.detach(VOLUME)
    assert (devices.device(VOLUME), target.exports, devices.attached()) == (None, set(), [])
    devices.detach(VOLUME)


def test_an_older_target_makes_files(target: FakeTarget, host: FakeLoops) -> None:
    target.refuse["virtlun_export_get_devices"] = RpcError(METHOD_NOT_FOUND, "not known")
    assert chosen(target, host).attach(VOLUME).name.startswith("loop")


@pytest.mark.parametrize(("first", "then"), [("loop", "auto"), ("auto", "loop")])
def test_what_a_volume_has_it_keeps_until_it_is_unstaged(
    target: FakeTarget, host: FakeLoops, first: str, then: str
) -> None:
    target.devices = dict(CAN["all"])
    before = chosen(target, host, first).attach(VOLUME)
    exports = target.virtlun_export_list()
    after = chosen(target, host, then)
    assert after.device(VOLUME) == before
    after.attach(VOLUME)
    assert target.virtlun_export_list() == exports
    after.flush(VOLUME)
    assert before in host.flushed
    other = after.attach(OTHER).name
    assert other.startswith("ublkb" if then == "auto" else "loop")
    after.detach(VOLUME)
    assert after.attach(VOLUME).name.rstrip("0123456789") == other.rstrip("0123456789")


def test_a_loop_device_whose_export_is_gone_is_replaced_by_one(
    target: FakeTarget, host: FakeLoops
) -> None:
    target.devices = dict(CAN["all"])
    name = f"{loopctl.DEAD}{VOLUME}"
    host.there[VOLUME] = [Loop(Path("/dev/loop9"), name, (0, 0), False, True, False)]
    devices = chosen(target, host)
    assert (devices.device(VOLUME), devices.answers(VOLUME)) == (Path("/dev/loop9"), False)
    assert devices.attach(VOLUME).name.startswith("loop")


def test_a_read_only_device_is_a_loop_device_over_the_other(
    target: FakeTarget, host: FakeLoops
) -> None:
    target.devices = dict(CAN["all"])
    devices = chosen(target, host)
    device = devices.attach(VOLUME)
    assert devices.device(VOLUME, read_only=True) is None
    sealed = devices.attach(VOLUME, read_only=True)
    assert sealed.name.startswith("loop") and host.there[VOLUME][0].read_only
    assert devices.attach(VOLUME, read_only=True) == sealed
    assert (devices.device(VOLUME), devices.device(VOLUME, read_only=True)) == (device, sealed)
    host.there[VOLUME] = [replace(each, leaving=True) for each in host.there[VOLUME]]
    assert devices.attach(VOLUME, read_only=True) != sealed
    devices.detach(VOLUME)
    assert host.there[VOLUME] == []


@pytest.mark.parametrize("grows", [True, False])
def test_growth_reaches_a_device_or_waits_for_the_next_one(
    target: FakeTarget, host: FakeLoops, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    target.devices = dict(CAN["all" if grows else "fixed"])
    devices = chosen(target, host, "ublk")
    devices.attach(VOLUME)
    devices.attach(VOLUME, read_only=True)
    monkeypatch.setattr(sysblock, "size_of", lambda _: MIB if grows else MIB // 2)
    if grows:
        devices.grow(VOLUME)
        return
    with pytest.raises(OfflineOnly, match=r"keeps its size .* Linux 6.16") as refused:
        devices.grow(VOLUME)
    assert describe(refused.value)[0] is Code.FAILED_PRECONDITION


def test_a_device_of_ublk_is_whose_the_holder_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder and a link that are root's."""
    (tmp_path / f"{VOLUME}.disk").symlink_to("/dev/ublkb3")
    (tmp_path / f"{OTHER}.disk").symlink_to("/dev/sda")
    links = Links([tmp_path / "none", tmp_path])
    assert links.all() == {VOLUME: Path("/dev/ublkb3")}
    links.check(VOLUME, Path("/dev/ublkb3"))
    for volume, device in ((OTHER, "/dev/ublkb3"), (VOLUME, "/dev/ublkb4"), (OTHER, "/dev/sda")):
        with pytest.raises(HostError, match=f"{device} is not of volume {volume}"):
            links.check(volume, Path(device))
    monkeypatch.setattr(ublkctl, "OWNERS", {os.geteuid() + 1})
    assert links.all() == {}
    assert ublkctl.is_device(Path("/dev/ublkb12"))
    for other in ("/dev/ublkc1", "/dev/ublkb", "/dev/ublkb1/../sda", "/tmp/dev/ublkb1"):
        assert not ublkctl.is_device(Path(other))
