"""What is known without asking: VmVolumes of the cluster, machines of this node, claims in use.

A change that this program made itself is put here from the server's answer; the watch tells of it
again, which is then no news.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from csi.kubevirt.vmvolume.model import VmVolume
from csi.objects import Claim, Vmi

Name = tuple[str, str]
"""Namespace and name."""
CLAIM_S = 240.0
"""So long a claim is taken for what it was while nothing tells of a change."""


class Cache:
    """The latest of each object; of the size of VmVolumes, their claims, and machines here."""

    def __init__(self) -> None:
        """Begins empty."""
        self._mutex = threading.Lock()
        self._volumes: dict[Name, VmVolume] = {}
        self._of_claim: dict[Name, set[Name]] = {}
        self._of_machine: dict[Name, set[Name]] = {}
        self._machines: dict[Name, Vmi] = {}
        self._claims: dict[Name, tuple[Claim | None, float]] = {}  # and until when, monotonic
        self._told: dict[Name, str] = {}  # the watch's last version of claims that VmVolumes name

    # VmVolumes

    def put_volume(self, volume: VmVolume) -> bool:
        """Keeps a VmVolume; whether it is news, and not what is here or older."""
        with self._mutex:
            known = self._volumes.get(volume.key)
            if known and known.uid != volume.uid:  # made anew
                self._forget(known)
                known = None
            return self._keep(known, _timed(known, volume))

    def refresh_volume(self, volume: VmVolume) -> VmVolume:
        """Keeps what the server answered to a change, unless the watch told that it is gone.

        Returns it with the time of its deletion as it is known here.
        """
        with self._mutex:
            known = self._volumes.get(volume.key)
            if known is None or known.uid != volume.uid:
                return volume
            volume = _timed(known, volume)
            self._keep(known, volume)
            return volume

    def _keep(self, known: VmVolume | None, volume: VmVolume) -> bool:
        if known and not _later(volume.resource_version, known.resource_version):
            return False
        if known and (known.claim_key, known.vm_key) != (volume.claim_key, volume.vm_key):
            self._forget(known)
        self._volumes[volume.key] = volume
        self._of_claim.setdefault(volume.claim_key, set()).add(volume.key)
        self._of_machine.setdefault(volume.vm_key, set()).add(volume.key)
        return True

    def drop_volume(self, key: Name) -> VmVolume | None:
        """Forgets a VmVolume and returns what was known of it."""
        with self._mutex:
            known = self._volumes.pop(key, None)
            if known:
                self._forget(known)
            return known

    def volume(self, key: Name) -> VmVolume | None:
        """Returns a VmVolume."""
        with self._mutex:
            return self._volumes.get(key)

    def volumes(self) -> list[VmVolume]:
        """Returns all of them."""
        with self._mutex:
            return list(self._volumes.values())

    def of_claim(self, claim: Name) -> list[VmVolume]:
        """Returns those that name a claim."""
        with self._mutex:
            return [self._volumes[key] for key in sorted(self._of_claim.get(claim, ()))]

    def of_machine(self, machine: Name) -> list[VmVolume]:
        """Returns those that name a machine."""
        with self._mutex:
            return [self._volumes[key] for key in sorted(self._of_machine.get(machine, ()))]

    def _forget(self, volume: VmVolume) -> None:
        for index, name in (
            (self._of_claim, volume.claim_key),
            (self._of_machine, volume.vm_key),
        ):
            keys = index.get(name, set())
            keys.discard(volume.key)
            if not keys:
                index.pop(name, None)
        if volume.claim_key not in self._of_claim:
            self._claims.pop(volume.claim_key, None)
            self._told.pop(volume.claim_key, None)

    # Claims that VmVolumes name

    def claim(self, name: Name, ask: Callable[[], Claim | None]) -> Claim | None:
        """Returns a claim: what `ask` returned since its last change, else what it returns now.

        After CLAIM_S it is asked for again, should a change have been missed.
        """
        with self._mutex:
            known, end = self._claims.get(name, (None, 0.0))
            if time.monotonic() < end:
                return known
        found = ask()
        self.keep_claim(name, found)
        return found

    def keep_claim(self, name: Name, claim: Claim | None) -> None:
        """Keeps what the server answered, unless the watch told of a later version meanwhile."""
        with self._mutex:
            told = self._told.get(name)
            old = told is not None and (claim is None or _later(told, claim.resource_version))
            if name in self._of_claim and not old:
                self._claims[name] = claim, time.monotonic() + CLAIM_S
            else:
                self._claims.pop(name, None)

    def drop_claim(self, name: Name, version: str | None = None) -> bool:
        """Forgets a claim, which changed; False if what is here is as new as `version`: no news.

        `version` is the watch's word of it, also of its end; None: ask anew in any case.
        """
        with self._mutex:
            if version and name in self._of_claim:
                self._told[name] = version
            known, _ = self._claims.get(name, (None, 0.0))
            if known is not None and version and not _later(version, known.resource_version):
                return False
            self._claims.pop(name, None)
            return True

    # Machines of this node

    def put_machine(self, machine: Vmi) -> bool:
        """Keeps a machine; whether anything changed that a VmVolume depends on."""
        key = machine.namespace, machine.name
        with self._mutex:
            known = self._machines.get(key)
            self._machines[key] = machine
        return known is None or _matters(known) != _matters(machine)

    def drop_machine(self, key: Name) -> None:
        """Forgets a machine."""
        with self._mutex:
            self._machines.pop(key, None)

    def machine(self, key: Name) -> Vmi | None:
        """Returns a machine of this node."""
        with self._mutex:
            return self._machines.get(key)


def _later(one: str, other: str) -> bool:
    """Whether one version of an object is later: they are numbers that grow (KEP-5504)."""
    try:
        return int(one) > int(other)
    except ValueError:
        return one != other


def _timed(known: VmVolume | None, volume: VmVolume) -> VmVolume:
    """Returns it with the time at which its deletion was seen here, where that was.

    The server's time may be ahead of this node's or behind it, and a guest has the disk in use.
    """
    if known is None or volume.deleted_at is None:
        return volume
    seen = time.time() if known.deleted_at is None else known.deleted_at
    return replace(volume, deleted_at=seen)


def _matters(machine: Vmi) -> tuple[object, ...]:
    spec = machine.object.get("spec") or {}
    return (
        machine.uid,
        machine.phase,
        machine.node,
        dict(machine.pods),
        machine.deleting,
        machine.migrating,
        spec.get("volumes"),
    )
