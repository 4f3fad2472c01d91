"""A record of persistent reservations that cannot be read: how an operator learns of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from plugin.cli import main
from tests.support.target import Target
from tests.support.wait import until


def findings(target: Target) -> list[Any]:
    """Returns what `virtlun doctor` says of reservations."""
    words = ["--socket", str(target.rpc_socket), "doctor", "--json"]
    found = json.loads(CliRunner().invoke(main, words).stdout)
    return [each for each in found if each["what"] == "reservations"]


def states(target: Target) -> list[str]:
    """Returns whether the reservations of each disk are known, by controller."""
    found = []
    for controller in target.rpc("vhost_get_controllers"):
        shown = controller["backend_specific"]
        luns = [lun for each in shown.get("scsi", []) for lun in each["luns"]]
        disks = luns + ([shown["block"]] if "block" in shown else [])
        found += [disk["reservations"] for disk in disks]
    return found


@pytest.mark.parametrize("state", ["lost", "unread"])
def test_doctor_names_the_volume_and_what_ends_it(target: Target, state: str) -> None:
    target.make_lvstore()
    shared, other = (target.make_thin(name, 8) for name in ("shared", "other"))
    target.attach("vm-a", shared, shareable=True)
    target.attach("vm-b", shared, other, shareable=True)
    target.rpc("vhost_create_blk_controller", ctrlr="vm-c", dev_name=shared, shareable=True)
    assert states(target) == ["known"] * 4 and findings(target) == []
    target.stop()
    record = target.state_dir / "reservations" / f"{shared}.json"
    record.parent.mkdir(exist_ok=True)
    if state == "lost":
        record.write_bytes(b"{")
    else:
        record.mkdir()
    target.start()
    assert states(target) == [state, state, "known", state]
    (found,) = findings(target)
    assert found["state"] == "failed"
    assert f"{record} " in found["found"] and "lvs0/shared" in found["found"]
    assert "remove it" in found["advice"]
    assert ("--replace-lost" in found["advice"]) == (state == "lost")
    if state == "lost":
        record.unlink()
    else:
        record.rmdir()
    until(lambda: states(target) == ["known"] * 4, "the target to read it again")
    assert findings(target) == []
