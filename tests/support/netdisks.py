"""A host whose gateway has disks over the network served, and one running guest on it."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import pytest

from pydataplane.domain.names import NETWORK_NAMESPACE
from tests.support.host import Host
from tests.support.libvirtd import VirshError

NAME = "cloud-vm"
MIB = 1 << 20


def is_small_file(path: Path) -> bool:
    """Whether it is a file, and can be read as a whole."""
    return path.is_file() and path.stat().st_size < 64 * MIB


class NetDisks:
    """What is done to the guest NAME of a host, and with libvirt's secrets there."""

    def __init__(self, host: Host) -> None:
        """Works on `host`."""
        self.host = host

    def secret_of(self, usage: str, base64: str, private: str = "no", uuid: str = "") -> str:
        """Makes a secret with that <usage>, as a cloud's installer does; returns its UUID.

        It is a new one if it is not given.
        """
        uuid, path = uuid or str(uuid4()), self.host.scratch / "secret.xml"
        path.write_text(
            f"<secret ephemeral='no' private='{private}'><uuid>{uuid}</uuid>{usage}</secret>"
        )
        self.host.virsh("secret-define", str(path))
        self.host.virsh("secret-set-value", uuid, "--base64", base64)
        return uuid

    def attach(self, xml: str, *words: str) -> None:
        """Attaches a disk to the running guest."""
        self._device("attach-device", xml, *words)

    def detach(self, xml: str, *words: str) -> None:
        """Detaches it."""
        self._device("detach-device", xml, *words)

    def serve(self, protocols: str | None, *words: str, name: str = NAME) -> None:
        """Says in a domain's metadata which of its disks are served; None: nothing any more."""
        said = ["--remove"] if protocols is None else ["--set", f"<network serve='{protocols}'/>"]
        key = ["--key", "virtlun"] if protocols is not None else []
        self.host.virsh("metadata", name, NETWORK_NAMESPACE, *key, *said, *words)

    def theirs(self, protocol: str, *words: str, name: str = NAME) -> int:
        """Returns how many disks over the network libvirtd has of its own in a domain."""
        shown = self.host.virsh_direct("dumpxml", name, *words)
        return shown[shown.index("<devices>") :].count(f"<source protocol='{protocol}'")

    def refusal(self, xml: str) -> str:
        """Returns why a disk cannot be attached."""
        with pytest.raises(VirshError) as refused:
            self.attach(xml)
        return str(refused.value)

    def _device(self, what: str, xml: str, *words: str) -> None:
        path = self.host.scratch / "device.xml"
        path.write_text(xml)
        self.host.virsh(what, NAME, str(path), "--live", *words)

    @property
    def images(self) -> list[str]:
        """What the target has open of other hosts."""
        found = self.host.client.call("bdev_get_bdevs")
        kinds = [each["driver_specific"] for each in found]
        of = {"rbd": "rbd_name", "nbd": "uri", "iscsi": "url"}
        return [
            name
            for kind, field in of.items()
            for name in sorted(each[kind][field] for each in kinds if kind in each)
        ]

    def places_of(self, secret: str) -> list[Path]:
        """Returns the files and command lines of the host that a secret is in; no document is."""
        scratch, word = self.host.scratch, secret.encode()
        files = [Path(folder) / name for folder, _, names in os.walk(scratch) for name in names]
        # libvirtd's own store of secrets, and what this test wrote.
        files = [path for path in files if "secrets" not in path.parts]
        files += list(Path("/proc").glob("[0-9]*/cmdline"))
        found = []
        for path in files:
            try:
                if is_small_file(path) and word in path.read_bytes():
                    found.append(path)
            except OSError:  # a process that has ended, or a file of one
                continue
        shown = self.host.virsh_direct("dumpxml", NAME, "--security-info")
        assert secret not in shown
        return found
