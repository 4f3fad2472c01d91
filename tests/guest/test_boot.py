"""How a VM starts on vhost-user-scsi: firmware first, then the kernel, on one connection."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.guest.conftest import BootGuest, add, add_known, add_malloc, checksum, disk
from tests.guest.emulator import Emulator, stock
from tests.guest.image import Image
from tests.support.agent import GuestError
from tests.support.qemu import Guest
from tests.support.target import Target
from tests.support.wait import serves

pytestmark = pytest.mark.vm

#: A boot sector that writes the text behind it to the first serial port, then halts.
BOOT_SECTOR_CODE = bytes.fromhex(
    "fa"  # cli
    "31c0"  # xor ax, ax
    "8ed8"  # mov ds, ax
    "be177c"  # mov si, 0x7c17: behind this code
    "baf803"  # mov dx, 0x3f8
    "fc"  # cld
    "ac"  # next: lodsb
    "84c0"  # test al, al
    "7403"  # jz halt
    "ee"  # out dx, al
    "ebf8"  # jmp next
    "f4"  # halt: hlt
    "ebfd"  # jmp halt
)


def requests(target: Target) -> int:
    """Returns how many requests the controller has taken."""
    stats = target.rpc("virtlun_vhost_get_stats", name="vm0")
    return int(stats[0]["requests"])


def test_seabios_boots_from_a_lun(target: Target, scratch: Path) -> None:
    """SeaBIOS drives the device itself: it scans 256 targets and reads LBA 0."""
    words = b"BOOTED-FROM-A-LUN\r\n\0"
    sector = (BOOT_SECTOR_CODE + words).ljust(510, b"\0") + b"\x55\xaa"
    file = target.make_file("boot.img", 1 << 20)
    with file.open("r+b") as image:
        image.write(sector)
    target.rpc("bdev_uring_create", filename=str(file), name="boot", block_size=512)
    add(target, 3, "boot")
    serial = scratch / "serial"
    command = [
        *("qemu-system-x86_64", "-machine", "q35,memory-backend=ram0", "-accel", "tcg"),
        *("-object", "memory-backend-memfd,id=ram0,size=64M,share=on", "-m", "64"),
        *("-nodefaults", "-display", "none", "-serial", f"file:{serial}"),
        *("-chardev", f"socket,id=c0,path={target.vhost_dir / 'vm0'}"),
        *("-device", "vhost-user-scsi-pci,chardev=c0,bootindex=1"),
    ]
    with (scratch / "qemu.log").open("wb") as log:
        qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        serves(
            qemu,
            lambda: b"BOOTED-FROM-A-LUN" in serial.read_bytes(),
            "SeaBIOS boots from the LUN",
            scratch / "qemu.log",
        )
    finally:
        qemu.kill()
        qemu.wait()


@pytest.mark.nightly
def test_linux_takes_over_from_seabios_and_again_after_a_reset(
    target: Target, boot: BootGuest
) -> None:
    """Each start begins with SeaBIOS's rings; Linux starts its own from zero."""
    add_malloc(target, 0, 16)
    guest = boot(extra=("-action", "reboot=reset"))
    name = disk(guest, 0)
    guest.run(f"dd if=/dev/urandom of=/dev/{name} bs=1M count=16 oflag=direct")
    written = checksum(guest, name)
    for _ in range(2):
        before = requests(target)
        boot_id = guest.run("cat /proc/sys/kernel/random/boot_id")
        guest.qmp("system_reset")
        guest.agent.wait_ready()
        assert guest.run("cat /proc/sys/kernel/random/boot_id") != boot_id
        # SeaBIOS alone asks 256 targets.
        assert requests(target) - before > 256
        assert checksum(guest, disk(guest, 0)) == written


@pytest.mark.parametrize(
    "options",
    [
        ",hotplug=off,param_change=off",
        pytest.param(",virtqueue_size=256", marks=pytest.mark.nightly),
    ],
)
def test_qemus_feature_bits_are_taken(target: Target, boot: BootGuest, options: str) -> None:
    """QEMU sends HOTPLUG and CHANGE in SET_FEATURES, or not; refused, it would exit."""
    known = add_known(target, 0, 16)
    socket = target.vhost_dir / "vm0"
    device = f"vhost-user-scsi-pci,chardev=c0{options}"
    guest = boot(none=True, extra=("-chardev", f"socket,id=c0,path={socket}", "-device", device))
    assert checksum(guest, disk(guest, 0)) == known


