"""Pools of an array on a target, asked as people and programs do."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from plugin.cli.main import main
from pydataplane.client import Client
from pydataplane.errors import RpcError
from pydataplane.volumes import Volumes
from tests.support.target import Target


def virtlun(target: Target, *words: str, code: int = 0, given: str | None = None) -> str:
    """Runs the command `virtlun`; returns what it printed."""
    done = CliRunner().invoke(main, ["--socket", str(target.rpc_socket), *words], input=given)
    assert done.exit_code == code, done.output
    return done.output


def listed(target: Target, pool: str) -> dict[str, dict[str, Any]]:
    """Returns what `virtlun volume list` says of a pool, by name."""
    found = json.loads(virtlun(target, "volume", "list", pool, "--json"))
    return {row["name"]: row for row in found}


def known(target: Target) -> list[dict[str, Any]]:
    """Returns all volumes that the target shows."""
    return [each.as_dict() for each in Volumes(Client(target.rpc_socket)).volumes()]


def info(target: Target, name: str) -> dict[str, Any]:
    """Returns what is told of one bdev."""
    (found,) = target.rpc("bdev_get_bdevs", name=name)
    return dict(found)


def not_had(target: Target, volume: str, ctrlr: str = "vm-1") -> RpcError:
    """Returns why a controller that is there is not given a volume."""
    asked = {"ctrlr": ctrlr, "scsi_target_num": 0, "bdev_name": volume}
    error = target.fails("vhost_scsi_controller_add_target", **asked)
    assert isinstance(error, RpcError)
    return error
