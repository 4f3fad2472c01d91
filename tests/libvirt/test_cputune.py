"""A domain whose vCPUs are bound is served by the reactors near them. Real libvirtd and QEMU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")

DOMAIN = """\
<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>
<vcpu cpuset='{cpuset}'>2</vcpu>
<cputune><vcpupin vcpu='0' cpuset='{cpuset}'/></cputune>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices>
<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/a'/>
<target dev='sda' bus='scsi'/></disk>
<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/b'/>
<target dev='vdb' bus='virtio'/></disk>
</devices></domain>"""


@pytest.fixture(scope="module")
def two_reactors(host: Host) -> Iterator[Host]:
    """A host whose target has two reactors."""
    for name in "abc":
        host.volumes.create(f"lvs0/{name}", 8 << 20, thin=True)
    host.stop_target()
    host.target_options += ["--cpumask", "[0,1]"]
    host.start_target()
    yield host
    for name in "abc":
        host.volumes.delete(f"lvs0/{name}")


def masks(host: Host) -> dict[str, str]:
    """Returns the CPUs of the reactors that serve each controller."""
    return {each["ctrlr"]: each["cpumask"] for each in host.client.call("vhost_get_controllers")}


@pytest.mark.nightly
@pytest.mark.parametrize("through", ["gateway", "hook"])
@pytest.mark.parametrize(
    ("cpuset", "served"), [("0", "0x2"), ("1", "0x1"), ("0-1", "0x3")], ids=["0", "1", "both"]
)
def test_its_controllers_run_beside_its_vcpus(
    two_reactors: Host, through: str, cpuset: str, served: str
) -> None:
    host = two_reactors
    if SIBLINGS.read_text().strip() != "0":
        served = "0x3"  # both are one core here: none is beside it
    name = f"bound-{through}"
    path = host.scratch / f"{name}.xml"
    path.write_text(DOMAIN.format(name=name, cpuset=cpuset))
    host.virsh("define", str(path))
    try:
        # A start behind the gateway's back is the hook's.
        (host.virsh if through == "gateway" else host.virsh_direct)("start", name)
        disk = (
            "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/c'/>"
            "<target dev='vdc' bus='virtio'/></disk>"
        )
        path.write_text(disk)
        host.virsh("attach-device", name, str(path), "--live")
        assert list(masks(host).values()) == [served] * 3
    finally:
        host.virsh("destroy", name, check=False)
        host.virsh("undefine", name, check=False)
