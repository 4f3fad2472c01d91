"""The virtlun command where it needs no target: which configuration it goes by."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from uuid import UUID

import click
import pytest
from click.testing import CliRunner

from plugin.cli import domain as domain_commands
from plugin.cli import main, remote
from plugin.cli.doctor import guests, libvirt, machine, target
from plugin.cli.doctor.finding import Finding
from plugin.config import Config, GatewaySection
from pydataplane import emulator, supervise
from pydataplane.domain import translate
from pydataplane.domain.model import ANY
from pydataplane.domain.translate import Settings
from tests.unit.gateway.world import UUID_1, disk, plain
from tests.unit.translate.domains import domain

DISK = (
    "<disk type='block' device='disk'><source dev='/disks/lvs0/v'/>"
    "<target dev='sda' bus='scsi'/></disk>"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "virtlun.toml"
    path.write_text(
        "[target]\nrpc_socket = '/s/rpc'\nvhost_dir = '/s/vhost'\n"
        "[disks]\npath_prefix = '/disks/'\nmax_queues = 1\n"
    )
    return path


def test_domain_translate_goes_by_the_configuration(config: Path) -> None:
    words = ("domain", "translate", "--plan", "-")
    done = CliRunner().invoke(main, ["--config", str(config), *words], input=domain(DISK))
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["socket"] == f"/s/vhost/{plan['controller']}"
    assert plan["num_queues"] == 1
    assert [lun["volume"] for lun in plan["luns"]] == [{"lvstore": "lvs0", "lvol": "v"}]
    assert plan["cpus"] == []
    named = CliRunner(env={"VIRTLUN_CONFIG": str(config)}).invoke(main, words, input=domain(DISK))
    assert named.stdout == done.stdout


def test_a_plan_says_where_the_vcpus_are_bound(config: Path) -> None:
    pins = "<vcpu cpuset='4-5'>2</vcpu><cputune><vcpupin vcpu='1' cpuset='2'/></cputune>"
    words = ["--config", str(config), "domain", "translate", "--plan", "-"]
    bound = domain(DISK).replace("<vcpu>2</vcpu>", pins)
    done = CliRunner().invoke(main, words, input=bound)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cpus"] == [[2], [4, 5]]


def test_target_start_goes_by_the_configuration(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[supervise.TargetPaths] = []

    def start(paths: supervise.TargetPaths, _options: tuple[str, ...]) -> int:
        started.append(paths)
        return 1

    monkeypatch.setattr(supervise, "start", start)
    words = ["--config", str(config), "target", "start"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert CliRunner().invoke(main, ["--socket", "/other", *words]).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--vhost-dir", "/w"]).exit_code == 0
    assert [(str(p.rpc_socket), str(p.vhost_dir)) for p in started] == [
        ("/s/rpc", "/s/vhost"),
        ("/other", "/s/vhost"),
        ("/s/rpc", "/w"),
    ]


@pytest.mark.parametrize(
    ("lines", "words", "options"),
    [
        ("", [], []),
        ("rbd = true", [], ["--rbd"]),
        ("network = true", ["--rbd"], ["--rbd", "--network"]),
        ("rbd = true", ["--", "--rbd", "--cpumask", "[0]"], ["--rbd", "--cpumask", "[0]"]),
    ],
)
def test_target_start_says_what_disks_over_the_network_need(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    words: list[str],
    options: list[str],
) -> None:
    started: list[tuple[str, ...]] = []

    def start(_paths: supervise.TargetPaths, given: tuple[str, ...]) -> int:
        started.append(given)
        return 1

    monkeypatch.setattr(supervise, "start", start)
    path = tmp_path / "virtlun.toml"
    path.write_text(f"[target]\nrpc_socket = '/s/rpc'\n{lines}\n")
    done = CliRunner().invoke(
        main, ["--config", str(path), "target", "start", "--socket-group", "g", *words]
    )
    assert done.exit_code == 0, done.output
    (given,) = started
    own = ("--hold-sessions", "--socket-group", "g")
    assert [word for word in given if word not in own] == options


def test_a_wrong_configuration_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "virtlun.toml"
    path.write_text("[disks]\nmax_queues = 0\n")
    done = CliRunner().invoke(main, ["--config", str(path), "volume", "list"])
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: {path}: disks.max_queues: ")
    gone = CliRunner().invoke(main, ["--config", str(tmp_path / "none"), "volume", "list"])
    assert gone.exit_code == 1
    assert "there is no such file" in gone.stderr


def test_the_targets_own_defaults_are_those_of_the_configuration() -> None:
    paths, section = supervise.TargetPaths(), Config().target
    assert (paths.rpc_socket, paths.vhost_dir) == (section.rpc_socket, section.vhost_dir)


def commands(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the words of each command, groups included."""
    yield words
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, (*words, name))


