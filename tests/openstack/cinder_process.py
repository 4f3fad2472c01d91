"""Cinder as a process, by the release of PyPI in an environment of its own, and its REST API."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.openstack.environments import environment
from tests.openstack.keystone_process import Glance, Keystone
from tests.openstack.rest import Rest
from tests.support.cache import ROOT
from tests.support.examples import used
from tests.support.wait import until

FOLDER = Path(__file__).parent
PROJECT = "5eb1de0c0d4b4c8e9b5576697274756c"
HOST = "compute1"
DEADLINE_S = 180.0
"""A backup reads a GiB, and makes a hash of each 32 KiB."""
VERSION = "volume 3.71"
"""The API's, as of Cinder 29."""
MORE = """
[DEFAULT]
host = {host}
state_path = {folder}
lock_path = {folder}
my_ip = 127.0.0.1
transport_url = fake://
auth_strategy = noauth
api_paste_config = {etc}/api-paste.ini
rootwrap_config = {rootwrap}
osapi_volume_listen = 127.0.0.1
osapi_volume_listen_port = 0
backup_driver = cinder.backup.drivers.posix.PosixBackupDriver
backup_posix_path = {folder}/backups
backup_workers = 1
backup_compression_algorithm = none
backup_file_size = 67108864
enable_force_upload = true
scheduler_driver_init_wait_time = 1
image_conversion_dir = {folder}/conversion
volume_clear = none
use_stderr = true
service_down_time = 86400
periodic_interval = 5
periodic_fuzzy_delay = 0
resource_query_filters_file = {etc}/resource_filters.json

[key_manager]
backend = cinder.keymgr.conf_key_mgr.ConfKeyManager
fixed_key = 0000000000000000000000000000000000000000000000000000000000000000

[database]
connection = sqlite:///{folder}/cinder.db
sqlite_synchronous = false

[oslo_concurrency]
lock_path = {folder}

[coordination]
backend_url = file://{folder}
"""


def python() -> Path:
    """Returns the Python that has Cinder."""
    return environment("cinder", FOLDER / "cinder.lock")


