#!/usr/bin/python3 -IS
"""virtlun's hook for libvirt's /etc/libvirt/hooks/qemu.d/: the target follows the domains.

libvirtd runs it as `virtlun [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA` with the domain's
XML on standard input, and waits. It never calls libvirt (that would hang libvirtd) and never takes
longer than its deadline.

- prepare begin: controller and LUNs exist, with the right volumes, before QEMU starts. If not, exit
  status 1 and one sentence: libvirtd shows it and does not start the domain.
- reconnect begin (libvirtd was restarted): the same, but always exit status 0, for libvirtd kills a
  running domain whose hook fails here.
- release end: the controller goes.
- anything else, and domains without our metadata: exit status 0 at once.

Standard library only, and this one file only: it runs in the system's Python, wherever it was
copied. What it reads is what plugin.translate.metadata writes; a test holds the two together.
Modules are imported where they are needed: a start without them takes a few milliseconds.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, BinaryIO, NoReturn
    from xml.etree.ElementTree import Element

NAMESPACE = "https://virtlun.dev/xmlns/domain/1"
QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
CARRIER_ALIAS = "ua-virtlun-scsi0"
VERSION = "1"
MAX_TARGETS = 255
CONTROLLER_PREFIX = "vm-"

DEFAULT_CONFIG = "/etc/virtlun/virtlun.toml"
DEFAULT_RPC_SOCKET = "/run/virtlun/target.sock"
DEFAULT_DEADLINE_S = 10.0

MAX_XML_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
RETRY_S = 0.05
"""Pause between attempts at a target number that is still being removed."""

NO_SUCH_DEVICE = -19
BUSY = -16
EXISTS = -17
"""The target's errors that mean something here: negative errno, as SPDK's."""


class HookError(Exception):
    """One sentence for the person who started the domain."""


class RpcFailure(Exception):
    """The target refused a call; `code` is a negative errno."""

    def __init__(self, method: str, code: int, message: str) -> None:
        super().__init__(f"{method}: {message}")
        self.code = code


class DeadlineError(Exception):
    """Time is up."""


class Lun:
    """One disk of ours: the LUN 0 of target number `target`."""

    def __init__(self, node: Element) -> None:
        target = node.get("target", "")
        names = [node.get(name, "") for name in ("dev", "lvstore", "lvol")]
        if not (target.isascii() and target.isdigit()) or not all(names):
            raise HookError("a disk of the virtlun metadata lacks target, dev, lvstore or lvol")
        self.target = int(target)
        if self.target >= MAX_TARGETS:
            raise HookError(f"target {target} of the virtlun metadata is not below {MAX_TARGETS}")
        self.dev = names[0]
        self.alias = f"{names[1]}/{names[2]}"
        self.uuid = node.get("uuid")
        self.serial = node.get("serial")
        self.read_only = node.get("readonly") == "yes"
        self.shareable = node.get("shareable") == "yes"


class Plan:
    """What a domain needs of the target."""

    def __init__(
        self, domain: str, controller: str, socket: str, num_queues: int, luns: list[Lun]
    ) -> None:
        self.domain = domain
        self.controller = controller
        self.socket = socket
        self.num_queues = num_queues
        self.luns = luns


def read_plan(xml: bytes) -> Plan | None:
    """Reads a domain's plan from libvirtd's XML, None if there is nothing of ours in it.

    Raises:
        HookError: our metadata is damaged, or the controller is missing.
    """
    if NAMESPACE.encode() not in xml:
        return None
    from xml.etree import ElementTree as ET  # noqa: PLC0415 - libvirtd's own XML

    try:
        root = ET.fromstring(xml)  # noqa: S314
    except ET.ParseError as error:
        raise HookError(f"libvirtd's XML of the domain cannot be read: {error}") from error
    name = (root.findtext("name") or "").strip()
    element = root.find(f"metadata/{{{NAMESPACE}}}disks")
    if element is None:
        return None
    controller = element.get("controller", "")
    if element.get("version") != VERSION or not _is_controller(controller):
        raise HookError("version or controller of the virtlun metadata is wrong")
    luns = [Lun(node) for node in element.findall(f"{{{NAMESPACE}}}disk")]
    luns.sort(key=lambda lun: lun.target)
    if len({lun.target for lun in luns}) != len(luns) or len({lun.dev for lun in luns}) != len(
        luns
    ):
        raise HookError("two disks of the virtlun metadata have the same number or target dev")
    carrier = next((d for d in root.findall("devices/disk") if _is_carrier(d)), None)
    if carrier is None:
        if not luns:
            return None
        raise HookError(
            "the domain has virtlun disks in its metadata but no controller for them; define it"
            " again through the gateway"
        )
    source = carrier.find("source")
    socket = source.get("path", "") if source is not None else ""
    return Plan(name, controller, socket, _queues(root), luns)


def _is_controller(text: str) -> bool:
    parts = text.split("-")
    return (
        parts[0] == "vm"
        and [len(part) for part in parts[1:]] == [8, 4, 4, 4, 12]
        and all(char in "0123456789abcdef" for part in parts[1:] for char in part)
    )


def _is_carrier(disk: Element) -> bool:
    alias = disk.find("alias")
    return (
        disk.get("type") == "vhostuser" and alias is not None and alias.get("name") == CARRIER_ALIAS
    )


def _queues(root: Element) -> int:
    prefix = f"{{{QEMU_NAMESPACE}}}"
    for device in root.findall(f"{prefix}override/{prefix}device"):
        if device.get("alias") == CARRIER_ALIAS:
            for item in device.iter(f"{prefix}property"):
                value = item.get("value", "")
                if item.get("name") == "num_queues" and value.isascii() and value.isdigit():
                    return int(value)
    return 1


class Target:
    """The target's JSON-RPC, over one connection."""

    def __init__(self, path: str, end: float) -> None:
        """Connects to the UNIX socket `path`; `end` is the deadline on the monotonic clock.

        Raises:
            HookError: nobody listens there.
        """
        import socket  # noqa: PLC0415

        self._end = end
        self._path = path
        self._id = 0
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._wait()
            self._socket.connect(path)
        except OSError as error:
            raise HookError(
                f"the virtlun target does not answer on {path} ({error.strerror or error}); start"
                " it with `virtlun target start`"
            ) from error

    def _wait(self) -> None:
        import time  # noqa: PLC0415

        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise DeadlineError
        self._socket.settimeout(remaining)

    def call(self, method: str, **params: object) -> Any:
        """Calls a method; parameters that are None are left out.

        Raises:
            RpcFailure: the target refused.
            HookError: it went away or answers nonsense.
        """
        import json  # noqa: PLC0415

        self._id += 1
        request: dict[str, object] = {"jsonrpc": "2.0", "id": self._id, "method": method}
        given = {key: value for key, value in params.items() if value is not None}
        if given:
            request["params"] = given
        try:
            self._wait()
            self._socket.sendall(json.dumps(request).encode())
            answer = self._receive()
        except TimeoutError as error:
            raise DeadlineError from error
        except OSError as error:
            raise HookError(f"{method}: the virtlun target on {self._path} went away") from error
        failure = answer.get("error")
        if isinstance(failure, dict):
            code, message = failure.get("code"), failure.get("message")
            raise RpcFailure(method, code if isinstance(code, int) else 0, str(message))
        if answer.get("id") != self._id or "result" not in answer:
            raise HookError(f"{method}: the virtlun target's answer is not one to this call")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        import json  # noqa: PLC0415

        data = b""
        while len(data) <= MAX_ANSWER_BYTES:
            self._wait()
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                break
            data += chunk
            if not data.rstrip().endswith(b"}"):
                continue
            try:
                answer = json.loads(data)
            except ValueError:  # more to come; UnicodeDecodeError is one, too
                continue
            if isinstance(answer, dict):
                return answer
            break
        raise HookError("the virtlun target closed the connection or answered nonsense")

    def retry(self, while_code: int, method: str, **params: object) -> Any:
        """Calls a method again and again while it fails with `while_code`, up to the deadline.

        A real SPDK takes targets away in the background: for a moment they are still there.
        """
        import time  # noqa: PLC0415

        while True:
            try:
                return self.call(method, **params)
            except RpcFailure as failure:
                if failure.code != while_code or self._end - time.monotonic() < RETRY_S * 2:
                    raise
            time.sleep(RETRY_S)


