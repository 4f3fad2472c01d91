"""`virtlun doctor`: what on this host works, what does not, and what to do about it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket as sockets
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.text import Text

from plugin.cli import qemu_user, remote
from plugin.cli.output import address, busy, client, config, console, json_option, size
from plugin.config import Config
from plugin.gateway import polkit
from plugin.hook import archive
from pydataplane import supervise
from pydataplane.errors import TargetError

EMULATOR = "qemu-system-x86_64"
HOOK = Path("/etc/libvirt/hooks/qemu.d/virtlun")
LIBVIRT_OVERRIDE = (8, 2)
QEMU_RECONNECT = (8, 2)
KVM_PROBE_S = 5.0
FREE_AND_TOTAL = ("free_clusters", "total_data_clusters")
LOW_SHARE = 0.05
"""Less of an lvstore free than this is worth a word."""
FACE_DEVICES = (Path("/dev/fuse"), Path("/dev/loop-control"))
APPARMOR = Path("/sys/module/apparmor/parameters/enabled")
APPARMOR_RULES = (
    Path("/etc/apparmor.d/local/abstractions/libvirt-qemu"),
    Path("/etc/apparmor.d/abstractions/libvirt-qemu"),
)
TARGET_USER = "virtlun"
CAPABILITIES = {
    0: "CHOWN",
    1: "DAC_OVERRIDE",
    2: "DAC_READ_SEARCH",
    3: "FOWNER",
    6: "SETGID",
    7: "SETUID",
    8: "SETPCAP",
    12: "NET_ADMIN",
    14: "IPC_LOCK",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
"""Those that a target is likely to have, by number."""
STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}
INDENT = " " * 9


@dataclass(frozen=True)
class Finding:
    """One thing looked at: `state` is ok, warning or failed; `advice` says what to do."""

    what: str
    state: str
    found: str
    advice: str = ""


@click.command(short_help="Check what on this host works, and say what to do.")
@json_option
@click.pass_obj
def doctor(socket: Path, as_json: bool) -> None:
    """Check this host: KVM, QEMU, libvirt, memory, permissions, target and gateway.

    `failed` is what a VM's disk needs, `warning` what some uses need. The exit status is 1 if
    something failed.
    """
    out = console()
    findings = []
    for what, check in examinations(socket, config(), address().vhost_dir):
        with busy(f"looking at {what}"):
            finding = check()
        findings.append(finding)
        if as_json:
            continue
        mark = Text(finding.state.ljust(len(INDENT)), style=STYLES[finding.state])
        out.print(mark + Text(f"{finding.what}: {finding.found}", style="none"), soft_wrap=True)
        if finding.advice:
            out.print(Text(INDENT + finding.advice, style="dim"), soft_wrap=True)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.state == "failed" for finding in findings):
        raise SystemExit(1)


def examinations(
    socket: Path, settings: Config, vhost_dir: Path
) -> list[tuple[str, Callable[[], Finding]]]:
    """Returns a check for each thing that the way from virsh to a guest's disk stands on."""
    return [
        ("the user", _user),
        ("KVM", _kvm),
        ("QEMU", _qemu),
        ("QEMU's devices", _qemu_device),
        ("libvirt", _libvirt),
        ("libvirtd", lambda: _libvirtd(settings.gateway.upstream)),
        ("remote clients", lambda: _remote(settings.gateway.listen, remote.listening())),
        ("authentication", lambda: _authentication(settings)),
        ("io_uring", _io_uring),
        ("shared memory", _memory),
        ("huge pages", _huge_pages),
        ("permissions", lambda: _permissions(vhost_dir)),
        ("AppArmor", lambda: _apparmor(vhost_dir)),
        ("pods' block devices", _kernel_face),
        ("target", lambda: _target(socket)),
        ("the target's rights", lambda: _rights(socket)),
        ("lvstores", lambda: _lvstores(socket)),
        ("gateway", lambda: _gateway(settings.gateway.listen)),
        ("hook", _hook),
    ]


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


def _user() -> Finding:
    if os.geteuid() == 0:
        return Finding("user", "ok", "root")
    return Finding(
        "user", "warning", "not root: some of what follows cannot be looked at", "run it as root"
    )


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


