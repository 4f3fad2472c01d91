"""Kubernetes, its CSI sidecars and csi-sanity, built from source into a cache outside the checkout.

No images and no downloads of binaries: one Go module (go.mod beside this file pins every version)
gives the control plane, kubelet and kubectl as one program, and the sidecars. csi-sanity is built
on its own, since it needs a newer CSI specification than Kubernetes compiles with.

The cache's key is a hash of what pins the versions, so a second call finds all of it there. Cold,
it takes about 550 CPU-seconds, 3 GB of Go's build cache and 1 GB of its module cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MODULE = Path(__file__).parent
KUBERNETES = "v1.36.3"
CSI_SANITY = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.6.0"
SIDECARS = (
    "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
    "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer",
    "github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter",
    "github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
)
#: The module with the definitions of VolumeSnapshot and the like, in its folder config/crd.
SNAPSHOT_CLIENT = "github.com/kubernetes-csi/external-snapshotter/client/v8"
CRDS = "crd"
#: The names by which the one Kubernetes program is called.
PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
)
MULTI_CALL = "kubernetes"
#: Packages that the big build compiles, near enough for a progress line.
PACKAGES = 2720
GO_MINIMUM = (1, 26)

#: What a cluster needs of Debian 12 beside what the other tests need; the Makefile reads it here.
APT_PACKAGES = (
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "etcd-server",
    "grub-common",
    "grub-pc-bin",
    "iproute2",
    "iptables",
    "openssl",
    "runc",
    "socat",
    "xfsprogs",
)

Report = Callable[[str], None]


class ToolsError(Exception):
    """The programs could not be built; the text says why and what to do."""


@dataclass(frozen=True)
class Tools:
    """Where the programs are."""

    directory: Path

    def path(self, name: str) -> Path:
        """Returns a program of `PROGRAMS`, a sidecar by its last name, or csi-sanity."""
        return self.directory / name

    def crds(self) -> list[Path]:
        """Returns the definitions of VolumeSnapshot, VolumeGroupSnapshot and their kin."""
        return sorted((self.directory / CRDS).glob("*storage.k8s.io_*.yaml"))


def key() -> str:
    """Returns the hash of all that decides what is built."""
    digest = hashlib.sha256(f"{CSI_SANITY} {SIDECARS} {SNAPSHOT_CLIENT} {PROGRAMS}".encode())
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    return digest.hexdigest()[:16]


def cache() -> Path:
    """Returns the cache's directory: $VIRTLUN_KUBERNETES_CACHE, else one in the user's cache."""
    given = os.environ.get("VIRTLUN_KUBERNETES_CACHE")
    if given:
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return home / "virtlun/kubernetes"


def build(report: Report | None = None) -> Tools:
    """Returns the programs, building them first where they are not there yet.

    Two builds at once wait for one another. `report` gets a line now and then (default: stderr).
    """
    directory = cache() / key()
    once(directory, f"Kubernetes {KUBERNETES}, its sidecars and csi-sanity", _build, report)
    return Tools(directory)


def once(
    directory: Path, what: str, make: Callable[[Path, Report], None], report: Report | None = None
) -> None:
    """Calls `make` to build Go programs into a directory, unless that was done before.

    Raises:
        ToolsError: there is no Go, or it failed.
    """
    say = report or _to_stderr
    if (directory / "complete").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (directory / "complete").exists():
            return
        _check_go()
        begun = time.monotonic()
        say(f"building {what} into {directory}, once")
        make(directory, say)
        (directory / "complete").touch()
        say(f"built in {time.monotonic() - begun:.0f} s")


def link_flags() -> str:
    """Returns what the linker of Kubernetes' programs is told: its version, and no symbols."""
    stamp = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    versions = {
        "gitVersion": KUBERNETES,
        "gitMajor": major,
        "gitMinor": minor,
        "gitCommit": "unknown",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    return " ".join(["-s -w", *(f"-X {stamp}.{name}={v}" for name, v in versions.items())])


def _build(directory: Path, say: Report) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        new = Path(scratch)
        (new / "bin").mkdir()
        go(["mod", "download"], say, "modules")
        go(
            [
                "build",
                "-v",
                "-mod=readonly",
                "-ldflags",
                link_flags(),
                "-o",
                f"{new}/bin/",
                ".",
                *SIDECARS,
            ],
            say,
            "Kubernetes and sidecars",
            packages=PACKAGES,
        )
        go(
            ["install", "-v", "-ldflags", "-s -w", CSI_SANITY],
            say,
            "csi-sanity",
            GOBIN=f"{new}/bin",
        )
        client = Path(output("list", "-m", "-f", "{{.Dir}}", SNAPSHOT_CLIENT))
        shutil.copytree(client / "config/crd", directory / CRDS, dirs_exist_ok=True)
        (new / "bin/tools").rename(new / "bin" / MULTI_CALL)
        for program in (new / "bin").iterdir():
            program.rename(directory / program.name)
    for name in PROGRAMS:
        link = directory / name
        link.unlink(missing_ok=True)
        link.symlink_to(MULTI_CALL)


def output(*arguments: str, module: Path = MODULE) -> str:
    """Returns what go says in a module; CalledProcessError where it fails."""
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        ["go", *arguments], cwd=module, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _check_go() -> None:
    if shutil.which("go") is None:
        raise ToolsError(
            f"go is not installed: Go {GO_MINIMUM[0]}.{GO_MINIMUM[1]} or newer is needed"
        )
    words = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=True)
    version = words.stdout.strip().removeprefix("go")
    if tuple(int(part) for part in version.split(".")[:2]) < GO_MINIMUM:
        raise ToolsError(f"Go {version} is too old: 1.26 or newer is needed, see https://go.dev/dl")


def go(
    arguments: list[str],
    say: Report,
    what: str,
    packages: int = 0,
    module: Path = MODULE,
    **env: str,
) -> None:
    """Runs go in a module and says now and then how far it is; ToolsError with its words."""
    process = subprocess.Popen(
        ["go", *arguments],
        cwd=module,
        # The compiler's own memory is collected less often: that is a tenth of its time.
        env={**os.environ, "CGO_ENABLED": "0", "GOGC": "400", "GOTOOLCHAIN": "local", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    said = begun = time.monotonic()
    for line in process.stdout:
        lines.append(line.rstrip())
        now = time.monotonic()
        if now - said >= 10:
            said = now
            far = (
                f"{len(lines)} of about {packages} packages"
                if packages
                else f"{len(lines)} packages"
            )
            say(f"{what}: {far}, {now - begun:.0f} s")
    if process.wait() != 0:
        tail = "\n".join(lines[-20:])
        raise ToolsError(f"go {arguments[0]} of {what} failed:\n{tail}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
