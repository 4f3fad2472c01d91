"""A guest run by QEMU directly, without libvirt."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.guest.emulator import PROGRAM, Emulator
from tests.guest.image import Image
from tests.support.agent import Agent, GuestError
from tests.support.starved import starved

#: `no_timer_check`: Linux panics at boot where a starved QEMU is late with the first timer ticks.
CMDLINE = (
    "console=ttyS0 panic=-1 quiet loglevel=6 mitigations=off cryptomgr.notests no_timer_check "
    # A test of itself, which no option turns off.
    "initcall_blacklist=crypto_kdf108_init virtlun.agent"
)

#: Linux says so where a processor's timer never fired, and so never does again.
LOST_TIMER = b"timer wakeup didn't happen"


class LostTimer(GuestError):
    """The emulated processor lost its timer, before any test had begun."""


def accelerator(image: Image, scratch: Path) -> str:
    """Returns "kvm" if a guest really boots with it on this machine, else "tcg".

    /dev/kvm alone proves nothing: on some virtual machines it opens and then hangs or aborts.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    try:
        with Guest(image, scratch / "kvm-probe", accel="kvm", deadline_s=6.0):
            return "kvm"
    except GuestError:
        return "tcg"


def reconnect_option(emulator: Emulator | None, milliseconds: int) -> str:
    """Returns the option of a character device; before QEMU 9.2 it counts whole seconds."""
    if emulator and emulator.version >= (9, 2):
        return f"reconnect-ms={milliseconds}"
    return f"reconnect={max(1, milliseconds // 1000)}"


