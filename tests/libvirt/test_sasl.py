"""A libvirtd that asks everybody for SASL: clients, and the gateway for calls of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.night import at_night
from tests.support.wait import until

pytestmark = [pytest.mark.root]

DOMAIN = "asked"
ATTACH = ("attach-disk", DOMAIN, "/dev/virtlun/lvs0/disk", "sda")

NAME, PASSWORD = "virtlun", "pass % word, ünlike any"

SASLPASSWD = shutil.which("saslpasswd2") or "/usr/sbin/saslpasswd2"


def write_credentials(path: Path, password: str) -> None:
    """Writes libvirt's file of names and passwords for this host."""
    path.write_text(
        f"[credentials-me]\nauthname={NAME}\npassword={password}\n\n"
        "[auth-libvirt-localhost]\ncredentials=me\n"
    )
    path.chmod(0o600)


class Asking:
    """A host whose administrator has asked for SASL."""

    def __init__(self, host: Host) -> None:
        """Starts a domain, and has libvirtd ask; the gateway has no password yet."""
        self.host = host
        self.etc = host.libvirtd.scratch / "etc"
        self.gateway_auth = self.etc / "auth.conf"
        self.client_auth = host.scratch / "client.conf"
        write_credentials(self.client_auth, PASSWORD)
        users = host.scratch / "users.sasldb"
        subprocess.run(
            [SASLPASSWD, "-p", "-c", "-f", str(users), "-a", "libvirt", NAME],
            input=PASSWORD.encode(),
            check=True,
        )
        host.start_without_guest(DOMAIN)
        host.volumes.create("lvs0/disk", 1 << 20)
        self.sasl = host.scratch / "sasl2"
        self.sasl.mkdir()
        self._conf = f"sasldb_path: {users}\nauxprop_plugin: sasldb\n"
        Path("/etc/sasl2").mkdir(exist_ok=True)  # only a place to mount on
        bind = host.libvirtd.command("mount", "--bind", str(self.sasl), "/etc/sasl2")
        subprocess.run(bind, check=True)
        conf = self.etc / "libvirtd.conf"
        text = conf.read_text()
        assert text.count('auth_unix_rw = "none"') == 1
        conf.write_text(text.replace('auth_unix_rw = "none"', 'auth_unix_rw = "sasl"'))
        self.offer("scram-sha-256")

    def offer(self, mechanism: str) -> None:
        """Has libvirtd ask for one mechanism, and starts it and the gateway again."""
        (self.sasl / "libvirt.conf").write_text(f"mech_list: {mechanism}\n{self._conf}")
        self.host.stop_gateway()
        self.host.libvirtd.restart()
        self.host.start_gateway()

    def virsh(self, *words: str) -> str:
        """Runs virsh through the gateway as who knows the password; returns what it prints."""
        done = subprocess.run(
            ["virsh", "-q", "-c", self.host.uri, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | {"LIBVIRT_AUTH_FILE": str(self.client_auth)},
            timeout=90,
            check=False,
        )
        if done.returncode:
            raise VirshError(done.stderr)
        return done.stdout

    def luns(self) -> int:
        """Returns how many LUNs the domain sees."""
        (controller,) = self.host.client.call("vhost_get_controllers")
        return sum(len(target["luns"]) for target in controller["backend_specific"]["scsi"])

    def doctor(self) -> dict[str, str]:
        """Returns what `virtlun doctor` says of authentication."""
        words = [self.host.program("virtlun"), "--config", str(self.host.config), "doctor"]
        done = subprocess.run(
            [*words, "--json"], capture_output=True, text=True, check=False, timeout=120
        )
        (found,) = [each for each in json.loads(done.stdout) if each["what"] == "authentication"]
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def asking(host: Host) -> Asking:
    return Asking(host)


@pytest.fixture
def known(asking: Asking) -> Iterator[Asking]:
    """The gateway knows the password."""
    write_credentials(asking.gateway_auth, PASSWORD)
    yield asking
    asking.gateway_auth.unlink()


@pytest.mark.nightly
def test_who_cannot_answer_it_gets_in_neither_way(asking: Asking) -> None:
    said = []
    for virsh in (asking.host.virsh_direct, asking.host.virsh):
        with pytest.raises(VirshError, match="authentication failed") as error:
            virsh("list")
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_read_only_socket_is_as_it_was(asking: Asking) -> None:
    words = ["virsh", "-q", "-r", "-c", asking.host.uri_ro, "list", "--all"]
    subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=90)


@pytest.mark.nightly
def test_without_a_password_log_doctor_and_clients_say_what_to_do(asking: Asking) -> None:
    sentence = (
        f"libvirtd asks for SASL, and there is no {asking.gateway_auth}: write"
        " [auth-libvirt-localhost] and its credentials there (gateway.auth_conf in virtlun.toml"
        " names the file), or let auth_unix_rw be polkit or none in libvirtd's configuration"
    )
    log = asking.host.scratch / "gateway.log"
    until(lambda: sentence in log.read_text(), "the gateway says why it cannot ask libvirtd")
    found = asking.doctor()
    assert found["state"] == "failed" and "asks for SASL" in found["found"]
    assert found["advice"].startswith("write [auth-libvirt-localhost]")
    assert asking.virsh("list", "--name").strip() == DOMAIN  # needs no call of the gateway's own
    with pytest.raises(VirshError) as error:
        asking.virsh(*ATTACH)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "mechanism", ["scram-sha-512", at_night("scram-sha-256"), at_night("scram-sha-1")]
)
def test_a_disk_is_attached_by_each_mechanism(known: Asking, mechanism: str) -> None:
    known.offer(mechanism)
    assert known.doctor()["found"] == f"the gateway is {NAME} for libvirtd, which asks for SASL"
    known.virsh(*ATTACH)
    assert ATTACH[2] in known.virsh("domblklist", DOMAIN)
    assert known.luns() == 1
    known.virsh("detach-disk", DOMAIN, "sda")
    assert known.luns() == 0


def test_a_wrong_password_is_told_in_the_log(asking: Asking) -> None:
    write_credentials(asking.gateway_auth, "another")
    try:
        asking.offer("scram-sha-256")
        log = asking.host.scratch / "gateway.log"
        until(lambda: "authentication failed" in log.read_text(), "the gateway was refused")
        with pytest.raises(VirshError, match="authentication failed"):
            asking.virsh(*ATTACH)
    finally:
        asking.gateway_auth.unlink()


def test_a_mechanism_that_the_gateway_does_not_know_is_named(known: Asking) -> None:
    known.offer("digest-md5")
    with pytest.raises(VirshError) as error:
        known.virsh(*ATTACH)
    assert (
        "libvirtd asks for SASL by DIGEST-MD5, and the gateway knows SCRAM-SHA-512, SCRAM-SHA-256,"
        " SCRAM-SHA-1: add one to mech_list in /etc/sasl2/libvirt.conf"
    ) in str(error.value)
