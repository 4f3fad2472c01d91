"""The domain whose volume goes to another host: it is shut down, and goes along if asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from plugin.hostmoves import domainxml
from plugin.moves.naming import Domains
from pydataplane.errors import VolumeError

SHUTDOWN_S = 300.0
"""How long a guest may take to shut down, seconds."""
LOOK_S = 0.05
"""How often libvirt is asked whether it has, seconds."""


class LeavingDomain:
    """A persistent domain of this host."""

    def __init__(self, domains: Domains, handle: Any) -> None:
        """`handle` is libvirt's.

        Raises:
            VolumeError: it is not persistent.
        """
        self._domains, self._handle = domains, handle
        self.name: str = handle.name()
        self.uuid: str = handle.UUIDString()
        if not handle.isPersistent():
            raise VolumeError(
                f"domain {self.name} is transient, so that nobody could start it again: shut it"
                " down, and move the volume then"
            )

    def needs(self, volume: str) -> dict[str, Any]:
        """Returns what the other host is to have for it, but for `volume`, LVSTORE/NAME.

        Raises:
            VolumeError: something of it would stay on this host.
        """
        xml = self._domains.inactive_xml(self._handle)
        if state := domainxml.state_on_host(xml):
            raise VolumeError(
                f"domain {self.name} has {' and '.join(state)} on this host, which would stay:"
                " move the volume without --with-vm, and carry that and the domain by hand"
            )
        if self._handle.hasManagedSaveImage():
            raise VolumeError(
                f"domain {self.name} is saved (managedsave): start it first, or `virsh "
                f"managedsave-remove {self.name}`"
            )
        if self._handle.snapshotNum():
            raise VolumeError(
                f"domain {self.name} has snapshots, which would stay: delete them first"
            )
        found = domainxml.needs(xml, self._domains.settings)
        if volume not in found.volumes:
            raise VolumeError(
                f"domain {self.name} has volume {volume} until it ends only: the definition that"
                " would go along does not name it; attach it with --config, too, or move the volume"
                " without --with-vm"
            )
        found.volumes[:] = [each for each in found.volumes if each != volume]
        return {"name": self.name, "uuid": self.uuid, **asdict(found)}

    def xml_on(self, volume: str, to: str) -> str:
        """Returns its definition with LVSTORE/NAME `to` in the place of `volume`."""
        return self._domains.on_another(self._handle, volume, to)

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return bool(self._handle.isActive())

    @property
    def starts_with_host(self) -> bool:
        """Whether libvirt starts it when the host does."""
        return bool(self._handle.autostart())

    def shut_down(self, waiting: Callable[[], None]) -> None:
        """Has its guest shut down, and waits for that; `waiting` is called meanwhile, again.

        Raises:
            VolumeError: it does not.
        """
        end = time.monotonic() + SHUTDOWN_S
        try:
            self._handle.shutdown()
        except self._domains.libvirt.libvirtError:
            if self._handle.isActive():  # else it has ended this moment
                raise
        while self._handle.isActive():
            if time.monotonic() > end:
                raise VolumeError(
                    f"the guest of domain {self.name} has not shut down in {SHUTDOWN_S:.0f} s: have"
                    " it do so from within, or `virsh destroy` it"
                )
            waiting()
            time.sleep(LOOK_S)

    def start(self) -> None:
        """Starts it on this host, if it does not run."""
        if not self._handle.isActive():
            self._handle.create()

    def undefine(self) -> None:
        """Has this host's libvirt know it no more."""
        self._handle.undefine()


class ArrivingDomain:
    """A domain that another host hands over."""

    def __init__(self, domains: Domains) -> None:
        """`domains` are this host's."""
        self._domains = domains

    def check(self, wanted: dict[str, Any]) -> None:
        """Refuses a domain that could not be defined here; `wanted` is of `LeavingDomain.needs`.

        What its volumes and files are is the caller's to look at.

        Raises:
            VolumeError: another one has its name, or it runs here; libvirt's: its QEMU is not here.
        """
        name, uuid = str(wanted["name"]), str(wanted["uuid"])
        for handle in self._domains.all():
            if handle.UUIDString() == uuid and handle.isActive():
                raise VolumeError(f"domain {handle.name()}, of the same UUID, runs here already")
            if handle.name() == name and handle.UUIDString() != uuid:
                raise VolumeError(
                    f"domain {name} is another one here, {handle.UUIDString()}: rename one of them"
                )
        self._domains.check_machine(*wanted["machine"])

    def define(self, uuid: str, xml: str, *, autostart: bool, again: bool) -> None:
        """Defines it; with `again` only if it is not there any more: it may be another by now."""
        if again and self._domains.of_uuid(uuid) is not None:
            return
        self._domains.define(xml).setAutostart(autostart)

    def start(self, uuid: str) -> None:
        """Has it run; safe to repeat.

        Raises:
            VolumeError: it is not there; libvirt's: it cannot.
        """
        handle = self._domains.of_uuid(uuid)
        if handle is None:
            raise VolumeError(f"domain {uuid}, which was defined, is not there any more")
        if not handle.isActive():
            handle.create()
