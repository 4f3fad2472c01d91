"""README's commands, run as they are written, and those of other texts after them.

They use the installed places (/run/virtlun, /var/lib/virtlun ...), which are folders of the test's
own in the mount namespace of its libvirtd. What differs from what a person does: virtlun.toml names
that libvirtd's socket, and where KVM does not work the example's VM runs without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.examples import used
from tests.support.host import scratch_directory
from tests.support.libvirtd import Libvirtd

ROOT = Path(__file__).parents[2]
LIBVIRT = ROOT / "examples/libvirt"
SYSTEMD = ROOT / "examples/systemd/README.md"
TUTORIAL = ROOT / "docs/pages/tutorial.md"
PLACES = ("/run/virtlun", "/var/lib/virtlun", "/var/log/virtlun", "/etc/virtlun")
CONFIG = """\
[gateway]
upstream = "{socket}"
upstream_ro = "{socket_ro}"
libvirtd_conf = "{conf}"
"""
LISTENS = "until [ -S /run/virtlun/libvirt-sock ]; do sleep 0.1; done"
GATEWAY = "qemu+unix:///system?socket=/run/virtlun/libvirt-sock"
PREPARED = f"export PATH=\"$PWD/.venv/bin:$PATH\" LIBVIRT_DEFAULT_URI='{GATEWAY}'\n"
"""What a person's shell has by then."""
DEADLINE_S = 240


