"""Writes pydataplane/methods.pyi, the types of the target's JSON-RPC: `python -m tests.methods`.

It is made from schemas/rpc alone; tests/unit/test_methods.py compares. A JSON Schema has no names
for the objects in it, so NAMES has them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "schemas/rpc"
MADE = ROOT / "pydataplane/methods.pyi"
WIDTH = 100

NAMES = {
    "accel_crypto_keys_get[]": "CryptoKey",
    "virtlun_integrity_get[]": "CheckedBdev",
    "bdev_get_bdevs[]": "Bdev",
    "bdev_get_bdevs[].assigned_rate_limits": "RateLimits",
    "bdev_get_bdevs[].enabled_dif_check_types": "DifCheckTypes",
    "bdev_get_iostat|0": "Iostat",
    "bdev_get_iostat|0.bdevs[]": "BdevIostat",
    "bdev_get_iostat|1": "ChannelsIostat",
    "bdev_get_iostat|1.channels[]": "ChannelIostat",
    "bdev_rbd_get_clusters_info|0": "RbdCluster",
    "bdev_rbd_get_clusters_info|1[]": "RbdCluster",
    "bdev_lvol_check_shallow_copy": "ShallowCopyState",
    "bdev_lvol_get_lvols[]": "Lvol",
    "bdev_lvol_get_lvols[].lvs": "LvolStore",
    "bdev_lvol_get_lvstores[]": "Lvstore",
    "bdev_lvol_get_lvstores[].zeroing[]": "Zeroing",
    "bdev_lvol_start_shallow_copy": "ShallowCopyBegun",
    "virtlun_lvol_move_check": "Moving",
    "framework_get_config[]": "ConfigCall",
    "bdev_nvme_attach_controller(namespaces)[]": "ExpectedNamespace",
    "bdev_nvme_attach_controller(paths)[]": "NvmePathOf",
    "bdev_nvme_get_controllers[]": "NvmeController",
    "bdev_nvme_get_controllers[].ctrlrs[]": "NvmePath",
    "bdev_nvme_get_controllers[].ctrlrs[].host": "NvmeHost",
    "bdev_nvme_get_controllers[].ctrlrs[].trid": "NvmeTrid",
    "bdev_nvme_get_io_paths": "NvmeIoPaths",
    "bdev_nvme_get_io_paths.poll_groups[]": "NvmePollGroup",
    "bdev_nvme_get_io_paths.poll_groups[].io_paths[]": "NvmeIoPath",
    "bdev_nvme_get_io_paths.poll_groups[].io_paths[].transport": "NvmeTransport",
    "framework_get_reactors": "Reactors",
    "framework_get_reactors.reactors[]": "Reactor",
    "framework_get_reactors.reactors[].lw_threads[]": "LwThread",
    "framework_get_subsystems[]": "Subsystem",
    "notify_get_notifications[]": "Notification",
    "scsi_get_devices[]": "ScsiDevice",
    "spdk_get_version": "Version",
    "spdk_get_version.fields": "VersionFields",
    "thread_get_stats": "ThreadStats",
    "thread_get_stats.threads[]": "Thread",
    "ublk_get_disks[]": "UblkDisk",
    "vhost_get_controllers[]": "Controller",
    "vhost_get_controllers[].backend_specific": "BackendSpecific",
    "vhost_get_controllers[].backend_specific.block": "BlockDisk",
    "vhost_get_controllers[].backend_specific.scsi[]": "ScsiTarget",
    "vhost_get_controllers[].backend_specific.scsi[].luns[]": "Lun",
    "vhost_get_controllers[].owner": "Owner",
    "vhost_get_controllers[].sessions[]": "Session",
    "vhost_get_controllers[].sessions[].queues[]": "RunningQueue",
    "vhost_get_controllers[].sessions[].stopped_queues[]": "StoppedQueue",
    "bdev_get_histogram": "Histogram",
    "bdev_get_histogram_borders": "HistogramBorders",
    "virtlun_bdev_get_latencies[]": "BdevLatencies",
    "virtlun_bdev_get_latencies[].operations[]": "OperationLatencies",
    "virtlun_bdev_get_limits": "IoLimits",
    "virtlun_controller_set_owner(process)": "OwnerProcess",
    "virtlun_export_create": "NewExport",
    "virtlun_export_get_devices": "ExportDevices",
    "virtlun_export_list[]": "Export",
    "virtlun_get_status": "Status",
    "virtlun_get_status.images": "StatusImages",
    "virtlun_get_status.iscsi": "StatusIscsi",
    "virtlun_get_status.reactors[]": "StatusReactor",
    "virtlun_get_status.upgrade": "StatusUpgrade",
    "virtlun_get_status.user": "StatusUser",
    "virtlun_get_status.waiting[]": "StatusWaiting",
    "virtlun_lvol_get_allocated_ranges": "AllocatedRanges",
    "virtlun_lvol_get_allocated_ranges.ranges[]": "AllocatedRange",
    "virtlun_lvol_get_changed_ranges": "ChangedRanges",
    "virtlun_lvol_get_changed_ranges.ranges[]": "ChangedRange",
    "virtlun_lvol_get_sizes{}": "LvolSizes",
    "virtlun_lvol_get_space{}": "LvolSpace",
    "virtlun_lvstore_check": "CheckedLvstore",
    "virtlun_lvstore_check.problems[]": "LvstoreProblem",
    "virtlun_lvstore_scrub": "Scrubbed",
    "virtlun_lvstore_scrub.unreadable[]": "Unreadable",
    "virtlun_lvstore_scrub.unreadable[].lvols[]": "UnreadableOf",
    "virtlun_nvme_pool_create(paths)[]": "NvmePathOf",
    "virtlun_lvstore_dump": "DumpedLvstore",
    "virtlun_lvstore_dump.entries[]": "DumpEntry",
    "virtlun_lvol_snapshot_together(snapshots)[]": "SnapshotOf",
    "virtlun_lvol_roll_back_together(rollbacks)[]": "RollBackOf",
    "virtlun_lun_copy_check[]": "LunCopy",
    "virtlun_vhost_get_stats[]": "ControllerStats",
    "virtlun_vhost_get_stats[].targets[]": "TargetStats",
    "virtlun_vhost_get_suspended[]": "SuspendedTarget",
}
"""Names of objects by place: the method, then `.field`, `[]` of a list, `{}` of a map, `|0` of the
first of several forms, `(name)` of a parameter."""

FORMS = {"bdev_get_iostat": "per_channel"}
"""Methods whose result has a second form, and the parameter that asks for it by being true."""

EACH = (
    "bdev_get_bdevs",
    "bdev_lvol_get_lvstores",
    "virtlun_lvol_get_xattrs",
    "virtlun_vhost_get_stats",
)
"""Methods that are called for each of many names in one exchange."""

SCALARS = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}

HEADER = '''\
"""The types of methods.py. Made by `python -m tests.methods` from schemas/rpc; do not edit.

