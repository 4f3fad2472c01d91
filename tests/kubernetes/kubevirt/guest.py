"""What tests ask the guest of a machine: its disks, as its kernel has them."""

from __future__ import annotations

from pathlib import Path

from tests.kubernetes.kubevirt.claims import MIB
from tests.support.agent import Agent

OURS = "VIRTLUN"


def vendor(agent: Agent, disk: str) -> str:
    """Returns the vendor that the guest read of a SCSI disk."""
    return agent.run(f"cat /sys/block/{disk}/device/vendor").strip()


def size(agent: Agent, disk: str) -> int:
    """Returns the size of a disk as the guest's kernel has it, MiB."""
    return int(agent.run(f"cat /sys/block/{disk}/size")) * 512 // MIB


def block_sizes(agent: Agent, disk: str) -> tuple[int, int]:
    """Returns bytes of a logical and a physical block of a disk, as the guest's kernel has them."""
    words = "logical_block_size physical_block_size"
    logical, physical = agent.run(f"cd /sys/block/{disk}/queue; cat {words}").split()
    return int(logical), int(physical)


def wait_size(agent: Agent, disk: str, mib: int) -> None:
    """Waits until the guest has noticed a disk's size; nobody tells it to look."""
    agent.wait_for(f"grep -x {mib * MIB // 512} /sys/block/{disk}/size")


def disk_at(agent: Agent, target: int) -> str:
    """Returns the guest's name of the disk at a target of our controller, once it is there."""
    found = agent.wait_for(f"ls -d /sys/bus/scsi/devices/*:0:{target}:0/block/*").split()
    (name,) = [Path(path).name for path in found if vendor(agent, Path(path).name) == OURS]
    return name


def write(agent: Agent, disk: str, mib: int = 4) -> str:
    """Writes random data at the end of a disk, past the page cache; returns its checksum."""
    at = size(agent, disk) - mib
    agent.run(f"dd if=/dev/urandom of=/tmp/data bs=1M count={mib} 2>/dev/null")
    agent.run(f"dd if=/tmp/data of=/dev/{disk} bs=1M seek={at} oflag=direct")
    return agent.run("md5sum < /tmp/data").split()[0]


def read(agent: Agent, disk: str, mib: int = 4) -> str:
    """Returns the checksum of what is at the end of a disk, read past the page cache."""
    at = size(agent, disk) - mib
    command = f"dd if=/dev/{disk} bs=1M skip={at} iflag=direct 2>/dev/null | md5sum"
    return agent.run(command).split()[0]
