"""The reference pages that are made from schemas/ and from what programs say of their options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from plugin.cli import main
from plugin.gateway.procedures import PROCEDURES, SHOWING, Access, By
from plugin.gateway.procs import Proc
from tests.docs import clients
from tests.docs.conformance import scsi_suite
from tests.docs.e2e import storage_suite
from tests.docs.links import ROOT
from tests.docs.tempest import volume_tests
from tests.support.target import binary

REFERENCE = ROOT / "docs/pages/reference"
CLASSES = "examples/kubernetes/storageclasses.yaml"
ATTRIBUTES = "examples/kubernetes/volumeattributesclasses.yaml"
WIDTH = 100
"""Characters of a line of help."""

NOTE = "<!-- Made by `python -m tests.docs`; do not edit. -->\n\n"

_Schema = dict[str, Any]

_RUST = {
    "virtlun-target": "The data plane. `virtlun target start` and the systemd unit run it.",
    "virtlun-holder": "Keeps exports mounted while the target is away.",
    "virtlun-bench": "A vhost-user front end: drives a target as a guest does, and measures.",
}
_PYTHON = {
    "virtlun-gateway": "libvirt's protocol with virtlun disks, in front of libvirtd.",
    "virtlun-hook": "libvirt's hook: domains that start without the gateway find their disks.",
    "virtlun-csi": "The CSI driver.",
    "virtlun-csi-helper": "Mounts for the CSI driver, which then needs no right to.",
    "virtlun-kubevirt-hook": "The sidecar of a launcher's pod, for KubeVirt 1.8.",
}


def commands() -> str:
    """Returns the page on every program and its options."""
    parts = ["# Commands\n\nWhat `--help` says, of each program and each command.\n"]
    for name, text in _of_click(main, "virtlun"):
        parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    for name, what in (_RUST | _PYTHON).items():
        path = binary(name) if name in _RUST else Path(sys.executable).with_name(name)
        parts.append(f"## {name}\n\n{what}\n\n```text\n{_help(str(path))}\n```\n")
    return NOTE + "\n".join(parts)


def _of_click(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    context = click.Context(
        command,
        info_name=name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        color=False,
        help_option_names=main.context_settings["help_option_names"],  # of the root, as in use
    )
    yield name, command.get_help(context).strip()
    if isinstance(command, click.Group):
        for each in sorted(command.commands):
            yield from _of_click(command.commands[each], f"{name} {each}")


def _help(program: str) -> str:
    done = subprocess.run(
        [program, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"},
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def methods() -> str:
    """Returns the page on the target's JSON-RPC methods."""
    parts = [
        "# JSON-RPC methods\n\nOf `virtlun-target`, on its socket `/run/virtlun/target.sock`. "
        "[The README of schemas/rpc](../../../schemas/rpc/README.md) says how they are framed, and "
        "what differs from SPDK. Those that begin with `virtlun_` are ours alone.\n"
    ]
    for path in sorted((ROOT / "schemas/rpc").glob("*.json")):
        schema = json.loads(path.read_text())
        errors = ", ".join(f"{error['name']} ({error['code']})" for error in schema["errors"])
        parts.append(f"## {schema['method']}\n\n{_words(schema['description'])}\n")
        parts.append(_table("parameter", schema["params"]) or "No parameters.\n")
        parts.append(f"Result: {_kind(schema['result'])}. {_words(_described(schema['result']))}\n")
        parts.append(f"Errors: {errors or 'none of its own'}.\n")
    return NOTE + "\n".join(parts)


def configuration() -> str:
    """Returns the page on /etc/virtlun/virtlun.toml."""
    schema = json.loads((ROOT / "schemas/config/plugin.schema.json").read_text())
    parts = [
        "# Configuration\n\n`/etc/virtlun/virtlun.toml`, of the gateway, the hook and `virtlun`. "
        "Every key has a default, and a key that is not here is an error. "
        "[examples/virtlun.toml](../../../examples/virtlun.toml) has them all in one file. The "
        "target itself has options ([virtlun-target](commands.md#virtlun-target)) and remembers "
        "what it was told by [JSON-RPC](rpc.md).\n"
    ]
    for name, given in schema["properties"].items():
        each = schema["$defs"][given["$ref"].rsplit("/", 1)[1]] if "$ref" in given else given
        rows = _table("key", each)
        if rows is None:  # a table of tables
            (of,) = each["patternProperties"].values()
            each = schema["$defs"][of["$ref"].rsplit("/", 1)[1]] | {
                "description": each["description"]
            }
            name, rows = f"{name}.NAME", _table("key", each)  # noqa: PLW2901
        parts.append(f"## [{name}]\n\n{_words(each.get('description', ''))}\n\n{rows}")
    return NOTE + "\n".join(parts)