@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_each_command_says_what_it_does_and_in_lists_nothing_is_cut(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*words, "--help"])
    assert done.exit_code == 0
    said = done.stdout.splitlines()
    assert said[0].startswith("Usage: ") and said[2].strip()
    assert not [line for line in said[1:] if line.endswith("...")]


def test_a_wrong_call_is_status_2_and_says_how_to_get_help() -> None:
    for words in (["volume", "frob"], ["volume", "create"], ["top", "--count", "x"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("version", "reconnect_s", "state", "words"),
    [
        (None, "auto", "failed", "not installed"),
        (
            "7.2.22",
            "auto",
            "warning",
            "7.2.22: I/O of a running VM's LUNs hangs when the target restarts",
        ),
        ("7.2.22", 0, "warning", "until the VM is started again"),
        ("7.2.22", 1, "failed", "starts no VM with reconnect_s = 1"),
        ("8.2.0", "auto", "ok", "8.2.0, connects again"),
        ("8.2.0", 3, "ok", "8.2.0, connects again"),
        ("8.2.0", 0, "warning", "8.2.0, but reconnect_s = 0 in virtlun.toml: a running VM's I/O"),
        ("unseen 10.0", "auto", "warning", "does not say so as a file"),
        ("unseen 10.0", 1, "ok", "10.0.0, connects again"),
    ],
)
def test_doctor_tells_what_becomes_of_a_vm_when_the_target_restarts(
    version: str | None,
    reconnect_s: int | Literal["auto"],
    state: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`unseen`: the program that is there says its version only when it runs."""
    monkeypatch.setattr(emulator, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(emulator, "OUTSIDE", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin/none")
    if version is not None:
        said = "QEMU emulator version " + version.removeprefix("unseen ")
        program = tmp_path / f"qemu-system-{platform.machine()}"
        text = said if said.endswith(version) else said.replace("version", "'version'")
        program.write_text(f"#!/bin/sh\necho {text}\n")
        program.chmod(0o777)  # so that it is no wrapper that may be run
    found = libvirt.qemu(reconnect_s)
    assert (found.what, found.state) == ("QEMU", state)
    assert words in found.found
    assert bool(found.advice) == (state != "ok")
    held = libvirt.qemu(reconnect_s, held=True)
    if state == "failed":
        assert held == found
    else:
        assert (held.state, held.advice) == ("ok", "")
        assert "its connections are kept when the target restarts" in held.found


@pytest.fixture
def vhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the controllers' sockets, and a user of QEMU's who may enter all above it."""
    monkeypatch.setattr(libvirt, "_ids", lambda user: (64055, frozenset({64055, 108})))
    folder = tmp_path / "vhost"
    folder.mkdir()
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    return folder


def test_doctor_tells_whether_qemu_reaches_its_sockets(vhost: Path) -> None:
    def found() -> tuple[str, str]:
        finding = libvirt.permissions(vhost)
        return finding.state, finding.found

    assert found()[0] == "ok"
    socket = vhost / "vm-1"
    socket.touch()
    socket.chmod(0o600)
    assert found() == ("failed", f"libvirt-qemu cannot open {socket}")
    os.chown(socket, 0, 108)
    socket.chmod(0o660)
    assert found()[0] == "ok"
    vhost.chmod(0o700)
    assert found() == ("failed", f"libvirt-qemu cannot enter {vhost}")
    assert libvirt.permissions(vhost / "none").state == "ok"


def test_doctor_without_qemus_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libvirt, "_ids", lambda user: None)
    assert "--socket-group" in libvirt.permissions(tmp_path).advice


def test_doctor_tells_whether_apparmor_lets_qemu_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, enabled = tmp_path / "rules", tmp_path / "enabled"
    monkeypatch.setattr(libvirt, "APPARMOR", enabled)
    monkeypatch.setattr(libvirt, "APPARMOR_RULES", (rules,))
    folder = Path("/run/virtlun/vhost")
    assert libvirt.apparmor(folder).state == "ok"
    enabled.write_text("Y\n")
    finding = libvirt.apparmor(folder)
    assert finding.state == "warning" and "/run/virtlun/vhost/** rw," in finding.advice
    rules.write_text("  /run/virtlun/vhost/** rw,\n")
    assert libvirt.apparmor(folder).state == "ok"


class Lvstores:
    """A target that has these lvstores."""

    def __init__(self, *stores: dict[str, object]) -> None:
        self.stores = list(stores)

    def call(self, method: str) -> list[dict[str, object]]:
        assert method == "bdev_lvol_get_lvstores"
        return self.stores


def store(free: int, **more: object) -> dict[str, object]:
    return {
        "name": "lvs0",
        "cluster_size": 1 << 20,
        "free_clusters": free,
        "total_data_clusters": 1024,
        **more,
    }


@pytest.mark.parametrize(
    ("stores", "state", "words"),
    [
        ((store(512),), "ok", "lvs0 with 512 MiB free"),
        ((store(8),), "warning", "virtlun lvstore resize lvs0 SIZE"),
        ((), "warning", "virtlun lvstore create"),
        ((store(512, stopped="a write failed"),), "failed", "lvs0 (a write failed)"),
    ],
)
def test_doctor_tells_what_volumes_are_cut_from(
    monkeypatch: pytest.MonkeyPatch, stores: tuple[dict[str, object], ...], state: str, words: str
) -> None:
    monkeypatch.setattr(target, "client", lambda _: Lvstores(*stores))
    finding = target.lvstores(Path("/none"))
    assert finding.state == state
    assert words in finding.found + finding.advice


class Integrity:
    """A target that has these bdevs with checksums."""

    def __init__(self, *bdevs: dict[str, object]) -> None:
        self.bdevs = list(bdevs)

    def call(self, method: str) -> list[dict[str, object]]:
        assert method == "virtlun_integrity_get"
        return self.bdevs


def sums(name: str, mismatches: int = 0, pages: int = 0, maps: int = 0) -> dict[str, object]:
    counts = {"mismatches": mismatches, "damaged_checksum_pages": pages, "damaged_maps": maps}
    return {"name": name, **counts}


def test_doctor_tells_what_a_disk_gave_back_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*bdevs: dict[str, object]) -> list[Finding]:
        monkeypatch.setattr(target, "client", lambda _: Integrity(*bdevs))
        return target.checksums(Path("/none"))

    assert found() == []
    (finding,) = found(sums("a"), sums("b"))
    assert (finding.state, finding.found) == (
        "ok",
        "of a, b: no mismatch since the target has them",
    )
    (finding,) = found(sums("a"), sums("b", 3, maps=1), sums("c", pages=2))
    assert finding.state == "failed"
    assert finding.found.endswith(": b (3 reads, 1 maps); c (2 pages of checksums)")
    assert "virtlun lvstore scrub" in finding.advice


