"""qemu-img: what is in an image, and copies of parts of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydataplane.errors import VolumeError

FORMATS = ("raw", "qcow2")
SECTOR = 512
"""An image's size is a multiple of it, for qemu-img, in bytes."""
ELSEWHERE = ("backing-filename", "full-backing-filename")
"""In qemu-img's answer, of an image that is not whole without another one."""


@dataclass(frozen=True)
class Image:
    """An image that is there."""

    path: Path
    format: str
    size: int
    """Of its contents, bytes."""
    version: tuple[int, int] | None = None
    """Tells it from what its file has after any change: inode, and when that was changed last."""


def probe(path: Path, form: str | None = None) -> Image:
    """Returns what an image is; `form` is its format where that is not to be looked for.

    Raises:
        VolumeError: there is none that can be read, or it is of another format, or not whole: what
            a stranger made could name any other file of this host.
    """
    version = version_of(path)
    words = [] if form is None else ["-f", form]
    found = json.loads(run("info", "--output=json", *words, "--", str(path.absolute())))
    if found["format"] not in FORMATS:
        raise VolumeError(
            f"{path} has the format {found['format']}: make it qcow2 with `qemu-img convert -O "
            "qcow2`, or say --format raw if it is to be taken as it is"
        )
    details = found.get("format-specific", {}).get("data", {})
    if any(key in found for key in ELSEWHERE) or "data-file" in details:
        raise VolumeError(
            f"{path} needs another file to be whole, which could be any of this host: if you trust "
            "it, make one image of both with `qemu-img convert -O qcow2`"
        )
    if details.get("encrypt") or found.get("encrypted"):
        raise VolumeError(f"{path} is encrypted: make a plain one of it with `qemu-img convert`")
    return Image(path.absolute(), found["format"], found["virtual-size"], version)


def version_of(path: Path) -> tuple[int, int]:
    """Returns the version of what is in a file or block device; see `Image`.

    Unlike the time of the last modification nobody can set it back.

    Raises:
        VolumeError: it is something else, which qemu-img might wait for, for ever.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        raise VolumeError(f"{path} is neither a file nor a block device: give one with an image")
    return found.st_ino, found.st_ctime_ns


def make(path: Path, form: str, size: int) -> Image:
    """Makes an image of `size` bytes that reads as zeros, in place of what has that name."""
    path.unlink(missing_ok=True)  # it may lead elsewhere
    run("create", "-q", "-f", form, "--", str(path.absolute()), str(size))
    return Image(path.absolute(), form, size)


def data_of(image: Image) -> list[tuple[int, int]]:
    """Returns where an image may hold anything but zeros: (offset, length) in bytes, in order."""
    said = run("map", "--output=json", "-f", image.format, "--", str(image.path))
    return [(each["start"], each["length"]) for each in json.loads(said) if not each["zero"]]


def copy(source: Image, target: Image, offset: int, length: int) -> None:
    """Copies some bytes to the same place of another image, durably; what is zeros there stays so.

    The target must read as zeros there.
    """
    _convert(_part(source, offset, length), _part(target, offset, length))


def read(image: Image, offset: int, length: int) -> bytes:
    """Returns some bytes of an image, from memory that holds them all."""
    if image.format == "raw":
        with image.path.open("rb") as file:
            file.seek(offset)
            # qemu-img takes the last sector for whole, with zeros.
            return file.read(length).ljust(length, b"\0")
    with os.fdopen(os.memfd_create("image"), "rb") as file:
        os.truncate(file.fileno(), length)
        held = Image(Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), "raw", length)
        _convert(_part(image, offset, length), _part(held, 0, length))
        return file.read()


def _convert(source: str, target: str) -> None:
    words = ["convert", "-n", "--target-is-zero", "--image-opts", "--target-image-opts"]
    run(*words, source, target)


def run(*words: str) -> str:
    """Runs qemu-img and returns what it prints.

    Raises:
        VolumeError: it is not installed, or its last words.
    """
    command = ["setpriv", "--pdeathsig", "KILL", "qemu-img", *words]
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError as error:
        raise VolumeError(
            "qemu-img, which reads and writes images, is not installed: install qemu-utils"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        last = lines[-1].removeprefix("qemu-img: ").removeprefix("setpriv: ")
        raise VolumeError(f"qemu-img failed: {last}")
    return done.stdout


def _part(image: Image, offset: int, length: int) -> str:
    """Returns qemu's options for some bytes of an image."""
    file = "file.file" if image.format != "raw" else "file"
    options: dict[str, Any] = {"driver": "raw", "offset": offset, "size": length}
    if image.format != "raw":
        options["file.driver"] = image.format
    options |= {f"{file}.driver": "file", f"{file}.filename": image.path}
    return ",".join(f"{key}={str(value).replace(',', ',,')}" for key, value in options.items())
