"""A whole virtualisation host in a scratch directory: libvirtd, target, gateway and hook, all real.

The demo and tests/libvirt stand on it. Nothing outside the scratch directory is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plugin.hook import archive
from pydataplane import supervise
from pydataplane.client import Client
from pydataplane.errors import TargetError
from pydataplane.volumes import Volumes
from tests.guest.image import Image, build
from tests.support import warm
from tests.support.agent import Agent, GuestError
from tests.support.domain import domain_xml, publish
from tests.support.libvirtd import HOST_UUID, Libvirtd, virsh
from tests.support.relay import Relay
from tests.support.starved import ran, starved, times
from tests.support.target import SANDBOX_REFUSED, binary
from tests.support.wait import listens, serves, until

CONFIG = """\
[target]
rpc_socket = "{target}"
vhost_dir = "{vhost}"

[gateway]
listen = "{listen}"
listen_ro = "{listen_ro}"
upstream = "{upstream}"
upstream_ro = "{upstream_ro}"
libvirtd_conf = "{libvirtd_conf}"
auth_conf = "{auth_conf}"
state_dir = "{state_dir}"
memory_dir = "{memory_dir}"

[hook]
state_dir = "{hook_state}"
"""


def scratch_directory(prefix: str = "vl-") -> Path:
    """Returns a new directory with a short path that QEMU's user can enter."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir="/var/tmp"))
    path.chmod(0o755)
    return path


