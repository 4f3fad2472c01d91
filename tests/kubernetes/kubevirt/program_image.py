"""The image `virtlun:0.1.0`, made of this machine's files, so that our sidecar runs in its pod.

It has Python, the packages that virtlun needs (not those of tests and lints), the libraries that
they are linked with, this checkout's code, and the commands of pyproject.toml, all at the paths
that they have here. A built one is kept in the cache without the code, which is added to it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from tests.guest.image import CACHE
from tests.kubernetes.images import BUSYBOX

ROOT = Path(__file__).resolve().parents[3]
NAME = "docker.io/library/virtlun:0.1.0"
CODE = ("csi", "plugin", "pydataplane", "schemas")
#: Of Python's own library, what no program needs.
UNUSED = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "__pycache__"}
VENV = Path(sys.prefix)
SITE = Path(sysconfig.get_path("purelib"))
STANDARD = Path(sysconfig.get_path("stdlib"))


def program_image(path: Path) -> Path:
    """Writes the image in the format of `docker save`; returns its path."""
    layers = [_dependencies(), _code(path.with_suffix(".code"))]
    digests = [_digest(layer) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"PATH={VENV / 'bin'}:/bin:/usr/bin"], "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": names}]
    with tarfile.open(path, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        for name, layer in zip(names, layers, strict=True):
            archive.add(layer, name)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    layers[1].unlink()
    return path


def _dependencies() -> Path:
    """Returns the layer of everything that is not this checkout's code."""
    distributions = sorted(_required("virtlun", set()))
    versions = [f"{name}={importlib.metadata.version(name)}" for name in distributions]
    # The packages lie where this checkout has them, and another one may use the same cache.
    key = "\n".join([Path(__file__).read_text(), sys.version, str(VENV), *versions]).encode()
    layer = CACHE / "kubernetes" / f"virtlun-{hashlib.sha256(key).hexdigest()[:16]}.tar"
    if layer.exists():
        return layer
    layer.parent.mkdir(parents=True, exist_ok=True)
    files = set(_standard_library())
    for name in distributions:
        found = importlib.metadata.distribution(name)
        files |= {Path(str(found.locate_file(file))).resolve() for file in found.files or ()}
    files = {file for file in files if file.is_file() and "__pycache__" not in file.parts}
    python = Path(sys.executable).resolve()
    linked = _libraries([python, *(file for file in files if ".so" in file.suffixes)])
    partial = layer.with_suffix(f".{os.getpid()}")  # several clusters may want it at a time
    with tarfile.open(partial, "w") as archive:
        for folder in ("tmp", "proc", "dev", "etc", "sys", "run", "var", "bin"):
            _add_folder(archive, folder)
        for file in sorted(files | {python}):
            _add(archive, str(file)[1:], file.read_bytes())
        for place, file in sorted(linked.items()):
            _add(archive, str(place)[1:], file.read_bytes())
        for link in _python_links(python):
            _add_link(archive, str(link)[1:], str(link.readlink()))
        _add(archive, str(VENV / "pyvenv.cfg")[1:], (VENV / "pyvenv.cfg").read_bytes())
        _add(archive, "bin/busybox", BUSYBOX.read_bytes())
        for name in ("sh", "cat", "ls", "sleep"):
            _add_link(archive, f"bin/{name}", "busybox")
        _add_link(archive, "var/run", "/run")
    partial.rename(layer)
    return layer


def _required(name: str, seen: set[str]) -> set[str]:
    """Returns the distributions that one needs, with those that they need; not itself."""
    for text in importlib.metadata.requires(name) or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if wanted.name not in seen:
            seen.add(wanted.name)
            _required(wanted.name, seen)
    return seen


def _standard_library() -> Iterator[Path]:
    for file in STANDARD.rglob("*"):
        parts = set(file.relative_to(STANDARD).parts)
        if file.is_file() and not parts & (UNUSED | {"site-packages", "dist-packages"}):
            yield file


def _libraries(files: list[Path]) -> dict[Path, Path]:
    """Returns the libraries that programs are linked with, by the path at which it looks."""
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(?:=> )?(/\S+) \(0x", said)
    return {Path(name): Path(name).resolve() for name in found}


def _python_links(python: Path) -> Iterator[Path]:
    """Yields the links by which the environment's Python is called."""
    link = VENV / "bin/python"
    while link.is_symlink():
        yield link
        link = link.parent / link.readlink()
    assert link.resolve() == python


def _code(layer: Path) -> Path:
    """Returns the layer with this checkout's code, and the commands that call it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tarfile.open(layer, "w") as archive:
        for folder in CODE:
            for file in sorted((ROOT / folder).rglob("*")):
                parts = file.relative_to(ROOT).parts
                if file.is_file() and not {"__pycache__", "target", "crates"} & set(parts):
                    _add(archive, str(file)[1:], file.read_bytes())
        for name, entry in project["scripts"].items():
            module, function = entry.split(":")
            program = (
                f"#!{VENV / 'bin/python'}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                f"from {module} import {function}\nsys.exit({function}())\n"
            )
            _add(archive, str(VENV / "bin" / name)[1:], program.encode())
        information = f"Metadata-Version: 2.1\nName: virtlun\nVersion: {project['version']}\n"
        metadata = SITE / f"virtlun-{project['version']}.dist-info/METADATA"
        _add(archive, str(metadata)[1:], information.encode())
    return layer


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    archive.addfile(entry)


def _add_link(archive: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    archive.addfile(entry)
