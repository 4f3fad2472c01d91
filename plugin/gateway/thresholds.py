"""Thresholds of what volumes have allocated, as clients set them: virDomainSetBlockThreshold.

One is of a disk in one run of its domain, and goes with either. libvirt has its own in QEMU, which
outlives libvirtd; so ours are noted in a file a domain, for the gateway that comes after this one.
They are lost with the host's memory, as the running domains are.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from plugin.gateway.errors import noting
from plugin.gateway.messages import Domain

SUFFIX = ".thresholds"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Threshold:
    """One of a disk."""

    allocated: int
    """Bytes; more than these exceed it."""
    name: str
    """What the client called the disk: `sda` or `sda[1]`. The event does, too."""


@dataclass
class Run:
    """One run of a domain with thresholds."""

    dom: Domain
    """As libvirtd had it when one was set; the id tells the run from others."""
    by_dev: dict[str, Threshold] = field(default_factory=dict)
    checked: bool = True
    """Whether the domain has not been started anew unseen since."""


class Thresholds:
    """By domain (its UUID, 16 bytes) and target dev."""

    def __init__(self, folder: Path) -> None:
        """Takes over what the gateway before this one has noted in `folder`, unchecked."""
        self._folder = folder
        self.runs: dict[bytes, Run] = {}
        self.any = asyncio.Event()
        """Set while there may be some."""
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                run = _read(file)
                self.runs[run.dom.uuid] = run
                self.any.set()

    def of(self, uuid: bytes, dev: str) -> Threshold | None:
        """Returns that of a disk."""
        run = self.runs.get(uuid)
        return None if run is None else run.by_dev.get(dev)

    def set(self, dom: Domain, dev: str, threshold: Threshold) -> None:
        """Has a disk of a running domain have this one, for the one that it had.

        Raises:
            Refused: that cannot be noted; all is as it was.
        """
        run = self.runs.get(dom.uuid)
        there = run.by_dev if run is not None and run.dom.id == dom.id else {}
        changed = Run(dom, {**there, dev: threshold})
        with noting(self._file(dom.uuid)):
            self._write(changed)
        self.runs[dom.uuid] = changed
        self.any.set()

    def forget(self, uuid: bytes, dev: str) -> None:
        """A disk has none any more."""
        run = self.runs.get(uuid)
        if run is None or dev not in run.by_dev:
            return
        rest = {each: threshold for each, threshold in run.by_dev.items() if each != dev}
        if not rest:
            self.domain_stopped(uuid)
            return
        self.runs[uuid] = replace(run, by_dev=rest)
        try:
            self._write(self.runs[uuid])
        except OSError as error:
            _log.warning("the next gateway may tell of a threshold again", error=str(error))

    def domain_stopped(self, uuid: bytes) -> None:
        """The run is over, or has none any more."""
        if self.runs.pop(uuid, None) is not None:
            with suppress(OSError):
                self._file(uuid).unlink()
        if not self.runs:
            self.any.clear()

    def uncheck(self) -> None:
        """Events may have been missed: domains may have been started anew."""
        for run in self.runs.values():
            run.checked = False

    def _write(self, run: Run) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._file(run.dom.uuid)
        new = file.with_suffix(".new-thresholds")
        disks = {dev: [each.allocated, each.name] for dev, each in run.by_dev.items()}
        new.write_text(json.dumps({"name": run.dom.name, "id": run.dom.id, "disks": disks}))
        new.rename(file)

    def _file(self, uuid: bytes) -> Path:
        return self._folder / f"{uuid.hex()}{SUFFIX}"


def _read(file: Path) -> Run:
    said = json.loads(file.read_text())
    uuid = bytes.fromhex(file.name.removesuffix(SUFFIX))
    disks = {dev: Threshold(int(most), str(name)) for dev, (most, name) in said["disks"].items()}
    return Run(Domain(str(said["name"]), uuid, int(said["id"])), disks, checked=False)
