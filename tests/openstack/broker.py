"""A message bus as OpenStack's services have it: a RabbitMQ of one's own, Debian's package."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.support.ports import free_port
from tests.support.wait import until

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
EPMD = "/usr/bin/epmd"


class Broker:
    """A node with ports and files of its own."""

    def __init__(self, folder: Path) -> None:
        """Starts it; what it keeps and its log are in `folder`.

        RuntimeError where RabbitMQ is not installed.
        """
        if not SERVER.exists():
            raise RuntimeError("rabbitmq-server is not installed: run `make nightly`")
        folder.mkdir()
        self.log = folder / "log"
        names, self._port = free_port(), free_port()
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._port}\nlog.file.level = warning\n"
        )
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),  # of Erlang's cookie
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "virtlun@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "none"),
        }
        # What tells a node's name from its port; the node would leave one behind that goes on.
        self._names = subprocess.Popen([EPMD, "-port", str(names)], env=environment)
        self._node = subprocess.Popen(
            [SERVER],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        until(self._is_up, lambda: f"RabbitMQ\n{self.log.read_text()}", 180, process=self._node)

    def _is_up(self) -> bool:
        return "Starting broker... completed" in self.log.read_text()

    @property
    def url(self) -> str:
        """What oslo.messaging calls it."""
        return f"rabbit://guest:guest@127.0.0.1:{self._port}/"

    def close(self) -> None:
        """Ends it and its children."""
        os.killpg(self._node.pid, signal.SIGKILL)
        self._node.wait()
        self._names.kill()
        self._names.wait()
