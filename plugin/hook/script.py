#!/usr/bin/python3 -IS
"""virtlun's hook for libvirt's /etc/libvirt/hooks/qemu.d/: the target follows the domains.

libvirtd runs it as `virtlun [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA` with the domain's
XML on standard input, and waits. It never calls libvirt (that would hang libvirtd) and never takes
longer than its deadline.

- prepare begin: controller and LUNs exist, with the right volumes, before QEMU starts. If not, exit
  status 1 and one sentence: libvirtd shows it and does not start the domain. The controller is kept
  for a process of QEMU's user that starts after this: whoever else is connected is no VM of its.
- migrate begin, restore begin (the guest has run before, on another host or from its saved state):
  all its volumes are there, or exit status 1. Nothing is made and nothing is printed.
- reconnect begin (libvirtd was restarted): as prepare, but no volume is made, and always exit
  status 0, for libvirtd kills a running domain whose hook fails here.
- release end: the controller goes.
- anything else, and domains without our metadata: exit status 0 at once.

A volume that is not there (`judge`): one that never was is made, thin; one that is lost is never
replaced. What tells them apart is the UUID, recorded at define, attach and start in the domain's
metadata by the gateway, and in a file of its own by the hook (it cannot change the domain's XML).

Standard library only, and this one file only: it runs in the system's Python, wherever it was
copied. What it reads is what plugin.translate.metadata writes; a test holds the two together.
Modules are imported where they are needed: a start without them takes a few milliseconds.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any, BinaryIO, NoReturn
    from xml.etree.ElementTree import Element

NAMESPACE = "https://virtlun.dev/xmlns/domain/1"
QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
CARRIER_ALIAS = "ua-virtlun-scsi0"
VERSION = "1"
MAX_TARGETS = 255
CONTROLLER_PREFIX = "vm-"
BLOCK_BYTES = 512
"""Logical block of a volume of which nothing else is known."""

DEFAULT_CONFIG = "/etc/virtlun/virtlun.toml"
DEFAULT_RPC_SOCKET = "/run/virtlun/target.sock"
DEFAULT_VHOST_DIR = "/run/virtlun/vhost"
DEFAULT_DEADLINE_S = 10.0
DEFAULT_CREATE_MISSING_MIB = 10240
DEFAULT_STATE_DIR = "/var/lib/virtlun/hook"

MAX_XML_BYTES = 16 << 20
MAX_ANSWER_BYTES = 64 << 20
RETRY_S = 0.05
"""Pause between attempts at a target number that is still being removed."""

NO_SUCH_DEVICE = -19
BUSY = -16
EXISTS = -17
"""The target's errors that mean something here: negative errno, as SPDK's."""
NO_SUCH_METHOD = -32601
"""JSON-RPC's error of a method that the target, as SPDK's, does not have."""


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
        blocks = node.get("blocksize")
        if blocks not in (None, "512", "4096"):
            raise HookError(f"blocksize {blocks} of the virtlun metadata is not one of a disk's")
        self.block_size = int(blocks) if blocks is not None else None
        self.own_block_size = BLOCK_BYTES
        """The volume's, as soon as that is found."""


class Plan:
    """What a domain needs of the target."""

    def __init__(
        self,
        domain: str,
        controller: str,
        socket: str,
        num_queues: int,
        luns: list[Lun],
        uid: int | None = None,
    ) -> None:
        self.domain = domain
        self.controller = controller
        self.socket = socket
        self.num_queues = num_queues
        self.luns = luns
        self.uid = uid
        """Number of the user that QEMU will run as; None: libvirtd does not say."""


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
    return Plan(name, controller, socket, _queues(root), luns, _uid(root))


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


def _uid(root: Element) -> int | None:
    for label in root.findall("seclabel"):
        if label.get("model") == "dac":
            user = (label.findtext("label") or "").split(":")[0].removeprefix("+")
            if user.isascii() and user.isdigit():
                return int(user)
    return None


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
                f" it with `{start_command(path)}`"
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


def start_command(path: str) -> str:
    """Returns the command that starts the target which is to listen on `path`."""
    parts = path.split("/")
    named = parts[:-2] == DEFAULT_RPC_SOCKET.split("/")[:-1]
    return f"virtlun --target {parts[-2]} target start" if named else "virtlun target start"


