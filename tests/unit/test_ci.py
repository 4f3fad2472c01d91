"""What CI's script says of what runs beside the rest, with programs in the place of others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.cache import ROOT

#: Licences are found wanting, or not, when lint has ended.
MAKE = """\
#!/bin/bash
case $1 in
  lint-code) touch linted; exit {lint} ;;
  licences)
    until [ -e linted ]; do sleep 0.01; done
    echo "licences were looked at"
    exit {licences}
    ;;
  test) touch tested ;;
esac
"""


@pytest.mark.parametrize(
    ("lint", "licences", "failed", "tested"),
    [(0, 0, 0, True), (2, 0, 1, False), (0, 2, 1, True), (2, 2, 1, False)],
)
def test_what_came_of_the_licences_is_told_also_where_lint_fails(
    tmp_path: Path, lint: int, licences: int, failed: int, tested: bool
) -> None:
    programs, script = tmp_path / "bin", tmp_path / ".ci/run"
    for folder in (programs, script.parent, tmp_path / ".cache"):
        folder.mkdir()
    shutil.copy(ROOT / ".ci/run", script)
    for name, text in {
        "make": MAKE.format(lint=lint, licences=licences),
        "python3": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (failed, "licences were looked at\n"), ended.stderr
    assert (tmp_path / "tested").exists() == tested
