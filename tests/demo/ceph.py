"""`make demo-ceph`: a VM on a pool of a real Ceph moves, grows, and survives its host."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from tests.demo.ceph_steps import STEPS, WATCH_TIMEOUT_S, Story
from tests.demo.running import OUT, run
from tests.demo.telling import tell
from tests.guest.image import build
from tests.support.ceph import PACKAGES, cluster, lacks
from tests.support.ceph_pair import hosts_over
from tests.support.qemu import accelerator


def main() -> int:
    """Runs the steps on two private hosts and a private cluster; returns the exit status."""
    if missing := lacks():
        OUT.print(
            f"the demo needs Ceph, of which {', '.join(missing)} is not installed: "
            f"apt-get install --no-install-recommends {' '.join(PACKAGES)}",
            style="red",
        )
        return 1
    return run(_tell)


def _tell(folders: list[Path]) -> None:
    with OUT.status("building the guest image"):
        image = build()
    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        with OUT.status("making a cluster of Ceph"):
            ceph = stack.enter_context(cluster(watch_timeout_s=WATCH_TIMEOUT_S))
        OUT.print(
            f"[bold]virtlun demo[/]: a cluster of Ceph in {ceph.directory}, a monitor and an OSD,"
            f" was there after {time.monotonic() - begun:.1f} s"
        )
        begun = time.monotonic()
        with OUT.status("starting two hosts: a libvirtd, a target and a gateway each"):
            hosts = stack.enter_context(hosts_over(ceph))
        folders += [hosts.first.scratch, hosts.second.scratch]
        OUT.print(
            f"two hosts in {folders[0]} and {folders[1]}, with a libvirtd, a target and a gateway"
            f" each, after {time.monotonic() - begun:.1f} s"
        )
        with OUT.status("trying KVM"):
            accel = accelerator(image, hosts.first.scratch)
        kind = "KVM" if accel == "kvm" else "software (KVM does not work here)"
        OUT.print(f"the guest runs with {kind}\n")
        story = Story(hosts, accel=accel)
        try:
            tell(OUT, story, STEPS)
        finally:
            if story.agent is not None:
                story.agent.close()


if __name__ == "__main__":
    sys.exit(main())
