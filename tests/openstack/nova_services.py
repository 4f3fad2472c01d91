"""A whole Nova of PyPI's release: API, conductor, scheduler, compute and placement as processes.

Message bus and databases are real as well: RabbitMQ and PostgreSQL. There is no Keystone, Neutron
or Glance: see nova_config.py and stand_ins.py.
"""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from tests.openstack.broker import Broker
from tests.openstack.databases import Databases
from tests.openstack.nova_config import (
    TOKEN,
    Peers,
    command,
    configure,
    configure_placement,
    make_cells,
)
from tests.openstack.nova_process import FOLDER, python
from tests.openstack.rest import Rest
from tests.openstack.stand_ins import StandIns
from tests.support.ports import free_port
from tests.support.wait import until

VERSION = "compute 2.104"
"""The API's, as of Nova 34."""
PLACEMENT_VERSION = "placement 1.39"
START_S = 180.0


class Services:
    """The services over a gateway and Cinder."""

    def __init__(self, folder: Path, libvirt: Path, port: int, cinder: str, images: Path) -> None:
        """Starts them, and waits until the host can be scheduled to.

        What they keep and their logs are in `folder`; `libvirt` is the gateway's socket, `cinder`
        its API's URL, `port` is the one of Nova's API, and `images` the folder of images.
        """
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._others = StandIns(images)
        self._broker: Broker | None = None
        self._databases: Databases | None = None
        try:
            self._broker = Broker(folder / "rabbitmq")
            self._databases = Databases(folder / "postgresql")
            new = self._databases.new
            told = free_port()
            placement = f"http://127.0.0.1:{told}"
            configure_placement(folder, new("placement"))
            self._api("placement", "placement.wsgi.api", told)
            databases = new("api"), new("cell1")
            peers = Peers(
                *(self._broker.url, *databases, placement, cinder, self._others.url), libvirt
            )
            self._config = configure(folder, peers)
            make_cells(self._config, new("cell0"))
            for program in ("conductor", "scheduler"):
                self.start(program)
            self._api("api", "nova.wsgi.osapi_compute", port)
            self.start("compute")
            headers = {"X-Auth-Token": TOKEN}
            self.api = Rest(
                f"http://127.0.0.1:{port}/v2.1", headers | {"OpenStack-API-Version": VERSION}
            )
            self.placement = Rest(placement, headers | {"OpenStack-API-Version": PLACEMENT_VERSION})
            until(self._are_up, f"Nova's services; {folder}", START_S, process=self.compute)
        except BaseException:
            self.close()
            raise

    def _run(self, name: str, words: list[str], environment: dict[str, str]) -> None:
        self._processes[name] = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log(name).open("ab"),
            env={"PATH": os.environ["PATH"]} | environment,
        )

    def _api(self, name: str, module: str, port: int) -> None:
        script = str(FOLDER / "wsgi_service.py")
        environment = {
            "OS_PLACEMENT_CONFIG_DIR": str(self.folder),
            "OS_NOVA_CONFIG_DIR": str(self.folder),
            "OS_NOVA_CONFIG_FILES": "api-paste.ini;nova.conf",
        }
        self._run(name, [str(python()), "-P", script, module, str(port)], environment)

        def answers() -> bool:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).close()
            except urllib.error.HTTPError:
                return True
            return True

        until(answers, f"{name}; {self.log(name)}", START_S, process=self._processes[name])

    def start(self, program: str) -> None:
        """Starts nova-`program`."""
        self._run(program, command(program, self._config), {})

    def kill(self, program: str) -> None:
        """Ends nova-`program` as a crash does."""
        self._processes[program].kill()
        self._processes[program].wait()

    @property
    def compute(self) -> subprocess.Popen[bytes]:
        """The process of nova-compute."""
        return self._processes["compute"]

    def log(self, name: str) -> Path:
        """Returns the log of a service."""
        return self.folder / f"{name}.log"

    def _are_up(self) -> bool:
        services = self.api.get("os-services")["services"]
        up = {each["binary"] for each in services if each["state"] == "up"}
        hosts = self.api.get("os-hypervisors")["hypervisors"]
        return up == {"nova-conductor", "nova-scheduler", "nova-compute"} and bool(hosts)

    def errors(self) -> str:
        """Returns the lines of errors in the logs."""
        return "\n".join(
            f"{name}: {line}"
            for name in self._processes
            for line in self.log(name).read_text().splitlines()
            if " ERROR " in line
        )[-8000:]

    def close(self) -> None:
        """Ends them as a crash does."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for each in (self._broker, self._databases):
            if each is not None:
                each.close()
        self._others.close()
