"""A libvirt domain that boots the test guest."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.guest.image import Image
from tests.support.qemu import CMDLINE

TEMPLATE = """\
<domain type='{kind}'>
  <name>{name}</name>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{cmdline}</cmdline>
  </os>
  <features><acpi/></features>
  {cpu}
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>{emulator}</emulator>{devices}
    <serial type='pty'><log file='{scratch}/{name}-console.log' append='on'/><target port='0'/></serial>
    <serial type='unix'><source mode='bind' path='{scratch}/{name}-agent'/><target port='1'/></serial>
    <console type='pty'><target type='serial' port='0'/></console>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def publish(image: Image, scratch: Path) -> Image:
    """Copies the image to where the user libvirt-qemu can read it; returns the copy."""
    folder = scratch / "image"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    copies = []
    for path in (image.kernel, image.initrd):
        copy = folder / path.name
        if not copy.exists():
            shutil.copy(path, copy)
        copy.chmod(0o644)
        copies.append(copy)
    return Image(*copies)


def domain_xml(
    name: str,
    image: Image,
    scratch: Path,
    *,
    accel: str = "tcg",
    vcpus: int = 1,
    memory_mib: int = 256,
    devices: str = "",
    emulator: Path = Path("/usr/bin/qemu-system-x86_64"),
) -> str:
    """Returns the XML of a domain named `name` as a person would write it: nothing of ours in it.

    Its console goes to `scratch`/`name`-console.log, its agent listens on `scratch`/`name`-agent.
    """
    return TEMPLATE.format(
        kind="kvm" if accel == "kvm" else "qemu",
        name=name,
        memory_mib=memory_mib,
        vcpus=vcpus,
        kernel=image.kernel,
        initrd=image.initrd,
        cmdline=CMDLINE,
        cpu="<cpu mode='host-passthrough'/>"
        if accel == "kvm"
        else "<cpu mode='custom' match='exact'><model>qemu64</model></cpu>",
        emulator=emulator,
        devices=f"\n    {devices}" if devices else "",
        scratch=scratch,
    )
