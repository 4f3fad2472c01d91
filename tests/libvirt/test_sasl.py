"""A libvirtd that asks everybody for SASL, which only a client can answer, not the gateway."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.host import Host
from tests.support.libvirtd import VirshError
from tests.support.wait import until

pytestmark = [pytest.mark.root]


@pytest.fixture(scope="module")
def asking(host: Host) -> Host:
    """The host after its administrator has asked for SASL, and restarted both."""
    conf = host.libvirtd.scratch / "etc/libvirtd.conf"
    text = conf.read_text()
    assert text.count('auth_unix_rw = "none"') == 1
    conf.write_text(text.replace('auth_unix_rw = "none"', 'auth_unix_rw = "sasl"'))
    host.stop_gateway()
    host.libvirtd.restart()
    host.start_gateway()
    return host


def test_who_cannot_answer_it_gets_in_neither_way(asking: Host) -> None:
    said = []
    for virsh in (asking.virsh_direct, asking.virsh):
        with pytest.raises(VirshError, match="authentication failed") as error:
            virsh("list")
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_read_only_socket_is_as_it_was(asking: Host) -> None:
    words = ["virsh", "-q", "-r", "-c", asking.uri_ro, "list", "--all"]
    subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=90)


def test_log_and_doctor_say_what_to_do(asking: Host) -> None:
    log = asking.scratch / "gateway.log"
    sentence = (
        f"libvirtd asks for SASL on {asking.libvirtd.socket}, which the gateway cannot answer for"
        " calls of its own: let auth_unix_rw be polkit or none in its configuration"
    )
    until(lambda: sentence in log.read_text(), "the gateway says why it cannot ask libvirtd")
    words = [asking.program("virtlun"), "--config", str(asking.config), "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    (found,) = [item for item in json.loads(done.stdout) if item["what"] == "authentication"]
    assert found["state"] == "failed" and "asks for SASL" in found["found"]
    assert found["advice"].startswith('set auth_unix_rw = "polkit" or "none" there')
