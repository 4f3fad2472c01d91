"""The options that a new target gets from the one that it replaces.

Root starts the new one, and a guest may have broken into the old one, which runs as a user of its
own. The command line of a process is its own to write, so it counts only where it is a process of
one's own user or root's; else what the target has recorded before it gave up root
(pydataplane/crates/target/src/started.rs).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydataplane.errors import TargetUnavailable

#: Options for one start, with how many values they have: what they configured is configured.
ONCE = {"--take-over": 0, "--wait-for-rpc": 0, "--config": 1, "-c": 1}
#: Of which one replaces the other.
SAME = {
    **{"-n": "--name", "-r": "--rpc-socket", "-S": "--vhost-dir", "-m": "--cpumask"},
    **{"--no-sandbox": "--sandbox", "--spin-us": "--poll"},
}
#: Permissions of others than the owner to write.
OF_OTHERS = 0o022


def options(rpc_socket: Path, pid: int, given: Sequence[str] = ()) -> list[str]:
    """Returns the options for a target in place of the one on `rpc_socket`, which says it is `pid`.

    They are those of the old one; `given` ones replace those of the same name.

    Raises:
        TargetUnavailable: what the old one was started with cannot be known for sure.
    """
    return merged(without_once(_words(rpc_socket, pid)), given)


def _words(rpc_socket: Path, pid: int) -> list[str]:
    me = os.geteuid()
    # The kernel says who listens; the process itself, which it is.
    owner = _listener(rpc_socket)
    if owner == me == Path(f"/proc/{pid}").stat().st_uid:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1]
        return [os.fsdecode(word) for word in raw]
    if me != 0:
        raise TargetUnavailable(
            f"the target runs as user {owner}: upgrade it as root, which has started it"
        )
    found = recorded(rpc_socket)
    if found is None:
        raise TargetUnavailable(
            f"root has no record of how the target on {rpc_socket} was started, and does not take "
            "its own word for it: restart it, or upgrade it as its user"
        )
    return found


def _listener(rpc_socket: Path) -> int:
    """Returns the user of the process that listens on a socket."""
    credentials = struct.Struct("3i")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(rpc_socket))
            found = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    except OSError as error:
        raise TargetUnavailable(f"no target answers on {rpc_socket}: {error}") from error
    uid: int = credentials.unpack(found)[1]
    return uid


def recorded(rpc_socket: Path) -> list[str] | None:
    """Returns the options in root's record of a target; None: no record is root's alone."""
    whole = Path.cwd() / rpc_socket
    for folder in whole.parents:
        with contextlib.suppress(OSError), _opened(folder, os.O_DIRECTORY) as opened:
            found = os.fstat(opened)
            others_write = found.st_mode & OF_OTHERS and not found.st_mode & stat.S_ISVTX
            if found.st_uid == 0 and not others_write:
                name = f".{str(whole.relative_to(folder)).replace('/', '-')}.options"
                with contextlib.suppress(OSError):
                    return _read(name, opened)
                return None
    return None


def _read(name: str, folder: int) -> list[str] | None:
    with _opened(name, 0, folder) as record:
        found = os.fstat(record)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != 0 or found.st_mode & OF_OTHERS:
            return None
        with os.fdopen(os.dup(record), encoding="utf-8") as text, contextlib.suppress(ValueError):
            words: list[str] = json.load(text)
            return words
        return None


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    try:
        yield found
    finally:
        os.close(found)


def without_once(words: Sequence[str]) -> list[str]:
    """Returns options without those that are for one start."""
    left = 0
    kept: list[str] = []
    for word in words:
        if left:
            left -= 1
        elif word in ONCE:
            left = ONCE[word]
        elif not word.startswith("--config="):
            kept.append(word)
    return kept


def merged(old: Sequence[str], given: Sequence[str]) -> list[str]:
    """Returns the `old` options but for those that `given` has, too, and these after them."""
    named = {name for name, _ in _named(given)}
    return [word for name, words in _named(old) if name not in named for word in words] + [*given]


def unused(running: Sequence[str], given: Sequence[str]) -> list[str]:
    """Returns those of the `given` options that a target with the options `running` lacks."""
    has = {_as_one(words) for _, words in _named(running)}
    return [word for _, words in _named(given) if _as_one(words) not in has for word in words]


def _as_one(words: Sequence[str]) -> tuple[str, ...]:
    """Returns an option as its long name and its values, however it was written."""
    name, equals, value = words[0].partition("=")
    long = name if name.startswith("--") else SAME.get(name, name)
    return (long, *([value] if equals else []), *words[1:])


def _named(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each option's long name, and its words: itself and its values."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("-") or not found:
            name = word.split("=", 1)[0]
            found.append((SAME.get(name, name), [word]))
        else:
            found[-1][1].append(word)
    return found