def test_doctor_tells_that_a_target_lacks_what_disks_over_the_network_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status: dict[str, object] = {"images": {"asked": False, "problem": None}, "network": False}
    monkeypatch.setattr(supervise, "status", lambda _: status)

    def found(**settings: object) -> list[tuple[str, str]]:
        config = Config.model_validate(settings)
        checks = (target.images, target.nbd_servers)
        findings = [each for check in checks for each in check(Path("/none"), config)]
        return [(each.state, each.found + each.advice) for each in findings]

    assert [state for state, _ in found()] == ["ok"]
    (rbd,) = found(disks={"serve_network": ["rbd"]})
    assert found(disks={"serve_network_on_request": ["rbd"]}) == [rbd]
    assert rbd == found(target={"rbd": True})[0]
    assert rbd[0] == "failed" and "started without --rbd" in rbd[1]
    assert "virtlun target upgrade -- --rbd" in rbd[1] and "systemd/rbd.conf" in rbd[1]
    nbd = found(disks={"serve_network": ["nbd"]})[1]
    assert nbd == found(target={"network": True})[1]
    assert nbd == found(disks={"serve_network_on_request": ["nbd"]})[1]
    assert nbd[0] == "warning" and "systemd/network.conf" in nbd[1]
    status |= {"network": True, "images": {"asked": True, "problem": "librbd1 is not installed"}}
    rbd, nbd = found(disks={"serve_network": ["rbd", "nbd"]})
    assert rbd[0] == "failed" and "librbd1 is not installed" in rbd[1]
    assert nbd[0] == "ok"


