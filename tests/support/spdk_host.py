"""A host whose target is SPDK's, where $SPDK_DIR names the folder in which it was built.

It takes guests whose memory is in huge pages alone, of which the host needs 400 (2 MiB each), and
polls: one processor is busy as long as the host is there.
"""

from __future__ import annotations

import grp
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.bench.subjects import SPDK_PROGRAM, spdk_command, wait_for, wait_until_ready
from tests.support.domain import domain_xml
from tests.support.host import Host
from tests.support.libvirtd import virsh

FOLDER = os.environ.get("SPDK_DIR")
MEMORY_MIB = 512
"""The target's own."""
GUEST_MIB = 128


def lacks() -> str | None:
    """Returns why there can be no such host here; None: there can."""
    if not FOLDER:
        return "SPDK_DIR does not name the folder of a built SPDK"
    program = Path(FOLDER) / SPDK_PROGRAM
    if not program.exists():
        return f"{program} is not built"
    needed = (MEMORY_MIB + 2 * GUEST_MIB) // 2
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    return f"{free} huge pages are free, of {needed}" if free < needed else None


class SpdkHost(Host):
    """A host as `Host`, with an lvstore `lvs0` of SPDK's."""

    _spdk: subprocess.Popen[bytes] | None = None

    def start_target(self) -> int:
        """Starts SPDK's target; QEMU's user may open its sockets by their group."""
        vhost, socket, log = self.paths.vhost_dir, self.paths.rpc_socket, self.paths.log
        vhost.mkdir(exist_ok=True)
        os.chown(vhost, 0, grp.getgrnam("kvm").gr_gid)
        vhost.chmod(0o2771)
        with log.open("ab") as out:
            process = subprocess.Popen(
                spdk_command(Path(FOLDER or ""), socket, vhost, MEMORY_MIB, 0),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                umask=0o007,
            )
        self._spdk = process
        wait_for(socket, process, log)
        wait_until_ready(self.client)
        return process.pid

    def stop_target(self) -> None:
        """Ends it."""
        if self._spdk is not None:
            self._spdk.terminate()
            try:
                self._spdk.wait(timeout=60)
            finally:
                self._spdk.kill()
                self._spdk = None

    def define(self, name: str, *, uri: str = "", **options: Any) -> None:
        """Defines a domain as `Host` does, with its memory in huge pages."""
        xml = domain_xml(name, self.image, self.scratch, memory_mib=GUEST_MIB, **options)
        path = self.scratch / f"{name}.xml"
        huge = "<memoryBacking><hugepages/></memoryBacking>"
        path.write_text(xml.replace("<vcpu>", f"{huge}<vcpu>"))
        virsh(uri or self.uri, "define", str(path))