def luns_of(controller: dict[str, Any]) -> dict[int, str]:
    """Returns bdev name by target number of a controller as vhost_get_controllers shows it."""
    result = {}
    for target in controller.get("backend_specific", {}).get("scsi", []):
        names = [lun.get("bdev_name") for lun in target.get("luns", [])]
        result[int(target["scsi_dev_num"])] = str(names[0]) if names else ""
    return result


def find_bdev(target: Target, lun: Lun, create_mib: int) -> str:
    """Returns the name of a disk's bdev: its UUID decides, so that a renamed volume is found.

    Raises:
        HookError: there is no such volume, and none is to be made (`create_mib` 0).
    """
    for name in (lun.uuid, lun.alias):
        if name is None:
            continue
        try:
            return str(target.call("bdev_get_bdevs", name=name)[0]["name"])
        except RpcFailure as failure:
            if failure.code != NO_SUCH_DEVICE:
                raise
    if create_mib <= 0:
        raise HookError(
            f"disk {lun.dev}: there is no volume {lun.alias}; create it with"
            f" `virtlun volume create {lun.alias} SIZE`, load its lvstore, or detach the disk"
        )
    store, _, name = lun.alias.partition("/")
    return str(
        target.call(
            "bdev_lvol_create",
            lvs_name=store,
            lvol_name=name,
            size_in_mib=create_mib,
            thin_provision=True,
        )
    )


def find_controller(target: Target, name: str) -> dict[str, Any] | None:
    """Returns a controller as the target shows it, or None."""
    for controller in target.call("vhost_get_controllers"):
        if controller.get("ctrlr") == name:
            return dict(controller)
    return None


