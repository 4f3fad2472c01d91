"""Nobody gets through the gateway what libvirtd's own sockets would refuse them."""

from __future__ import annotations

import contextlib
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin.config import load
from tests.support.examples import used
from tests.support.gateway import GatewayProcess
from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import by_day
from tests.support.wait import listens, serves, until

pytestmark = [pytest.mark.root]

DOMAIN = (
    "<domain type='qemu'><name>idle</name><memory unit='MiB'>64</memory>"
    "<os><type arch='x86_64' machine='q35'>hvm</type></os><devices/></domain>"
)
EXAMPLES = Path(__file__).parents[2] / "examples/libvirt"
TRANSPARENT = EXAMPLES / "transparent"
NOBODY = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--reset-env"]
MEMBER = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=libvirt", "--reset-env"]


@pytest.fixture(scope="module", autouse=True)
def domain(host: Host) -> str:
    """A stopped domain that was defined through the gateway, and a volume."""
    path = host.scratch / "idle.xml"
    path.write_text(DOMAIN)
    host.virsh("define", str(path))
    host.volumes.create("lvs0/trust", 8 << 20)
    host.scratch.chmod(0o755)
    return "idle"


def virsh_as(user: list[str], uri: str, *words: str) -> tuple[int, str]:
    """Runs virsh as another user; returns status and output."""
    done = subprocess.run(
        [*user, "virsh", "-q", "-c", uri, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


@pytest.fixture
def libvirtd_log(host: Host) -> Iterator[Path]:
    """libvirtd's log of the identities that it is told; a new file for each test."""
    admin = f"libvirtd+unix:///system?socket={host.libvirtd.run_dir}/libvirt-admin-sock"
    path = host.scratch / f"identity-{time.monotonic_ns()}.log"
    for words in (
        ["daemon-log-outputs", "--outputs", f"1:file:{path}"],
        ["daemon-log-filters", "--filters", "1:daemon.remote 1:util.typedparam 4:*"],
    ):
        subprocess.run(["virt-admin", "-c", admin, *words], check=True, capture_output=True)
    yield path
    for words in (
        ["daemon-log-outputs", "--outputs", f"2:file:{host.libvirtd.log}"],
        ["daemon-log-filters", "--filters", "3:*"],
    ):
        subprocess.run(["virt-admin", "-c", admin, *words], check=True, capture_output=True)


def test_a_user_outside_the_group_does_not_get_in(host: Host) -> None:
    status, text = virsh_as(NOBODY, host.uri, "list")
    assert status != 0
    assert "Permission denied" in text


def test_the_read_only_socket_is_for_everybody(host: Host) -> None:
    with _gateway(host, 'auth_ro = "none"') as gateway:
        uri = host.libvirtd.uri(Path(f"{gateway.socket}-ro"))
        status, text = virsh_as(NOBODY, uri, "-r", "list", "--all", "--name")
        assert status == 0, text
        assert "idle" in text


@by_day("504-libvirt-ours1-ours_ro1", "None--ours4-ours_ro4")
@pytest.mark.parametrize(
    ("mode", "group", "ours", "ours_ro"),
    [
        (0o777, "root", (0o660, "libvirt"), (0o666, "libvirt")),
        (0o770, "libvirt", (0o660, "libvirt"), (0o660, "libvirt")),
        (0o660, "adm", (0o660, "adm"), (0o660, "adm")),
        (0o700, "adm", (0o600, "root"), (0o600, "root")),
        (None, "", (0o600, "root"), (0o600, "root")),
    ],
)
def test_its_sockets_are_for_no_more_than_libvirtds(
    host: Host, mode: int | None, group: str, ours: tuple[int, str], ours_ro: tuple[int, str]
) -> None:
    theirs = (host.libvirtd.socket, host.libvirtd.socket_ro)
    before = [(path.stat().st_mode, path.group()) for path in theirs]
    for path in theirs:
        if mode is not None:
            shutil.chown(path, group=group)
            path.chmod(mode)
        else:
            path.rename(f"{path}-away")
    try:
        with _gateway(host, "") as gateway:
            paths = (gateway.socket, Path(f"{gateway.socket}-ro"))
            until(lambda: listens(paths[1]))
            made = [(stat.S_IMODE(path.stat().st_mode), path.group()) for path in paths]
            assert made == [ours, ours_ro]
        with _gateway(host, 'socket_group = "adm"\nsocket_mode = "0620"') as gateway:
            assert stat.S_IMODE(gateway.socket.stat().st_mode) == 0o620, "a setting decides"
            assert gateway.socket.group() == "adm"
    finally:
        for path, (old_mode, old_group) in zip(theirs, before, strict=True):
            if mode is None:
                Path(f"{path}-away").rename(path)
            path.chmod(stat.S_IMODE(old_mode))
            shutil.chown(path, group=old_group)


def test_a_members_identity_reaches_libvirtd_before_its_calls(
    host: Host, libvirtd_log: Path
) -> None:
    with _gateway(host, 'auth = "none"') as gateway:
        uri = host.libvirtd.uri(gateway.socket)
        source = "/dev/virtlun/lvs0/trust"
        status, text = virsh_as(MEMBER, uri, "attach-disk", "idle", source, "sda", "--config")
        assert status == 0, text
        status, text = virsh_as(MEMBER, uri, "detach-disk", "idle", "sda", "--config")
        assert status == 0, text
    log = libvirtd_log.read_text(errors="replace")
    assert log.count("Received forwarded identity") >= 4, "each client's, and for our own calls"
    assert "nobody" in log


def test_the_read_only_socket_refuses_to_write_in_libvirtds_words(host: Host) -> None:
    for words in (
        ("attach-disk", "idle", "/dev/virtlun/lvs0/trust", "sda", "--config"),
        ("define", str(host.scratch / "idle.xml")),
        ("undefine", "idle"),
        ("start", "idle"),
    ):
        with pytest.raises(VirshError, match=r"read only access prevents|forbidden"):
            _read_only(host, *words)
    assert "sda" not in host.virsh("domblklist", "idle")
    assert "idle" in _read_only(host, "dumpxml", "idle")


def _read_only(host: Host, *words: str) -> str:
    done = subprocess.run(
        ["virsh", "-q", "-r", "-c", host.uri_ro, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise VirshError(done.stdout)
    return done.stdout


@contextlib.contextmanager
def _gateway(host: Host, lines: str) -> Iterator[GatewayProcess]:
    """A second gateway with these lines in its section [gateway], instead of the host's."""
    keys = {line.split("=")[0].strip() for line in lines.splitlines()}
    kept = [
        line
        for line in host.config.read_text().splitlines()
        if line.split("=")[0].strip() not in keys
    ]
    kept.insert(kept.index("[gateway]") + 1, lines)
    config = host.scratch / "second.toml"
    config.write_text("\n".join(kept))
    with GatewayProcess(config, host.scratch / "second", host.scratch / "second.log") as gateway:
        yield gateway


@pytest.mark.parametrize(("status", "works"), [(0, True), (1, False)])
def test_polkit_decides_where_libvirtd_conf_says_so(
    host: Host, tmp_path: Path, status: int, works: bool
) -> None:
    """A script stands for pkcheck: what it is asked. test_polkit.py has a real polkitd."""
    asked = tmp_path / "asked"
    pkcheck = tmp_path / "pkcheck"
    pkcheck.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexit {status}\n')
    pkcheck.chmod(0o755)
    conf = tmp_path / "libvirtd.conf"
    conf.write_text('auth_unix_rw = "polkit"\n')
    lines = f'libvirtd_conf = "{conf}"\npkcheck = "{pkcheck}"'
    with _gateway(host, lines) as gateway:
        uri = host.libvirtd.uri(gateway.socket)
        returned, text = virsh_as(MEMBER, uri, "list", "--all", "--name")
        assert (returned == 0) == works, text
        assert ("idle" in text) == works
        assert "--action-id org.libvirt.unix.manage" in asked.read_text()
        assert ",65534" in asked.read_text(), "the user's own id, not root's"
        if not works:
            assert "access denied by policy" in text


def test_polkit_that_does_not_answer_keeps_everybody_but_root_out(host: Host) -> None:
    with _gateway(host, 'auth = "polkit"\npkcheck = "/nonexistent/pkcheck"') as gateway:
        uri = host.libvirtd.uri(gateway.socket)
        status, text = virsh_as(MEMBER, uri, "list")
        assert status != 0
        assert "authentication failed" in text
        status, text = virsh_as([], uri, "list")
        assert status == 0, text


@by_day('unix_sock_group = "adm"\\nunix_sock_rw_perms = "0770"\\n-admitted1')
@pytest.mark.parametrize(
    ("conf", "admitted"),
    [
        (None, (0o660, "libvirt")),
        ('unix_sock_group = "adm"\nunix_sock_rw_perms = "0770"\n', (0o660, "adm")),
        ('unix_sock_rw_perms = "0700"\n', (0o600, "root")),
    ],
)
def test_in_libvirtds_place_no_client_needs_a_setting(
    host: Host, tmp_path: Path, conf: str | None, admitted: tuple[int, str]
) -> None:
    """The files of examples/libvirt/transparent, in a namespace where /run/libvirt is our own.

    This libvirtd's sockets lie elsewhere already (unix_sock_dir); only that path differs. `conf`:
    what libvirtd.conf says besides.
    """
    config = used(TRANSPARENT / "virtlun.toml")
    if conf is not None:
        file = tmp_path / "libvirtd.conf"
        file.write_text(conf)
        own = tmp_path / "virtlun.toml"
        own.write_text(f'{config.read_text()}\nlibvirtd_conf = "{file}"\n')
        config = own
    assert not (host.libvirtd.scratch / "run-libvirt/libvirt-sock").exists()
    before = stat.S_IMODE(host.libvirtd.socket.stat().st_mode)
    host.libvirtd.socket.chmod(0o700)  # as in the example: nobody else is to use it
    gateway = subprocess.Popen(
        host.libvirtd.command(
            str(Path(sys.executable).parent / "virtlun-gateway"),
            *("--config", str(config)),
            *("--upstream", str(host.libvirtd.socket)),
            *("--upstream-ro", str(host.libvirtd.socket_ro)),
            *("--target-socket", str(host.paths.rpc_socket)),
        ),
        stdin=subprocess.DEVNULL,
        stderr=(host.scratch / "transparent.log").open("ab"),
    )
    try:
        known = host.libvirtd.scratch / "run-libvirt/libvirt-sock"  # /run/libvirt in there
        serves(gateway, lambda: listens(known), "the gateway", host.scratch / "transparent.log")
        assert (stat.S_IMODE(known.stat().st_mode), known.group()) == admitted
        virsh = host.libvirtd.command("virsh", "-q", "-c", "qemu:///system")
        shown = subprocess.check_output([*virsh, "dumpxml", "idle"], text=True, timeout=60)
        assert "vhostuser" not in shown, "it went through the gateway"
        listed = subprocess.check_output([*virsh, "-r", "list", "--all"], text=True, timeout=60)
        assert "idle" in listed
    finally:
        host.libvirtd.socket.chmod(before)
        gateway.terminate()
        assert gateway.wait(90) == 0


def test_the_example_moves_each_socket_to_where_the_gateway_looks() -> None:
    config = load(TRANSPARENT / "virtlun.toml").gateway
    conf = used(TRANSPARENT / "libvirtd.conf").read_text()
    for unit, ours, theirs in (
        ("libvirtd.socket", config.listen, config.upstream),
        ("libvirtd-ro.socket", config.listen_ro, config.upstream_ro),
    ):
        drop_in = used(TRANSPARENT / f"{unit}.d/virtlun.conf").read_text()
        assert f"ListenStream={theirs}\n" in drop_in
        assert f'unix_sock_dir = "{theirs.parent}"' in conf
        packaged = Path(f"/lib/systemd/system/{unit}").read_text()
        assert f"ListenStream={ours}\n" in packaged


def test_systemd_may_hand_over_the_sockets(host: Host) -> None:
    path = host.scratch / "handed"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(8)
    program = str(Path(sys.executable).parent / "virtlun-gateway")
    # As systemd does it: the socket is descriptor 3, LISTEN_PID the process that gets it.
    script = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    gateway = subprocess.Popen(
        [
            *(sys.executable, "-c", script, str(listening.fileno()), program),
            *("--config", str(host.config), "--listen", str(path)),
            *("--listen-ro", f"{path}-ro"),
        ],
        pass_fds=[listening.fileno()],
        stderr=(host.scratch / "handed.log").open("ab"),
    )
    try:
        assert "idle" in virsh_as([], host.libvirtd.uri(path), "list", "--all", "--name")[1]
    finally:
        gateway.terminate()
        assert gateway.wait(90) == 0
        listening.close()
    assert path.is_socket(), "it is systemd's to remove"


def test_sigterm_ends_it_in_order(host: Host) -> None:
    with _gateway(host, "") as gateway:
        client = subprocess.Popen(
            ["virsh", "-c", host.libvirtd.uri(gateway.socket), "event", "--all", "--loop"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(0.5)
            assert gateway.stop() == 0
            client.wait(90)
            assert not gateway.socket.exists()
        finally:
            client.kill()
            client.wait()


@pytest.mark.parametrize(
    ("name", "says"),
    [("x" * 120, "107 bytes at most"), ("taken", "another process listens there")],
)
def test_a_socket_that_cannot_be_made_is_one_sentence(host: Host, name: str, says: str) -> None:
    path = host.gateway_socket if name == "taken" else host.scratch / name
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "virtlun-gateway"),
            *("--config", str(host.config), "--listen", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert host.virsh("list", "--all"), "the one that listens there goes on"