def test_doctor_names_domains_whose_autostart_needs_a_secret(tmp_path: Path) -> None:
    disk = (
        "<disk type='network' device='disk'><source protocol='rbd' name='p/{0}'/>{1}"
        "<target dev='sdb' bus='scsi'/></disk>"
    )
    auth = "<auth username='u'><secret type='ceph' usage='s'/></auth>"
    served = Settings(network=frozenset({"rbd"}), allowed=ANY)
    for name, devices in (
        ("secret", disk.format("a", auth)),
        ("keyring", disk.format("b", "")),
        ("none", ""),
    ):
        made = translate.define(domain(devices), served, new_uuid=UUID(UUID_1))
        (tmp_path / f"{name}.xml").write_text(f"<!-- libvirt's own words -->\n{made.xml}")
    (tmp_path / "broken.xml").write_text("<domain")
    (finding,) = libvirt.autostart(tmp_path)
    assert finding.state == "warning" and finding.found.startswith("secret: ")
    (tmp_path / "secret.xml").unlink()
    assert libvirt.autostart(tmp_path) == []


def test_doctor_tells_whether_libvirtd_listens(tmp_path: Path) -> None:
    path = tmp_path / "libvirt-sock"
    finding = libvirt.libvirtd(path)
    assert finding.state == "failed" and "systemctl start libvirtd" in finding.advice
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        assert libvirt.libvirtd(path).state == "ok"


