"""QEMU's own guest agent, Debian's, in the test guest."""

from __future__ import annotations

import re

from tests.support.agent import Agent
from tests.support.host import Host
from tests.support.wait import until

CHANNEL = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
"""Its port, in a domain's XML."""

RUN = (
    "LD_LIBRARY_PATH=/tools/lib setsid /tools/qemu-ga -m virtio-serial -p /dev/{port} -t /run"
    " -l /tmp/qemu-ga.log >/tmp/qemu-ga.out 2>&1 </dev/null &"
)


def freeze_status(host: Host, name: str) -> str:
    """Returns what the agent says: thawed or frozen."""
    asked = '{"execute":"guest-fsfreeze-status"}'
    said = host.virsh_direct("qemu-agent-command", name, asked)
    return str(re.findall(r'"return":"(\w+)"', said)[0])


def start_agent(host: Host, name: str, guest: Agent) -> None:
    """Has it run in a guest of `agent_image`, and waits until libvirtd has its answer."""
    if not guest.run("pidof qemu-ga", check=False):
        place = "basename $(dirname $(grep -l org.qemu /sys/class/virtio-ports/*/name))"
        guest.run(RUN.format(port=guest.wait_for(place).strip()))
    until(
        lambda: (
            "return"
            in host.virsh_direct(
                "qemu-agent-command", name, '{"execute":"guest-ping"}', check=False
            )
        ),
        "QEMU's agent answers",
    )
