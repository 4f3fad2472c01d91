"""The image `virtlun:0.1.0`, made of this machine's files, so that our pods run as users' do.

It has what examples/kubernetes/Containerfile puts into its own, without a registry: the files of
the Debian packages that it installs, of those that they depend on; Python and the packages that
virtlun needs (not those of tests and lints), with the libraries that they are linked with; our
programs, this checkout's code and the commands of pyproject.toml, all at the paths that they have
here; and the user that the target becomes. What does not change with the code is kept in the cache.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.cache import CACHE
from tests.support.target import binary

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "examples/kubernetes/Containerfile"
NAME = "docker.io/library/virtlun:0.1.0"
#: Of packages, beside those of the Containerfile: what every Debian image has, and is used here.
BASE_PACKAGES = ("coreutils", "dash", "findutils", "grep", "procps", "sed")
#: What no program needs, as in Debian's slim images.
UNPACKED_NOT = re.compile("/usr/share/(doc|man|info|locale|lintian|bash-completion|zoneinfo)/")
PYTHON = re.compile("(lib)?python3")
#: Debian's links of folders; of a package the folder itself is taken.
MERGED = ("bin", "sbin", "lib", "lib64")
ROOT_USER = "root:x:0:0::/root:/bin/sh"
PROGRAMS = ("virtlun-target", "virtlun-holder")
CODE = ("csi", "plugin", "pydataplane", "schemas")
#: Of Python's own library, what no program needs.
UNUSED = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "__pycache__"}
#: The same by how names begin: what programs are built with, and what is linked with X11.
UNUSED_BEGINNINGS = ("config-", "_tkinter.", "_test")
VENV = Path(sys.prefix)
SITE = Path(sysconfig.get_path("purelib"))
STANDARD = Path(sysconfig.get_path("stdlib"))


def program_image(path: Path, tags: Sequence[str] = (NAME,), packages: Sequence[str] = ()) -> Path:
    """Writes the image under some names in the format of `docker save`; returns its path.

    It may have further `packages` of Debian, as an image that is made from this one has.
    """
    own = [_code(path.with_suffix(".code"))]
    if packages:
        own.append(_further(path.with_suffix(".packages"), packages))
    layers = [_dependencies(), *own]
    digests = [_digest(layer) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"PATH={VENV / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": "config.json", "RepoTags": list(tags), "Layers": names}]
    with tarfile.open(path, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        for place, layer in zip(names, layers, strict=True):
            archive.add(layer, place)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    for layer in own:
        layer.unlink()
    return path


def _dependencies() -> Path:
    """Returns the layer of everything that is not this checkout's code."""
    distributions = sorted(_required("virtlun", set()))
    versions = [f"{name}={importlib.metadata.version(name)}" for name in distributions]
    packages = debian_packages()
    # The packages lie where this checkout has them, and another one may use the same cache.
    key = "\n".join(
        [Path(__file__).read_text(), sys.version, str(VENV), *versions, *packages]
    ).encode()
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
        for folder in ("tmp", "proc", "dev", "etc", "sys", "run", "var", "usr"):
            _add_folder(archive, folder)
        for name in MERGED:
            _add_link(archive, name, f"usr/{name}")
            _add_folder(archive, f"usr/{name}")
        debian = _debian_files(name.split("=")[0] for name in packages)
        more = {place: place for place in files | {python}}
        for place, file in sorted({**debian, **linked, **more}.items()):
            _add_file(archive, place, file)
        for link in _python_links(python):
            _add_link(archive, str(link)[1:], str(link.readlink()))
        _add(archive, str(VENV / "pyvenv.cfg")[1:], (VENV / "pyvenv.cfg").read_bytes())
        _add_link(archive, "var/run", "/run")
        _add_link(archive, "usr/bin/sh", "dash")
        for name, content in _users().items():
            _add(archive, name, content, 0o644)
    partial.rename(layer)
    return layer


