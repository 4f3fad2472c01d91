"""Moves to another host: the domain that goes along is handed over once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plugin.hostmoves import sourcechecks, sourcenote
from plugin.hostmoves.completion import Completion
from plugin.hostmoves.handover import ArrivingDomain, LeavingDomain
from plugin.hostmoves.remote import Remote, RemoteError
from plugin.hostmoves.sourcenote import HostNote
from plugin.moves.naming import Domains
from pydataplane.errors import VolumeError
from pydataplane.lvols import Volume
from pydataplane.volumes import Volumes

SOURCE = cast(Volume, SimpleNamespace(uuid="v-uuid", path="lvs0/v"))
DOMAIN = cast(
    LeavingDomain,
    SimpleNamespace(uuid="d-uuid", starts_with_host=True, xml_on=lambda *_: "<domain/>"),
)


@dataclass
class NotedAtVolume:
    """What is noted at the volume."""

    xattrs: dict[str, str] = field(default_factory=dict)

    def set_xattr(self, _: str, name: str, text: str) -> None:
        self.xattrs[name] = text

    @property
    def note(self) -> HostNote:
        return HostNote(**json.loads(self.xattrs[sourcenote.XATTR]))


@dataclass
class Asked:
    """The other host, which refuses one request."""

    refuses: str = ""
    asked: list[tuple[str, object]] = field(default_factory=list)

    def ask(self, do: str, **values: object) -> dict[str, Any]:
        self.asked.append((do, values.get("again")))
        if do == self.refuses:
            raise RemoteError("the network is not there")
        return {}


def hand_over(noted: NotedAtVolume, there: Asked, note: HostNote) -> HostNote:
    volumes = cast(Volumes, noted)
    completion = Completion(volumes, volumes, None, cast(Remote, there))
    return completion._hand_over(SOURCE, note, DOMAIN, "lvs0/v")


def test_one_that_could_not_start_is_not_defined_again() -> None:
    """It may have been mended there; and one that was started may have been shut down."""
    noted, there = NotedAtVolume(), Asked("start")
    note = HostNote("b", "lvs0/v", True, "moved", "d-uuid", was_running=True)
    with pytest.raises(RemoteError):
        hand_over(noted, there, note)
    assert there.asked == [("define", False), ("start", None)]
    there = Asked()
    hand_over(noted, there, noted.note)
    assert there.asked == [("define", True), ("start", None)]
    there = Asked()
    assert hand_over(noted, there, noted.note) == noted.note
    assert there.asked == []


def test_one_that_did_not_run_is_defined_once() -> None:
    noted, there = NotedAtVolume(), Asked()
    hand_over(noted, there, HostNote("b", "lvs0/v", True, "moved", "d-uuid"))
    hand_over(noted, there, noted.note)
    assert there.asked == [("define", False)]


class Libvirt:
    """A libvirt with one domain at most, that tells what was done to it."""

    def __init__(self, *, has: bool, active: bool = False) -> None:
        self.done: list[str] = []
        self._handle = SimpleNamespace(
            isActive=lambda: active,
            create=lambda: self.done.append("start"),
            setAutostart=lambda on: self.done.append(f"autostart {on}"),
            name=lambda: "web",
        )
        self._has = has

    def of_uuid(self, _: str) -> Any:
        return self._handle if self._has else None

    def define(self, xml: str) -> Any:
        self.done.append(xml)
        return self._handle


@pytest.mark.parametrize(
    ("has", "again", "done"),
    [
        (True, True, []),
        (False, True, ["<x/>", "autostart True"]),
        (True, False, ["<x/>", "autostart True"]),
    ],
)
def test_what_is_there_by_now_stays(has: bool, again: bool, done: list[str]) -> None:
    libvirt = Libvirt(has=has)
    arriving = ArrivingDomain(cast(Domains, libvirt))
    arriving.define("d-uuid", "<x/>", autostart=True, again=again)
    assert libvirt.done == done


def test_one_that_runs_is_not_started_and_one_that_is_gone_is_told() -> None:
    for active, done in ((True, []), (False, ["start"])):
        libvirt = Libvirt(has=True, active=active)
        ArrivingDomain(cast(Domains, libvirt)).start("d-uuid")
        assert libvirt.done == done
    with pytest.raises(VolumeError, match="d-uuid, which was defined, is not there any more"):
        ArrivingDomain(cast(Domains, Libvirt(has=False))).start("d-uuid")


def test_a_domain_of_nova_is_novas() -> None:
    metadata = "<nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'/>"
    for xml, refused in ((metadata, True), ("<metadata/>", False)):
        handle = SimpleNamespace(name=lambda: "instance-1")
        domains = cast(Domains, SimpleNamespace(defined=lambda _, x=xml, h=handle: [(h, x)]))
        if not refused:
            sourcechecks._check_not_novas(domains, SOURCE)
            continue
        with pytest.raises(VolumeError, match="instance-1, which has volume lvs0/v, is Nova's"):
            sourcechecks._check_not_novas(domains, SOURCE)
