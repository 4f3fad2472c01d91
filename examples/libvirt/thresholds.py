#!/usr/bin/env python3
"""Says each time that thin volumes of a running domain have taken some more of their lvstore.

    thresholds.py URI DOMAIN STEP

STEP is in MiB. What is to happen then, such as `virtlun lvstore resize`, goes into `told`. Needs
libvirt-python (Debian's python3-libvirt).
"""

import sys

import libvirt


def watch(domain, dev, step):
    """Asks to be told when a disk has `step` bytes more than now; an event is sent once."""
    _, allocated, _ = domain.blockInfo(dev)
    try:
        domain.setBlockThreshold(dev, allocated + step)
    except libvirt.libvirtError as error:  # a thick volume, or no volume at all
        print(error, flush=True)
    else:
        print(f"{dev} has {allocated} bytes", flush=True)


def told(_connection, domain, dev, path, threshold, excess, step):
    """Is called with each event."""
    print(f"{dev} ({path}) has {threshold + excess} bytes", flush=True)
    watch(domain, dev, step)


def main(uri, name, mib):
    """Goes on until the connection ends."""
    step = int(mib) << 20
    libvirt.virEventRegisterDefaultImpl()
    connection = libvirt.open(uri)
    domain = connection.lookupByName(name)
    # First: what is exceeded at once is told at once.
    connection.domainEventRegisterAny(
        domain, libvirt.VIR_DOMAIN_EVENT_ID_BLOCK_THRESHOLD, told, step
    )
    ((_, disks),) = connection.domainListGetStats([domain], libvirt.VIR_DOMAIN_STATS_BLOCK)
    for number in range(disks["block.count"]):
        watch(domain, disks[f"block.{number}.name"], step)
    while connection.isAlive():
        libvirt.virEventRunDefaultImpl()


if __name__ == "__main__":
    main(*sys.argv[1:])
