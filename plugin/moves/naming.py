"""Which domains name a volume, and another one in its place: by libvirt, through the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydataplane.domain.model import Settings
from pydataplane.domain.names import NAMESPACE
from pydataplane.domain.translate import sources
from pydataplane.errors import VolumeError


class Domains:
    """Those of a libvirt, as its clients see them."""

    def __init__(self, opened: Any, settings: Settings) -> None:
        """`opened` is libvirt-python's connection."""
        import libvirt  # noqa: PLC0415 (an optional extra)

        self.libvirt = libvirt
        self.settings = settings
        self._opened = opened
        self._definition = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE

    def of_uuid(self, uuid: str) -> Any:
        """Returns libvirt's handle of a domain; None: there is none.

        Raises:
            libvirt's: nobody knows.
        """
        try:
            return self._opened.lookupByUUIDString(uuid)
        except self.libvirt.libvirtError as error:
            if error.get_error_code() != self.libvirt.VIR_ERR_NO_DOMAIN:
                raise
            return None

    def all(self) -> list[Any]:
        """Returns libvirt's handles of all domains."""
        return list(self._opened.listAllDomains())

    def define(self, xml: str) -> Any:
        """Defines a domain, also one that is there, and returns libvirt's handle."""
        return self._opened.defineXML(xml)

    def check_machine(
        self, emulator: str | None, arch: str | None, machine: str | None, kind: str | None
    ) -> None:
        """Has libvirt refuse what its QEMUs cannot be; None: its default.

        Raises:
            libvirt's: there is no such emulator, architecture, machine or virtualisation type.
        """
        self._opened.getDomainCapabilities(emulator, arch, machine, kind)

    def inactive_xml(self, handle: Any) -> str:
        """Returns a domain's definition, with its secrets, as it is for its next start."""
        return self._xml(handle, self._definition)

    def on_another(self, handle: Any, old: str, new: str) -> str:
        """Returns a domain's definition with `new` where its disks name `old`, LVSTORE/NAME."""
        return sources.on_another(self.inactive_xml(handle), old, new, self.settings)

    def live_devs(self, handle: Any, volume: str) -> list[str]:
        """Returns the target devs of a domain's disks that name a volume, LVSTORE/NAME."""
        return sources.devs_on(self._xml(handle, 0), volume, self.settings)

    def disk_on(self, handle: Any, dev: str, volume: str) -> str:
        """Returns a <disk> on a volume, in the way in which a running domain names that of `dev`.

        Raises:
            VolumeError: the domain has no such disk any more.
        """
        found = sources.disk_on(self._xml(handle, 0), dev, volume, self.settings)
        if found is None:
            raise VolumeError(f"domain {handle.name()} has no disk {dev} any more")
        return found

    def check_none_saved(self, volume: str) -> None:
        """Refuses a volume that a domain which is saved goes on with.

        Raises:
            VolumeError: there is one; what is saved cannot be given another disk.
        """
        for handle, _ in self.defined(volume):
            if handle.hasManagedSaveImage():
                raise VolumeError(
                    f"domain {handle.name()}, which is saved, goes on with volume {volume}: start"
                    f" it first, or `virsh managedsave-remove {handle.name()}`"
                )

    def redefine(self, old: str, new: str) -> list[str]:
        """Has all domains' definitions that name `old`, LVSTORE/NAME, name `new`; safe to repeat.

        Returns the domains' names.

        Raises:
            VolumeError: some do not; all others do.
        """
        found, refused = [], []
        for handle, xml in self.defined(old):
            try:
                self._opened.defineXML(sources.on_another(xml, old, new, self.settings))
            except self.libvirt.libvirtError as error:
                refused.append(f"{handle.name()} ({error})")
            else:
                found.append(handle.name())
        if refused:
            raise VolumeError(
                f"volume {old} is {new} now, and domains do not name it: {', '.join(refused)}; see"
                " to that, and move it again"
            )
        return sorted(found)

    def naming(self, volume: str) -> list[str]:
        """Returns the names of the domains whose definition names a volume, LVSTORE/NAME."""
        return sorted(handle.name() for handle, _ in self.defined(volume))

    def defined(self, volume: str) -> Iterator[tuple[Any, str]]:
        """Yields the persistent domains whose definition names a volume, and that."""
        for handle in self._opened.listAllDomains(self.libvirt.VIR_CONNECT_LIST_DOMAINS_PERSISTENT):
            try:
                xml = self.inactive_xml(handle)
            except self.libvirt.libvirtError as error:
                if error.get_error_code() != self.libvirt.VIR_ERR_NO_DOMAIN:
                    raise
                continue
            if sources.devs_on(xml, volume, self.settings):
                yield handle, xml

    def _xml(self, handle: Any, flags: int) -> str:
        xml: str = handle.XMLDesc(flags)
        if NAMESPACE in xml:
            raise VolumeError(
                "that libvirt is libvirtd itself, which does not know disks of virtlun: name the"
                " gateway's socket (--connect)"
            )
        return xml