def luns_of(controller: dict[str, Any]) -> dict[int, str]:
    """Returns bdev name by target number of a controller as vhost_get_controllers shows it."""
    result = {}
    for target in controller.get("backend_specific", {}).get("scsi", []):
        names = [lun.get("bdev_name") for lun in target.get("luns", [])]
        result[int(target["scsi_dev_num"])] = str(names[0]) if names else ""
    return result


def is_right(lun: Lun, wanted: Mapping[int, str], controller: dict[str, Any]) -> bool:
    """Whether a controller shows a disk as it is wanted, as far as the target tells.

    Without a serial of the client's the target takes the volume's UUID, which is the bdev's name.
    """
    for target in controller.get("backend_specific", {}).get("scsi", []):
        if target["scsi_dev_num"] == lun.target and target.get("luns"):
            shown = target["luns"][0]
            bdev = wanted[lun.target]
            return (
                shown.get("bdev_name") == bdev
                and shown.get("serial") in (None, lun.serial or bdev)
                and not (shown.get("read_only") is False and lun.read_only)
                and shown.get("block_size") in (None, max(lun.block_size or 0, lun.own_block_size))
            )
    return False


def judge(
    dev: str,
    alias: str,
    uuid: str | None,
    there: Callable[[str], str | None],
    stores: Callable[[], Collection[str]],
) -> str | None:
    """Returns the bdev of a disk's volume; None if that never existed, and may be made.

    The gateway uses it, too. The UUID decides: a renamed volume is found, and another one under the
    old name is not taken for it.

    Args:
        dev: the disk's target dev, for messages.
        alias: LVSTORE/LVOL.
        uuid: of the volume that the disk is known to have had, None if it never had one.
        there: from a bdev's name or alias to its name, None if there is none.
        stores: gives the names of the lvstores that are loaded.

    Raises:
        HookError: the volume is lost, or another has its name, or its lvstore is not loaded.
    """
    bdev = there(uuid or alias)
    if bdev is not None:
        return bdev
    store = alias.partition("/")[0]
    volume = f"volume {alias} (UUID {uuid})" if uuid is not None else f"volume {alias}"
    if store not in stores():
        raise HookError(
            f"disk {dev}: lvstore {store} with {volume} is not loaded; bring back the file or"
            " device that it is on (`virtlun lvstore list` shows what is loaded), then start the"
            " domain again"
        )
    if uuid is None:
        return None
    other = there(alias)
    if other is not None:
        raise HookError(
            f"disk {dev}: {volume} is lost, and another one has its name (UUID {other}); to use"
            " that one, detach the disk and attach it again, or else rename it and restore the lost"
            " one under its UUID"
        )
    raise HookError(
        f"disk {dev}: {volume} is lost: lvstore {store} has no volume of this UUID; make it again"
        f" with `virtlun volume create {alias} SIZE --uuid {uuid}` and restore its data, or detach"
        " the disk"
    )


def absent(dev: str, alias: str) -> str:
    """Returns the sentence about a volume that never existed and is not to be made."""
    return (
        f"disk {dev}: there is no volume {alias}; create it with"
        f" `virtlun volume create {alias} SIZE`, or detach the disk"
    )


def find_volumes(
    target: Target, plan: Plan, known: Mapping[str, str], create_mib: int
) -> dict[int, str]:
    """Returns the name of each disk's bdev by target number; makes those that never existed.

    All are looked at before the first is made. `known` has the UUIDs (by LVSTORE/LVOL) of which the
    metadata does not know; with `create_mib` 0 none is made.

    Raises:
        HookError: a volume is lost or missing, or its lvstore is not loaded.
    """
    block_sizes: dict[str, int] = {}

    def there(name: str) -> str | None:
        try:
            bdev = target.call("bdev_get_bdevs", name=name)[0]
        except RpcFailure as failure:
            if failure.code != NO_SUCH_DEVICE:
                raise
            return None
        found = str(bdev["name"])
        block_sizes[found] = bdev.get("block_size", BLOCK_BYTES)
        return found

    def stores() -> set[str]:
        return {str(store["name"]) for store in target.call("bdev_lvol_get_lvstores")}

    def bdev_of(lun: Lun) -> str | None:
        uuid = lun.uuid or known.get(lun.alias)
        found = there(uuid or lun.alias)
        if found is None:
            target.call("bdev_wait_for_examine")  # it may have been started just now
            found = judge(lun.dev, lun.alias, uuid, there, stores)
        return found

    found = {lun.target: bdev_of(lun) for lun in plan.luns}
    missing = [lun for lun in plan.luns if found[lun.target] is None]
    if missing and create_mib <= 0:
        raise HookError(absent(missing[0].dev, missing[0].alias))
    for lun in missing:
        store, _, name = lun.alias.partition("/")
        try:
            target.call(
                "bdev_lvol_create",
                lvs_name=store,
                lvol_name=name,
                size_in_mib=create_mib,
                thin_provision=True,
            )
        except RpcFailure as failure:
            if failure.code != EXISTS:  # another start was faster
                raise HookError(
                    f"disk {lun.dev}: volume {lun.alias} of {create_mib} MiB cannot be made:"
                    f" {failure}"
                ) from failure
        found[lun.target] = str(there(lun.alias))
    for lun in plan.luns:
        lun.own_block_size = block_sizes.get(found[lun.target] or "", BLOCK_BYTES)
    return {number: bdev for number, bdev in found.items() if bdev is not None}


