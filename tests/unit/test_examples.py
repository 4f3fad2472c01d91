"""What a user copies from examples/ works: units, commands; and no file goes untested."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import click
import pytest

from plugin.cli import main
from plugin.config import Config
from tests.support.examples import used
from tests.unit.translate.domains import ROOT

EXAMPLES = ROOT / "examples"
SYSTEMD = EXAMPLES / "systemd"
PROGRAMS = Path(sys.executable).parent
INSTALLED = "/opt/virtlun/bin"
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.suffix in (".service", ".socket"))

KUBERNETES_READMES = sorted((EXAMPLES / "kubernetes").rglob("README.md"))


@pytest.mark.parametrize("readme", KUBERNETES_READMES, ids=lambda path: path.parent.name)
def test_what_a_readme_of_kubernetes_applies_is_there(readme: Path) -> None:
    """By night tests/kubernetes runs the commands (test_daemonset.py)."""
    commands = re.findall(r"^```sh\n(.+?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    named = re.findall(r"(?:-f |--patch-file=)(\S+)", "".join(commands))
    assert named
    for name in named:
        assert (readme.parent / name).is_file(), f"{readme}: {name}"


def test_the_image_has_what_its_containers_run() -> None:
    """Its parts are looked at; by night it is built (tests/kubernetes/test_containerfile.py)."""
    text = used(EXAMPLES / "kubernetes/Containerfile").read_text()
    build, final = text.split("\nFROM ")[1:]
    assert "AS build\nRUN apt-get" in build and "pip install --no-cache-dir /src" in build
    cargo = (ROOT / "pydataplane/Cargo.toml").read_text()
    needed = re.search(r'^rust-version = "([\d.]+)"', cargo, re.MULTILINE)
    assert needed and f"rust:{needed[1].removesuffix('.0')}-bookworm" in build
    (packages,) = re.findall(r"--no-install-recommends (.+?) \\\n", final)
    have = set(packages.split())
    sources = "".join(path.read_text() for path in (ROOT / "csi").rglob("*.py"))
    commands = set(re.findall(r'\brun\(\s*"([a-z0-9._]+)"', sources))
    commands |= set(re.findall(r'\["(mkfs\.[a-z0-9]+)"', sources)) | {"blkid"}
    assert {"e2fsck", "resize2fs", "xfs_growfs", "mkfs.ext4"} <= commands
    assert "libseccomp2" in have  # which no program is of: csi.host.syscalls
    for command in sorted(commands):
        path = shutil.which(command, path="/usr/sbin:/usr/bin:/sbin:/bin")
        assert path, command
        owner = _package(path) or _package(path.removeprefix("/usr"))
        assert owner in have, f"{command} is of the package {owner}"
    for manifest in sorted((EXAMPLES / "kubernetes").rglob("*.yaml")):
        for program in re.findall(r"command: \[(virtlun[a-z-]*)\]", manifest.read_text()):
            assert (PROGRAMS / program).exists(), program


def test_target_and_driver_of_the_image_are_not_privileged() -> None:
    """The holder lets in the user that the target becomes, and the driver has its group."""
    text = (EXAMPLES / "kubernetes/daemonset.yaml").read_text()
    holder, target, rest = text.split("\n---\n")
    driver, helper = rest.split("        - name: virtlun-csi-helper\n")
    helper, sidecars = helper.split("        - name: csi-provisioner\n")
    image = (EXAMPLES / "kubernetes/Containerfile").read_text()
    made = re.search(r"useradd --system --uid (\d+) .* virtlun$", image, re.MULTILINE)
    assert made and f"- --user={made[1]}\n" in holder
    assert "securityContext: {privileged" in holder
    assert "securityContext: {privileged" not in target
    assert "drop: [ALL]" in target and "allowPrivilegeEscalation: false" in target
    assert f"runAsGroup: {made[1]}\n" in driver
    for plain in (driver, sidecars):
        assert "privileged: true" not in plain and "add:" not in plain
        assert "drop: [ALL]" in plain and "readOnlyRootFilesystem: true" in plain
    assert "privileged: true" in helper
    # the target's folder, with its sockets
    run = re.compile(r"name: run\n +mountPath: /run/virtlun\n +readOnly: true\n")
    assert len(run.findall(driver)) == len(run.findall(helper)) == 1
    assert "SYS_ADMIN" not in target and "hostPath: {path: /dev}" not in target


def _package(path: str) -> str | None:
    done = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True, check=False)
    return done.stdout.split(":")[0] if done.returncode == 0 else None


LINE = re.compile(r"(?<![\w/.-])virtlun ((?:doctor|domain|lvstore|target|top|volume)\b[^#`|;)\n]*)")
TEXTS = sorted(
    [
        *EXAMPLES.rglob("*.md"),
        *EXAMPLES.rglob("*.yaml"),
        *(path for path in (ROOT / "docs/pages").rglob("*.md") if path.parent.name != "reference"),
        ROOT / "README.md",
    ]
)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_virtlun_command_in_a_text_is_one(path: Path) -> None:
    """Its words are parsed by the program itself, and nothing is done."""
    if path == EXAMPLES / "openstack/README.md":
        used(path)  # the other words of it are a cloud's
    for line in LINE.findall(path.read_text()):
        words = shlex.split(re.sub(r"--uuid \S+", f"--uuid {UUID(int=1)}", line))
        command: click.Command = main
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert not isinstance(command, click.Group) or not words, f"{path}: virtlun {line}"
        if words:
            command.make_context(command.name, words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_units_are_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    for path in UNITS:
        text = used(path).read_text().replace(INSTALLED, str(PROGRAMS))
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
    program, *options = shlex.split(found[1].replace("%i", "gold"))
    if "$TARGET_OPTIONS" in options:
        options[-1:] = ["--rbd", "--iscsi", "--network"]  # as the drop-ins have it
    done = subprocess.run(
        [PROGRAMS / program, *options, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["rbd", "iscsi", "network"])
def test_a_drop_in_gives_the_target_its_option_and_what_that_needs(name: str) -> None:
    lines = used(SYSTEMD / f"{name}.conf").read_text().splitlines()
    assert f"Environment=TARGET_OPTIONS=--{name}" in lines
    # Which systemd adds to the unit's own.
    assert "RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK" in lines
    assert "PrivateNetwork=no" in lines
    assert any(f"examples/systemd/{name}.conf" in line for line in lines)


@pytest.mark.parametrize("name", ["target", "holder"])
def test_a_template_differs_by_the_name_only(name: str) -> None:
    one, each = ((SYSTEMD / f"virtlun-{name}{at}.service").read_text() for at in ("", "@"))
    options = ("[Unit]", "[Service]", "[Install]")
    assert [line for line in each.splitlines() if line.startswith(options)] == list(options)
    for named, plain in (
        ("--name %i ", ""),
        ("--target %i ", ""),
        ("virtlun-%i", "virtlun"),
        (" --export-dir /run/virtlun/export/%i", ""),
        (" --socket /run/virtlun/holder/%i.sock --dir /run/virtlun/export/%i", ""),
        ("/run/virtlun/holder/%i.sock", "/run/virtlun/holder.sock"),
        ("virtlun-target@%i", "virtlun-target"),
        ("virtlun-holder@%i", "virtlun-holder"),
        ("target %i:", "target:"),
        (" of target %i:", ":"),
        ("while it is", "while the target is"),
    ):
        each = each.replace(named, plain)
    differing = set(one.splitlines()) ^ set(
        each.replace("holder of target:", "holder:").splitlines()
    )
    assert all(line.startswith("#") for line in differing), differing


@pytest.mark.parametrize("at", ["", "@"])
def test_holder_and_target_mean_the_same_places(at: str) -> None:
    def given(name: str) -> dict[str, str]:
        text = (SYSTEMD / f"virtlun-{name}{at}.service").read_text()
        words = re.search(rf"^ExecStart={INSTALLED}/(.+)$", text, re.MULTILINE)
        assert words
        options = shlex.split(words[1].removesuffix(" $TARGET_OPTIONS"))[1:]
        return dict(itertools.pairwise(options))

    holder, target = given("holder"), given("target")
    socket = "/run/virtlun/holder.sock"
    assert holder.get("--socket", socket) == target["--holder-socket"]
    folder = "/run/virtlun/export"
    assert holder.get("--dir", folder) == target.get("--export-dir", folder)


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("virtlun-target*.service")), ids=str)
def test_systemd_rates_the_target_as_little_exposed(unit: Path) -> None:
    """Of 100, below what it calls medium; root starts it, which alone costs some."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=40", "--no-pager", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-200:]


