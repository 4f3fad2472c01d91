"""The hook's few keys of virtlun.toml, and which target they name. Standard library only.

plugin.config describes them; a test holds the defaults together.
"""

from __future__ import annotations

import tomllib

from pydataplane.domain import portals
from pydataplane.domain.errors import ConfigError
from pydataplane.domain.model import Allowed

DEFAULT_CONFIG = "/etc/virtlun/virtlun.toml"
DEFAULT_RPC_SOCKET = "/run/virtlun/target.sock"
DEFAULT_VHOST_DIR = "/run/virtlun/vhost"
DEFAULT_RECONNECT_S = "auto"
DEFAULT_DEADLINE_S = 10.0
DEFAULT_CREATE_MISSING_MIB = 0
DEFAULT_STATE_DIR = "/var/lib/virtlun/hook"
DEFAULT_JOURNAL_DIR = "/run/virtlun/gateway"


class Config:
    """What the hook needs of the file."""

    def __init__(self, path: str | None) -> None:
        """Reads `path`; without one the default file, which may be missing.

        Raises:
            ConfigError: the file cannot be read or says something wrong.
        """
        file = path or DEFAULT_CONFIG
        try:
            with open(file, "rb") as stream:  # noqa: PTH123 - pathlib is slow to import
                values = tomllib.load(stream)
        except FileNotFoundError:
            if path is not None:
                raise ConfigError(f"{path}: there is no such file") from None
            values = {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from error
        hook, target = values.get("hook", {}), values.get("target", {})
        try:
            again = values.get("disks", {}).get("reconnect_s", DEFAULT_RECONNECT_S)
            self.reconnect_s = None if again == "auto" else int(again)
            disks = values.get("disks", {})
            self.allowed = Allowed(
                disks.get("own_keyring", False) is True,
                [str(folder) for folder in disks.get("nbd_sockets", [])],
                [portals.check(str(each)) for each in disks.get("iscsi_portals", [])],
            )
            self.rpc_socket = str(target.get("rpc_socket", DEFAULT_RPC_SOCKET))
            self.vhost_dir = str(target.get("vhost_dir", DEFAULT_VHOST_DIR))
            self.others = {
                str(other["vhost_dir"]): str(other["rpc_socket"])
                for other in values.get("targets", {}).values()
            }
            self.deadline_s = float(hook.get("deadline_s", DEFAULT_DEADLINE_S))
            self.create_missing_mib = int(
                hook.get("create_missing_mib", DEFAULT_CREATE_MISSING_MIB)
            )
            self.state_dir = str(hook.get("state_dir", DEFAULT_STATE_DIR))
            gateway = values.get("gateway", {})
            self.journal_dir = str(gateway.get("state_dir", DEFAULT_JOURNAL_DIR))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file}: sections [target], [targets], [hook] and [gateway]: {error!r}"
            ) from error
        if not 0 < self.deadline_s <= 3600:
            raise ConfigError(f"{file}: hook.deadline_s is not between 0 and 3600 seconds")
        if self.create_missing_mib < 0:
            raise ConfigError(f"{file}: hook.create_missing_mib is below 0")

    def rpc_socket_of(self, vhost_socket: str) -> str:
        """Returns the JSON-RPC socket of the target that makes a controller's socket.

        That of several targets of a host is told by the folder: configured, or `NAME/vhost` beside
        the first target's own JSON-RPC socket. The first is asked where none is known.
        """
        folder = vhost_socket.rpartition("/")[0]
        if folder.rstrip("/") == self.vhost_dir.rstrip("/"):
            return self.rpc_socket
        if folder in self.others:
            return self.others[folder]
        own, _, name = self.rpc_socket.rpartition("/")
        parent, _, last = folder.rpartition("/")
        if last == "vhost" and parent.rpartition("/")[0] == own:
            return f"{parent}/{name}"
        return self.rpc_socket
