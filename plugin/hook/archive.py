"""The hook as one executable file: a zip archive of its modules that the system's Python runs.

It holds each module as source, and as code compiled for the Python that made it; any other Python
from 3.11 on takes the source.
"""

from __future__ import annotations

import io
import py_compile
import tempfile
import zipfile
from pathlib import Path

SHEBANG = b"#!/usr/bin/python3 -IS\n"
MAIN = """\
import gc
import sys

gc.disable()  # it ends before there is anything to collect; a twentieth of its time went there

from plugin.hook.entry import main

sys.exit(main())
"""
ROOT = Path(__file__).parents[2]
MODULES = (
    "plugin/__init__.py",
    "plugin/hook/__init__.py",
    "plugin/hook/config.py",
    "plugin/hook/entry.py",
    "plugin/hook/operations.py",
    "plugin/hook/pivots.py",
    "plugin/hook/rpc.py",
    "pydataplane/__init__.py",
    "pydataplane/domain/__init__.py",
    "pydataplane/domain/actions.py",
    "pydataplane/domain/errors.py",
    "pydataplane/domain/histograms.py",
    "pydataplane/domain/images.py",
    "pydataplane/domain/limiting.py",
    "pydataplane/domain/limits.py",
    "pydataplane/domain/missingvolumes.py",
    "pydataplane/domain/model.py",
    "pydataplane/domain/names.py",
    "pydataplane/domain/observed.py",
    "pydataplane/domain/portals.py",
    "pydataplane/domain/reactors.py",
    "pydataplane/domain/reconcile.py",
    "pydataplane/domain/records.py",
    "pydataplane/domain/xml/",
    "pydataplane/emulator.py",
    "pydataplane/errors.py",
    "pydataplane/methods.py",
    "pydataplane/sockets.py",
)
"""What the hook is made of; a folder stands for all modules in it."""

_TIME = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that the same modules give the same archive."""


def sources() -> dict[str, str]:
    """Returns the text of the archive's modules, by their paths in it."""
    found = {"__main__.py": MAIN}
    for name in MODULES:
        path = ROOT / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            found[str(file.relative_to(ROOT))] = file.read_text()
    return found


def build() -> bytes:
    """Returns the archive."""
    stream = io.BytesIO()
    stream.write(SHEBANG)
    with zipfile.ZipFile(stream, "a") as archive, tempfile.TemporaryDirectory() as folder:
        for name, text in sources().items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), text)
            archive.writestr(
                zipfile.ZipInfo(f"{name}c", _TIME), _compiled(Path(folder), name, text)
            )
    return stream.getvalue()


def _compiled(folder: Path, name: str, text: str) -> bytes:
    source, code = folder / "source.py", folder / "code.pyc"
    source.write_text(text)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), str(code), name, doraise=True, invalidation_mode=mode)
    return code.read_bytes()


def install(path: str) -> None:
    """Writes the archive to a file, executable, whole or not at all; folders are made.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_bytes(build())
        new.chmod(0o755)
        new.rename(file)
    finally:
        new.unlink(missing_ok=True)


def is_current(path: Path) -> bool | None:
    """Whether a file is this version's hook; None: it is no hook of ours, of any version.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            there = {name: archive.read(name).decode() for name in names}
    except (zipfile.BadZipFile, UnicodeDecodeError):
        return None
    if "plugin/hook/entry.py" not in there:
        return None
    return there == sources()
