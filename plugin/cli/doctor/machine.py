"""The machine: who runs this, KVM, io_uring, memory, and what pods' block devices are made of."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from plugin.cli.doctor.finding import Finding
from plugin.cli.doctor.libvirt import EMULATOR

KVM_PROBE_S = 5.0
FACE_DEVICES = (Path("/dev/fuse"), Path("/dev/loop-control"))


def user() -> Finding:
    """Whether all can be looked at."""
    if os.geteuid() == 0:
        return Finding("user", "ok", "root")
    return Finding(
        "user", "warning", "not root: some of what follows cannot be looked at", "run it as root"
    )


def kvm() -> Finding:
    """Whether a guest runs with KVM."""
    what = "KVM"
    if not Path("/dev/kvm").exists():
        return Finding(
            what,
            "warning",
            "no /dev/kvm: VMs run slowly, in software",
            "load kvm_intel or kvm_amd, and allow nested virtualisation if this is a VM",
        )
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Finding(
            what, "warning", "/dev/kvm is not for this user", "add the user to the group kvm"
        )
    if _kvm_runs_code():
        return Finding(what, "ok", "a guest ran with it")
    return Finding(
        what,
        "warning",
        "/dev/kvm opens, but a guest does not run with it",
        "use <domain type='qemu'> on this machine, or ask its provider for nested virtualisation",
    )


def _kvm_runs_code() -> bool:
    """Boots a sector that writes to QEMU's exit port; KVM works only if that write arrives."""
    sector = bytes.fromhex("baf400b010eefaf4ebfd").ljust(510, b"\0") + b"\x55\xaa"
    with tempfile.NamedTemporaryFile() as disk:
        disk.write(sector)
        disk.flush()
        try:
            done = subprocess.run(
                [
                    *(EMULATOR, "-accel", "kvm", "-cpu", "host", "-machine", "pc", "-m", "16"),
                    *("-nodefaults", "-display", "none", "-no-reboot"),
                    *("-device", "isa-debug-exit,iobase=0xf4,iosize=1"),
                    *("-drive", f"file={disk.name},format=raw,if=ide"),
                ],
                capture_output=True,
                timeout=KVM_PROBE_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return done.returncode == (0x10 << 1 | 1)


def io_uring() -> Finding:
    """Whether the target may use io_uring."""
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    disabled = setting.read_text().strip() if setting.exists() else "0"
    if disabled == "0":
        return Finding("io_uring", "ok", "allowed for everybody")
    if disabled == "1":
        return Finding(
            "io_uring",
            "warning",
            "allowed for root and one group only",
            "run the target as root or as a member of sysctl kernel.io_uring_group",
        )
    return Finding(
        "io_uring", "failed", "switched off", "set sysctl kernel.io_uring_disabled to 0 or 1"
    )


def shared_memory() -> Finding:
    """Whether a guest can have memory that the target shares."""
    try:
        descriptor = os.memfd_create("virtlun-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Finding("shared memory", "failed", f"no memfd: {error.strerror}")
    os.close(descriptor)
    return Finding("shared memory", "ok", "memfd works")


def huge_pages() -> Finding:
    """How many huge pages are reserved and free."""
    text = Path("/proc/meminfo").read_text()
    total = int((re.search(r"HugePages_Total:\s+(\d+)", text) or ["", "0"])[1])
    free = int((re.search(r"HugePages_Free:\s+(\d+)", text) or ["", "0"])[1])
    if total == 0:
        return Finding(
            "huge pages",
            "ok",
            "none reserved: not needed, though guests with them do more I/O",
        )
    return Finding("huge pages", "ok", f"{free} of {total} free")


def pods_block_devices() -> Finding:
    """Whether a volume can be a block device of this host, for pods and claims before a VM."""
    what = "block devices for pods"
    missing = [str(path) for path in FACE_DEVICES if not path.exists()]
    if missing:
        return Finding(
            what,
            "warning",
            f"no {' and no '.join(missing)}: claims of pods cannot be published here",
            "modprobe fuse loop; VMs through libvirt do not need it",
        )
    return Finding(what, "ok", "FUSE and loop devices are there")
