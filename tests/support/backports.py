"""Packages of Debian's backports, for what tests run beside what this machine has installed.

They are downloaded from the mirror that this machine's apt uses and nothing is installed; apt's own
lists stay as they are. Needs apt; not root.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def download(work: Path, packages: Sequence[str]) -> list[Path]:
    """Downloads packages with what they need that this machine lacks, and returns their files.

    Those that this machine has are downloaded again. apt works on lists of its own in the folder
    `work`, which is to be empty and outlives the call.

    Raises:
        RuntimeError: this machine does not reach the mirror, or it has no such package.
    """
    mirror, codename = _mirror()
    suite = f"{codename}-backports"
    signed = f" [signed-by={KEYRING}]" if KEYRING.exists() else ""
    sources = work / "sources.list"
    sources.write_text("".join(f"deb{signed} {mirror} {name} main\n" for name in (codename, suite)))
    (work / "lists/partial").mkdir(parents=True)
    (work / "cache/archives/partial").mkdir(parents=True)
    apt = [
        *("apt-get", "-q", "-y", "-o", f"Dir::Etc::SourceList={sources}"),
        *("-o", "Dir::Etc::SourceParts=/dev/null", "-o", f"Dir::State::Lists={work}/lists"),
        *("-o", f"Dir::Cache={work}/cache", "-o", "APT::Sandbox::User="),
        *("-o", "Acquire::Retries=5"),
        *("-o", "Debug::NoLocking=1"),  # of dpkg's state, which is only read
    ]
    names = [f"{name}/{suite}" for name in packages]
    download = ["install", "--download-only", "--reinstall", "--no-install-recommends", *names]
    for words in (["update"], download):
        done = subprocess.run([*apt, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr or done.stdout).strip()
            raise RuntimeError(
                f"apt-get {words[0]} of {packages[0]} from {mirror} {suite} failed; see that "
                f"this machine reaches the mirror, then try again:\n{why}"
            )
    return sorted((work / "cache/archives").glob("*.deb"))


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