def ensure(target: Target, plan: Plan, create_mib: int = 0) -> None:
    """Makes the controller exist with exactly the plan's LUNs; safe to repeat.

    Raises:
        HookError, RpcFailure: it cannot be done; the sentence says why.
    """
    import os  # noqa: PLC0415

    wanted = {lun.target: find_bdev(target, lun, create_mib) for lun in plan.luns}
    controller = find_controller(target, plan.controller)
    if controller is None:
        target.call("vhost_create_scsi_controller", ctrlr=plan.controller)
    present = luns_of(controller or {})
    for number, bdev in present.items():
        if wanted.get(number) != bdev:
            target.call(
                "vhost_scsi_controller_remove_target",
                ctrlr=plan.controller,
                scsi_target_num=number,
            )
    for lun in plan.luns:
        bdev = wanted[lun.target]
        if present.get(lun.target) == bdev:
            continue
        try:
            target.retry(
                EXISTS,
                "vhost_scsi_controller_add_target",
                ctrlr=plan.controller,
                scsi_target_num=lun.target,
                bdev_name=bdev,
                serial=lun.serial,
                read_only=True if lun.read_only else None,
                shareable=True if lun.shareable else None,
            )
        except RpcFailure as failure:
            raise HookError(f"disk {lun.dev} (volume {lun.alias}): {failure}") from failure
    if not os.path.exists(plan.socket):  # noqa: PTH110 - pathlib is slow to import
        raise HookError(
            f"the virtlun target made no socket {plan.socket}; vhost_dir in virtlun.toml and the"
            " target's own folder differ: make them the same and define the domain again"
        )


def release(target: Target, plan: Plan) -> None:
    """Removes the controller with its LUNs; safe to repeat."""
    controller = find_controller(target, plan.controller)
    if controller is None:
        return
    for number in luns_of(controller):
        target.call(
            "vhost_scsi_controller_remove_target", ctrlr=plan.controller, scsi_target_num=number
        )
    target.retry(BUSY, "vhost_delete_controller", ctrlr=plan.controller)


class Config:
    """What the hook needs of virtlun.toml."""

    def __init__(self, path: str | None) -> None:
        """Reads `path`; without one the default file, which may be missing.

        Raises:
            HookError: the file cannot be read or says something wrong.
        """
        import tomllib  # noqa: PLC0415

        file = path or DEFAULT_CONFIG
        try:
            with open(file, "rb") as stream:  # noqa: PTH123 - pathlib is slow to import
                values = tomllib.load(stream)
        except FileNotFoundError:
            if path is not None:
                raise HookError(f"{path}: there is no such file") from None
            values = {}
        except (OSError, ValueError) as error:
            raise HookError(f"{file}: {error}") from error
        hook, target = values.get("hook", {}), values.get("target", {})
        try:
            self.rpc_socket = str(target.get("rpc_socket", DEFAULT_RPC_SOCKET))
            self.deadline_s = float(hook.get("deadline_s", DEFAULT_DEADLINE_S))
            self.create_missing_mib = int(hook.get("create_missing_mib", 0))
        except (AttributeError, TypeError, ValueError) as error:
            raise HookError(f"{file}: sections [target] and [hook]: {error}") from error
        if not 0 < self.deadline_s <= 3600:
            raise HookError(f"{file}: hook.deadline_s is not between 0 and 3600 seconds")


def run(operation: str, xml: bytes, config_path: str | None) -> None:
    """Does one operation on one domain.

    Raises:
        HookError, RpcFailure, DeadlineError: it failed.
    """
    plan = read_plan(xml)
    if plan is None:
        return
    import signal  # noqa: PLC0415
    import time  # noqa: PLC0415

    config = Config(config_path)
    # Calls end by themselves at the deadline; the alarm is for what might hang elsewhere.
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, config.deadline_s + 0.5)
    try:
        end = time.monotonic() + config.deadline_s
        if operation == "release":
            release(Target(config.rpc_socket, end), plan)
        else:
            ensure(Target(config.rpc_socket, end), plan, config.create_missing_mib)
    except DeadlineError:
        raise HookError(
            f"the virtlun target did not answer within {config.deadline_s:g} s; see its log"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _alarm(*_: object) -> NoReturn:
    raise DeadlineError


OPERATIONS = {("prepare", "begin"), ("reconnect", "begin"), ("release", "end")}


def main(arguments: Sequence[str] | None = None, stdin: BinaryIO | None = None) -> int:
    """Runs the hook; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config_path = None
    if given[:1] == ["--config"] and len(given) > 1:
        config_path = given[1]
        given = given[2:]
    if len(given) < 3:
        sys.stderr.write(
            "usage: virtlun-hook [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA\n"
        )
        return 2
    domain, operation, suboperation = given[:3]
    xml = (stdin or sys.stdin.buffer).read(MAX_XML_BYTES)
    if (operation, suboperation) not in OPERATIONS:
        return 0
    try:
        run(operation, xml, config_path)
    except (HookError, RpcFailure) as error:
        sys.stderr.write(f"virtlun: domain {domain}: {error}\n")
        return 0 if operation == "reconnect" else 1
    except Exception as error:
        sys.stderr.write(f"virtlun: domain {domain}: internal error: {error!r}\n")
        return 0 if operation == "reconnect" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
