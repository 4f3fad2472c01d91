"""What a user copies from examples/ works: units, commands, links; and no file goes untested."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from plugin.config import Config
from tests.unit.translate.domains import ROOT

EXAMPLES = ROOT / "examples"
SYSTEMD = EXAMPLES / "systemd"
PROGRAMS = Path(sys.executable).parent
INSTALLED = "/opt/virtlun/bin"
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.suffix != ".md")

TESTED_BY = {
    "README.md": "tests/unit/test_examples.py",
    ".service": "tests/unit/test_examples.py",
    ".socket": "tests/unit/test_examples.py",
    "virtlun.toml": "tests/unit/test_plugin_config.py",
    "transparent/": "tests/libvirt/test_gateway_trust.py",
    "vm.xml": "tests/unit/translate/domains.py",
    "libvirt/disk": "tests/unit/test_plugin_config.py",
    "kubernetes/": "tests/kubernetes/test_volumes.py",
}
"""Parts of examples' paths, and the test that uses what has them."""


def test_each_example_is_used_by_a_test() -> None:
    for path in (path for path in EXAMPLES.rglob("*") if path.is_file()):
        name = str(path.relative_to(EXAMPLES))
        tests = {test for part, test in TESTED_BY.items() if part in name}
        assert tests, f"no test uses examples/{name}"
        for test in tests:
            assert "examples" in (ROOT / test).read_text()


@pytest.mark.parametrize("readme", sorted(EXAMPLES.rglob("README.md")), ids=lambda p: p.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    text = readme.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        assert (readme.parent / link).exists(), link


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_units_are_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace(INSTALLED, str(PROGRAMS))
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    own = [line for line in done.stderr.splitlines() if "virtlun" in line]
    assert not own, done.stderr


def test_systemds_check_does_find_what_is_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "virtlun-target.service"
    unit.write_text((SYSTEMD / unit.name).read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Unknown key 'NoNewPrivilege'" in done.stderr
    assert f"{INSTALLED}/virtlun-target is not executable" in done.stderr


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("*.service")), ids=lambda path: path.name)
def test_the_programs_take_the_options_of_their_units(unit: Path) -> None:
    found = re.search(rf"^ExecStart={INSTALLED}/(.+)$", unit.read_text(), re.MULTILINE)
    assert found
    program, *options = shlex.split(found[1])
    done = subprocess.run(
        [PROGRAMS / program, *options, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_socket_unit_listens_where_the_gateway_looks() -> None:
    text = (SYSTEMD / "virtlun-gateway.socket").read_text()
    gateway = Config().gateway
    assert re.findall(r"^ListenStream=(.+)$", text, re.MULTILINE) == [
        str(gateway.listen),
        str(gateway.listen_ro),
    ]


def test_the_hook_is_found_and_runs_as_the_installation_does_it(tmp_path: Path) -> None:
    command = re.search(
        rf"install -D -m 755 \"\$\({INSTALLED}/python -c '(.+)'\)\"",
        (SYSTEMD / "README.md").read_text(),
    )
    assert command
    script = subprocess.check_output([sys.executable, "-c", command[1]], text=True).strip()
    hook = tmp_path / "qemu.d/virtlun"
    subprocess.run(["install", "-D", "-m", "755", script, hook], check=True)
    done = subprocess.run(
        [hook, "vm", "stopped", "end", "-"],
        input=b"<domain/>",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