def test_doctor_tells_of_ways_to_libvirt_that_pass_the_gateway_by(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st\n"
    four, six = tmp_path / "tcp", tmp_path / "tcp6"
    four.write_text(head + "   0: 0100007F:407D 00000000:0000 0A 0\n")  # 16509
    six.write_text(head + f"   0: {'0' * 32}:4082 {'0' * 32}:0000 0A 0\n")  # 16514
    usual = remote.ports(tmp_path / "libvirtd.conf")
    assert remote.listening(usual, (four, six)) == "port 16509 (TCP) and port 16514 (TLS)"
    four.write_text(head + "   0: 0100007F:407D 0100007F:1234 01 0\n")  # only connected
    assert remote.listening(usual, (four, tmp_path / "none")) == ""
    found = libvirt.remote_clients(Path("/gw"), "port 16514 (TLS)")
    assert found.state == "warning" and "sees no virtlun disks" in found.found
    assert "qemu+ssh://HOST/system?socket=/gw" in found.advice
    assert libvirt.remote_clients(Path("/gw"), "").state == "ok"


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("libvirtd.conf", 'tls_port = "9999"\n', "TLS"),
        ("libvirtd.conf", "tcp_port = '9999'\n", "TCP"),
        ("virtproxyd.conf", 'tcp_port = "9999"\n', "TCP"),
        ("libvirtd-tls.socket", "[Socket]\nListenStream=9999\n", "TLS"),
        ("virtproxyd-tcp.socket.d/own.conf", "[Socket]\nListenStream=[::1]:9999\n", "TCP"),
        ("libvirtd.conf", '#tcp_port = "9999"\n', ""),
    ],
)
def test_doctor_looks_where_libvirt_was_told_to_listen(
    tmp_path: Path, file: str, text: str, kind: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    table = tmp_path / "tcp"
    table.write_text("  sl\n   0: 00000000:270F 00000000:0000 0A 0\n")
    found = remote.ports(tmp_path / "libvirtd.conf", (tmp_path,))
    assert remote.listening(found, (table,)) == (f"port 9999 ({kind})" if kind else "")


def test_doctor_knows_a_port_by_its_name(tmp_path: Path) -> None:
    conf = tmp_path / "libvirtd.conf"
    conf.write_text('tcp_port = "no-such-service"\ntls_port = ""\n')
    assert remote.ports(conf) == remote.PORTS


def test_doctor_tells_who_the_gateway_is_for_sasl(tmp_path: Path) -> None:
    conf = tmp_path / "libvirtd.conf"
    auth = tmp_path / "auth.conf"
    settings = Config(gateway=GatewaySection(libvirtd_conf=conf, auth_conf=auth))
    for words, state in (('auth_unix_rw = "sasl"', "failed"), ('auth_unix_rw = "none"', "ok")):
        conf.write_text(words)
        assert libvirt.authentication(settings).state == state
    upstream = Path("/run/libvirt/virtqemud-sock")
    modular = GatewaySection(libvirtd_conf=conf, auth_conf=auth, upstream=upstream)
    (tmp_path / "virtqemud.conf").write_text('auth_unix_rw = "sasl"')
    found = libvirt.authentication(Config(gateway=modular))
    assert found.state == "failed" and "virtqemud.conf" in found.found
    auth.write_text(
        "[credentials-x]\nauthname=me\npassword=p%w\n[auth-libvirt-default]\ncredentials=x\n"
    )
    found = libvirt.authentication(Config(gateway=modular))
    assert found.state == "ok" and "the gateway is me for libvirtd" in found.found


@pytest.mark.parametrize(
    ("unit", "drop_in", "state"),
    [
        ("SocketMode=0666\n", "", "ok"),
        ("SocketMode=0660\nSocketGroup={own}\n", "", "ok"),
        ("SocketMode=0660\nSocketGroup=not-{own}\n", "", "warning"),
        ("SocketMode=0666\n", "SocketGroup=not-{own}\nSocketMode=0660\n", "warning"),
        ("SocketMode=0666\n", "SocketMode=0600\n", "warning"),
        ("", "", "ok"),
    ],
)
def test_doctor_tells_that_systemd_gave_libvirts_socket_to_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, drop_in: str, state: str
) -> None:
    packaged, local = tmp_path / "lib", tmp_path / "etc"
    unit, drop_in = (text.format(own=tmp_path.group()) for text in (unit, drop_in))
    for path, text in (
        (packaged / "libvirtd.socket", f"[Socket]\n{unit}"),
        (local / "libvirtd.socket.d/here.conf", f"[Socket]\n{drop_in}"),
        # Ours, which keeps everybody from where libvirtd's own socket went.
        (local / "libvirtd.socket.d/virtlun.conf", "[Socket]\nSocketMode=0600\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    listen = tmp_path / "libvirt-sock"
    listen.touch()
    listen.chmod(0o660)
    settings = Config(gateway=GatewaySection(listen=listen))
    assert libvirt.admission(settings, (packaged, local)).state == "ok", "not in its place"
    monkeypatch.setattr(libvirt, "LIBVIRTDS_PLACES", (tmp_path,))
    found = libvirt.admission(settings, (packaged, local))
    assert found.state == state, found
    if state == "warning":
        assert "socket_group = " in found.advice
    listen.chmod(0o600)
    assert libvirt.admission(settings, (packaged, local)).state == "ok"


def test_doctor_tells_what_pods_block_devices_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "fuse"
    there.touch()
    monkeypatch.setattr(machine, "FACE_DEVICES", (there, tmp_path / "loop-control"))
    finding = machine.pods_block_devices()
    assert finding.state == "warning" and "modprobe fuse loop" in finding.advice
    assert "loop-control" in finding.found and str(there) not in finding.found
    monkeypatch.setattr(machine, "FACE_DEVICES", (there,))
    assert machine.pods_block_devices().state == "ok"


def test_doctor_looks_at_all_that_attaching_stands_on(config: Path) -> None:
    done = CliRunner().invoke(main, ["--config", str(config), "doctor", "--json"])
    assert done.exit_code == 1, "there is no target"
    found = {item["what"]: item for item in json.loads(done.stdout)}
    for what in ("KVM", "QEMU", "disks' front end", "libvirt", "shared memory"):
        assert what in found
    for what in ("huge pages", "permissions", "AppArmor", "gateway", "libvirt hook", "io_uring"):
        assert what in found
    for what in ("user", "libvirtd", "block devices for pods", "lvstores"):
        assert what in found
    assert found["target"]["state"] == "failed"
    for item in found.values():
        assert item["state"] == "ok" or item["advice"] or item["what"] == "target"
    shown = CliRunner().invoke(main, ["--config", str(config), "doctor"])
    assert shown.exit_code == 1
    assert "failed" in shown.stdout and "virtlun target start" in shown.stdout


@pytest.mark.parametrize(
    ("started_s", "settings", "says", "advice"),
    [
        (1, Settings(qemu_reconnects=lambda *_: True), "1 with a virtlun controller", ""),
        (0, Settings(qemu_reconnects=lambda *_: True), "one does not connect again", "stop it and"),
        (0, Settings(reconnect_s=2), "one does not connect again", "stop it and start it once"),
        (0, Settings(reconnect_s=0), "one does not connect again", "take reconnect_s = 0 out"),
        (0, Settings(), "one does not connect again", "start the target with --hold-sessions"),
    ],
)
def test_doctor_names_each_vm_that_would_lose_its_disks(
    started_s: int, settings: Settings, says: str, advice: str
) -> None:
    def of(seconds: int) -> str:
        given = plain(devices=disk())
        return translate.define(given, Settings(reconnect_s=seconds), new_uuid=UUID(UUID_1)).xml

    foreign = plain(devices="")
    (found,) = guests.judged([foreign, of(started_s)], settings)
    assert says in found.found and found.advice.startswith(advice)
    assert found.state == ("ok" if started_s else "warning")
    several = guests.judged([of(started_s), of(0)], settings)
    assert [item.state for item in several] == ["warning"] * (1 if started_s else 2)
    assert guests.judged([foreign], settings)[0].found == "none with a virtlun controller"
    (kept,) = guests.judged([of(started_s)], settings, {f"vm-{UUID_1}"})
    assert (kept.state, kept.found[:1]) == ("ok", "1")
    others = guests.judged([of(0)], settings, {"vm-other"})
    assert [item.state for item in others] == ["warning"]


def test_domain_list_has_a_lun_that_the_domain_does_not() -> None:
    """From a running guest nothing takes it but a detach, so somebody has to see it."""
    xml = translate.define(plain(devices=disk()), Settings(), new_uuid=UUID(UUID_1)).xml
    handle = SimpleNamespace(
        name=lambda: "one", isActive=lambda: 1, UUIDString=lambda: UUID_1, XMLDesc=lambda _: xml
    )
    served = {f"vm-{UUID_1}": {0: ["lvs0/data", "uuid-0"], 7: ["lvs0/more", "uuid-7"]}}
    rows = domain_commands._rows(handle, served)
    assert [(row["dev"], row["volume"], row["target"], row["served"]) for row in rows] == [
        ("sdb", "lvs0/data", 0, True),
        (None, "lvs0/more", 7, True),
    ]
    (row,) = domain_commands._rows(handle, None)
    assert (row["dev"], row["as"], row["served"]) == ("sdb", "LUN", None)
    assert (row["domain"], row["uuid"]) == ("one", UUID_1)
    (row,) = domain_commands._rows(handle, {})
    assert (row["target"], row["served"]) == (0, False)