def recall(folder: str, controller: str) -> dict[str, str]:
    """Returns the volumes' UUIDs (by LVSTORE/LVOL) that `remember` recorded for a controller.

    Raises:
        HookError: there is a record, but it cannot be read: to go on might hide a loss.
    """
    import json  # noqa: PLC0415

    path = f"{folder}/{controller}.json"
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - pathlib is slow to import
            volumes = json.load(stream)["volumes"]
        return {str(alias): str(uuid) for alias, uuid in volumes.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HookError(
            f"{path}, which records the volumes that the domain had, cannot be read ({error!r});"
            " remove it if all of them are there"
        ) from error


def remember(folder: str, controller: str, uuids: Mapping[str, str]) -> None:
    """Records the volumes' UUIDs (by LVSTORE/LVOL) of a controller, durably; none: no record.

    Raises:
        HookError: that cannot be written.
    """
    import json  # noqa: PLC0415
    import os  # noqa: PLC0415

    path = f"{folder}/{controller}.json"
    try:
        if not uuids:
            if os.path.exists(path):  # noqa: PTH110
                os.unlink(path)  # noqa: PTH108
            return
        os.makedirs(folder, mode=0o755, exist_ok=True)  # noqa: PTH103
        with open(f"{path}.new", "w") as stream:  # noqa: PTH123
            json.dump({"version": 1, "volumes": dict(uuids)}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(f"{path}.new", path)  # noqa: PTH104
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise HookError(
            f"{path}: the domain's volumes cannot be recorded ({error.strerror or error});"
            " make hook.state_dir of virtlun.toml a folder that can be written"
        ) from error


def find_controller(target: Target, name: str) -> dict[str, Any] | None:
    """Returns a controller as the target shows it, or None."""
    for controller in target.call("vhost_get_controllers"):
        if controller.get("ctrlr") == name:
            return dict(controller)
    return None


def ensure(target: Target, plan: Plan, wanted: Mapping[int, str], *, starts: bool = False) -> None:
    """Makes the controller exist with exactly the plan's LUNs; safe to repeat.

    `wanted` has the bdev of each, by target number. `starts`: QEMU is about to be started, so that
    whoever is connected is a stranger.

    Raises:
        HookError, RpcFailure: it cannot be done; the sentence says why.
    """
    import os  # noqa: PLC0415

    controller = find_controller(target, plan.controller)
    if controller is None:
        target.call("vhost_create_scsi_controller", ctrlr=plan.controller)
    if starts:
        keep_for_qemu(target, plan)
    present = luns_of(controller or {})
    right = {lun.target for lun in plan.luns if is_right(lun, wanted, controller or {})}
    for number in present:
        if number not in right:
            target.call(
                "vhost_scsi_controller_remove_target",
                ctrlr=plan.controller,
                scsi_target_num=number,
            )
    for lun in plan.luns:
        if lun.target in right:
            continue
        try:
            target.retry(
                EXISTS,
                "vhost_scsi_controller_add_target",
                ctrlr=plan.controller,
                scsi_target_num=lun.target,
                bdev_name=wanted[lun.target],
                serial=lun.serial,
                read_only=True if lun.read_only else None,
                shareable=True if lun.shareable else None,
                block_size=lun.block_size if lun.block_size != lun.own_block_size else None,
            )
        except RpcFailure as failure:
            raise HookError(f"disk {lun.dev} (volume {lun.alias}): {failure}") from failure
    if not os.path.exists(plan.socket):  # noqa: PTH110 - pathlib is slow to import
        raise HookError(
            f"the virtlun target made no socket {plan.socket}; vhost_dir in virtlun.toml and the"
            " target's own folder differ: make them the same and define the domain again"
        )


def keep_for_qemu(target: Target, plan: Plan) -> None:
    """Keeps the controller for a process of QEMU's user that starts from now on.

    Raises:
        RpcFailure: the target refused; not where it does not have the method.
    """
    try:
        target.call("virtlun_controller_set_owner", ctrlr=plan.controller, uid=plan.uid, fresh=True)
    except RpcFailure as failure:
        if failure.code != NO_SUCH_METHOD:
            raise


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
            self.vhost_dir = str(target.get("vhost_dir", DEFAULT_VHOST_DIR))
            self.others = {
                str(other["vhost_dir"]): str(other["rpc_socket"])
                for other in values.get("targets", {}).values()
            }
            self.deadline_s = float(hook.get("deadline_s", DEFAULT_DEADLINE_S))
            self.create_missing_mib = int(
                hook.get("create_missing_mib", DEFAULT_CREATE_MISSING_MIB)
            )
            self.state_dir = str(hook.get("state_dir", DEFAULT_STATE_DIR))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise HookError(
                f"{file}: sections [target], [targets] and [hook]: {error!r}"
            ) from error
        if not 0 < self.deadline_s <= 3600:
            raise HookError(f"{file}: hook.deadline_s is not between 0 and 3600 seconds")
        if self.create_missing_mib < 0:
            raise HookError(f"{file}: hook.create_missing_mib is below 0")


def rpc_socket_of(config: Config, plan: Plan) -> str:
    """Returns the JSON-RPC socket of the target that makes a plan's socket.

    That of several targets of a host is told by the folder: configured, or `NAME/vhost` beside the
    first target's own JSON-RPC socket. The first is asked where none is known.
    """
    folder = plan.socket.rpartition("/")[0]
    if folder.rstrip("/") == config.vhost_dir.rstrip("/"):
        return config.rpc_socket
    if folder in config.others:
        return config.others[folder]
    own, _, name = config.rpc_socket.rpartition("/")
    parent, _, last = folder.rpartition("/")
    if last == "vhost" and parent.rpartition("/")[0] == own:
        return f"{parent}/{name}"
    return config.rpc_socket


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
        socket = rpc_socket_of(config, plan)
        if operation == "release":
            release(Target(socket, end), plan)
        elif plan.luns or operation not in INCOMING:
            _bring_up(Target(socket, end), plan, operation, config)
    except DeadlineError:
        raise HookError(
            f"the virtlun target did not answer within {config.deadline_s:g} s; see its log"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _bring_up(target: Target, plan: Plan, operation: str, config: Config) -> None:
    """Does what comes before a start, and after libvirtd's own restart."""
    create_mib = config.create_missing_mib if operation == "prepare" else 0
    known = recall(config.state_dir, plan.controller)
    bdevs = find_volumes(target, plan, known, create_mib)
    new = {lun.alias: bdevs[lun.target] for lun in plan.luns if lun.uuid is None}
    if new != known:
        remember(config.state_dir, plan.controller, new)
    if operation not in INCOMING:
        ensure(target, plan, bdevs, starts=operation == "prepare")


def _alarm(*_: object) -> NoReturn:
    raise DeadlineError


INCOMING = ("migrate", "restore")
"""Before these, `prepare` follows; what it would make as if new must be there already."""

USAGE = """\
usage: virtlun-hook [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA
libvirtd runs this, with the domain's XML on standard input: install it as
/etc/libvirt/hooks/qemu.d/virtlun
"""

OPERATIONS = {
    ("prepare", "begin"),
    ("migrate", "begin"),
    ("restore", "begin"),
    ("reconnect", "begin"),
    ("release", "end"),
}


def main(arguments: Sequence[str] | None = None, stdin: BinaryIO | None = None) -> int:
    """Runs the hook; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config_path = None
    if given[:1] == ["--config"] and len(given) > 1:
        config_path = given[1]
        given = given[2:]
    if given in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if len(given) < 3:
        sys.stderr.write(USAGE)
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
