"""Tempest as a program, by the release of PyPI in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.openstack import keystone_process
from tests.openstack.environments import environment
from tests.openstack.tempest.cloud import Cloud

HERE = Path(__file__).parent
TESTS = r"^(tempest|cinder_tempest_plugin)\.api\.volume\."
"""Those of volumes; Tempest has others that make servers."""


def python() -> Path:
    """Returns the Python that has Tempest and Cinder's plugin for it."""
    return environment("tempest", HERE.parent / "tempest.lock")


class Tempest:
    """Tempest with a cloud's settings."""

    def __init__(self, cloud: Cloud) -> None:
        """Makes its workspace in the cloud's folder, and what its settings name."""
        self.folder = cloud.folder / "tempest"
        self._run("init", str(self.folder), folder=cloud.folder)
        image = cloud.folder / "image.qcow2"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "64M"], check=True)
        several = {"name": "multiattach", "extra_specs": {"multiattach": "<is> True"}}
        cloud.cinder.post("types", {"volume_type": several})
        cloud.keystone.add_service("none", "network", f"{cloud.keystone.url}/no-neutron")
        settings = (HERE / "tempest.conf").read_text()
        (self.folder / "etc/tempest.conf").write_text(
            settings.format(
                folder=self.folder,
                password=keystone_process.PASSWORD,
                keystone=cloud.keystone.url,
                region=keystone_process.REGION,
                image=cloud.glance.add("small", image.read_bytes(), "qcow2"),
            )
        )

    def tests(self, pattern: str = TESTS) -> list[str]:
        """Returns the IDs of its tests that match a pattern."""
        listed = self._run("run", "--regex", pattern, "--list-tests").decode().splitlines()
        return [line for line in listed if line.endswith("]")]

    def run(self, but: str, pattern: str = TESTS) -> Mapping[str, tuple[str, str]]:
        """Runs those that do not match `but`.

        Returns, of each test and of each class, its status and what it said.
        """
        words = ("--regex", pattern, "--exclude-regex", but, "--concurrency", "2", "--subunit")
        stream = self._run("run", *words, check=False)
        (self.folder / "subunit").write_bytes(stream)
        found = subprocess.run(
            [python(), "-P", HERE / "results.py"],
            input=stream,
            stdout=subprocess.PIPE,
            check=True,
        )
        return {name: (status, said) for name, (status, said) in json.loads(found.stdout).items()}

    def _run(self, *words: str, folder: Path | None = None, check: bool = True) -> bytes:
        """Runs it in its workspace, or another folder; returns what it printed."""
        return subprocess.run(
            [python(), "-P", python().with_name("tempest"), *words],
            cwd=folder or self.folder,
            # It starts `python` by that name.
            env={"PATH": f"{python().parent}:/usr/bin:/bin", "HOME": str(self.folder.parent)},
            stdout=subprocess.PIPE,
            check=check,
        ).stdout
