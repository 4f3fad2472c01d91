"""The targets of this host: the one without a name, those configured, those that are found.

A target with a name keeps its sockets in a folder of that name beside the socket of the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from plugin.config import Config, load

DEFAULT = "default"
"""What the target without a name is called in messages."""


@dataclass(frozen=True)
class TargetAddress:
    """Where a target is."""

    name: str | None
    """None: the one without a name."""
    rpc_socket: Path
    vhost_dir: Path
    """Folder of its controllers' sockets."""

    @property
    def label(self) -> str:
        """Returns what to call it in messages."""
        return self.name or DEFAULT


def addresses(config: Config) -> list[TargetAddress]:
    """Returns where the targets of this host are, running or not; the one without a name first."""
    first = TargetAddress(None, config.target.rpc_socket, config.target.vhost_dir)
    found = [first]
    found += [
        TargetAddress(name, at.rpc_socket, at.vhost_dir) for name, at in config.targets.items()
    ]
    names = {address.name for address in found}
    sockets = {address.rpc_socket for address in found}
    parent = first.rpc_socket.parent
    for name in sorted(_with(first.rpc_socket.name, parent)):
        socket = parent / name / first.rpc_socket.name
        if name not in names and socket not in sockets:
            found.append(TargetAddress(name, socket, socket.parent / "vhost"))
    return found


def _with(name: str, parent: Path) -> list[str]:
    """Returns the names of the folders in `parent` that have a file `name`.

    For each call of a client: Path.glob takes ten times as long.
    """
    try:
        with os.scandir(parent) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
    return [folder for folder in folders if os.path.lexists(f"{parent}/{folder}/{name}")]


def address(config: Config, name: str | None) -> TargetAddress:
    """Returns where the target `name` is, or is to be."""
    for known in addresses(config):
        if known.name == name:
            return known
    assert name is not None
    folder = config.target.rpc_socket.parent / name
    return TargetAddress(name, folder / config.target.rpc_socket.name, folder / "vhost")


def chosen(
    config_path: Path | None, socket: Path | None, name: str | None
) -> tuple[Config, TargetAddress, Path]:
    """Returns what a command works with, by its options, each None where it is not given.

    That is the configuration, where the target `name` is, and the socket to ask it by.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = load(config_path)
    at = address(config, name)
    return config, at, socket or at.rpc_socket
