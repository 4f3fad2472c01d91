"""`make demo-openstack`: a volume of Cinder's, in a guest that Nova's driver looks after."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.demo.openstack_steps import GIB, LVSTORE, STEPS, Story
from tests.demo.running import OUT, run
from tests.demo.telling import tell
from tests.guest.image import build
from tests.openstack import cinder_process, nova_process
from tests.support.host import Host, scratch_directory
from tests.support.qemu import accelerator


def main() -> int:
    """Runs the steps on a private host; returns the exit status."""
    return run(_tell)


def _tell(folders: list[Path]) -> None:
    with OUT.status("building the guest image"):
        image = build()
    with OUT.status("installing Nova and Cinder, once, for the demo alone"):
        nova_process.python()
        cinder_process.python()
    scratch = scratch_directory()
    folders.append(scratch)
    with OUT.status("starting a private libvirtd, the target and the gateway"):
        host = Host(scratch, keep=True)
    with host:
        with OUT.status("trying KVM"):
            accel = accelerator(image, host.scratch)
        kind = "KVM" if accel == "kvm" else "software (KVM does not work here)"
        OUT.print(f"[bold]virtlun demo[/] in {host.scratch}; the guest runs with {kind}\n")
        host.volumes.create_lvstore(LVSTORE, host.scratch / f"{LVSTORE}.img", 8 * GIB)
        story = Story(host, accel)
        with story.ends:
            tell(OUT, story, STEPS)


if __name__ == "__main__":
    sys.exit(main())
