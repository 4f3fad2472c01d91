"""The section [gateway] of virtlun.toml; plugin.config has the file as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AuthSetting = Literal["auto", "none", "polkit"]


class GatewayConfig(BaseModel):
    """The proxy in front of libvirtd."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

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
    """Connections at a time to each of the two sockets; further ones wait."""
    allow_shrink: bool = False
    """Whether blockresize may make a volume smaller, which cuts off data."""
    always_controller: bool = True
    """Whether a define adds the controller even to a domain without a disk of ours."""
    reconcile: bool = True
    """Whether the running domains' LUNs are put right when the gateway starts."""
