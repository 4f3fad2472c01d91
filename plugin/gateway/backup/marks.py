"""The dirty bitmap of what is to be copied: the target's ranges become bits.

Blocks become dirty by being written: of a device of the same size, whose data goes nowhere.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from plugin.gateway.backup.launch import DIES_WITH_US
from pydataplane.errors import VolumeError

WRITE_MAX = 1 << 30
"""Bytes of one write: qemu-io takes up to 2 GiB."""


def mark(ranges: Iterable[Iterable[tuple[int, int]]], socket: Path, export: str, size: int) -> None:
    """Writes to all `ranges` of an NBD export of `size` bytes; blocks.

    `ranges` has pages of offset and length in bytes.

    Raises:
        VolumeError: qemu-io cannot.
    """
    server = f"driver=nbd,server.type=unix,server.path={str(socket).replace(',', ',,')}"
    words = [*DIES_WITH_US, "qemu-io", "--image-opts"]
    words.append(f"driver=raw,file.{server.replace(',', ',file.')},file.export={export}")
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise VolumeError(
            "qemu-io, which incremental backups need, is not installed: install qemu-utils"
        ) from error
    with process:
        assert process.stdin is not None and process.stderr is not None
        try:
            for page in ranges:
                for offset, length in page:
                    for at in range(offset, min(offset + length, size), WRITE_MAX):
                        part = min(WRITE_MAX, offset + length - at, size - at)
                        process.stdin.write(f"write -z -q {at} {part}\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # what it says tells why
        except BaseException:
            process.kill()
            raise
        said = process.stderr.read().strip()
    if process.returncode or said:
        raise VolumeError(f"the blocks to copy cannot be marked: {said or process.returncode}")
