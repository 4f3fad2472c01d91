"""A whole Nova of PyPI's release: API, conductor, scheduler, compute and placement as processes.

Message bus and databases are real as well: RabbitMQ and PostgreSQL. There is no Keystone and no
Neutron: see nova_config.py and stand_ins.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
DATA = "nova_object.data"
"""Where Nova's JSON of an object has its fields."""


class Services:
    """The services over gateways and Cinder."""

    def __init__(
        self, folder: Path, hosts: Mapping[str, Path], port: int, cinder: str, glance: str
    ) -> None:
        """Starts them, and waits until each host can be scheduled to.

        What they keep and their logs are in `folder`; `hosts` are the sockets of their gateways,
        `cinder` and `glance` are URLs of their APIs, and `port` is the one of Nova's.
        """
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts: dict[str, Path] = {}
        self._others = StandIns()
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
            urls = placement, cinder, glance, self._others.url
            self._hosts = configure(folder, Peers(self._broker.url, *databases, *urls), hosts)
            self._config = next(iter(self._hosts.values()))
            make_cells(self._config, new("cell0"))
            for program in ("conductor", "scheduler"):
                self.start(program)
            files = f"api-paste.ini;{self._config.name}"
            self._api("api", "nova.wsgi.osapi_compute", port, OS_NOVA_CONFIG_FILES=files)
            for host in hosts:
                self.start(host)
            headers = {"X-Auth-Token": TOKEN}
            self.api = Rest(
                f"http://127.0.0.1:{port}/v2.1", headers | {"OpenStack-API-Version": VERSION}
            )
            self.placement = Rest(placement, headers | {"OpenStack-API-Version": PLACEMENT_VERSION})
            compute = self._processes[next(iter(hosts))]
            until(self._are_up, f"Nova's services; {folder}", START_S, process=compute)
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

    def _api(self, name: str, module: str, port: int, **more: str) -> None:
        script = str(FOLDER / "wsgi_service.py")
        environment = {
            "OS_PLACEMENT_CONFIG_DIR": str(self.folder),
            "OS_NOVA_CONFIG_DIR": str(self.folder),
        } | more
        self._run(name, [str(python()), "-P", script, module, str(port)], environment)

        def answers() -> bool:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).close()
            except urllib.error.HTTPError:
                return True
            return True

        until(answers, f"{name}; {self.log(name)}", START_S, process=self._processes[name])

    def start(self, name: str) -> None:
        """Starts a host's nova-compute, or else nova-`name`."""
        if name in self._hosts:
            self._run(name, command("compute", self._hosts[name]), {})
        else:
            self._run(name, command(name, self._config), {})

    def kill(self, name: str) -> None:
        """Ends a host's nova-compute, or else nova-`name`, as a crash does."""
        self._processes[name].kill()
        self._processes[name].wait()

    def log(self, name: str) -> Path:
        """Returns the log of a service."""
        return self.folder / f"{name}.log"

    def _are_up(self) -> bool:
        services = self.api.get("os-services")["services"]
        up = {each["binary"] for each in services if each["state"] == "up"}
        known = self.api.get("os-hypervisors/detail")["hypervisors"]
        found = {each["service"]["host"] for each in known if each["state"] == "up"}
        return up == {"nova-conductor", "nova-scheduler", "nova-compute"} and found == set(
            self._hosts
        )

    def errors(self) -> str:
        """Returns the lines of errors in the logs."""
        return "\n".join(
            f"{name}: {line}"
            for name in self._processes
            for line in self.log(name).read_text().splitlines()
            if " ERROR " in line
        )[-8000:]

    def told(self, event: str) -> list[dict[str, Any]]:
        """Returns what the hosts' nova-computes have told whoever bills servers, of one event."""
        word = f" oslo.messaging.notification.{event} "
        return [
            json.loads(line[line.index("{") :])["payload"]
            for host in self._hosts
            for line in self.log(host).read_text().splitlines()
            if word in line
        ]

    def devices(self, server: str) -> list[dict[str, Any]]:
        """Returns what Nova's database has of a server's devices that have a tag, for the guest.

        Each has `tags`, `serial`, `bus` (its class) and `address` (None: it has none).
        """
        assert self._databases is not None
        query = f"SELECT device_metadata FROM instance_extra WHERE instance_uuid = '{server}'"
        (row,) = self._databases.read("cell1", query)
        if not row:
            return []
        found = [each[DATA] for each in json.loads(row)[DATA]["devices"]]
        return [
            {
                "tags": each["tags"],
                "serial": each["serial"],
                "bus": each["bus"]["nova_object.name"],
                "address": each["bus"][DATA].get("address"),
            }
            for each in found
        ]

    def close(self) -> None:
        """Ends them as a crash does."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for each in (self._broker, self._databases):
            if each is not None:
                each.close()
        self._others.close()
