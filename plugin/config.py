"""/etc/virtlun/virtlun.toml: every key, its default and what it means.

The schema for people and tools, schemas/config/plugin.schema.json, is made from these models (a
test holds the two together). The hook reads its few keys by itself: it has no third-party modules.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pydataplane import emulator
from pydataplane.domain import portals
from pydataplane.domain.errors import ConfigError
from pydataplane.domain.model import Allowed, FrontEndSetting
from pydataplane.domain.translate import Settings

DEFAULT_PATH = Path("/etc/virtlun/virtlun.toml")

TARGET_NAME = "[a-z0-9][a-z0-9-]{0,22}"
TargetName = Annotated[str, Field(pattern=f"^{TARGET_NAME}$")]
Protocol = Literal["rbd", "nbd", "iscsi"]
AuthSetting = Literal["auto", "none", "polkit"]
ControllersSetting = Literal["auto", "all", "needed"]
RoomSetting = Literal["resume", "stay"]

LIBVIRTDS_PLACES = (Path("/run/libvirt"), Path("/var/run/libvirt"))
"""Folders of the sockets that libvirt's clients look for by themselves."""


class Section(BaseModel):
    """A table of the file; keys that it does not know are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TargetSection(Section):
    """Where the target is."""

    rpc_socket: Path = Path("/run/virtlun/target.sock")
    """The target's JSON-RPC socket."""
    vhost_dir: Path = Path("/run/virtlun/vhost")
    """Folder in which the target makes the controllers' sockets."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """How long one call to the target may take, seconds."""
    rbd: bool = False
    """Whether `virtlun target start` starts targets that serve images of Ceph (--rbd)."""
    iscsi: bool = False
    """Whether it starts targets that serve LUNs of iSCSI targets (--iscsi)."""
    network: bool = False
    """Whether it starts targets that may make network connections (--network)."""


class NamedTargetSection(Section):
    """A further target of this host whose sockets are not in the packaged folders."""

    rpc_socket: Path
    """Its JSON-RPC socket."""
    vhost_dir: Path
    """Folder in which it makes the controllers' sockets."""


class DisksSection(Section):
    """Which disks are ours, and what their controller is like."""

    path_prefix: str = Field(default="/dev/virtlun/", pattern="^/.*/$")
    """<source dev=> and <source file=> that begin so name LVSTORE/LVOL."""
    rbd_prefix: str = Field(default="virtlun/", pattern="^(.*/)?$")
    """<source protocol='rbd' name=> that begins so is ours; empty: none is."""
    protocol: str = Field(default="lvol", pattern="^[a-z0-9]*$")
    """<source protocol=> that is ours; empty: none is."""
    pool_prefix: str = "virtlun-"
    """<source pool=> that begins so names an lvstore; empty: none does."""
    front_end: FrontEndSetting = "auto"
    """What a disk that a domain gets is to its guest. scsi: a LUN of the domain's vhost-user-scsi
    controller, which is plugged by an event of that. blk: a virtio-blk disk, with a
    vhost-user-blk controller of its own, which QEMU plugs as a PCI device; it survives a restart
    of a target without --hold-sessions with any QEMU. auto: blk with bus='virtio', unless the disk
    asks for what only SCSI has, and where the domain's <emulator> has no vhost-user-scsi; else
    scsi. A disk that a domain has stays what it is until it is detached, or gets another bus."""
    serve_network: list[Protocol] = []
    """Protocols of <source protocol=> whose disks are the target's, too: images of Ceph (rbd),
    exports of NBD servers (nbd), LUNs of iSCSI targets (iscsi). Those of a domain are that is
    defined, created or attached to through the gateway, where it can have a controller; of one that
    runs without, what is attached is QEMU's, as all others are. A domain that says itself which of
    its disks are served (<network serve=> in its metadata) has these served, or none of them."""
    serve_network_on_request: list[Protocol] = []
    """Further protocols that a domain may ask for so. Who may change a domain says then to which
    servers the target connects."""
    own_keyring: bool = False
    """Whether images of Ceph without a secret are served like those with one. The target opens them
    with its user's own keyring: who may change a domain has every image that this may open, and is
    asked for no right."""
    nbd_sockets: list[Annotated[str, Field(pattern="^/")]] = []
    """Folders below which UNIX sockets of NBD servers are that the target connects to, as its own
    user. Disks on others are QEMU's."""
    iscsi_portals: list[Annotated[str, AfterValidator(portals.check)]] = []
    """Names, addresses and networks (10.0.0.0/24) of iSCSI targets that the target logs in to for
    disks, at port 3260 or one that is given (san.lan:3261, [fd00::1]:3261); "*" is any, at any
    port. Disks on others are QEMU's: an iSCSI target that is hostile may crash the
    target, or have it do what it wants, and with it all VMs' disks."""
    max_queues: int = Field(default=8, ge=1, le=64)
    """Most request queues of a controller; it gets one for each vCPU of the domain. A virtio-blk
    disk has those that its `<driver queues=>` says, if it does."""
    reconnect_s: Annotated[int, Field(ge=0, le=3600)] | Literal["auto"] = "auto"
    """How long QEMU waits before it connects again to a target that went away, seconds. auto: 1
    where the domain's <emulator> is QEMU 8.2 or newer; else none, as older ones do not start with
    it. 0: none, and a guest's I/O hangs from the next restart of a target without --hold-sessions
    until the VM is started again. A domain has it from when it is defined or started through the
    gateway."""
    protection: bool = False
    """Whether guests may carry T10 protection information to LUNs that have it (QEMU's property
    t10_pi), where the domain's <emulator> lets them. A domain has that from when it is defined or
    started through the gateway, and keeps it as long as it runs, wherever it goes. Without a disk
    of ours it needs a target, too, where it is restored or migrates to."""

    def may_serve(self, protocol: Protocol) -> bool:
        """Whether disks of a protocol are the target's, or can be."""
        return protocol in (*self.serve_network, *self.serve_network_on_request)