def storage_class() -> str:
    """Returns the page on the parameters of a StorageClass."""
    schema = json.loads((ROOT / "schemas/csi/storageclass.schema.json").read_text())
    return (
        f"{NOTE}# StorageClass\n\n{_words(schema['description'])} "
        f"[{CLASSES}](../../../{CLASSES}) "
        f"has classes to begin with.\n\n{_table('parameter', schema)}"
    )


def attributes_class() -> str:
    """Returns the page on the parameters of a VolumeAttributesClass."""
    schema = json.loads((ROOT / "schemas/csi/volumeattributesclass.schema.json").read_text())
    return (
        f"{NOTE}# VolumeAttributesClass\n\n{_words(schema['description'])} All are whole numbers, "
        "as text, and what a class does not name stays as a volume has it: "
        "[limits in Kubernetes](../how-to/limits.md#in-kubernetes). "
        f"[{ATTRIBUTES}](../../../{ATTRIBUTES}) "
        f"has classes to begin with.\n\n{_table('parameter', schema)}"
    )


def _table(what: str, schema: _Schema) -> str | None:
    """Returns a table of the properties of an object; None if it has none."""
    if not schema.get("properties"):
        return None
    required = schema.get("required", ())
    rows = [f"| {what} | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, each in schema["properties"].items():
        if "default" in each and each["default"] is not None:
            default = f"`{json.dumps(each['default'])}`"
        else:
            default = "required" if name in required else ""
        rows.append(f"| `{name}` | {_kind(each)} | {default} | {_words(_described(each))} |")
    return "\n".join(rows) + "\n"


def _described(schema: _Schema) -> str:
    return str(schema.get("description", ""))


def _words(text: str) -> str:
    """Returns a description as Markdown in one line."""
    line = " ".join(text.split())
    for plain, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("*", "\\*")):
        line = line.replace(plain, written)
    return line


def _kind(schema: _Schema) -> str:
    """Returns what values there are, in words."""
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return " or ".join(_kind(each) for each in several if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kinds = schema.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    if kinds == ["array"] and isinstance(schema.get("items"), dict):
        return f"list of {_kind(schema['items'])}"
    least, most = (
        schema.get(name, schema.get(f"exclusive{name.capitalize()}"))
        for name in ("minimum", "maximum")
    )
    if least is not None and most is not None:
        kinds = [f"{kind}, {least} to {most}" for kind in kinds]
    elif least is not None:
        kinds = [f"{kind}, at least {least}" for kind in kinds]
    return " or ".join(kinds)


def answered_by(call: Proc) -> By:
    """Returns who answers a call that the gateway looks into, where it is about something of ours.

    Raises:
        KeyError: the gateway does not look into it.
    """
    return By.LIBVIRTD if call.value in SHOWING else PROCEDURES[call.value].by


def of_pool(name: str, by: By) -> bool:
    """Whether a call is about a pool or volume of ours, of which libvirtd knows nothing."""
    return by is By.GATEWAY and name.startswith("STORAGE_")


def calls() -> str:
    """Returns the page on libvirt's calls that the gateway looks into."""
    by_polkit = "the gateway; polkit is asked for permission where libvirtd asks it"
    answers = {
        By.GATEWAY: "the gateway; libvirtd is asked for permission",
        By.LIBVIRTD: "libvirtd, with arguments or result changed",
        By.NOBODY: "refused with a sentence",
    }
    shown = [
        (Proc(number).name, Access.READ, By.LIBVIRTD)
        for number in sorted(SHOWING.keys() - PROCEDURES)
    ]
    rows = [
        f"| `{name}` | {access.value} | {by_polkit if of_pool(name, by) else answers[by]} |"
        for name, access, by in sorted(
            [(row.proc.name, row.access, row.by) for row in PROCEDURES.values()] + shown,
            key=lambda row: row[0],
        )
    ]
    return (
        f"{NOTE}# libvirt's calls\n\nThose that `virtlun-gateway` looks into. It answers itself "
        "where they are about a disk, a domain or a pool of ours; where they are not, and all "
        "other calls, go to libvirtd as they are. `read` calls are allowed on the read-only socket,"
        " too.\n\n"
        "| call | socket | who answers, where it is ours |\n| --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "rpc.md": methods,
    "configuration.md": configuration,
    "storageclass.md": storage_class,
    "volumeattributesclass.md": attributes_class,
    "calls.md": calls,
    "e2e.md": lambda: NOTE + storage_suite(),
    "tempest.md": lambda: NOTE + volume_tests(),
    "conformance.md": lambda: NOTE + scsi_suite(),
    "clients.md": lambda: NOTE + clients.page(),
}
"""File of docs/pages/reference, and what makes it."""
