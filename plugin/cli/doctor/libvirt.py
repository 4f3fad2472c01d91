"""QEMU and libvirt: what they can do, who reaches whom, and gateway and hook in between."""

from __future__ import annotations

import grp
import os
import re
import shutil
import socket as sockets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from plugin import qemu_user
from plugin.cli.doctor.finding import Finding, dotted, run, version_of
from plugin.config import LIBVIRTDS_PLACES, Config
from plugin.gateway import libvirtdconf, sasl
from plugin.gateway.errors import Refused
from plugin.hook import archive
from pydataplane import emulator
from pydataplane.domain import translate
from pydataplane.domain.errors import TranslateError
from pydataplane.domain.images import of_plan
from pydataplane.domain.model import FrontEndSetting

SOCKET_UNIT = "libvirtd.socket"
UNITS = (Path("/lib/systemd/system"), Path("/run/systemd/system"), Path("/etc/systemd/system"))
DROP_IN = "virtlun.conf"
"""Ours, which moves libvirtd's socket away (examples/libvirt/transparent)."""
EMULATOR = "qemu-system-x86_64"
AUTOSTART = Path("/etc/libvirt/qemu/autostart")
"""Links to the definitions of domains that libvirtd starts by itself."""
HOOK = Path("/etc/libvirt/hooks/qemu.d/virtlun")
LIBVIRT_OVERRIDE = (8, 2)
FRONT_END = "disks' front end"
APPARMOR = Path("/sys/module/apparmor/parameters/enabled")
APPARMOR_RULES = (
    Path("/etc/apparmor.d/local/abstractions/libvirt-qemu"),
    Path("/etc/apparmor.d/abstractions/libvirt-qemu"),
)


def qemu(reconnect_s: int | Literal["auto"], *, held: bool = False) -> Finding:
    """Whether there is a QEMU, and whether its guests survive a restart of the target.

    `reconnect_s` is that of virtlun.toml; `held`: the target's holder keeps connections, so that
    it does not matter. A domain may name another QEMU; the one that libvirt takes by itself is
    looked at.
    """
    program = emulator.default(None) or EMULATOR
    version = version_of(run(program, "--version"))
    if version is None:
        return Finding(
            "QEMU", "failed", f"{EMULATOR} is not installed", "apt-get install qemu-system-x86"
        )
    if version < emulator.RECONNECTS and reconnect_s not in ("auto", 0):
        return Finding(
            "QEMU",
            "failed",
            f"{dotted(version)} starts no VM with reconnect_s = {reconnect_s} of virtlun.toml",
            "take it out of [disks], then start the VMs through the gateway",
        )
    if held:
        found = f"{dotted(version)}; its connections are kept when the target restarts"
        return Finding("QEMU", "ok", found)
    return _reconnects(program, version, reconnect_s)


def _reconnects(
    program: str, version: tuple[int, ...], reconnect_s: int | Literal["auto"]
) -> Finding:
    """Whether it connects again to a target that restarts."""
    hangs = "a running VM's I/O hangs when the target restarts"
    if version < emulator.RECONNECTS:
        return Finding(
            "QEMU",
            "warning",
            f"{dotted(version)}: I/O of a running VM's LUNs hangs when the target restarts, until"
            " the VM is started again",
            "start the target with --hold-sessions, as examples/systemd does; or use QEMU 8.2 or"
            " newer (Debian 12: bookworm-backports), or virtio-blk disks (bus='virtio')",
        )
    if reconnect_s == 0:
        return Finding(
            "QEMU",
            "warning",
            f"{dotted(version)}, but reconnect_s = 0 in virtlun.toml: {hangs}, until the VM is"
            " started again",
            "take it out of [disks], restart the gateway, then stop the VMs and start them"
            " through it",
        )
    if reconnect_s == "auto" and not emulator.reconnects(None, None):
        return Finding(
            "QEMU",
            "warning",
            f"{dotted(version)}, but {program} does not say so as a file: {hangs}, until the VM is"
            " started again",
            "set reconnect_s = 1 in [disks] of virtlun.toml and restart the gateway, then stop the"
            " VMs and start them through it",
        )
    return Finding("QEMU", "ok", f"{dotted(version)}, connects again to a target that restarts")