class GatewaySection(Section):
    """The proxy in front of libvirtd."""

    listen: Path = Path("/run/virtlun/libvirt-sock")
    """The read-write socket that clients use."""
    listen_ro: Path | None = Path("/run/virtlun/libvirt-sock-ro")
    """The read-only socket, or none."""
    upstream: Path = Path("/run/libvirt/libvirt-sock")
    """libvirtd's read-write socket."""
    upstream_ro: Path = Path("/run/libvirt/libvirt-sock-ro")
    """libvirtd's read-only socket."""
    uri: str = "qemu:///system"
    """What to open there for the gateway's own questions."""
    socket_group: str = "auto"
    """Group of both sockets; '' leaves root's. auto: that of libvirtd's own socket where that is
    for a group; libvirt where it is for all. In libvirtd's place: unix_sock_group of libvirtd_conf,
    or libvirt."""
    socket_mode: str = Field(default="auto", pattern=r"^(auto|0[0-7]{3})$")
    """Mode of the read-write socket, octal. auto: 0660, but 0600 where libvirtd's own is for root
    alone or not there. In libvirtd's place unix_sock_rw_perms of libvirtd_conf says that."""
    socket_mode_ro: str = Field(default="auto", pattern=r"^(auto|0[0-7]{3})$")
    """Mode of the read-only socket, octal. auto: 0666, but 0660 or 0600 where libvirtd's own is for
    a group or for root alone. In libvirtd's place unix_sock_ro_perms of libvirtd_conf says that."""
    auth: AuthSetting = "auto"
    """What clients of the read-write socket must pass: none, polkit, or as libvirtd.conf says."""
    auth_ro: AuthSetting = "auto"
    """The same for the read-only socket."""
    libvirtd_conf: Path = Path("/etc/libvirt/libvirtd.conf")
    """Where `auto` looks; what cannot be read there counts as polkit."""
    auth_conf: Path = Path("/etc/libvirt/auth.conf")
    """libvirt's file of names and passwords: who the gateway is for a libvirtd that asks for SASL
    (mechanisms SCRAM-SHA-512, -256 and -1), as [auth-libvirt-localhost]."""
    pkcheck: str = "pkcheck"
    """polkit's program."""
    max_clients: int = Field(default=1000, gt=0)
    """Connections at a time to each of the two sockets; further ones wait."""
    allow_shrink: bool = False
    """Whether blockresize and vol-resize may make a volume smaller, which cuts off data."""
    controllers: ControllersSetting = "auto"
    """Which domains run with a controller, so that the first disk can be attached while they run.
    all: all that are started through the gateway. needed: those with a disk of ours, and those that
    had one or that `virtlun domain prepare` named. auto: needed where the gateway listens in
    libvirtd's place (in /run/libvirt), all elsewhere. It makes a domain's memory shared."""
    reconcile: bool = True
    """Whether the gateway keeps the target's controllers and LUNs as the domains need them."""
    reconcile_s: float = Field(default=60.0, ge=1, le=86400)
    """How often it looks at all of them, seconds; besides when it starts and when libvirtd does."""
    state_dir: Path = Path("/run/virtlun/gateway")
    """Its journal of the changes under way, by which interrupted ones are recovered."""
    when_room_returns: RoomSetting = "resume"
    """What becomes of a domain that the gateway paused because a write found no room, when there is
    room again. resume: it goes on, and its guest notices nothing but the time. stay: it stays
    paused, as with libvirt alone, until somebody resumes it. One that an administrator paused, or
    that had another I/O error, always stays."""
    memory_dir: Path = Path("/var/lib/virtlun/memory")
    """Where libvirtd saves the memory of a running domain with a snapshot that names no file for it
    (without --memspec and --disk-only). Files in there go with their snapshot; others stay."""

    @property
    def controllers_for_all(self) -> bool:
        """Whether a domain without a disk of ours, and never named, gets a controller."""
        if self.controllers == "auto":
            return self.listen.parent not in LIBVIRTDS_PLACES
        return self.controllers == "all"