def test_the_targets_user_is_made_from_sysusers(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("disk:x:6:\n")
    subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", used(SYSTEMD / "virtlun.sysusers")],
        check=True,
        capture_output=True,
        timeout=60,
    )
    users = (tmp_path / "etc/passwd").read_text()
    assert re.search(r"^virtlun:x:\d+:\d+:virtlun target:/var/lib/virtlun:", users, re.MULTILINE)
    assert "disk:x:6:virtlun" in (tmp_path / "etc/group").read_text()


def test_the_socket_unit_listens_where_the_gateway_looks() -> None:
    text = (SYSTEMD / "virtlun-gateway.socket").read_text()
    gateway = Config().gateway
    assert re.findall(r"^ListenStream=(.+)$", text, re.MULTILINE) == [
        str(gateway.listen),
        str(gateway.listen_ro),
    ]


@pytest.mark.root
def test_the_steps_to_libvirtds_place_put_the_files_where_systemd_reads_them(
    tmp_path: Path,
) -> None:
    """As they are written, with /etc of the test's own; then systemd says what it would do."""
    readme = (EXAMPLES / "libvirt/README.md").read_text()
    (copy,) = re.findall(r"^ +(cp -r transparent/.+)$", readme, re.MULTILINE)
    (install,) = re.findall(r"`(install -m 644 transparent/.+?)`", readme)
    own = tmp_path / "etc"
    (own / "systemd/system").mkdir(parents=True)
    (own / "virtlun").mkdir()
    script = f"""\
        mount --bind {own} /etc
        {copy}
        {install}
        systemd-analyze cat-config systemd/system/libvirtd.socket
        systemd-analyze cat-config systemd/system/libvirtd-ro.socket
        systemd-analyze verify --man=no libvirtd.socket libvirtd-ro.socket 2>&1"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script],
        cwd=EXAMPLES / "libvirt",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("libvirtd.socket", "libvirtd-ro.socket"):
        part = f"{name}.d/virtlun.conf"
        text = (EXAMPLES / "libvirt/transparent" / part).read_text()
        assert f"# /etc/systemd/system/{part}\n{text}" in done.stdout
    assert (own / "virtlun/virtlun.toml").read_text() == (
        EXAMPLES / "libvirt/transparent/virtlun.toml"
    ).read_text()


def test_the_hook_is_found_and_runs_as_the_installation_does_it(tmp_path: Path) -> None:
    command = re.search(
        rf"^{INSTALLED}/(virtlun-hook) (--install) /etc/libvirt/hooks/(qemu.d/virtlun)$",
        (SYSTEMD / "README.md").read_text(),
        re.MULTILINE,
    )
    assert command
    program, hook = Path(sys.executable).with_name(command[1]), tmp_path / command[3]
    subprocess.run([program, command[2], hook], check=True, timeout=60)
    done = subprocess.run(
        [hook, "vm", "stopped", "end", "-"],
        input=b"<domain/>",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
