"""Tests have mounts of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.root
def test_what_a_test_mounts_is_in_no_other_process(tmp_path: Path) -> None:
    """Nor in the namespaces that others make, which would keep it mounted."""
    other = Path(f"/proc/{os.getppid()}/mountinfo")
    own = Path("/proc/self/mountinfo").read_text()
    subprocess.run(["mount", "-t", "tmpfs", "tests", tmp_path], check=True)
    try:
        assert f" {tmp_path} " in Path("/proc/self/mountinfo").read_text()
        assert f" {tmp_path} " not in other.read_text()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    # What is unmounted outside goes here too, and nothing that is mounted here shows there.
    (root,) = [line for line in own.splitlines() if line.split()[4] == "/"]
    assert " shared:" not in root
