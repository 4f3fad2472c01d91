"""Container images made of local files, since a test cluster pulls nothing.

The format is that of `docker save`, which containerd imports.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

#: What pods in examples/kubernetes name, and what we give them for it.
BUSYBOX_IMAGE = "docker.io/library/busybox:stable"
PAUSE_IMAGE = "localhost/pause:3"
BUSYBOX = Path("/usr/bin/busybox")
DIRECTORIES = ("bin", "dev", "etc", "proc", "sys", "tmp", "usr", "usr/bin")


def busybox_image(path: Path) -> Path:
    """Writes an image with Debian's static busybox and a link for each of its commands."""
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    links = {f"bin/{name}": "busybox" for name in listed.stdout.split() if name != "busybox"}
    return _image(path, BUSYBOX_IMAGE, {"bin/busybox": BUSYBOX}, links, ["sh"])


def pause_image(path: Path, program: Path) -> Path:
    """Writes the image that holds a pod's namespaces."""
    return _image(path, PAUSE_IMAGE, {"pause": program}, {}, ["/pause"])


def _image(
    path: Path, name: str, files: dict[str, Path], links: dict[str, str], command: list[str]
) -> Path:
    layer = _layer(files, links)
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": command, "Env": ["PATH=/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]
    with tarfile.open(path, "w") as archive:
        _add(archive, config_name, config)
        _add(archive, layer_name, layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def _layer(files: dict[str, Path], links: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for directory in DIRECTORIES:
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, source in files.items():
            _add(archive, name, source.read_bytes())
        for name, to in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, to
            archive.addfile(entry)
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))