def _libvirtd(path: Path) -> Finding:
    """Whether libvirtd takes connections where the gateway looks for it."""
    what = "libvirtd"
    advice = "systemctl start libvirtd, or name its socket in gateway.upstream of virtlun.toml"
    try:
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.connect(str(path))
    except PermissionError:
        return Finding(what, "warning", f"{path} is not for this user", "run it as root")
    except OSError as error:
        return Finding(what, "failed", f"{path}: {error.strerror or error}", advice)
    return Finding(what, "ok", f"listens on {path}")


def _remote(gateway: Path, ports: str) -> Finding:
    """Whether clients can come over the network, which the gateway does not listen on."""
    what = "remote clients"
    uri = f"qemu+ssh://HOST/system?socket={gateway}"
    if not ports:
        return Finding(what, "ok", f"none over TCP or TLS; {uri} leads to the gateway")
    return Finding(
        what,
        "warning",
        f"libvirt itself listens on {ports}: who comes so sees no virtlun disks",
        f"use {uri}, and stop the sockets of libvirtd or virtproxyd for TCP and TLS",
    )


def _authentication(settings: Config) -> Finding:
    """Whether libvirt's sockets ask for what the gateway can answer for itself."""
    what = "authentication"
    gateway = settings.gateway
    file = polkit.configuration_of(gateway.libvirtd_conf, gateway.upstream)
    if polkit.configured(file, read_only=False) is polkit.Auth.SASL:
        return Finding(
            what,
            "failed",
            f"{file} asks for SASL, which the gateway cannot answer",
            'set auth_unix_rw = "polkit" or "none" there, and restart the daemon',
        )
    return Finding(what, "ok", "the gateway gets in")


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


def _permissions(vhost_dir: Path) -> Finding:
    """Whether QEMU's user can enter the folder of the controllers' sockets, and open those."""
    what = "permissions"
    user = next((name for name in qemu_user.NAMES if _ids(name)), None)
    if user is None:
        return Finding(
            what,
            "warning",
            f"no user of libvirt's QEMU here ({', '.join(qemu_user.NAMES)})",
            "give virtlun-target --socket-group with the group in /etc/libvirt/qemu.conf",
        )
    if not vhost_dir.is_dir():
        return Finding(what, "ok", f"{vhost_dir} is not there yet: the target makes it")
    for folder in (*reversed(vhost_dir.parents), vhost_dir):
        if not _allowed(folder, user, 0o1):
            return Finding(
                what, "failed", f"{user} cannot enter {folder}", f"chmod o+x {folder}, or its group"
            )
    closed = [path for path in vhost_dir.iterdir() if not _allowed(path, user, 0o6)]
    if closed:
        return Finding(
            what,
            "failed",
            f"{user} cannot open {closed[0]}",
            "start virtlun-target with --socket-group kvm, or another group of that user",
        )
    return Finding(what, "ok", f"{user} reaches the controllers' sockets in {vhost_dir}")


def _ids(user: str) -> tuple[int, frozenset[int]] | None:
    """Returns a user's id and those of its groups, or None."""
    try:
        entry = qemu_user.entry(user)
    except KeyError:
        return None
    return entry.pw_uid, frozenset(os.getgrouplist(user, entry.pw_gid))


def _allowed(path: Path, user: str, bits: int) -> bool:
    """Whether a user has these of the bits rwx (octal 7) on `path`."""
    ids = _ids(user)
    try:
        status = path.stat()
    except OSError:
        return False
    assert ids is not None
    if ids[0] in (0, status.st_uid):
        return ids[0] == 0 or status.st_mode >> 6 & bits == bits
    shift = 3 if status.st_gid in ids[1] else 0
    return status.st_mode >> shift & bits == bits


def _apparmor(vhost_dir: Path) -> Finding:
    what = "AppArmor"
    try:
        enabled = APPARMOR.read_text().strip() == "Y"
    except OSError:
        enabled = False
    if not enabled:
        return Finding(what, "ok", "not in use")
    rules = ""
    for file in APPARMOR_RULES:
        with suppress(OSError):
            rules += file.read_text()
    if str(vhost_dir) in rules:
        return Finding(what, "ok", f"QEMU may use {vhost_dir}")
    return Finding(
        what,
        "warning",
        f"no rule lets QEMU use {vhost_dir}",
        f"add the line `{vhost_dir}/** rw,` to {APPARMOR_RULES[0]}, where libvirt confines QEMU",
    )


