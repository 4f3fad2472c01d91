"""examples/kubernetes/Containerfile, built by buildah from a checkout as its first lines say.

No registry is in reach of the tests, so what the file is FROM is made here, under the same names:
Debian's base system by debootstrap, and on it this machine's Rust. The rest is done by the file.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.program_image import CONTAINERFILE
from tests.support.cache import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

DEBIAN = "docker.io/library/debian:bookworm-slim"
RUST = "docker.io/library/rust:1.89-bookworm"
IMAGE = "virtlun:0.1.0"
#: What Debian's packages come from and are checked with, on this machine as in the image.
APT = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/apt.conf.d", "usr/share/keyrings")
#: Where a step has the container's name.
IT = "container"
#: This machine's, which may have one more than Debian has.
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
#: Of a compiler's image, beside the compiler.
BUILD_PACKAGES = ("ca-certificates", "gcc", "libc6-dev", "make")


class Buildah:
    """buildah with a store of its own, for a machine that may itself be a container."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, *words: str | Path) -> str:
        """Runs one command of it; returns what it printed, without the end of the line."""
        store = (f"--root={self._folder}/store", f"--runroot={self._folder}/run")
        done = subprocess.run(
            ["buildah", *store, "--storage-driver=vfs", *words],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "BUILDAH_ISOLATION": "chroot"},
        )
        assert done.returncode == 0, (
            f"buildah {words[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done.stdout.strip()

    def image(self, base: str, name: str, *steps: tuple[str | Path, ...]) -> None:
        """Makes the image `name` of another and some steps, such as ("run", IT, "--", "true")."""
        container = self("from", "--pull-never", base)
        for step in steps:
            self(*(container if word is IT else word for word in step))
        self("commit", "-q", "--rm", container, name)


def debian(root: Path) -> Path:
    """Makes a folder with Debian's base system, whose packages come from where this one's do."""
    mirror = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Codename: bookworm"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", root, mirror],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name in APT:
        subprocess.run(["rm", "-rf", root / name], check=True)
        if (Path("/") / name).exists():
            subprocess.run(["cp", "-a", Path("/") / name, root / name], check=True)
    return root


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """It has the image, built from what is committed."""
    folder = tmp_path_factory.mktemp("buildah")
    buildah = Buildah(folder)
    buildah.image("scratch", DEBIAN, ("add", "-q", IT, debian(folder / "debian"), "/"))
    packages = " ".join(BUILD_PACKAGES)
    get = f"apt-get -q update && apt-get -qy install --no-install-recommends {packages}"
    rust = subprocess.run(
        ["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    copy = "cp -a /mnt /usr/local/rust && ln -s /usr/local/rust/bin/* /usr/local/bin/"
    buildah.image(
        DEBIAN,
        RUST,
        ("run", IT, "--", "sh", "-c", get),
        ("run", "-v", f"{rust}:/mnt:ro", IT, "--", "sh", "-c", copy),
        ("add", "-q", IT, CERTIFICATES, CERTIFICATES),
        ("config", "--env", f"PIP_CERT={CERTIFICATES}", IT),
    )
    checkout = folder / "checkout"
    checkout.mkdir()
    archive = ["git", "archive", "--format=tar", f"--output={folder}/checkout.tar", "HEAD"]
    subprocess.run(archive, cwd=ROOT, check=True)
    subprocess.run(["tar", "-xf", folder / "checkout.tar", "-C", checkout], check=True)
    file = checkout / CONTAINERFILE.relative_to(ROOT)
    buildah("build", "--pull-never", "-t", IMAGE, "-f", file, checkout)
    yield buildah
    subprocess.run(["rm", "-rf", folder / "store", folder / "debian"], check=True)


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    """A container of it."""
    return buildah("from", "--pull-never", IMAGE)


def test_it_is_from_what_the_tests_have() -> None:
    """Another name in the file would be one that nobody has built."""
    assert set(re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE)) == {
        DEBIAN,
        RUST,
    }


def test_every_program_answers(buildah: Buildah, container: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] in buildah("run", container, "--", "virtlun", "--version")
    for program in sorted({*project["scripts"], "virtlun-target", "virtlun-holder"}):
        assert "usage" in buildah("run", container, "--", program, "--help").lower(), program


def test_the_target_serves_a_volume(buildah: Buildah, container: str) -> None:
    """As the image's own user, by the image's own command line."""
    script = (
        "virtlun-target --rpc-socket /tmp/rpc.sock --vhost-dir /tmp --state-dir /tmp/state & "
        "until [ -S /tmp/rpc.sock ] || ! kill -0 $!; do sleep 0.1; done; "
        "virtlun --socket /tmp/rpc.sock target status --json; kill $!"
    )
    assert '"version"' in buildah("run", "--user", "virtlun", container, "--", "sh", "-c", script)


def test_the_helper_has_the_programs_that_it_runs(buildah: Buildah, container: str) -> None:
    programs = ["blkid", "e2fsck", "mkfs.ext4", "mkfs.xfs", "mount", "resize2fs", "xfs_growfs"]
    script = f"for each in {' '.join(programs)}; do command -v $each; done; id virtlun"
    said = buildah("run", container, "--", "sh", "-c", script).splitlines()
    assert [Path(line).name for line in said[:-1]] == programs
    assert "uid=64100(virtlun)" in said[-1] and "(disk)" in said[-1]
