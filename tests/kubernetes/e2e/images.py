"""The images that the suite's pods name, made of local files under the same names.

Two of them are what a shell of Alpine or glibc is for upstream. Their tools are GNU's where
busybox's differ in what specs ask of them, such as `dd oflag=direct`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.kubernetes.images import BUSYBOX, Content, busybox_links, image

REGISTRY = "registry.k8s.io/e2e-test-images"
#: Names and versions as in Kubernetes' test/utils/image/manifest.go.
AGNHOST_IMAGE = f"{REGISTRY}/agnhost:2.63.0"
BUSYBOX_IMAGE = f"{REGISTRY}/busybox:1.37.0-1"
GNU_IMAGES = [
    f"{REGISTRY}/glibc-dns-testing:2.0.0",
    f"{REGISTRY}/nginx:1.15-4",
    f"{REGISTRY}/nginx:1.27-0",
]
PAUSE_IMAGE = "registry.k8s.io/pause:3.10.2"
GNU_TOOLS = ("dd", "cat", "stat", "ls", "truncate", "sync", "sha256sum", "base64", "head", "tail")
#: Debian's busybox takes its own applets before what is on PATH; dash does not.
SHELL = Path("/usr/bin/dash")
ENVIRONMENT = {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
FOLDERS = ("lib", "lib/x86_64-linux-gnu", "lib64", "mnt", "root", "uploads", "var", "var/tmp")
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"


def images(folder: Path, agnhost: Path, pause: Path) -> Iterator[Path]:
    """Writes the images into a folder, one after the other, and yields the path of each."""
    busybox: Content = {
        "bin/busybox": BUSYBOX,
        "etc/passwd": PASSWD,
        "etc/group": b"root:x:0:\n",
    }
    links = busybox_links()
    shell = {**ENVIRONMENT, "Cmd": ["sh"]}
    yield image(folder / "busybox.tar", [BUSYBOX_IMAGE], busybox, links, shell, FOLDERS)
    gnu = {**busybox, **_gnu()}
    dash = {**links, "bin/sh": "dash", "bin/bash": "dash"}
    yield image(folder / "gnu.tar", GNU_IMAGES, gnu, dash, shell, FOLDERS)
    serve = {**ENVIRONMENT, "Entrypoint": ["/agnhost"], "Cmd": ["pause"]}
    server = {**busybox, "agnhost": agnhost}
    yield image(folder / "agnhost.tar", [AGNHOST_IMAGE], server, links, serve, FOLDERS)
    wait = {"Entrypoint": ["/pause"]}
    yield image(folder / "pause.tar", [PAUSE_IMAGE], {"pause": pause}, {}, wait)


def _gnu() -> dict[str, Path]:
    """Returns GNU's tools and a shell, with the libraries that they are linked with."""
    tools = [Path("/usr/bin") / name for name in GNU_TOOLS]
    said = subprocess.run(["ldd", *tools, SHELL], capture_output=True, text=True, check=True)
    libraries = re.findall(r"(?:=> )?(/\S+) \(0x", said.stdout)
    return {
        "bin/dash": SHELL,
        **{str(tool)[1:]: tool for tool in tools},
        **{name[1:]: Path(name).resolve() for name in libraries},
    }
