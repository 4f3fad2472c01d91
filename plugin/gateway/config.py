"""What the gateway reads from virtlun.toml; the command line overrides it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plugin.errors import ConfigError
from plugin.translate import Settings

DEFAULT_CONFIG = Path("/etc/virtlun/virtlun.toml")

AuthSetting = Literal["auto", "none", "polkit"]


class TargetSection(BaseModel):
    """Section [target]."""

    model_config = ConfigDict(extra="ignore")

    rpc_socket: Path = Path("/run/virtlun/target.sock")
    """The target's JSON-RPC socket."""
    vhost_dir: Path = Path("/run/virtlun/vhost")
    """Where the target makes the controllers' sockets."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long one call to the target may take, seconds."""


class GatewayConfig(BaseModel):
    """Section [gateway]."""

    model_config = ConfigDict(extra="forbid")

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
    socket_group: str = "libvirt"
    """Group of both sockets; '' leaves root's."""
    socket_mode: str = Field(default="0660", pattern=r"^0[0-7]{3}$")
    """Mode of the read-write socket, octal."""
    socket_mode_ro: str = Field(default="0666", pattern=r"^0[0-7]{3}$")
    """Mode of the read-only socket, octal."""
    auth: AuthSetting = "auto"
    """What clients of the read-write socket must pass: none, polkit, or as libvirtd.conf says."""
    auth_ro: AuthSetting = "auto"
    """The same for the read-only socket."""
    libvirtd_conf: Path = Path("/etc/libvirt/libvirtd.conf")
    """Where `auto` looks; what cannot be read there counts as polkit."""
    pkcheck: str = "pkcheck"
    """polkit's program."""
    max_clients: int = Field(default=1000, gt=0)
    """Connections at a time; further ones wait."""
    allow_shrink: bool = False
    """Whether blockresize may make a volume smaller, which cuts off data."""
    always_controller: bool = True
    """Whether a define adds the controller even to a domain without a disk of ours."""
    reconcile: bool = True
    """Whether the running domains' LUNs are put right when the gateway starts."""


class Config(BaseModel):
    """The file as far as the gateway is concerned; other sections are others' business."""

    model_config = ConfigDict(extra="ignore")

    target: TargetSection = TargetSection()
    gateway: GatewayConfig = GatewayConfig()

    def settings(self) -> Settings:
        """Returns what the translation needs."""
        return Settings(
            vhost_dir=str(self.target.vhost_dir),
            always_controller=self.gateway.always_controller,
        )


def load(path: Path | None) -> Config:
    """Reads the configuration; without a `path` the default one, which may be missing.

    Raises:
        ConfigError: the file is missing, unreadable or wrong; names file and key.
    """
    source = path or DEFAULT_CONFIG
    try:
        values = tomllib.loads(source.read_text())
    except FileNotFoundError as error:
        if path is None:
            return Config()
        raise ConfigError(f"{source}: there is no such file") from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {key}: {first['msg']}") from error