class Guest:
    """A running QEMU with the test image; a context manager that kills it at the end.

    `controllers` are paths of vhost-user-scsi sockets, `emulator` is a QEMU other than the
    machine's own. With `reconnect_ms` QEMU tries each so many milliseconds to connect again to a
    target that went away. `scratch` gets the sockets and the console
    log. Raises GuestError, with the end of the console, if it is not up within `deadline_s`. A boot
    that ends with a lost timer, as of some thousands with several emulated processors one does, is
    done again once.
    With `incoming` (QEMU's -incoming) it waits for a migration instead of booting: call
    `arrived` when that is over.
    """

    def __init__(
        self,
        image: Image,
        scratch: Path,
        *,
        controllers: tuple[Path, ...] = (),
        accel: str = "tcg",
        memory_mib: int = 256,
        vcpus: int = 1,
        num_queues: int | None = None,
        extra: tuple[str, ...] = (),
        deadline_s: float = 180.0,
        emulator: Emulator | None = None,
        reconnect_ms: int | None = None,
        incoming: str | None = None,
    ) -> None:
        """Starts QEMU and waits for the guest's agent."""
        scratch.mkdir(parents=True, exist_ok=True)
        self.console = scratch / "console.log"
        self._qmp_path = scratch / "qmp"
        agent_path = scratch / "agent"
        command = [
            str(emulator.path) if emulator else shutil.which(PROGRAM) or PROGRAM,
            *("-machine", "q35,memory-backend=ram0"),
            *("-accel", accel if accel == "kvm" else "tcg,thread=multi"),
            *("-cpu", "host" if accel == "kvm" else "qemu64"),
            *("-smp", str(vcpus), "-m", str(memory_mib)),
            *("-object", f"memory-backend-memfd,id=ram0,size={memory_mib}M,share=on"),
            *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", CMDLINE),
            *("-nodefaults", "-display", "none", "-no-reboot"),
            *("-serial", f"file:{self.console}"),
            *("-serial", f"unix:{agent_path},server=on,wait=off"),
            *("-qmp", f"unix:{self._qmp_path},server=on,wait=off"),
        ]
        for index, path in enumerate(controllers):
            again = f",{reconnect_option(emulator, reconnect_ms)}" if reconnect_ms else ""
            command += ["-chardev", f"socket,id=vus{index},path={path}{again}"]
            queues = f",num_queues={num_queues}" if num_queues else ""
            command += ["-device", f"vhost-user-scsi-pci,id=scsi{index},chardev=vus{index}{queues}"]
        if incoming:
            command += ["-incoming", incoming]
        self._agent_path = agent_path
        self._command = [*command, *extra]
        self.log = scratch / "qemu.log"
        self._start()
        if incoming:
            return
        begun = time.monotonic()
        try:
            try:
                self.agent = self._wait(agent_path, deadline_s)
            except LostTimer:
                self.stop()
                self.console.unlink()
                self._start()
                begun = time.monotonic()
                self.agent = self._wait(agent_path, deadline_s)
        except GuestError as error:
            why = starved(self.process.pid, time.monotonic() - begun)
            self.stop()
            text = self.console.read_text(errors="replace") if self.console.exists() else ""
            raise GuestError(
                f"{error}{why}\n--- qemu\n{self.log.read_text(errors='replace')}\n--- console\n"
                f"{text[-3000:]}"
            ) from error

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )

    def _wait(self, agent_path: Path, deadline_s: float) -> Agent:
        end = time.monotonic() + deadline_s
        while not agent_path.exists() or b"GUEST-READY" not in self._console_bytes():
            if self.process.poll() is not None:
                raise GuestError(f"QEMU ended with status {self.process.returncode}")
            if LOST_TIMER in self._console_bytes():
                raise LostTimer("a timer of the guest never fired")
            if time.monotonic() > end:
                raise GuestError(f"the guest did not boot within {deadline_s:.0f} s")
            time.sleep(0.02)
        agent = Agent(agent_path, qemu=self.process.pid)
        agent.wait_ready(max(20.0, end - time.monotonic()))
        return agent

    def arrived(self, deadline_s: float = 180.0) -> None:
        """Connects to the agent of a guest that was migrated here."""
        self.agent = Agent(self._agent_path, qemu=self.process.pid)
        self.agent.wait_ready(deadline_s)

    def _console_bytes(self) -> bytes:
        return self.console.read_bytes() if self.console.exists() else b""

    def run(self, command: str, deadline_s: float = 120.0, check: bool = True) -> str:
        """Runs a command in the guest; see `Agent.run`."""
        return self.agent.run(command, deadline_s, check)

    def qmp(self, command: str, **arguments: Any) -> Any:
        """Runs one QMP command and returns its result; raises GuestError with QEMU's error."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(90)
            connection.connect(str(self._qmp_path))
            lines = connection.makefile("rw")
            lines.readline()
            for request in (
                {"execute": "qmp_capabilities"},
                {"execute": command, "arguments": arguments},
            ):
                lines.write(json.dumps(request) + "\n")
                lines.flush()
                while True:
                    answer = json.loads(lines.readline())
                    if "event" not in answer:
                        break
        if "error" in answer:
            raise GuestError(f"QMP {command}: {answer['error']['desc']}")
        return answer["return"]

    def monitor(self, command: str) -> str:
        """Runs a command of QEMU's human monitor and returns what it says."""
        said: str = self.qmp("human-monitor-command", **{"command-line": command})
        return said

    def state(self) -> str:
        """Returns what a person needs to see of a guest that does not answer."""
        if self.process.poll() is not None:
            seen = [f"QEMU ended with status {self.process.returncode}"]
        else:
            seen = [str(self.qmp("query-status"))]
            for _ in range(2):
                words = self.monitor("info registers").splitlines()
                seen += [line for line in words if line.startswith("RIP")]
                words = self.monitor("info lapic").splitlines()
                seen += [line for line in words if line.startswith(("LVTT\t", "Timer", "I"))]
                time.sleep(1)
        console = self._console_bytes()[-3000:].decode(errors="replace")
        return "\n".join([*seen, "--- qemu", self.log.read_text(), "--- console", console])

    def stop(self) -> None:
        """Kills QEMU and waits for its end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> Guest:
        """Returns the running guest."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops it."""
        self.stop()