class HookSection(Section):
    """The hook in /etc/libvirt/hooks/qemu.d/."""

    deadline_s: float = Field(default=10.0, gt=0, le=3600)
    """The longest that libvirtd is made to wait, seconds."""
    create_missing_mib: int = Field(default=0, ge=0)
    """0: a start fails where a disk's volume does not exist, with the command that makes it. More:
    the size in MiB of the thin volume that a start makes, through the gateway too, for a disk of
    which no volume is recorded; nothing is recorded of a domain that is undefined and defined
    again, as Nova does, so that a lost volume would come back empty."""
    state_dir: Path = Path("/var/lib/virtlun/hook")
    """Where the hook records which volumes a domain had that was started without the gateway."""


class Config(Section):
    """The whole file; every section may be left out."""

    target: TargetSection = TargetSection()
    targets: dict[TargetName, NamedTargetSection] = {}
    """Further targets by name. Those with sockets in /run/virtlun/NAME are found without."""
    disks: DisksSection = DisksSection()
    gateway: GatewaySection = GatewaySection()
    hook: HookSection = HookSection()

    def settings(self) -> Settings:
        """Returns what the translation needs, in the gateway and in the commands."""
        return Settings(
            vhost_dir=str(self.target.vhost_dir),
            path_prefix=self.disks.path_prefix,
            rbd_prefix=self.disks.rbd_prefix,
            protocol=self.disks.protocol,
            pool_prefix=self.disks.pool_prefix,
            max_queues=self.disks.max_queues,
            reconnect_s=None if self.disks.reconnect_s == "auto" else self.disks.reconnect_s,
            qemu_reconnects=emulator.reconnects,
            front_end=self.disks.front_end,
            network=frozenset(self.disks.serve_network),
            on_request=frozenset(self.disks.serve_network_on_request),
            allowed=Allowed(
                self.disks.own_keyring,
                tuple(self.disks.nbd_sockets),
                tuple(self.disks.iscsi_portals),
            ),
            qemu_lacks_scsi=emulator.lacks_scsi,
            protection=self.disks.protection,
            qemu_protects=emulator.protects,
        )


def load(path: Path | None = None) -> Config:
    """Reads the file `path`; without one the default file, which may be missing.

    Raises:
        ConfigError: the file is missing, unreadable or wrong; the text names file and key.
    """
    file = path or DEFAULT_PATH
    try:
        values = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        if path is None:
            return Config()
        raise ConfigError(f"{file}: there is no such file") from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    _check_renamed(file, values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = [(_key(each["loc"], values), each["msg"]) for each in error.errors()]
        key = found[0][0]  # it may be one of several kinds, and then is none of them
        why = " or ".join(text for name, text in found if name == key)
        raise ConfigError(f"{file}: {key}: {why}") from error


def _key(loc: tuple[int | str, ...], values: Any) -> str:
    """Returns what the file calls a place in it, without the kinds of value that may be there."""
    parts = []
    for part in loc:
        if not isinstance(values, dict):
            break
        parts.append(str(part))
        values = values.get(part)
    return ".".join(parts)


def _check_renamed(file: Path, values: dict[str, Any]) -> None:
    """Says what a key of earlier versions is called now.

    Raises:
        ConfigError: there is one.
    """
    gateway = values.get("gateway")
    if isinstance(gateway, dict) and "always_controller" in gateway:
        word = "needed" if gateway["always_controller"] is False else "all"
        raise ConfigError(
            f"{file}: gateway.always_controller is no key any more; write"
            f' controllers = "{word}" in its place'
        )


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of the file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Config.model_json_schema()


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