class Host:
    """A running host; a context manager that ends all of it and removes the directory.

    `keep` keeps the directory (its logs) where the body failed. Needs root.
    """

    def __init__(
        self,
        scratch: Path | None = None,
        *,
        keep: bool = False,
        host_uuid: str = HOST_UUID,
        hostname: str = "",
        network: str = "",
        kvm: bool = True,
        target_options: Sequence[str] = (),
        more_config: str = "",
    ) -> None:
        """Starts libvirtd, the target with an empty file-backed lvstore `lvs0`, and the gateway.

        Two hosts between which guests migrate need two `host_uuid`, and those of one cloud two of
        what libvirt calls them (`hostname`, by default this machine's). `network` is the network
        namespace of libvirtd and its QEMUs, by default that of this process, and `kvm` says whether
        libvirtd has any. `more_config` are further sections of the configuration.
        """
        self.scratch = scratch or scratch_directory()
        self.keep = keep
        self.paths = supervise.TargetPaths(
            rpc_socket=self.scratch / "target.sock",
            vhost_dir=self.scratch / "vhost",
            state_dir=self.scratch / "state",
            log=self.scratch / "target.log",
        )
        self.gateway_socket = self.scratch / "gateway"
        self.gateway_socket_ro = self.scratch / "gateway-ro"
        self.config = self.scratch / "virtlun.toml"
        self.image: Image = publish(build(), self.scratch)
        #: Further options of the target.
        self.target_options: list[str] = list(target_options)
        self._gateway: subprocess.Popen[bytes] | None = None
        self._holder: subprocess.Popen[bytes] | None = None
        self.libvirtd = Libvirtd(
            self.scratch / "l", host_uuid=host_uuid, hostname=hostname, network=network, kvm=kvm
        )
        try:
            self.config.write_text(
                CONFIG.format(
                    target=self.paths.rpc_socket,
                    vhost=self.paths.vhost_dir,
                    listen=self.gateway_socket,
                    listen_ro=self.gateway_socket_ro,
                    upstream=self.libvirtd.socket,
                    upstream_ro=self.libvirtd.socket_ro,
                    libvirtd_conf=self.libvirtd.scratch / "etc/libvirtd.conf",
                    auth_conf=self.libvirtd.scratch / "etc/auth.conf",
                    state_dir=self.scratch / "notes",
                    memory_dir=self.scratch / "memory",
                    hook_state=self.scratch / "hook",
                )
                + more_config
            )
            self._install_hook()
            self._start_holder()
            self.start_target()
            self.volumes.create_lvstore("lvs0", self.scratch / "lvs0.img", 1 << 30)
            self.start_gateway()
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> Client:
        """A client of the target."""
        return Client(self.paths.rpc_socket)

    @property
    def volumes(self) -> Volumes:
        """The target's volumes."""
        return Volumes(self.client)

    @property
    def uri(self) -> str:
        """The URI that people use: the gateway's."""
        return self.libvirtd.uri(self.gateway_socket)

    @property
    def uri_ro(self) -> str:
        """The gateway's read-only URI."""
        return self.libvirtd.uri(self.gateway_socket_ro)

    def virsh(self, *words: str, deadline_s: float = 90.0, check: bool = True) -> str:
        """Runs plain virsh against the gateway; see `tests.support.libvirtd.virsh`."""
        return virsh(self.uri, *words, deadline_s=deadline_s, check=check)

    def virsh_direct(self, *words: str, deadline_s: float = 90.0, check: bool = True) -> str:
        """Runs plain virsh against libvirtd itself, behind the gateway's back."""
        return virsh(self.libvirtd.uri(), *words, deadline_s=deadline_s, check=check)

    @property
    def export_dir(self) -> Path:
        """Where the gateway sees exported volumes."""
        return self.scratch / "export"

    @property
    def _holder_socket(self) -> Path:
        return self.scratch / "holder.sock"

    def _start_holder(self) -> None:
        """Starts what mounts exports, where the gateway sees mounts."""
        self._holder = subprocess.Popen(
            self.libvirtd.command(
                str(binary("virtlun-holder")),
                *("--socket", str(self._holder_socket), "--dir", str(self.export_dir)),
            ),
            stdin=subprocess.DEVNULL,
            stdout=(self.scratch / "holder.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        until(lambda: listens(self._holder_socket, socket.SOCK_SEQPACKET), "the holder")

    def start_target(self) -> int:
        """Starts the target (again); returns its process id."""
        exports = [
            "--export-dir",
            str(self.export_dir),
            "--holder-socket",
            str(self._holder_socket),
        ]
        words = ["--socket-group", "kvm", *exports, *self.target_options]
        return supervise.start(self.paths, words)

    def stop_target(self) -> None:
        """Stops the target in order."""
        supervise.stop(self.paths.rpc_socket)

    def kill_target(self) -> None:
        """Kills the target as a crash would."""
        supervise.kill(self.paths.rpc_socket)

    def start_gateway(self) -> None:
        """Starts the gateway and waits until virsh gets an answer through it.

        It sees the files that libvirtd sees, among them the domains' emulators.
        """
        log = self.scratch / "gateway.log"
        with log.open("ab") as out:
            self._gateway = warm.begin(
                warm.GATEWAY,
                ["--config", str(self.config)],
                stdout=out,
                stderr=subprocess.STDOUT,
                mounts_of=self.libvirtd.mounts_of,
            )
        serves(self._gateway, lambda: listens(self.gateway_socket), "the gateway", log)

    @contextlib.contextmanager
    def relayed(self) -> Iterator[Relay]:
        """The gateway and the hook reach the target through a relay, for the length of a block."""
        text, path = self.config.read_text(), self.scratch / "relay"
        self.stop_gateway()
        self.config.write_text(text.replace(str(self.paths.rpc_socket), str(path)))
        with Relay(path, self.paths.rpc_socket, self.kill_target) as relay:
            self.start_gateway()
            try:
                yield relay
            finally:
                self.stop_gateway()
                self.config.write_text(text)
                self.start_gateway()

    @contextlib.contextmanager
    def configured(self, old: str, new: str) -> Iterator[None]:
        """The gateway and the hook have `new` in the place of `old` in their file, for a block."""
        text = self.config.read_text()
        assert text.count(old) == 1, text
        self.stop_gateway()
        self.config.write_text(text.replace(old, new))
        self.start_gateway()
        try:
            yield
        finally:
            self.stop_gateway()
            self.config.write_text(text)
            self.start_gateway()

    @property
    def has_gateway(self) -> bool:
        """Whether the gateway runs."""
        return self._gateway is not None and self._gateway.poll() is None

    @staticmethod
    def program(name: str) -> str:
        """Returns the path of one of our installed programs."""
        return str(Path(sys.executable).parent / name)

    @property
    def gateway_pid(self) -> int:
        """The gateway's process id."""
        assert self._gateway is not None
        return self._gateway.pid

    def stop_gateway(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the gateway and waits for it."""
        assert self._gateway is not None
        self._gateway.send_signal(how)
        self._gateway.wait(timeout=90)

    def _install_hook(self) -> None:
        folder = self.libvirtd.hooks / "qemu.d"
        folder.mkdir()
        program = self.scratch / "virtlun-hook"
        archive.install(str(program))
        script = folder / "virtlun"
        script.write_text(f'#!/bin/sh\nexec {program} --config {self.config} "$@"\n')
        script.chmod(0o755)
        self.libvirtd.restart()  # libvirtd looks for hooks when it starts

    def define(
        self,
        name: str,
        *,
        uri: str = "",
        **options: Any,
    ) -> None:
        """Defines a domain that boots the test guest, as a person would: through the gateway."""
        path = self.scratch / f"{name}.xml"
        path.write_text(domain_xml(name, self.image, self.scratch, **options))
        virsh(uri or self.uri, "define", str(path))

    def start_without_guest(self, name: str, *volumes: str) -> None:
        """Starts a domain with nothing to boot, and with new thin volumes of 8 MiB: `a` is sda."""
        disks = ""
        for volume in volumes:
            self.volumes.create(f"lvs0/{volume}", 8 << 20, thin=True)
            disks += (
                f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{volume}'/>"
                f"<target dev='sd{volume}' bus='scsi'/></disk>"
            )
        path = self.scratch / f"{name}.xml"
        path.write_text(
            f"<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><os>"
            f"<type arch='x86_64' machine='q35'>hvm</type></os><devices>{disks}</devices></domain>"
        )
        self.virsh("define", str(path))
        self.virsh("start", name)

    def agent(self, name: str) -> Agent:
        """Returns the command channel into a running guest, once it has booted."""
        qemu = self.libvirtd.qemu_pid(name)
        agent = Agent(self.scratch / f"{name}-agent", qemu=qemu)
        begun, before = time.monotonic(), times(qemu) if qemu is not None else None
        try:
            agent.wait_ready()
        except GuestError as error:
            why = starved(qemu, time.monotonic() - begun, before) or f" ({ran(qemu, before)})"
            log = self.paths.log.read_text(errors="replace")
            state = self.virsh_direct("domstate", name, "--reason", check=False)
            raise GuestError(
                f"{error}{why}; libvirt says: {state}\n{self.stands(name)}"
                f"\nIts console:\n{self.console(name)[-2000:]}"
                f"\nThe target's log:\n{log[-2000:]}"
            ) from error
        return agent

    def stands(self, name: str) -> str:
        """Returns where a guest's processors are, and what the target has of its queues."""
        command = ("qemu-monitor-command", name, "--hmp", "info registers -a")
        registers = self.virsh_direct(*command, check=False).splitlines()
        places = [line for line in registers if re.search("CPU#|IP=", line)]
        try:
            queues = self.client.call_raw("vhost_get_controllers")
        except TargetError as error:
            queues = error
        return "\n".join(["Its processors:", *places, f"Controllers: {queues}"])

    def console(self, name: str) -> str:
        """Returns what a guest printed on its console so far."""
        text = (self.scratch / f"{name}-console.log").read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)

    def close(self) -> None:
        """Ends everything."""
        if self._gateway is not None and self._gateway.poll() is None:
            try:
                self.stop_gateway()
            except subprocess.TimeoutExpired:
                self._gateway.kill()
                self._gateway.wait()
        self.libvirtd.stop()
        with contextlib.suppress(TargetError):
            self.stop_target()
        if self._holder is not None:
            self._holder.terminate()
            self._holder.wait(timeout=90)

    def __enter__(self) -> Host:
        """Returns the running host."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Ends it; removes the directory unless the body failed and it is to be kept."""
        self.close()
        words = self.paths.log.read_text(errors="replace") if self.paths.log.exists() else ""
        assert error is not None or SANDBOX_REFUSED not in words, words
        if error is None or not self.keep:
            shutil.rmtree(self.scratch, ignore_errors=True)


def is_root() -> bool:
    """Whether this process may make a host."""
    return os.geteuid() == 0