def _target(socket: Path) -> Finding:
    try:
        found = supervise.status(socket)
    except TargetError as error:
        return Finding("target", "failed", str(error))
    errors = found.get("flush_errors", [])
    if errors:
        return Finding(
            "target",
            "failed",
            f"runs; {'; '.join(map(str, errors))}",
            "mend the disk, then `virtlun bdev clear-flush-error` with its name, which says what "
            "that means, and check what is on it",
        )
    waiting = [
        f"{wait['name']} has waited for {wait['waits_for']} for {float(wait['since_s']):.0f} s"
        for wait in found.get("waiting", [])
    ]
    problems = [*map(str, found["restore_problems"]), *waiting]
    if problems:
        return Finding("target", "warning", f"runs; {'; '.join(problems)}")
    return Finding("target", "ok", f"runs: pid {found['pid']}, version {found['version']}")


def _rights(socket: Path) -> Finding:
    """What could be done by who runs code in the target: user, capabilities, system calls."""
    what = "the target's rights"
    try:
        found = supervise.status(socket)
        status = _process_status(int(found["pid"]))
    except (TargetError, OSError, ValueError):
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    user = found.get("user", {}).get("name", status["Uid"].split()[0])
    capabilities = _capabilities(int(status["CapEff"], 16))
    confined = status.get("Seccomp") == "2" and found.get("sandbox", "enforce") == "enforce"
    facts = (
        f"user {user}",
        f"capabilities {', '.join(capabilities) or 'none'}",
        f"no_new_privs {'set' if status.get('NoNewPrivs') == '1' else 'not set'}",
        f"seccomp {'enforced' if confined else 'not enforced'}",
    )
    refused = found.get("refused_calls", [])
    if refused:
        return Finding(
            what,
            "warning",
            f"{'; '.join(facts)}; refused system calls: {', '.join(refused)}",
            "report this with the target's log: the target lacks a call, or a guest attacks it",
        )
    if status["Uid"].split()[1] == "0" or capabilities:
        return Finding(
            what,
            "warning",
            "; ".join(facts),
            f"make a user for it (systemd-sysusers, or useradd --system {TARGET_USER}), then start "
            "it again",
        )
    if not confined:
        return Finding(what, "warning", "; ".join(facts), "start it without --no-sandbox")
    return Finding(what, "ok", "; ".join(facts))


def _process_status(pid: int) -> dict[str, str]:
    """Returns the fields of proc_pid_status(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _capabilities(bits: int) -> list[str]:
    """Returns the names of those that are set, as linux/capability.h numbers them."""
    return [
        CAPABILITIES.get(number, f"number {number}")
        for number in range(bits.bit_length())
        if bits >> number & 1
    ]


def _kernel_face() -> Finding:
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


def _lvstores(socket: Path) -> Finding:
    """Whether there is a store to cut volumes from, that works and has room."""
    what = "lvstores"
    try:
        stores = client(socket).call("bdev_lvol_get_lvstores")
    except TargetError:
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    stopped = [f"{store['name']} ({store['stopped']})" for store in stores if store.get("stopped")]
    if stopped:
        return Finding(
            what,
            "failed",
            f"{', '.join(stopped)}: takes no more changes",
            "mend the file or device that it is on, then `virtlun bdev clear-flush-error` with the "
            "name of its bdev: `virtlun bdev list` has it",
        )
    if not stores:
        return Finding(
            what,
            "warning",
            "none: there is nothing to cut volumes from",
            "virtlun lvstore create lvs0 --file FILE-OR-DEVICE, with --size for a new file",
        )
    rooms = [
        (store["name"], *(store["cluster_size"] * store[key] for key in FREE_AND_TOTAL))
        for store in stores
    ]
    found = ", ".join(f"{name} with {size(free)} free" for name, free, _ in rooms)
    full = [name for name, free, total in rooms if free < LOW_SHARE * total]
    if full:
        return Finding(
            what,
            "warning",
            f"{found}: writes to thin volumes fail when nothing is left",
            f"virtlun lvstore resize {full[0]} SIZE, or delete volumes",
        )
    return Finding(what, "ok", found)


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
    advice = f"`virtlun-hook --install {HOOK}`, then restart libvirtd"
    try:
        current = archive.is_current(HOOK)
    except OSError as error:
        missing = "VMs started behind the gateway's back find no controller"
        return Finding(what, "warning", f"{HOOK}: {error.strerror}: {missing}", advice)
    if not os.access(HOOK, os.X_OK):
        return Finding(what, "warning", f"{HOOK} is not executable", advice)
    if current is False:
        return Finding(what, "warning", f"{HOOK} is of another version of virtlun", advice)
    return Finding(what, "ok", str(HOOK))