class Cinder(Rest):
    """Its services over a target."""

    def __init__(
        self,
        folder: Path,
        rpc_socket: Path,
        lvstore: str = "lvs0",
        *,
        nova: str | None = None,
        within: Sequence[str] = (),
        keystone: Keystone | None = None,
        glance: Glance | None = None,
        more: str = "",
        modules: Path = ROOT,
    ) -> None:
        """Starts them; what they keep is in `folder`, also for the next ones.

        `nova` is the URL of a real Nova, which is told of volumes that have grown. `within` is what
        runs them where the target's exports are mounted, if that is not here. Without a `keystone`
        everybody is the administrator; without a `glance` images are files of a folder. `more` is
        for cinder.conf, and outdoes what stands there. `modules` is a folder of more modules.
        """
        self.images = folder / "images"
        self.images.mkdir(exist_ok=True)
        self.log = folder / "cinder.err"
        self._read = 0
        etc = python().parents[1] / "etc/cinder"
        text = used(ROOT / "examples/openstack/cinder.conf").read_text()
        for word, its in (("/run/virtlun/target.sock", str(rpc_socket)), ("lvs0", lvstore)):
            assert word in text
            text = text.replace(word, its)
        path = folder / "cinder.conf"
        text += MORE.format(folder=folder, host=HOST, etc=etc, rootwrap=_rootwrap(folder, etc))
        if nova is not None:
            text += f"[nova]\nauth_type = admin_token\nendpoint = {nova}\n"
            text += f"token = admin:{PROJECT}\n"
        project, headers, words = PROJECT, {"X-Auth-Token": f"admin:{PROJECT}"}, [str(self.images)]
        if glance is not None:
            words = []
            text += f"[DEFAULT]\nglance_api_servers = {glance.url}\n"
        if keystone is not None:
            project, headers = keystone.project, keystone.headers
            text += "[DEFAULT]\nauth_strategy = keystone\n" + keystone.add_user("cinder")
        path.write_text(text + more)
        program = (*within, str(python()), "-P", str(FOLDER / "cinder_service.py"))
        self._process = subprocess.Popen(
            [*program, path, *words],
            stdout=subprocess.PIPE,
            stderr=self.log.open("ab"),
            text=True,
            env={
                "PATH": f"{_as_root(folder)}:{os.environ['PATH']}",
                "PYTHONPATH": f"{ROOT}:{modules}",
            },
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, self.log.read_text()[-4000:]
        self.port = int(port)
        self.url = f"http://127.0.0.1:{port}/v3/{project}"
        super().__init__(self.url, headers | {"OpenStack-API-Version": VERSION})
        until(self._is_up, f"Cinder's services; {self.log}", process=self._process)

    def _is_up(self) -> bool:
        states = [each["state"] for each in self.get("os-services")["services"]]
        return set(states) == {"up"}

    def wait(self, path: str, status: str = "available") -> dict[str, Any]:
        """Waits for the status of what is at a path; returns it."""
        found: dict[str, Any] = {}

        def there() -> bool:
            nonlocal found
            (found,) = self.get(path).values()
            if found["status"].startswith("error") and status != found["status"]:
                raise AssertionError(f"{path}: {found}\n{self.errors()}")
            return bool(found["status"] == status)

        until(there, f"{path}: {status}; {self.log}", DEADLINE_S)
        return found

    def errors(self) -> str:
        """Returns the first lines of errors in the log since the last call."""
        text = self.log.read_text()[self._read :]
        self._read += len(text)
        return "\n".join([line for line in text.splitlines() if " ERROR " in line][:100])

    def volume(self, **properties: Any) -> str:
        """Makes a volume of 1 GiB, unless said otherwise, and returns its ID."""
        made = self.post("volumes", {"volume": {"size": 1} | properties})["volume"]["id"]
        self.wait(f"volumes/{made}")
        return str(made)

    def snapshot(self, volume: str) -> str:
        """Takes a snapshot and returns its ID."""
        body = {"snapshot": {"volume_id": volume, "force": True}}
        made = self.post("snapshots", body)["snapshot"]["id"]
        self.wait(f"snapshots/{made}")
        return str(made)

    def delete(self, path: str) -> None:
        """Deletes something, and waits until it is gone."""
        self.call("DELETE", path)
        kind, identifier = path.split("/")
        until(
            lambda: identifier not in [each["id"] for each in self.get(kind)[kind]],
            f"{path} to be gone; {self.log}",
        )

    def close(self) -> None:
        """Ends them as a crash does."""
        self._process.kill()
        self._process.wait()


def _as_root(folder: Path) -> Path:
    """Returns a folder with what Cinder runs as root, and a `sudo` of root's, which just does."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    run = "#!{python} -P\nfrom {module} import {main}\n{main}()\n"
    texts = {
        "sudo": '#!/bin/sh\nexec "$@"\n',
        "cinder-rootwrap": run.format(python=python(), module="oslo_rootwrap.cmd", main="main"),
        "privsep-helper": run.format(
            python=python(), module="oslo_privsep.daemon", main="helper_main"
        ),
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs


def _rootwrap(folder: Path, etc: Path) -> Path:
    """Returns the configuration of Cinder's rootwrap, with the filters of the example."""
    filters = folder / "rootwrap.d"
    filters.mkdir(exist_ok=True)
    own = used(ROOT / "examples/openstack/virtlun.filters")
    for file in (*(etc / "rootwrap.d").iterdir(), own):
        (filters / file.name).write_bytes(file.read_bytes())
    text = (etc / "rootwrap.conf").read_text()
    for key, its in (("filters_path=", filters), ("exec_dirs=", folder / "programs")):
        assert key in text
        text = text.replace(key, f"{key}{its},")
    path = folder / "rootwrap.conf"
    path.write_text(text)
    return path


def connector(host: str = HOST, **more: str) -> dict[str, Any]:
    """Returns what Nova tells of a host, as of Nova 34 without multipath."""
    return {
        "platform": "x86_64",
        "os_type": "linux",
        "ip": "127.0.0.1",
        "host": host,
        "multipath": False,
        "do_local_attach": False,
        "hostname": socket.gethostname(),
    } | more
