"""Container images made of local files, since a test cluster pulls nothing.

The format is that of `docker save`, which containerd imports.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

#: What pods in examples/kubernetes name, and what we give them for it.
BUSYBOX_IMAGE = "docker.io/library/busybox:stable"
PAUSE_IMAGE = "localhost/pause:3"
BUSYBOX = Path("/usr/bin/busybox")
DIRECTORIES = ("bin", "dev", "etc", "proc", "sys", "tmp", "usr", "usr/bin")


Content = Mapping[str, Path | bytes]


def busybox_image(path: Path) -> Path:
    """Writes an image with Debian's static busybox and a link for each of its commands."""
    config = {"Cmd": ["sh"], "Env": ["PATH=/bin:/usr/bin"]}
    return image(path, [BUSYBOX_IMAGE], {"bin/busybox": BUSYBOX}, busybox_links(), config)


def busybox_links() -> dict[str, str]:
    """Returns the links of an image by which busybox's commands are called."""
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    return {f"bin/{name}": "busybox" for name in listed.stdout.split() if name != "busybox"}


def pause_image(path: Path, program: Path) -> Path:
    """Writes the image that holds a pod's namespaces."""
    return image(path, [PAUSE_IMAGE], {"pause": program}, {}, {"Cmd": ["/pause"]})


def image(
    path: Path,
    names: list[str],
    files: Content,
    links: Mapping[str, str],
    config: Mapping[str, object],
    folders: Iterable[str] = (),
) -> Path:
    """Writes an image of one layer with some names; returns its path.

    `files`, `links` (what each points to) and `folders`, beside `DIRECTORIES`, are by their paths
    in it, without a leading slash; `config` is what the image format has under this name.
    """
    layer = _layer(files, links, (*DIRECTORIES, *folders))
    digest = hashlib.sha256(layer).hexdigest()
    described = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(described).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": names, "Layers": [layer_name]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, config_name, described)
        _add(archive, layer_name, layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _layer(files: Content, links: Mapping[str, str], folders: Iterable[str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for directory in folders:
            entry = tarfile.TarInfo(directory)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if directory.endswith("tmp") else 0o755
            archive.addfile(entry)
        for name, source in files.items():
            _add(archive, name, source if isinstance(source, bytes) else source.read_bytes())
        for name, to in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, to
            archive.addfile(entry)
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))
