"""Packages of Debian's backports, for what tests run beside what this machine has installed.

They are downloaded from the mirror that this machine's apt uses and nothing is installed here;
apt's own lists stay as they are. Needs apt; root only to install them in a copy of the file system.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEXT = {"bookworm": "trixie", "trixie": "forky"}
"""The release after each that tests run on."""


def download(work: Path, packages: Sequence[str]) -> list[Path]:
    """Downloads packages with what they need that this machine lacks, and returns their files.

    Those that this machine has are downloaded again. apt works on lists of its own in the folder
    `work`, which is to be empty and outlives the call.

    Raises:
        RuntimeError: this machine does not reach the mirror, or it has no such package.
    """
    apt, suite, said = _backports(work, packages[0])
    names = [f"{name}/{suite}" for name in packages]
    words = ["install", "--download-only", "--reinstall", "--no-install-recommends", *names]
    _run(["apt-get", *apt, *words], "apt-get", f"install of {said}")
    return sorted((work / "cache/archives").glob("*.deb"))


def install(work: Path, root: Path, packages: Sequence[str]) -> None:
    """Installs packages with what they need in `root`, a copy of this machine's file system.

    No service is started, and configuration files that are there stay. `work` is as for `download`
    and has the same path in `root`. Needs root.

    Raises:
        RuntimeError: this machine does not reach the mirror, or a package cannot be installed.
    """
    apt, suite, said = _backports(work, packages[0])
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    words = ["install", "-t", suite, "--no-install-recommends", *packages]
    inside = ["chroot", str(root), "env", "DEBIAN_FRONTEND=noninteractive"]
    kept = ["-o", "Dpkg::Options::=--force-confold"]
    _run([*inside, "apt-get", *apt, *kept, *words], "apt-get", f"install of {said}")


def _backports(work: Path, first: str) -> tuple[list[str], str, str]:
    """Returns apt's options for the backports, their suite, and words for `first` of that."""
    mirror, codename = _mirror()
    suite = f"{codename}-backports"
    sources = "".join(f"deb{_signed()} {mirror} {name} main\n" for name in (codename, suite))
    apt = _apt(work, sources)[1:]
    said = f"{first} from {mirror} {suite}"
    _run(["apt-get", *apt, "update"], "apt-get", f"update for {said}")
    return apt, suite, said


def newest_kernel(work: Path) -> list[Path]:
    """Downloads the cloud kernel of the next release's backports, and returns its packages.

    That is one, or three: image, binary and modules. `work` is as for `download`. What they depend
    on is not downloaded: no package of this machine's release fits it.

    Raises:
        RuntimeError: this machine does not reach the mirror, or it has no such suite.
    """
    mirror, codename = _mirror()
    suite = f"{NEXT[codename]}-backports"
    apt = _apt(work, f"deb{_signed()} {mirror} {suite} main\n")
    _run([*apt, "update"], "apt-get", f"update of {suite} from {mirror}")
    cache = ["apt-cache", *(word for word in apt[1:] if word not in ("-q", "-y"))]
    depends = _run([*cache, "depends", "linux-image-cloud-amd64"], "apt-cache", "depends")
    found = re.search(r"Depends: linux-image-(\d\S*-cloud-amd64)", depends)
    if not found:
        raise RuntimeError(f"{mirror} {suite} has no linux-image-cloud-amd64: try again later")
    depends = _run([*cache, "depends", f"linux-image-{found[1]}"], "apt-cache", "depends")
    parts = re.findall(rf"Depends: (linux-(?:binary|modules)-{re.escape(found[1])})", depends)
    names = [f"linux-image-{found[1]}", *parts]
    _run([*apt, "download", *names], "apt-get", f"download of {names[0]}", work)
    return sorted(work.glob("*.deb"))


def _signed() -> str:
    return f" [signed-by={KEYRING}]" if KEYRING.exists() else ""


def _apt(work: Path, sources: str) -> list[str]:
    """Returns apt-get with lists of its own in the folder `work`, of these sources."""
    listed = work / "sources.list"
    listed.write_text(sources)
    (work / "lists/partial").mkdir(parents=True)
    (work / "cache/archives/partial").mkdir(parents=True)
    return [
        *("apt-get", "-q", "-y", "-o", f"Dir::Etc::SourceList={listed}"),
        *("-o", "Dir::Etc::SourceParts=/dev/null", "-o", f"Dir::State::Lists={work}/lists"),
        *("-o", f"Dir::Cache={work}/cache", "-o", "APT::Sandbox::User="),
        *("-o", "Acquire::Retries=5"),
        *("-o", "Debug::NoLocking=1"),  # of dpkg's state, which is only read
    ]


def _run(words: list[str], program: str, what: str, folder: Path | None = None) -> str:
    """Returns what a program of apt's says; RuntimeError with its own words where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(
            f"{program} {what} failed; see that this machine reaches the mirror, then try again:\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def _mirror() -> tuple[str, str]:
    """Returns the Debian mirror that apt uses on this machine, and the release's code name."""
    release = Path("/etc/os-release").read_text()
    found = re.search(r"^VERSION_CODENAME=\"?(\w+)", release, re.MULTILINE)
    codename = found[1] if found else "stable"
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    lines = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line in lines:
        uri, suite, component = line.split()
        if component == "main" and suite in (codename, "stable", "oldstable"):
            return uri, codename
    raise RuntimeError(
        f"apt has no source of Debian {codename} main: add one, as /etc/apt/sources.list of a "
        "fresh machine has it, then try again"
    )
