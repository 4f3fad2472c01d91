"""Keystone and Glance as processes, by the releases of PyPI in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path

from tests.openstack.environments import environment
from tests.openstack.rest import Rest
from tests.support.ports import free_port
from tests.support.wait import serves

FOLDER = Path(__file__).parent
REGION = "RegionOne"
PASSWORD = "of a test"
"""Everybody's."""
KEYSTONE = """
[DEFAULT]
use_stderr = true

[database]
connection = sqlite:///{folder}/keystone.db
sqlite_synchronous = false

[cache]
# Else each call reads all that there is of its user, many times.
enabled = true
backend = dogpile.cache.memory

[fernet_tokens]
key_repository = {folder}/fernet

[fernet_receipts]
key_repository = {folder}/fernet

[credential]
key_repository = {folder}/credential

[identity]
# bcrypt's fewest: what is kept here is no secret.
password_hash_rounds = 4
"""
GLANCE = """
[DEFAULT]
use_stderr = true
enabled_backends = files:file
worker_self_reference_url = http://127.0.0.1:{port}

[database]
connection = sqlite:///{folder}/glance.db
sqlite_synchronous = false

[glance_store]
default_backend = files

[files]
filesystem_store_datadir = {folder}/files

[os_glance_staging_store]
filesystem_store_datadir = {folder}/staging

[os_glance_tasks_store]
filesystem_store_datadir = {folder}/tasks

[oslo_concurrency]
lock_path = {folder}

[paste_deploy]
config_file = {etc}/glance-api-paste.ini
"""
WITH_KEYSTONE = """
[paste_deploy]
flavor = keystone
"""
WITHOUT = """
[oslo_policy]
policy_file = {policy}
"""


def python() -> Path:
    """Returns the Python that has both."""
    return environment("services", FOLDER / "services.lock")


class _Service:
    """The process of one of them, on a port of its own."""

    def __init__(self, name: str, folder: Path, settings: str) -> None:
        """Writes its configuration; what it keeps is in `folder`/`name`."""
        self.name = name
        self.log = folder / f"{name}.err"
        self.port = free_port()
        folder = folder / name
        folder.mkdir()
        etc = python().parents[1] / "etc" / name
        self._config = folder / {"keystone": "keystone.conf", "glance": "glance-api.conf"}[name]
        self._config.write_text(settings.format(folder=folder, port=self.port, etc=etc))
        self._environment = {
            "PATH": os.environ["PATH"],
            f"OS_{name.upper()}_CONFIG_DIR": str(folder),
        }

    def manage(self, *words: str) -> None:
        """Runs its program of administration."""
        program = (python(), "-P", python().with_name(f"{self.name}-manage"))
        with self.log.open("ab") as log:
            subprocess.run(
                [*program, "--config-file", self._config, *words],
                env=self._environment,
                stdout=log,
                stderr=log,
                check=True,
            )

    def start(self, path: str) -> None:
        """Has it serve; `path` is of what it shows to everybody."""
        program = (python(), "-P", FOLDER / "keystone_service.py")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, f"{self.name}.wsgi.api", str(self.port)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        shown = Rest(f"http://127.0.0.1:{self.port}", {})
        serves(self._process, lambda: shown.get(path), f"{self.name} to answer", self.log)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


class Keystone(Rest):
    """Its API, called by an administrator, and its process."""

    def __init__(self, folder: Path) -> None:
        """Makes its database and starts it."""
        service = _Service("keystone", folder, KEYSTONE)
        self.url = f"http://127.0.0.1:{service.port}/v3"
        whose = ("--keystone-user", str(os.getuid()), "--keystone-group", str(os.getgid()))
        service.manage("fernet_setup", *whose)
        service.manage("credential_setup", *whose)
        service.manage("db_sync")
        urls = (f"--bootstrap-{kind}-url={self.url}" for kind in ("admin", "internal", "public"))
        options = (f"--bootstrap-password={PASSWORD}", f"--bootstrap-region-id={REGION}")
        service.manage("bootstrap", *options, *urls)
        service.start("v3")
        self.close = service.close
        token, self.project = self._log_in()
        self.headers = {"X-Auth-Token": token}
        super().__init__(self.url, self.headers)
        project = {"name": "service", "domain_id": "default"}
        self._services = self.post("projects", {"project": project})["project"]["id"]
        self._roles = {each["name"]: each["id"] for each in self.get("roles")["roles"]}

    def _log_in(self) -> tuple[str, str]:
        """Returns a token of the administrator's, and the ID of its project."""
        domain = {"id": "default"}
        user = {"name": "admin", "password": PASSWORD, "domain": domain}
        body = {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": {"name": "admin", "domain": domain}},
            }
        }
        request = urllib.request.Request(
            f"{self.url}/auth/tokens",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            said = json.loads(answer.read())
            return answer.headers["X-Subject-Token"], said["token"]["project"]["id"]

    def add_user(self, name: str) -> str:
        """Makes the user of a service; returns the settings by which the service asks Keystone."""
        user = {"name": name, "password": PASSWORD, "domain_id": "default"}
        made = self.post("users", {"user": user})["user"]["id"]
        for role in ("admin", "service"):
            path = f"projects/{self._services}/users/{made}/roles/{self._roles[role]}"
            self.call("PUT", path)
        return (
            "\n[keystone_authtoken]\n"
            f"www_authenticate_uri = {self.url}\nauth_url = {self.url}\nauth_type = password\n"
            f"username = {name}\npassword = {PASSWORD}\nproject_name = service\n"
            "user_domain_id = default\nproject_domain_id = default\n"
        )

    def add_service(self, name: str, kind: str, url: str) -> None:
        """Makes a service known, which is at `url`."""
        made = self.post("services", {"service": {"name": name, "type": kind}})["service"]["id"]
        body = {"service_id": made, "interface": "public", "url": url, "region_id": REGION}
        self.post("endpoints", {"endpoint": body})


class Glance(Rest):
    """Its API, called by an administrator, and its process; images are files."""

    def __init__(self, folder: Path, keystone: Keystone | None = None) -> None:
        """Makes its database and starts it; without a Keystone all who call are administrators."""
        if keystone is None:
            policy = folder / "glance-policy.yaml"
            policy.write_text('"context_is_admin": "@"\n')
            settings, headers = WITHOUT.format(policy=policy), {}
        else:
            settings, headers = WITH_KEYSTONE + keystone.add_user("glance"), keystone.headers
        service = _Service("glance", folder, GLANCE + settings)
        self.url = f"http://127.0.0.1:{service.port}"
        service.manage("db_sync")
        service.start("versions")
        self.close = service.close
        self._headers_of_data = headers | {"Content-Type": "application/octet-stream"}
        super().__init__(self.url, headers)
        if keystone is not None:
            keystone.add_service("glance", "image", self.url)

    def add(self, name: str, data: bytes, disk_format: str, **properties: str) -> str:
        """Makes an image that everybody sees; returns its ID."""
        body = {"name": name, "disk_format": disk_format, "container_format": "bare"} | properties
        made = self.post("v2/images", body | {"visibility": "public"})["id"]
        request = urllib.request.Request(
            f"{self.url}/v2/images/{made}/file",
            method="PUT",
            data=data,
            headers=self._headers_of_data,
        )
        urllib.request.urlopen(request).close()
        return str(made)