def blocks(readme: Path, language: str = "sh") -> list[str]:
    """Returns the code of a README, block by block."""
    found = re.findall(rf"^```{language}\n(.+?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    return [str(block) for block in found]


@dataclass
class Checkout:
    """A folder in which commands find what a checkout has, after `make setup`."""

    folder: Path
    libvirtd: Libvirtd

    def run(self, script: str) -> str:
        """Runs a script as the shell of a person would; returns what it printed."""
        done = subprocess.run(
            self.libvirtd.command("bash", "-euo", "pipefail", "-c", f"cd {self.folder}\n{script}"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            start_new_session=True,
        )
        log = self.folder / "gateway.log"
        words = log.read_text() if log.exists() else ""
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\n{words[-2000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def checkout() -> Iterator[Checkout]:
    scratch = scratch_directory()
    made = [place for place in map(Path, PLACES) if not place.exists()]
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, scratch, ignore_errors=True)
        libvirtd = ending.enter_context(Libvirtd(scratch / "l"))
        for place in map(Path, PLACES):
            own = scratch / place.relative_to("/")
            own.mkdir(parents=True)
            place.mkdir(exist_ok=True)  # only a place to mount on
            subprocess.run(libvirtd.command("mount", "--bind", str(own), str(place)), check=True)
        for place in made:
            ending.callback(_remove_empty, place)
        (scratch / "etc/virtlun/virtlun.toml").write_text(
            CONFIG.format(
                socket=libvirtd.socket,
                socket_ro=libvirtd.socket_ro,
                conf=libvirtd.scratch / "etc/libvirtd.conf",
            )
        )
        folder = scratch / "checkout"
        shutil.copytree(ROOT / "examples", folder / "examples")
        (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
        used(LIBVIRT / "vm.xml")
        _without_kvm(folder / "examples/libvirt/vm.xml")
        yield Checkout(folder, libvirtd)


def _remove_empty(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()


def _without_kvm(path: Path) -> None:
    text = path.read_text()
    assert "<domain type='kvm'>" in text and "<cpu mode='host-passthrough'/>" in text
    text = text.replace("<domain type='kvm'>", "<domain type='qemu'>")
    path.write_text(text.replace("<cpu mode='host-passthrough'/>", ""))


@pytest.fixture(scope="module")
def session(checkout: Checkout) -> Iterator[str]:
    """README's session, done; what it printed."""
    (script,) = [block for block in blocks(ROOT / "README.md") if "virtlun target start" in block]
    lines = script.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("virtlun-gateway ")]
    lines[at + 1 : at + 1] = ["echo $! >gateway.pid", LISTENS]  # a person is slow
    try:
        yield checkout.run("\n".join(lines))
    finally:
        pid = checkout.folder / "gateway.pid"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGTERM)
        checkout.run('export PATH="$PWD/.venv/bin:$PATH"\nvirtlun target stop --yes')


@pytest.mark.root
@pytest.mark.vm
def test_readmes_commands_do_what_it_says(session: str) -> None:
    for said in (
        "the target runs: pid ",
        "lvs0/data  1 GiB",
        "Domain 'vm' defined from examples/libvirt/vm.xml",
        "Domain 'vm' started",
        "Disk attached successfully",
        "Block device 'sdc' is resized",
        "sdc rd_req ",
        "Disk detached successfully",
    ):
        assert said in session, session
    (doctor,) = re.findall(r"^(\w+) +target: (.+)$", session, re.MULTILINE)
    assert doctor[0] == "ok" and doctor[1].startswith("runs: pid ")
    assert not re.search(r"^failed", session, re.MULTILINE), session


@pytest.mark.root
@pytest.mark.vm
def test_the_commands_of_examples_libvirt_work_on_the_same_vm(
    session: str, checkout: Checkout
) -> None:
    listing, commands = blocks(used(LIBVIRT / "README.md"))[:2]
    path = 'export PATH="$PWD/.venv/bin:$PATH"\n'
    said = checkout.run(path + listing + commands)
    assert re.search(r"vm +running", said), said
    for one in ("Disk attached", "Block device 'sdc' is resized", "Disk detached"):
        assert one in said, said


@pytest.mark.root
@pytest.mark.vm
def test_the_tutorials_commands_work_on_the_same_vm(session: str, checkout: Checkout) -> None:
    """In the demo's shell they mean its VM; the last shows what is done until it is stopped."""
    (script,) = [block for block in blocks(TUTORIAL) if "virtlun top" in block]
    assert script.count(" demo ") + script.count(" demo\n") == 5
    script = re.sub(r"\bdemo\b", "vm", script).replace("virtlun top", "virtlun top --count 1")
    said = checkout.run(PREPARED + script)
    assert re.search(r"^ sdx +/dev/virtlun/lvs0/mine$", said, re.MULTILINE), said
    for one in ("Disk attached", "Block device 'sdx' is resized", "sdx rd_req ", "Disk detached"):
        assert one in said, said
    assert re.search(r"^lvs0/mine ", said, re.MULTILINE), said
    assert "128 MiB" in checkout.run(f"{PREPARED}virtlun volume list lvs0 | grep mine")


@pytest.mark.root
@pytest.mark.vm
def test_the_first_volume_of_the_services_is_made_and_attached(
    session: str, checkout: Checkout
) -> None:
    """README's session has made the same lvstore: the same again changes nothing."""
    (script,) = [block for block in blocks(used(SYSTEMD)) if "attach-disk VM" in block]
    for written, here in (("lvs0/data", "lvs0/first"), (" VM ", " vm "), (" sdb ", " sdf ")):
        assert written in script
        script = script.replace(written, here)
    said = checkout.run(PREPARED + script)
    assert "lvs0/first  10 GiB" in said and "Disk attached successfully" in said, said
    checkout.run(f"{PREPARED}virsh detach-disk vm sdf --live --config")


@pytest.mark.root
@pytest.mark.vm
def test_each_example_disk_can_be_attached_to_the_example_vm(
    session: str, checkout: Checkout
) -> None:
    names = {"disk": "data", "disk-pool": "shared", "disk-nova": None, "disk-virtio": None}
    files = sorted((checkout.folder / "examples/libvirt").glob("disk*.xml"))
    assert {path.stem for path in files} == set(names)
    path = f"export PATH=\"$PWD/.venv/bin:$PATH\" LIBVIRT_DEFAULT_URI='{GATEWAY}'\n"
    for file in files:
        volume = names[file.stem] or re.findall(r"lvs0/([^']+)'", file.read_text())[0]
        if volume != "data":  # which README has made
            checkout.run(f"{path}virtlun volume create lvs0/{volume} 1G --thin")
        said = checkout.run(
            f"{path}virsh attach-device vm {file} --live\nvirsh domblklist vm\n"
            f"virsh detach-device vm {file} --live\nvirtlun domain list"
        )
        assert "Device attached successfully" in said and "Device detached successfully" in said
        assert volume in said, said
        used(LIBVIRT / file.name)
        assert re.search(r"vm +running +sda +lvs0/vm-root +0 +LUN +yes", said), said


@pytest.mark.nightly
@pytest.mark.root
@pytest.mark.vm
def test_virtlun_domain_tells_of_a_vm_and_what_it_cannot_know(
    session: str, checkout: Checkout
) -> None:
    path = f"export PATH=\"$PWD/.venv/bin:$PATH\" LIBVIRT_DEFAULT_URI='{GATEWAY}'\n"
    shown = checkout.run(f"{path}virtlun domain show vm")
    assert re.search(r"^controller +vm-", shown, re.MULTILINE), shown
    assert re.search(r"^sda +lvs0/vm-root +0 +LUN +yes", shown, re.MULTILINE), shown
    blind = checkout.run(f"{path}virtlun --socket /none domain list 2>&1")
    assert "Warning: what the target serves is not known: no target answers on /none" in blind
    assert re.search(r"lvs0/vm-root +\d +LUN +unknown", blind), blind
    rows = json.loads(checkout.run(f"{path}virtlun --socket /none domain list --json 2>/dev/null"))
    assert {(row["domain"], row["served"]) for row in rows} == {("vm", None)}
    missing = checkout.run(f"{path}virtlun domain show none 2>&1 || true")
    assert missing == "Error: there is no domain none: see `virsh list --all`\n"


@pytest.mark.root
@pytest.mark.vm
def test_a_target_in_use_is_not_stopped_unasked(session: str, checkout: Checkout) -> None:
    path = 'export PATH="$PWD/.venv/bin:$PATH"\n'
    said = checkout.run(f"{path}virtlun target stop 2>&1 || virtlun target status")
    assert "VMs that use the target: 1;" in said and "add --yes" in said
    assert re.search(r"^pid +\d+$", said, re.MULTILINE), said


@pytest.mark.root
@pytest.mark.vm
def test_a_domain_goes_without_virtlun_again(session: str, checkout: Checkout) -> None:
    own = checkout.libvirtd.uri()
    (block,) = [block for block in blocks(used(LIBVIRT / "README.md")) if "plain.xml" in block]
    assert "-c qemu:///system define" in block
    checkout.run(
        f"export LIBVIRT_DEFAULT_URI='{GATEWAY}'\nvirsh detach-disk vm sda --config\n"
        + block.replace("qemu:///system", f"'{own}'")
    )
    left = checkout.run(f"virsh -c '{own}' dumpxml --inactive vm")
    assert "<name>vm</name>" in left
    assert not re.search("virtlun|vhost|override", left), left
    checkout.run(
        f"virsh -c '{own}' destroy vm\nvirsh -c '{own}' start vm\n"
        f'until [ -z "$(ls /run/virtlun/vhost)" ]; do sleep 0.2; done'
    )