LACKS_SCSI = Finding(
    FRONT_END,
    "failed",
    'this QEMU has no vhost-user-scsi-pci, and front_end = "scsi" in virtlun.toml',
    "take that out of [disks], and all disks are virtio-blk disks, or use a QEMU with it",
)
LACKS_BLK = Finding(
    FRONT_END,
    "failed",
    'this QEMU has no vhost-user-blk-pci, and front_end = "blk" in virtlun.toml',
    "take that out of [disks], or use a QEMU built with it",
)
LUNS_ALONE = Finding(
    FRONT_END,
    "warning",
    "LUNs of vhost-user-scsi; this QEMU has no vhost-user-blk-pci for bus='virtio'",
    'set front_end = "scsi" in [disks] of virtlun.toml, and those are LUNs, too',
)


def front_ends(setting: FrontEndSetting) -> Finding:
    """Which front end disks get: what `front_end` of virtlun.toml says, and QEMU was built with."""
    program = emulator.default(None) or EMULATOR
    devices = run(program, "-device", "help") or ""
    scsi, blk = (f"vhost-user-{kind}-pci" in devices for kind in ("scsi", "blk"))
    if not scsi and not blk:
        lacks = "this QEMU has neither vhost-user-scsi-pci nor vhost-user-blk-pci"
        return Finding(FRONT_END, "failed", lacks, "use a QEMU built with them")
    if setting == "scsi":
        luns = 'LUNs of vhost-user-scsi (front_end = "scsi")'
        return Finding(FRONT_END, "ok", luns) if scsi else LACKS_SCSI
    if setting == "blk":
        disks = 'virtio-blk disks of vhost-user-blk (front_end = "blk")'
        return Finding(FRONT_END, "ok", disks) if blk else LACKS_BLK
    if not blk:
        return LUNS_ALONE
    both = "LUNs of vhost-user-scsi, with bus='virtio' virtio-blk disks of vhost-user-blk"
    lacks = "virtio-blk disks alone, of vhost-user-blk: this QEMU has no vhost-user-scsi-pci"
    return Finding(FRONT_END, "ok", both if scsi else lacks)


def libvirt() -> Finding:
    """Whether libvirt can make our controller."""
    version = version_of(run("libvirtd", "--version") or run("virtqemud", "--version"))
    if version is None:
        return Finding(
            "libvirt", "failed", "not installed", "apt-get install libvirt-daemon-system"
        )
    if version < LIBVIRT_OVERRIDE:
        return Finding(
            "libvirt", "failed", dotted(version), "8.2 or newer is needed for <qemu:override>"
        )
    return Finding("libvirt", "ok", dotted(version))


def libvirtd(path: Path) -> Finding:
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


def remote_clients(gateway: Path, ports: str) -> Finding:
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


def authentication(settings: Config) -> Finding:
    """Whether libvirt's sockets ask for what the gateway can answer for itself."""
    what = "authentication"
    gateway = settings.gateway
    file = libvirtdconf.configuration_of(gateway.libvirtd_conf, gateway.upstream)
    if libvirtdconf.configured(file, read_only=False) is not libvirtdconf.Auth.SASL:
        return Finding(what, "ok", "the gateway gets in")
    try:
        name = sasl.credentials(gateway.auth_conf).name
    except Refused as error:
        found, _, advice = str(error).partition(": ")
        return Finding(what, "failed", f"{file}: {found}", advice)
    return Finding(what, "ok", f"the gateway is {name} for libvirtd, which asks for SASL")


