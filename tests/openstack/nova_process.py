"""Nova's libvirt driver as a process, by the release of PyPI in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.openstack.environments import environment
from tests.support.cache import ROOT
from tests.support.host import Host

FOLDER = Path(__file__).parent
PROPERTIES = {
    "hw_disk_bus": "scsi",
    "hw_scsi_model": "virtio-scsi",
    "hw_qemu_guest_agent": "yes",
}


def python() -> Path:
    """Returns the Python that has Nova."""
    return environment("nova", FOLDER / "requirements.lock")


class Nova:
    """The driver's process."""

    def __init__(
        self,
        host: Host,
        uuid: str,
        *,
        example: str = "nova.conf",
        here: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Starts it for the domain that has `uuid`, or will have it.

        `example` is its configuration, of which `here` says what it is on this host.
        """
        text = (ROOT / "examples/openstack" / example).read_text()
        for word, its in here.items():
            assert word in text
            text = text.replace(word, its)
        text = text.replace("/run/virtlun/libvirt-sock", str(host.gateway_socket))
        state = host.scratch / "nova"
        (state / "instances").mkdir(parents=True, exist_ok=True)
        path = host.scratch / "nova.conf"
        path.write_text(
            text.replace("virt_type = kvm", "virt_type = qemu")
            + f"[DEFAULT]\nstate_path = {state}\n[oslo_concurrency]\nlock_path = {state}\n"
        )
        program = (python(), "-P", FOLDER / "nova_driver.py")
        self._process = subprocess.Popen(
            [*program, path, uuid, json.dumps(PROPERTIES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(host.scratch / "nova.err").open("wb"),
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __call__(self, call: str, *words: object) -> dict[str, Any]:
        """Returns what became of a call of the driver."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, "words": words}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def does(self, call: str, *words: object) -> list[str]:
        """Has the driver do what is to work; returns the statuses that Cinder was told."""
        answer = self(call, *words)
        assert answer["raised"] is None, answer
        statuses: list[str] = answer["cinder"]
        return statuses

    def made(self, call: str, *words: object) -> Any:
        """Has the driver do what is to work; returns what it returned."""
        answer = self(call, *words)
        assert answer["raised"] is None, answer
        return answer["made"]

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
