"""Programs that make backups: one that hangs is ended, and nothing of theirs reaches further."""

from __future__ import annotations

import asyncio
import os
import pwd
from pathlib import Path

import pytest

from plugin.gateway.backup import daemon, launch
from plugin.gateway.backup.daemon import PROGRAM, QMP, StorageDaemon
from tests.support.frozen import freeze


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "END_S", 0.1)

    async def run() -> None:
        hanging = await StorageDaemon.start([PROGRAM, *QMP])
        pid = hanging._process.pid
        freeze(pid)
        assert not await hanging.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        ends = await StorageDaemon.start([PROGRAM, *QMP])
        monkeypatch.setattr(daemon, "END_S", 60.0)
        assert await ends.close()

    asyncio.run(run())


def test_what_a_link_leads_to_is_not_given_away(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    user = pwd.getpwuid(os.getuid())
    launch.Launch("test", user, systemd=False).give(link)