def _further(layer: Path, packages: Sequence[str]) -> Path:
    """Returns the layer with packages that the Containerfile's image does not have."""
    more = set(debian_packages(packages)) - set(debian_packages())
    with tarfile.open(layer, "w") as archive:
        for place, file in sorted(_debian_files(name.split("=")[0] for name in more).items()):
            _add_file(archive, place, file)
    return layer


def debian_packages(further: Sequence[str] = ()) -> list[str]:
    """Returns NAME=VERSION of the packages that the Containerfile's image has, sorted.

    Those are among them that it would have with `further` ones. Python is left out, which comes
    from where this environment has it.
    """
    named = re.findall(r"install -y --no-install-recommends ([a-z0-9 -]+)", _last_stage())
    listed = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}\t${Version}\t${Pre-Depends}, ${Depends}\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    known = {name: (version, needs) for name, version, needs in map(_fields, listed)}
    wanted, found = [*" ".join(named).split(), *BASE_PACKAGES, *further], {}
    while wanted:
        name = wanted.pop()
        # one that is not known is virtual, or an alternative to one that is there
        if name in found or name not in known or PYTHON.match(name):
            continue
        found[name], needs = known[name]
        wanted += re.findall(r"[a-z0-9][a-z0-9.+-]+(?=[ ,|:]|$)", re.sub(r"\([^)]*\)", "", needs))
    return sorted(f"{name}={version}" for name, version in found.items())


def _fields(line: str) -> tuple[str, str, str]:
    name, version, needs = line.split("\t")
    return name, version, needs


def _last_stage() -> str:
    return CONTAINERFILE.read_text().rpartition("\nFROM ")[2]


def _debian_files(packages: Iterable[str]) -> dict[Path, Path]:
    """Returns the installed files of packages, by the path that they have in the image."""
    said = subprocess.run(
        ["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for line in said.splitlines():
        file = Path(line)
        wanted = line.startswith("/") and not UNPACKED_NOT.match(line)
        if wanted and not file.is_dir() and (file.is_symlink() or file.is_file()):
            found[_merged(file)] = file
    return found


def _merged(file: Path) -> Path:
    """Returns a path without the links that Debian has for /bin and the like."""
    first = file.parts[1] if file.parts[1:] else ""
    return Path("/usr") / file.relative_to("/") if first in MERGED else file


def _users() -> dict[str, bytes]:
    """Returns the files that name users and groups, with the user that the Containerfile makes."""
    made = re.search(r"useradd --system --uid (\d+) --groups disk .* (\w+)$", _last_stage(), re.M)
    assert made, "the Containerfile makes no user for the target"
    number, name = made.groups()
    return {
        "etc/passwd": f"{ROOT_USER}\n{name}:x:{number}:{number}::/:/bin/sh\n".encode(),
        "etc/group": f"root:x:0:\ndisk:x:6:{name}\n{name}:x:{number}:\n".encode(),
    }


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
        if not file.is_file() or parts & (UNUSED | {"site-packages", "dist-packages"}):
            continue
        if not any(part.startswith(UNUSED_BEGINNINGS) for part in parts):
            yield file


def _libraries(files: list[Path]) -> dict[Path, Path]:
    """Returns the libraries that programs are linked with, by the path at which it looks."""
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(?:=> )?(/\S+) \(0x", said)
    return {_merged(Path(name)): Path(name).resolve() for name in found}


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
        for name in PROGRAMS:
            _add(archive, str(VENV / "bin" / name)[1:], binary(name).read_bytes())
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


def _add_file(archive: tarfile.TarFile, place: Path, file: Path) -> None:
    """Adds a file, or a link that is one here, by the path that it is to have."""
    if file.is_symlink() and place != file.resolve():
        _add_link(archive, str(place)[1:], str(file.readlink()))
    else:
        _add(archive, str(place)[1:], file.read_bytes(), file.stat().st_mode & 0o7777 | 0o444)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o755) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    archive.addfile(entry)


def _add_link(archive: tarfile.TarFile, name: str, to: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, to
    archive.addfile(entry)
