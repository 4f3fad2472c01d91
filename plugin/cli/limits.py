"""`virtlun volume limits`: how much I/O may be done with a volume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from plugin.cli import completion
from plugin.cli.output import client, errors_as_sentences, json_option, show, text
from pydataplane.domain import limiting
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limits import NAMES, NONE, Limits, contradiction, merged
from pydataplane.domain.observed import observe
from pydataplane.errors import VolumeError
from pydataplane.volumenames import parse_size
from pydataplane.volumes import Volumes

HELP = {
    "bytes_sec": "Bytes a second, such as 100M.",
    "iops_sec": "Operations a second.",
    "bytes_sec_max": "The same in a burst.",
    "iops_sec_max": "The same in a burst.",
    "bytes_sec_max_length": "Seconds that a burst of it may last.",
    "iops_sec_max_length": "Seconds that a burst of it may last.",
    "size_iops_sec": "Bytes that count as one operation, such as 4K.",
}
"""By what follows `total`, `read` and `write`."""


def _is_bytes(name: str) -> bool:
    return name == "size_iops_sec" or ("bytes" in name and not name.endswith("_length"))


class _Bytes(click.ParamType[int]):
    """A number of bytes, 0 for none."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads one."""
        if isinstance(value, int) or value == "0":
            return int(value)
        try:
            return parse_size(value)
        except VolumeError as error:
            self.fail(str(error), param, ctx)


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each limit, by virsh's names."""
    for name in reversed(NAMES):
        kind = _Bytes() if _is_bytes(name) else click.IntRange(min=0)
        unit = "SECONDS" if name.endswith("_length") else "SIZE" if _is_bytes(name) else "NUMBER"
        what = HELP.get(name) or HELP[name.partition("_")[2]]
        words = f"--{name.replace('_', '-')}"
        function = click.option(words, name, type=kind, metavar=unit, help=what)(function)
    return function


@click.command(short_help="Show or change how much I/O may be done with a volume.")
@click.argument("volume", shell_complete=completion.volumes)
@_options
@click.option("--none", is_flag=True, help="Limit nothing.")
@json_option
@click.pass_obj
@errors_as_sentences
def limits(socket: Path, /, volume: str, none: bool, as_json: bool, **given: int | None) -> None:
    """Show how much I/O may be done with VOLUME, or change it, at once, also while it is used.

    The options are those of `virsh blkdeviotune`, and so are the rules: 0 is no limit, and of a
    kind (bytes or operations, or the bursts of either) of which one is named, the others end. What
    is set here lasts; the <iotune> of a disk takes its place, and goes with the disk.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if none and values:
        raise click.UsageError("--none goes without other limits")
    rpc = client(socket)
    found = Volumes(rpc).volume(volume)
    now = limiting.found(rpc, found.uuid)
    wanted = NONE if none else merged(now, values)
    wrong = contradiction(wanted)
    if wrong is not None:
        raise VolumeError(f"volume {found.path}: {wrong}")
    if wanted != now:
        try:
            limiting.by_hand(rpc, found.uuid, wanted, observe(rpc))
        except ReconcileError as error:
            raise VolumeError(f"volume {found.path}: {error}") from error
    _shown(found.path, wanted, as_json=as_json)


def _shown(path: str, limits: Limits, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"path": path, **limits.all}, indent=2))
        return
    show(
        [{"limit": name, "value": value} for name, value in limits.given.items()],
        [("LIMIT", "limit", text), ("VALUE", "value", text)],
        as_json=False,
        empty=f"volume {path} has no I/O limits",
    )
