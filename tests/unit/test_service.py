"""Which systemd service a process is of."""

from __future__ import annotations

import os

import pytest

from pydataplane import service


@pytest.mark.parametrize(
    ("groups", "unit"),
    [
        ("0::/system.slice/virtlun-target.service\n", "virtlun-target.service"),
        (
            "0::/system.slice/system-virtlun\\x2dtarget.slice/virtlun-target@gold.service\n",
            "virtlun-target@gold.service",
        ),
        ("4:memory:/x.service\n1:name=systemd:/system.slice/a.service\n0::/\n", "a.service"),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/shell.scope\n", None),
        ("0::/user.slice/user-0.slice/session-1.scope\n", None),
        ("4:memory:/a.service\n0::/..\n", None),
        ("", None),
    ],
)
def test_the_group_names_the_service(groups: str, unit: str | None) -> None:
    assert service.unit_in(groups) == unit


def test_one_in_our_own_group_or_in_none_is_no_service() -> None:
    assert service.main_of(os.getpid()) is None
    assert service.main_of(1 << 30) is None
