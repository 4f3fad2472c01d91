"""`virtlun doctor`: what on this host works, what does not, and what to do about it."""

from __future__ import annotations

import grp
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from plugin.cli.output import config, console, json_option
from plugin.hook import SCRIPT
from pydataplane import supervise
from pydataplane.errors import TargetError

EMULATOR = "qemu-system-x86_64"
HOOK = Path("/etc/libvirt/hooks/qemu.d/virtlun")
LIBVIRT_OVERRIDE = (8, 2)
QEMU_RECONNECT = (8, 2)
KVM_PROBE_S = 5.0
MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is ok, warning or failed; `advice` says what to do."""

    what: str
    state: str
    found: str
    advice: str = ""


@click.command()
@json_option
@click.pass_obj
def doctor(socket: Path, as_json: bool) -> None:
    """Check this host: KVM, QEMU, libvirt, memory, permissions, target and gateway.

    The exit status is 1 if something failed that attaching a volume needs.
    """
    findings = list(examine(socket, config().gateway.listen))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        out = console()
        for finding in findings:
            out.print(f"{MARKS[finding.state]:<16} {finding.what}: {finding.found}")
            if finding.advice:
                out.print(f"         [dim]{finding.advice}[/]")
    if any(finding.state == "failed" for finding in findings):
        raise SystemExit(1)


def examine(socket: Path, gateway: Path) -> Iterator[Finding]:
    """Yields a finding for each thing that the way from virsh to a guest's disk stands on."""
    checks: tuple[Callable[[], Finding], ...] = (
        _kvm,
        _qemu,
        _qemu_device,
        _libvirt,
        _io_uring,
        _memory,
        _huge_pages,
        _group,
        lambda: _target(socket),
        lambda: _gateway(gateway),
        _hook,
    )
    for check in checks:
        yield check()


def _run(*words: str, timeout_s: float = 10.0) -> str | None:
    """Returns what a command printed, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=True, input=""
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(text: str | None) -> tuple[int, ...] | None:
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part) for part in found.groups(default="0")) if found else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _kvm() -> Finding:
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


def _qemu() -> Finding:
    version = _version(_run(EMULATOR, "--version"))
    if version is None:
        return Finding(
            "QEMU", "failed", f"{EMULATOR} is not installed", "apt-get install qemu-system-x86"
        )
    if version < QEMU_RECONNECT:
        return Finding(
            "QEMU",
            "warning",
            f"{_dotted(version)}: a running VM loses its disks when the target restarts",
            "QEMU 8.2 or newer reconnects vhost-user-scsi (Debian 12: bookworm-backports)",
        )
    return Finding("QEMU", "ok", _dotted(version))


def _qemu_device() -> Finding:
    what = "vhost-user-scsi in QEMU"
    if "vhost-user-scsi-pci" in (_run(EMULATOR, "-device", "help") or ""):
        return Finding(what, "ok", "built in")
    return Finding(
        what, "failed", "this QEMU has no vhost-user-scsi-pci", "use a QEMU built with it"
    )


def _libvirt() -> Finding:
    version = _version(_run("libvirtd", "--version") or _run("virtqemud", "--version"))
    if version is None:
        return Finding(
            "libvirt", "failed", "not installed", "apt-get install libvirt-daemon-system"
        )
    if version < LIBVIRT_OVERRIDE:
        return Finding(
            "libvirt", "failed", _dotted(version), "8.2 or newer is needed for <qemu:override>"
        )
    return Finding("libvirt", "ok", _dotted(version))


def _io_uring() -> Finding:
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


def _memory() -> Finding:
    try:
        descriptor = os.memfd_create("virtlun-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Finding("shared memory", "failed", f"no memfd: {error.strerror}")
    os.close(descriptor)
    return Finding("shared memory", "ok", "memfd works")


def _huge_pages() -> Finding:
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


def _group() -> Finding:
    try:
        grp.getgrnam("kvm")
    except KeyError:
        return Finding(
            "group kvm",
            "warning",
            "missing: QEMU's user cannot open controller sockets by group",
            "give virtlun-target --socket-group with QEMU's group",
        )
    return Finding("group kvm", "ok", "controller sockets can be given to it")


def _target(socket: Path) -> Finding:
    try:
        found = supervise.status(socket)
    except TargetError as error:
        return Finding("target", "failed", str(error))
    problems = found["restore_problems"]
    if problems:
        return Finding("target", "warning", f"runs; not restored: {'; '.join(map(str, problems))}")
    return Finding("target", "ok", f"runs: pid {found['pid']}, version {found['version']}")


def _gateway(socket: Path) -> Finding:
    try:
        mode = socket.stat().st_mode
    except OSError:
        return Finding(
            "gateway",
            "warning",
            f"no socket {socket}",
            "start virtlun-gateway: without it virsh cannot attach volumes",
        )
    if not stat.S_ISSOCK(mode):
        return Finding("gateway", "failed", f"{socket} is not a socket", "remove it")
    uri = f"qemu+unix:///system?socket={socket}"
    if shutil.which("virsh") and _run("virsh", "-c", uri, "version") is None:
        return Finding("gateway", "failed", "virsh gets no answer through it", "see its log")
    return Finding("gateway", "ok", uri)


def _hook() -> Finding:
    what = "libvirt hook"
    advice = f"install -D -m 755 {SCRIPT} {HOOK}, then restart libvirtd"
    try:
        text = HOOK.read_text()
    except OSError as error:
        missing = "VMs started behind the gateway's back find no controller"
        return Finding(what, "warning", f"{HOOK}: {error.strerror}: {missing}", advice)
    if not os.access(HOOK, os.X_OK):
        return Finding(what, "warning", f"{HOOK} is not executable", advice)
    if "plugin.translate.metadata" in text and text != SCRIPT.read_text():
        return Finding(what, "warning", f"{HOOK} is of another version of virtlun", advice)
    return Finding(what, "ok", str(HOOK))
