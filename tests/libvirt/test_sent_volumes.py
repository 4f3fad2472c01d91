"""A guest goes to another host with its volume, which is sent while it runs, as the page says."""

from __future__ import annotations

import shlex
import subprocess
import time

import pytest

from tests.support.host import Host

pytestmark = [pytest.mark.root, pytest.mark.vm]

NAME = "goes"
IDENTITY = "cat /sys/block/sda/device/vpd_pg80 /sys/block/sda/device/vpd_pg83 | od -c"
"""What the names in /dev/disk/by-id are made of."""
MIB = 1 << 20
DISK = (
    "<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/db'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)


def volume(host: Host, *words: str) -> str:
    """Returns a `virtlun volume` command for a shell, where the host's mounts are seen."""
    command = (host.program("virtlun"), "--socket", str(host.paths.rpc_socket), "volume", *words)
    return shlex.join(host.libvirtd.command(*command))


def run(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)


@pytest.mark.nightly
def test_a_guest_goes_to_another_host_with_its_volume() -> None:
    ids = [f"c0ffee00-0000-4000-8000-00000000001{n}" for n in (1, 2)]
    with Host(keep=True, host_uuid=ids[0]) as here, Host(keep=True, host_uuid=ids[1]) as there:
        made = here.volumes.create("lvs0/db", 64 * MIB, thin=True)
        here.define(NAME, devices=DISK)
        here.virsh("start", NAME)
        agent = here.agent(NAME)
        agent.wait_for("[ -b /dev/sda ]")
        names = agent.run(IDENTITY)
        for step, options in (("one", []), ("two", ["--since", "@one"])):
            agent.run(
                f"(echo {step}; head -c 3000000 /dev/urandom) > /tmp/{step};"
                f" dd if=/tmp/{step} of=/dev/sda bs=1M seek={len(step) * len(options)} conv=fsync"
            )
            run(volume(here, "snapshot", "lvs0/db", step))
            new = [] if options else ["--thin", "--uuid", made.uuid]
            sent = volume(here, "send", f"lvs0/db@{step}", *options)
            run(f"{sent} | {volume(there, 'receive', 'lvs0/db', *new)}")
        agent.run("echo last | dd of=/dev/sda bs=512 seek=40000 conv=fsync,sync")
        agent.close()
        begun = time.monotonic()
        here.virsh("destroy", NAME)
        stopped = time.monotonic()
        run(volume(here, "snapshot", "lvs0/db", "three"))
        sent = volume(here, "send", "lvs0/db@three", "--since", "@two")
        run(f"{sent} | {volume(there, 'receive', 'lvs0/db')}")
        pause = time.monotonic() - begun
        print(f"stopped in {stopped - begun:.2f} s, the rest sent in {pause + begun - stopped:.2f}")
        sums = []
        for host in (here, there):
            path = host.volumes.export(made.uuid, read_only=True)
            command = host.libvirtd.command("sha256sum", str(path))
            sums.append(subprocess.check_output(command, text=True).split()[0])
            host.volumes.end_export(made.uuid)
        assert sums[0] == sums[1]
        xml = here.virsh("dumpxml", "--inactive", NAME).replace(
            str(here.scratch), str(there.scratch)
        )
        path = there.scratch / "sent.xml"
        path.write_text(xml)
        begun = time.monotonic()
        there.virsh("define", str(path))
        there.virsh("start", NAME)
        pause += time.monotonic() - begun
        print(f"defined and started in {time.monotonic() - begun:.2f} s; pause {pause:.2f} s")
        agent = there.agent(NAME)
        agent.wait_for("[ -b /dev/sda ]")
        assert agent.run(IDENTITY) == names
        said = agent.run("dd if=/dev/sda bs=512 skip=40000 count=1 2>/dev/null | head -n 1")
        assert said == "last\n"
        agent.close()
