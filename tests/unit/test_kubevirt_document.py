"""controller.json: whole or not there, and as its schema says."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import jsonschema
import pytest

from csi.hosterrors import HostError
from csi.kubevirt import document
from csi.kubevirt.document import BlkOf, Controller, LunOf
from csi.proto.__main__ import ROOT

SCHEMA = ROOT / "schemas/kubevirt/controller.schema.json"
FULL = Controller(
    reconnect_s=1,
    luns={"boot": LunOf(target=0, volume="0f0e0d0c-0b0a-4908-8706-050403020100")},
    left={"iso": "claim default/iso stays: it is a CD-ROM"},
)


def test_the_schema_is_the_model_s() -> None:
    assert json.loads(SCHEMA.read_text()) == document.schema(), (
        "write it anew: python -m csi.kubevirt.document > schemas/kubevirt/controller.schema.json"
    )


DISKS = Controller(
    absent="no device",
    disks={"boot": BlkOf(socket="vhost.sock.0", volume="0f0e0d0c-0b0a-4908-8706-050403020100")},
)


@pytest.mark.parametrize("found", [Controller(), FULL, Controller(absent="no device"), DISKS])
def test_what_is_written_is_read_again_by_everyone(tmp_path: Path, found: Controller) -> None:
    assert document.read(tmp_path) is None
    document.write(tmp_path, found)
    assert document.read(tmp_path) == found
    path = tmp_path / document.FILE
    written = json.loads(path.read_text())
    jsonschema.validate(written, document.schema())
    # A sidecar of before there were virtio-blk disks knows no such field.
    assert ("disks" in written) == bool(found.disks)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == [document.FILE]
    document.remove(tmp_path)
    document.remove(tmp_path)
    assert document.read(tmp_path) is None


def test_a_failed_write_leaves_the_old_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document.write(tmp_path, FULL)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        document.write(tmp_path, Controller())
    assert document.read(tmp_path) == FULL
    assert [each.name for each in tmp_path.iterdir()] == [document.FILE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"later": 1}',
        '{"socket": "../vhost.sock"}',
        '{"luns": {"a": {"target": 255, "volume": ""}}}',
        '{"disks": {"a": {"socket": "../vhost.sock.0", "volume": ""}}}',
    ],
)
def test_another_version_or_a_torn_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / document.FILE).write_text(text)
    with pytest.raises(HostError, match="of the same version"):
        document.read(tmp_path)