def admission(settings: Config, folders: Sequence[Path] = UNITS) -> Finding:
    """Whether the gateway, in libvirtd's place, is for whom the packaged socket was.

    `folders` are systemd's of units, the first counts least.
    """
    what = "libvirt's users"
    gateway = settings.gateway
    try:
        found = gateway.listen.stat()
    except OSError:
        return Finding(what, "ok", "the gateway does not listen")
    if gateway.listen.parent not in LIBVIRTDS_PLACES:
        return Finding(what, "ok", "libvirtd's own socket says who they are")
    values = _socket_unit(folders)
    group = values.get("SocketGroup", "root")
    try:
        mode = int(values.get("SocketMode", "0666"), 8)
    except ValueError:
        mode = 0o600
    if not values or _is_for_no_more(found, group, mode):
        return Finding(what, "ok", f"{gateway.listen} is for no more than libvirtd's was")
    return Finding(
        what,
        "warning",
        f"{gateway.listen} has mode {stat.S_IMODE(found.st_mode):04o} and group"
        f" {_group_name(found.st_gid)}; {SOCKET_UNIT} had mode {mode:04o} and group {group}",
        f'set socket_group = "{group}" and socket_mode = "{mode:04o}" in [gateway] of virtlun.toml,'
        " and restart the gateway",
    )


def _is_for_no_more(found: os.stat_result, group: str, mode: int) -> bool:
    """Whether a socket is for no more users than one of this group and mode."""
    if mode & stat.S_IWOTH:
        return True
    if found.st_mode & stat.S_IWOTH:
        return False
    if not found.st_mode & stat.S_IWGRP:
        return True
    return bool(mode & stat.S_IWGRP) and _group_name(found.st_gid) == group


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _socket_unit(folders: Sequence[Path]) -> dict[str, str]:
    """Returns what the section [Socket] of libvirtd's unit says, but for our own drop-in."""
    files: list[Path] = []
    for folder in folders:
        unit = folder / SOCKET_UNIT
        files = [unit] if unit.exists() else files  # one of a later folder takes its place
    drop_ins = [path for folder in folders for path in (folder / f"{SOCKET_UNIT}.d").glob("*.conf")]
    files += sorted((path for path in drop_ins if path.name != DROP_IN), key=lambda p: p.name)
    values: dict[str, str] = {}
    for file in files:
        with suppress(OSError, UnicodeDecodeError):
            for key, value in re.findall(r"(?m)^(Socket(?:Group|Mode))=(.*)$", file.read_text()):
                values[key] = value.strip()
    return values


def permissions(vhost_dir: Path) -> Finding:
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


def apparmor(vhost_dir: Path) -> Finding:
    """Whether AppArmor, where it confines QEMU, lets it open the controllers' sockets."""
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


def autostart(folder: Path = AUTOSTART) -> list[Finding]:
    """Names the domains that libvirtd cannot start by itself, as it starts them past the gateway.

    It tells nobody else the secrets that their images are opened with.
    """
    names = []
    for file in sorted(folder.glob("*.xml")):
        with suppress(OSError, ValueError, TranslateError):
            plan = translate.plan(file.read_text())
            sources = [lun.volume.source for lun in of_plan(plan)] if plan is not None else []
            if any(source is not None and source.secret is not None for source in sources):
                names.append(file.stem)
    if not names:
        return []
    return [
        Finding(
            "autostart",
            "warning",
            f"{', '.join(names)}: libvirtd starts them with the host past the gateway, which alone"
            " can have the secrets of their images; so that is refused",
            "start them through the gateway (Nova: resume_guests_state_on_host_boot), and turn"
            " `virsh autostart` off",
        )
    ]


def gateway(socket: Path) -> Finding:
    """Whether virsh gets an answer through the gateway."""
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
    if shutil.which("virsh") and run("virsh", "-c", uri, "version") is None:
        return Finding("gateway", "failed", "virsh gets no answer through it", "see its log")
    return Finding("gateway", "ok", uri)


def hook() -> Finding:
    """Whether libvirt has the hook of this version."""
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