@pytest.mark.nightly
def test_every_virtual_cpu_has_a_queue_that_works(target: Target, boot: BootGuest) -> None:
    """QEMU makes one request queue for each vCPU unless told otherwise."""
    add_malloc(target, 0, 16)
    guest = boot(vcpus=2)
    name = disk(guest, 0)
    assert guest.run(f"ls /sys/block/{name}/mq").split() == ["0", "1"]
    guest.run("dd if=/dev/urandom of=/tmp/data bs=1M count=8")
    for cpu in (1, 2):
        guest.run(f"taskset {cpu} dd if=/tmp/data of=/dev/{name} bs=64k oflag=direct")
        guest.run(f"taskset {3 - cpu} dd if=/dev/{name} of=/tmp/back bs=64k count=128 iflag=direct")
        guest.run("cmp /tmp/data /tmp/back")


@pytest.mark.nightly
def test_the_whole_range_of_targets_is_scanned(target: Target, boot: BootGuest) -> None:
    """QEMU's configuration space says max_target 255: targets 0 and 254 are found at boot."""
    add_malloc(target, 0, 16)
    add_malloc(target, 254, 16)
    guest = boot()
    assert disk(guest, 0) and disk(guest, 254)
    luns = guest.run("sg_luns /dev/sg0")
    assert "0000000000000000" in luns


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [1, 2])
def test_a_boot_that_lost_its_timer_is_done_again_once(
    image: Image, scratch: Path, lost: int
) -> None:
    """A stand-in for QEMU's fault, which no test can bring about: Linux's words, and no more."""
    started, console = scratch / "started", scratch / "guest/console.log"
    program = scratch / "qemu"
    program.write_text(
        "#!/bin/sh\n"
        f"echo >>{started}\n"
        f'if [ $(wc -l <{started}) -gt {lost} ]; then exec qemu-system-x86_64 "$@"; fi\n'
        f'echo "rcu: rcu_preempt kthread timer wakeup didn\'t happen" >{console}\n'
        "exec sleep 60\n"
    )
    program.chmod(0o755)
    emulator = Emulator(program, stock().version)
    if lost == 1:
        with Guest(image, scratch / "guest", emulator=emulator) as guest:
            assert guest.run("echo up") == "up\n"
    else:
        with pytest.raises(GuestError, match="a timer of the guest never fired"):
            Guest(image, scratch / "guest", emulator=emulator)
    assert started.read_text() == "\n\n"


@pytest.mark.nightly
def test_a_second_vm_on_the_controller_fails_at_once_and_the_first_goes_on(
    target: Target, boot: BootGuest
) -> None:
    """QEMU does its handshake in its main loop: left without an answer, it would hang."""
    known = add_known(target, 0, 16)
    guest = boot()
    name = disk(guest, 0)
    with pytest.raises(GuestError, match="QEMU ended"):
        boot()
    # The same from a running QEMU: its monitor comes back with an error.
    backend = {
        "type": "socket",
        "data": {
            "addr": {"type": "unix", "data": {"path": str(target.vhost_dir / "vm0")}},
            "server": False,
        },
    }
    guest.qmp("chardev-add", id="second", backend=backend)
    with pytest.raises(GuestError, match="device_add"):
        guest.qmp("device_add", driver="vhost-user-scsi-pci", id="second", chardev="second")
    assert guest.qmp("query-status")["status"] == "running"
    assert checksum(guest, name) == known


@pytest.mark.nightly
def test_a_vm_outlives_its_target(target: Target, boot: BootGuest) -> None:
    """QEMU and its monitor stay alive when the target dies (7.2 cannot reconnect)."""
    add_malloc(target, 0, 16)
    guest = boot()
    disk(guest, 0)
    target.kill9()
    assert guest.qmp("query-status")["status"] == "running"
    assert guest.run("echo alive") == "alive\n"
    guest.stop()
    # The socket of the dead target is in nobody's way.
    target.start()
    assert disk(boot(), 0)
