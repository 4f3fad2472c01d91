"""What guests did is asked of targets that are older than the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from plugin.gateway.usage import Unit, ask
from pydataplane.errors import BAD_PARAMETERS, RpcError
from tests.support.fake_target import FakeTarget

ONE = Unit("vm-1", 2)


@pytest.fixture
def target() -> FakeTarget:
    made = FakeTarget({"lvs0/a": "uuid-a"})
    made.controllers = {"vm-1": {0: "uuid-a", 2: "uuid-a"}}
    return made


def test_a_target_that_cannot_be_asked_about_one_is_asked_about_its_controller(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(name: str | None = None, scsi_target_num: int | None = None) -> Any:
        if scsi_target_num is not None:
            raise RpcError(BAD_PARAMETERS, "unknown field `scsi_target_num`")
        return FakeTarget.virtlun_vhost_get_stats(target, name)

    now = ask(target, [ONE])
    monkeypatch.setattr(target, "virtlun_vhost_get_stats", older)
    assert ask(target, [ONE]) == now
    assert now.keys() == {ONE}
