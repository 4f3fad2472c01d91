"""The steps of the demo of OpenStack, in order, as those of the main job.

Cinder's API, scheduler and volume service and Nova's libvirt driver are the releases of PyPI. What
Nova's API and compute service would do between the two the demo does, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from tests.openstack.cinder_process import Cinder, connector
from tests.openstack.nova_process import Nova
from tests.support.agent import Agent
from tests.support.host import Host

NAME = "instance-00000001"
LVSTORE = "cinder0"
GIB = 1 << 30
Step = Callable[["Story"], str]


class Story:
    """What the steps share; each part is there from the step on that starts it."""

    cinder: Cinder
    nova: Nova
    guest: Agent
    server: str
    """The instance's UUID."""
    volume: str
    snapshot: str
    clone: str
    attachment: str
    connection: dict[str, Any]
    """What Cinder has told of the attachment, as Nova has it."""

    def __init__(self, host: Host, accel: str) -> None:
        """Begins with a host that has nothing but its lvstore."""
        self.host, self.accel = host, accel
        self.ends = ExitStack()


def start_cinder(story: Story) -> str:
    """cinder-api, cinder-scheduler, cinder-volume   (enabled_backends: VirtlunDriver)"""
    begun = time.monotonic()
    (folder := story.host.scratch / "cinder").mkdir()
    cinder = Cinder(folder, story.host.paths.rpc_socket, lvstore=LVSTORE)
    story.cinder = story.ends.enter_context(closing(cinder))
    services = story.cinder.get("os-services")["services"]
    shown = [f"{each['binary']} on {each['host']}: {each['state']}" for each in services]
    return "\n".join((*shown, f"after {time.monotonic() - begun:.1f} s"))


def boot(story: Story) -> str:
    """an instance boots   (libvirt_type and connection_uri as examples/openstack/nova.conf)"""
    begun = time.monotonic()
    story.host.define(NAME, accel=story.accel)
    story.host.virsh("start", NAME)
    story.server = story.host.virsh("domuuid", NAME)
    story.guest = story.ends.enter_context(closing(story.host.agent(NAME)))
    story.guest.run("true")
    story.nova = story.ends.enter_context(closing(Nova(story.host, story.server)))
    return f"{NAME} is up after {time.monotonic() - begun:.1f} s"


def create(story: Story) -> str:
    """openstack volume create --size 1 data"""
    begun = time.monotonic()
    story.volume = story.cinder.volume()
    took = time.monotonic() - begun
    (there,) = story.host.volumes.volumes(LVSTORE)
    return f"volume {story.volume} after {took:.1f} s: the lvol {LVSTORE}/{there.name}"


def attach(story: Story) -> str:
    """openstack server add volume   (Nova's driver has the connection from Cinder)"""
    begun = time.monotonic()
    body = {"attachment": {"volume_uuid": story.volume, "instance_uuid": story.server}}
    story.attachment = story.cinder.post("attachments", body)["attachment"]["id"]
    told = {"attachment": {"connector": connector(mountpoint="/dev/sda")}}
    answer = story.cinder.call("PUT", f"attachments/{story.attachment}", told)
    data = answer["attachment"]["connection_info"]
    kind = data["driver_volume_type"]
    story.connection = {"driver_volume_type": kind, "serial": story.volume, "data": data}
    given = time.monotonic()
    story.nova.does("attach", story.connection, "sda", "scsi")
    attached = time.monotonic()
    story.cinder.post(f"attachments/{story.attachment}/action", {"os-complete": {}})
    story.guest.wait_for("[ -b /dev/sda ]")
    seen = time.monotonic()
    return (
        f"Cinder {given - begun:.1f} s, Nova's driver {attached - given:.1f} s, the guest had it"
        f" after {seen - begun:.1f} s\n{story.guest.run('lsblk -o NAME,SIZE,VENDOR,MODEL').strip()}"
    )


def snapshot(story: Story) -> str:
    """openstack volume snapshot create, while the guest writes   (first, then second)"""
    story.guest.run("echo first > /dev/sda && sync")
    begun = time.monotonic()
    story.snapshot = story.cinder.snapshot(story.volume)
    took = time.monotonic() - begun
    story.guest.run("echo second > /dev/sda && sync")
    return f"snapshot {story.snapshot} after {took:.1f} s"


def extend(story: Story) -> str:
    """openstack volume set --size 2   (in use: Cinder grows it, Nova's driver is told)"""
    begun = time.monotonic()
    story.cinder.post(f"volumes/{story.volume}/action", {"os-extend": {"new_size": 2}})
    story.cinder.wait(f"volumes/{story.volume}", "in-use")
    grown = time.monotonic()
    story.nova.does("extend", story.connection, 2 * GIB)
    story.guest.wait_for(f"[ $(cat /sys/block/sda/size) = {2 * GIB // 512} ]")
    seen = time.monotonic()
    held = story.guest.run("head -n 1 /dev/sda").strip()
    assert held == "second"
    return f"Cinder {grown - begun:.1f} s, the guest had 2 GiB after {seen - begun:.1f} s"


def detach(story: Story) -> str:
    """openstack server remove volume"""
    begun = time.monotonic()
    story.nova.does("detach", story.connection, "sda")
    done = time.monotonic()
    story.guest.wait_for("[ ! -e /sys/block/sda ]")
    story.cinder.call("DELETE", f"attachments/{story.attachment}")
    story.cinder.wait(f"volumes/{story.volume}")
    return f"Nova's driver {done - begun:.1f} s; the volume is available"


def clone(story: Story) -> str:
    """openstack volume create --snapshot, and attach it   (it has what was there then)"""
    begun = time.monotonic()
    story.clone = story.cinder.volume(snapshot_id=story.snapshot)
    took = time.monotonic() - begun
    kept, story.volume = story.volume, story.clone
    attach(story)
    held = story.guest.run("head -n 1 /dev/sda").strip()
    assert held == "first"
    detach(story)
    story.volume = kept
    return f"volume {story.clone} after {took:.1f} s; the guest reads: {held}"


def delete(story: Story) -> str:
    """openstack volume snapshot delete, volume delete"""
    story.cinder.delete(f"snapshots/{story.snapshot}")
    for each in (story.volume, story.clone):
        story.cinder.delete(f"volumes/{each}")
    assert story.host.volumes.volumes(LVSTORE) == []
    return f"nothing is left in {LVSTORE}"


STEPS: tuple[Step, ...] = (
    start_cinder,
    boot,
    create,
    attach,
    snapshot,
    extend,
    detach,
    clone,
    delete,
)
