"""Volumes' UUIDs in the metadata: put where there are none, and never changed by the way."""

from __future__ import annotations

import pytest

from pydataplane.domain.errors import TranslateError
from pydataplane.domain.translate import Settings, identify, plan, update
from tests.unit.translate.domains import domain, lvol, plain, translated

OLD, NEW = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "12")


def known(xml: str) -> list[str | None]:
    there = plan(xml)
    assert there is not None
    return [lun.uuid for lun in there.luns]


def test_a_uuid_is_put_where_there_is_none() -> None:
    xml = translated(domain(lvol("sda", "a") + lvol("sdb", "b"))).xml
    assert known(xml) == [None, None]
    element = identify(xml, {"lvs0/b": NEW, "lvs0/other": OLD})
    assert element is not None
    assert f'uuid="{NEW}"' in element
    assert element.count("uuid=") == 1


def test_what_is_known_stays() -> None:
    xml = translated(domain(lvol("sda", "a"))).xml.replace('lvol="a"', f'lvol="a" uuid="{OLD}"')
    assert known(xml) == [OLD]
    assert identify(xml, {"lvs0/a": NEW}) is None


def test_a_domain_without_disks_of_ours_needs_nothing() -> None:
    assert identify(domain(plain("vda", "virtio")), {"lvs0/a": NEW}) is None
    assert identify(translated(domain()).xml, {"lvs0/a": NEW}) is None
    assert identify("no xml", {}) is None


def test_damaged_metadata_is_not_written_over() -> None:
    xml = translated(domain(lvol("sda", "a"))).xml.replace('target="0"', 'target="x"')
    with pytest.raises(TranslateError):
        identify(xml, {"lvs0/a": NEW})


def test_an_update_of_the_same_volume_does_not_accept_a_namesake() -> None:
    xml = translated(domain(lvol("sda", "a"))).xml.replace('lvol="a"', f'lvol="a" uuid="{OLD}"')
    change = update(xml, lvol("sda", "a"), Settings(), live=False, uuids={"lvs0/a": NEW})
    assert change is not None
    assert change.lun.uuid == OLD
    change = update(xml, lvol("sda", "b"), Settings(), live=False, uuids={"lvs0/b": NEW})
    assert change is not None
    assert change.lun.uuid == NEW, "another volume is meant on purpose"
