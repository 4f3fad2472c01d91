"""What could be done by who runs code in a program of ours: user, capabilities, system calls.

The target tells who it is; holder and helper, which have some of root's rights, tell what the
kernel says of them, as doctor may be in another container than they are.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plugin.cli.doctor.finding import Finding
from pydataplane import methods, supervise
from pydataplane.errors import TargetError

TARGET_USER = "virtlun"
HELPER_SOCKET = Path("/run/virtlun-csi/helper.sock")
"""As the driver's container has it."""
ANSWER_BYTES = 64 << 10
DEADLINE_S = 10.0
CAPABILITIES = {
    0: "CHOWN",
    1: "DAC_OVERRIDE",
    2: "DAC_READ_SEARCH",
    3: "FOWNER",
    6: "SETGID",
    7: "SETUID",
    8: "SETPCAP",
    12: "NET_ADMIN",
    14: "IPC_LOCK",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",
    21: "SYS_ADMIN",
    23: "SYS_NICE",
    24: "SYS_RESOURCE",
}
"""Those that a program of ours is likely to have, by number."""
OF_HOLDER = {"CHOWN", "DAC_OVERRIDE", "SYS_ADMIN"}
OF_HELPER = {"DAC_OVERRIDE", "SYS_ADMIN", "SYS_RESOURCE"}


@dataclass(frozen=True)
class Rights:
    """What a process may do to its host."""

    user: str
    capabilities: Sequence[str]
    no_new_privs: bool
    confined: bool
    """Whether a filter of system calls is enforced."""
    refused: Sequence[str]
    """System calls that it refused."""

    def __str__(self) -> str:
        """Returns the facts in one line."""
        return "; ".join(
            (
                f"user {self.user}",
                f"capabilities {', '.join(self.capabilities) or 'none'}",
                f"no_new_privs {'set' if self.no_new_privs else 'not set'}",
                f"seccomp {'enforced' if self.confined else 'not enforced'}",
            )
        )


def target(path: Path) -> Finding:
    """Of the target at this JSON-RPC socket: it needs no right of root's."""
    what = "the target's rights"
    try:
        found = supervise.status(path)
        rights = _of_target(found)
    except (TargetError, OSError, ValueError):
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    advice = (
        f"make a user for it (systemd-sysusers, or useradd --system {TARGET_USER}), then start it "
        "again"
    )
    user = found.get("user")
    superuser = user["uid"] == 0 if user else rights.user == "0"  # whatever the account's name
    return _judged(what, rights, "target", advice if superuser or rights.capabilities else "")


def holder(path: Path) -> Finding:
    """Of the holder that the target at this JSON-RPC socket has its exports kept by."""
    what = "the holder's rights"
    try:
        at = Path(str(supervise.status(path)["holder_socket"]))
    except (TargetError, KeyError):
        return Finding(what, "warning", "not known, for the target does not tell", "start it first")
    absent = "exported files end with the target; VMs do not need one"
    return _asked(what, at, b"rights", _of_holder, ("holder", OF_HOLDER, absent))


def helper() -> Finding:
    """Of the helper of this node's CSI driver, where doctor runs in the driver's container."""
    what = "the driver's helper's rights"
    question = json.dumps({"do": "rights"}).encode()
    absent = "only a Kubernetes node's driver has one, in its own pod"
    return _asked(what, HELPER_SOCKET, question, _of_helper, ("helper", OF_HELPER, absent))


def _asked(
    what: str,
    at: Path,
    question: bytes,
    read: Callable[[bytes], Rights],
    expected: tuple[str, set[str], str],
) -> Finding:
    """Asks a program with one packet, and judges what it answers."""
    program, allowed, absent = expected
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(DEADLINE_S)
            peer.connect(str(at))
            peer.send(question)
            answer = peer.recv(ANSWER_BYTES)
    except (FileNotFoundError, ConnectionRefusedError):
        return Finding(what, "ok", f"none runs at {at}: {absent}")
    except OSError as error:
        return Finding(what, "warning", f"not known: {at}: {error.strerror}", "ask as root")
    try:
        rights = read(answer)
    except (ValueError, KeyError, TypeError):
        told = "not known: it is of another version, or does not let this user ask"
        return Finding(what, "warning", told, f"ask as root; exchange the {program} if it is older")
    more = sorted(set(rights.capabilities) - allowed)
    advice = f"start the {program} of this release: it gives up {', '.join(more)}" if more else ""
    return _judged(what, rights, program, advice)


def _judged(what: str, rights: Rights, program: str, advice: str) -> Finding:
    """`advice`: for rights that it should not have, if it has such."""
    if rights.refused:
        return Finding(
            what,
            "warning",
            f"{rights}; refused system calls: {', '.join(rights.refused)}",
            f"report this with the {program}'s log: it lacks a call, or somebody attacks it",
        )
    if advice:
        return Finding(what, "warning", str(rights), advice)
    if not rights.confined:
        return Finding(what, "warning", str(rights), "start it without --no-sandbox")
    return Finding(what, "ok", str(rights))


def _of_target(found: methods.Status) -> Rights:
    """By its status, and what the kernel says of its process (proc_pid_status(5))."""
    lines = Path(f"/proc/{found['pid']}/status").read_text().splitlines()
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    user = found.get("user")
    return Rights(
        user=user["name"] if user else status["Uid"].split()[1],
        capabilities=_capabilities(int(status["CapEff"], 16)),
        no_new_privs=status.get("NoNewPrivs") == "1",
        confined=status.get("Seccomp") == "2" and found.get("sandbox", "enforce") == "enforce",
        refused=found.get("refused_calls", []),
    )


def _of_holder(answer: bytes) -> Rights:
    """Of `ok KEY=VALUE ...`; ValueError or KeyError for anything else."""
    state, *words = answer.decode().split(" ")
    if state != "ok":
        raise ValueError(state)
    found = dict(word.split("=", 1) for word in words)
    return Rights(
        user="root" if found["uid"] == "0" else found["uid"],
        capabilities=_capabilities(int(found["capabilities"], 16)),
        no_new_privs=found["no_new_privs"] == "1",
        confined=found["seccomp"] == "2",
        refused=found["refused"].split(",") if found["refused"] else [],
    )


def _of_helper(answer: bytes) -> Rights:
    """Of `{"done": {...}}`; ValueError, KeyError or TypeError for anything else."""
    found = json.loads(answer)["done"]
    return Rights(
        user="root" if found["uid"] == 0 else str(found["uid"]),
        capabilities=_capabilities(int(found["capabilities"])),
        no_new_privs=bool(found["no_new_privs"]),
        confined=bool(found["seccomp"]),
        refused=list(map(str, found["refused"])),
    )


def _capabilities(bits: int) -> list[str]:
    """Returns the names of those that are set, as linux/capability.h numbers them."""
    return [
        CAPABILITIES.get(number, f"number {number}")
        for number in range(bits.bit_length())
        if bits >> number & 1
    ]