A real SPDK target, or one of another release, may leave out what is required here: where one is
expected, fields are read with `get`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, overload
'''

RPC = """

class Rpc(ABC):
    @abstractmethod
    def call_raw(self, method: str, **params: Any) -> Any: ...
"""

BATCHES = """

class BatchRpc(Rpc):
    @abstractmethod
    def call_for_each_raw(
        self, method: str, names: Sequence[str], params: Callable[[str], Mapping[str, Any]]
    ) -> dict[str, Any]: ...
"""

_Schema = Mapping[str, Any]


class Types:
    """Types of the values of schemas; classes of the objects among them, in order of definition."""

    def __init__(self) -> None:
        """Begins without classes."""
        self.classes: list[str] = []
        self.named: set[str] = set()

    def of(self, schema: _Schema | bool, place: str) -> str:
        """Returns the type of a value; an object's class is added to `classes`.

        Raises:
            ValueError: the schema is of a kind that is not known here, or an object has no name.
        """
        if isinstance(schema, bool):
            return "Any"
        forms = schema.get("anyOf")
        if forms:
            return " | ".join(self.of(each, f"{place}|{n}") for n, each in enumerate(forms))
        if "enum" in schema:
            values = [json.dumps(value) for value in schema["enum"] if value is not None]
            return f"Literal[{', '.join(values)}]" + " | None" * (None in schema["enum"])
        kinds = schema.get("type")
        if kinds is None:
            return "Any"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return " | ".join(self._one(kind, schema, place) for kind in kinds)

    def _one(self, kind: str, schema: _Schema, place: str) -> str:
        if kind in SCALARS:
            return SCALARS[kind]
        if kind == "array":
            return f"list[{self.of(schema['items'], place + '[]')}]"
        if kind == "object" and "properties" in schema:
            return self._object(schema, place)
        if kind == "object":
            values = schema.get("additionalProperties", True)
            return f"dict[str, {self.of(values, place + '{}')}]"
        raise ValueError(f"{place}: type {kind} is not known: extend tests/methods.py")

    def _object(self, schema: _Schema, place: str) -> str:
        if place not in NAMES:
            raise ValueError(f"the object {place} has no name: give it one in tests/methods.py")
        required = schema.get("required", ())
        lines = [f"\n\nclass {NAMES[place]}(TypedDict):\n"]
        method = re.split(r"\W", place, maxsplit=1)[0]
        what = schema.get("description") or f"In the result of {method}."
        lines.append(_docstring(what) + "\n")
        for name, each in schema["properties"].items():
            kind = self.of(each, f"{place}.{name}")
            lines.append(f"    {name}: {kind if name in required else f'NotRequired[{kind}]'}\n")
            if not isinstance(each, bool) and "description" in each:
                lines.append(_docstring(each["description"]))
        self.classes.append("".join(lines).rstrip("\n") + "\n")
        self.named.add(place)
        return NAMES[place]


def _docstring(text: str) -> str:
    """Returns a description as an indented docstring."""
    plain = " ".join(text.replace("\\", "\\\\").replace('"""', "'''").split())
    if plain.endswith('"'):
        plain = f'{plain[:-1]}\\"'
    lines = textwrap.wrap(
        f'"""{plain}"""', WIDTH - 4, break_long_words=False, break_on_hyphens=False
    )
    if len(lines) == 1:
        return f"    {lines[0]}\n"
    first, _, rest = plain.partition(". ")
    if rest and len(first) < WIDTH - 8:  # a summary line, then the rest
        body = textwrap.wrap(rest, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines = [f'"""{first}.', "", *body, '"""']
    else:
        lines = textwrap.wrap(
            f'"""{plain}', WIDTH - 4, break_long_words=False, break_on_hyphens=False
        )
        lines.append('"""')
    return "".join(f"    {line}\n" if line else "\n" for line in lines)


def _overload(method: str, schema: _Schema, result: str, types: Types, extra: str = "") -> str:
    """Returns one form of `call`; `extra` is how the parameter of FORMS is given in this one."""
    params = schema["params"]
    required = params.get("required", ())
    words = []
    for name, each in params.get("properties", {}).items():
        kind = types.of(each, f"{method}({name})")
        if name == FORMS.get(method):
            words.append(f"{name}: {extra}")
        elif name in required:
            words.append(f"{name}: {kind}")
        else:  # None is left out, whether the schema allows it or not
            kind = kind if kind.endswith("None") else f"{kind} | None"
            words.append(f"{name}: {kind} = ...")
    given = "".join(f"        {word},\n" for word in ["*", *words]) if words else ""
    what = " ".join(schema["description"].split())
    comment = textwrap.fill(what, WIDTH, initial_indent="    # ", subsequent_indent="    # ")
    return (
        f"\n{comment}\n    @overload\n"
        f'    def call(\n        self,\n        method: Literal["{method}"],\n        /,\n{given}'
        f"    ) -> {result}: ...\n"
    )


def _overloads(method: str, schema: _Schema, types: Types) -> Iterator[str]:
    result = types.of(schema["result"], method)
    if method not in FORMS:
        yield _overload(method, schema, result, types)
        return
    first, second = result.split(" | ")
    yield _overload(method, schema, first, types, "Literal[False] | None = ...")
    yield _overload(method, schema, second, types, "Literal[True]")


def _each(method: str, result: str) -> str:
    return (
        "\n    @overload\n"
        "    def call_for_each(\n        self,\n"
        f'        method: Literal["{method}"],\n'
        "        names: Sequence[str],\n"
        f"        params: Callable[[str], {_params_name(method)}],\n"
        f"    ) -> dict[str, {result}]: ...\n"
    )


def _params_name(method: str) -> str:
    return "".join(part.capitalize() for part in method.split("_")) + "Params"


def _params_class(method: str, params: _Schema, types: Types) -> str:
    required = params.get("required", ())
    lines = [f"\n\nclass {_params_name(method)}(TypedDict):\n"]
    lines.append(f'    """The parameters of {method}, in a batch."""\n\n')
    for name, each in params["properties"].items():
        if name == FORMS.get(method):
            continue
        kind = types.of(each, f"{method}({name})")
        lines.append(f"    {name}: {kind if name in required else f'NotRequired[{kind}]'}\n")
    return "".join(lines)


def made() -> str:
    """Returns the module.

    Raises:
        ValueError: a schema has what is not known here, or NAMES has what no schema has.
    """
    schemas = {path.stem: json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))}
    types = Types()
    calls = [call for name, schema in schemas.items() for call in _overloads(name, schema, types)]
    each = [
        _each(name, types.of(schemas[name]["result"], name).split(" | ", maxsplit=1)[0])
        for name in EACH
    ]
    batches = [_params_class(name, schemas[name]["params"], types) for name in EACH]
    if types.named != NAMES.keys():
        raise ValueError(f"no schema has {sorted(NAMES.keys() - types.named)}: see NAMES")
    classes = list(dict.fromkeys(types.classes)) + batches
    return "".join([HEADER, *classes, RPC, *calls, BATCHES, *each])


if __name__ == "__main__":
    MADE.write_text(made())
