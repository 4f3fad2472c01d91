"""The host that a volume comes to: it answers the source, one request after the other.

Until "finish" the volume has an xattr (`virtlun.move`) with which the target makes no disk of it.
It has the UUID that it has on the source, by which it is found whatever it is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.metadata import version
from typing import Any, BinaryIO, cast

from plugin.hostmoves import movesnapshots
from plugin.hostmoves.handover import ArrivingDomain
from plugin.hostmoves.wire import PROTOCOL, ChunkReader, Input, Message, identity, say
from plugin.moves import notes
from plugin.moves.naming import Domains
from plugin.moves.notes import Note
from plugin.streams.form import Reader
from plugin.streams.receiving import New, Receiver
from plugin.volumelocks import locked
from pydataplane.domain import limiting
from pydataplane.domain.limits import limits_of
from pydataplane.errors import TargetError, VolumeError, VolumeNotFoundError
from pydataplane.lvols import Volume
from pydataplane.lvstores import Lvstore
from pydataplane.volumenames import split_path
from pydataplane.volumes import Volumes

LOCK_S = 20.0
"""How long a connection before may take to end, seconds."""
LOOK_S = 0.1


class Destination:
    """One connection of a source, for one volume."""

    def __init__(
        self,
        volumes: Volumes,
        patient: Volumes,
        domains: Callable[[], Domains | None],
        requests: Input,
        answers: BinaryIO,
    ) -> None:
        """`patient` waits for calls that take their time; `domains` opens this host's libvirt."""
        self._volumes, self._patient, self._domains = volumes, patient, domains
        self._requests, self._answers = requests, answers
        self._of = ""
        self._steps: dict[str, Callable[[Message], Message]] = {
            "ping": lambda _: {},
            "prepare": self._prepare,
            "receive": self._receive,
            "finish": self._finish,
            "define": self._define,
            "start": self._start,
            "clean": self._clean,
            "cancel": self._cancel,
        }

    def serve(self) -> None:
        """Answers until the other side asks no more.

        Raises:
            VolumeError, TargetError, OSError, libvirt's: something cannot be done. The connection
                is at its end then; who has called says why, by `refuse`.
        """
        target = identity(self._volumes.client.path)
        say(
            self._answers,
            {"virtlun": version("virtlun"), "protocol": PROTOCOL, "target": target},
        )
        with ExitStack() as stack:
            while (request := self._requests.message()) is not None:
                step = self._steps.get(str(request.get("do")))
                if step is None:
                    raise VolumeError("what is asked for is not known to the version there")
                of = str(request.get("of", ""))
                if of and self._of == "":
                    self._of = of
                    self._lock(stack)
                elif of not in ("", self._of):
                    raise VolumeError("one connection is for one volume")
                say(self._answers, step(request))

    def _lock(self, stack: ExitStack) -> None:
        """Keeps others from the volume; one whose source was killed may take a moment to end."""
        what = f"volume {self._of} is coming from another host, or being moved"
        work = [(f"incoming {self._of}", what), (self._of, what)]
        end = time.monotonic() + LOCK_S
        while True:
            try:
                stack.enter_context(locked(self._volumes.client.path.parent, *work))
            except VolumeError:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK_S)
            else:
                return

    def _found(self) -> Volume | None:
        """Returns the volume that comes, by its UUID, also if it counts by now."""
        try:
            return self._volumes.volume(self._of)
        except VolumeNotFoundError:
            return None

    def _is_coming(self, volume: Volume) -> bool:
        note = notes.read(self._volumes, volume.uuid)
        return note is not None and note.of == volume.uuid

    def _arriving(self) -> Volume:
        """Returns the volume that has come.

        Raises:
            VolumeNotFoundError: it is not there.
        """
        volume = self._found()
        if volume is None:
            raise VolumeNotFoundError(f"there is no volume {self._of}, which had come: it is lost")
        return volume

    def _receiver(self, request: Message) -> Receiver:
        return Receiver(self._volumes, self._patient, _text(request, "to"))

    # Before anything is sent

    def _prepare(self, request: Message) -> Message:
        """May the volume come; `there`: part of it has, and `last` is its last snapshot's name."""
        receiver = self._receiver(request)
        receiver.take_back()
        to = "/".join(split_path(_text(request, "to")))
        movesnapshots.check_name(to.split("/")[1])
        store = self._volumes.lvstore(to.split("/")[0])
        notes.check_target(self._volumes.client, self._of)
        if (domain := request.get("domain")) is not None:
            self._check_domain(domain)
        present = self._found()
        if present is not None and self._is_coming(present) and present.path == to:
            _check_key(present, request.get("key"))
            # Of a command that was killed before it noted at the volume what it does.
            self._volumes.end_export(present.uuid)
            last = present.parent.partition("@")[2] if present.parent else None
            return {"there": True, "last": last, "allocated": present.allocated}
        if present is not None and self._is_coming(present):
            raise VolumeError(
                f"volume {present.path} is of an earlier move of the same volume: move it there,"
                f" or delete that (`virtlun volume delete --snapshots {present.path}`)"
            )
        if present is not None:
            raise VolumeError(
                f"the UUID {self._of} is that of volume {present.path} there, which counts: delete"
                " that if it is a copy of before, which nobody needs"
            )
        if (other := self._volumes.some([to])).get(to) is not None:
            raise VolumeError(
                f"volume {other[to].path} exists already, and is another one: choose another name"
                " (--to), or rename or delete it"
            )
        self._check_room(request, store)
        self._check_kind(request, store)
        return {"there": False, "last": None}

    def _check_room(self, request: Message, store: Lvstore) -> None:
        takes = _number(request, "allocated" if request.get("thin") else "size")
        if store.tells_room and store.free < takes:
            raise VolumeError(
                f"the volume needs {takes} bytes, and {store.name} has {store.free} left: free"
                " some, or choose another lvstore (--to)"
            )

    def _check_kind(self, request: Message, store: Lvstore) -> None:
        """Refuses an lvstore with blocks of another size, and a key that is not there."""
        client = self._volumes.client
        block = client.call("bdev_get_bdevs", name=store.base_bdev)[0]["block_size"]
        if block != _number(request, "block_size"):
            raise VolumeError(
                f"volumes of {store.name} have blocks of {block} bytes, and the one that comes has"
                f" those of {request['block_size']}, which what is on it counts in: choose another"
                " lvstore (--to)"
            )
        key = request.get("key")
        keys = {each["name"] for each in client.call("accel_crypto_keys_get")}
        if key is not None and key not in keys:
            raise VolumeError(
                f"there is no key {key}, by which the volume is encrypted: give it there (`virtlun"
                " key create`), or name another (--key)"
            )

    def _check_domain(self, wanted: Message) -> None:
        lost = [path for path in wanted["files"] if not os.path.exists(path)]  # noqa: PTH110
        names: dict[str, str] = wanted["volumes"]
        there = self._volumes.some(names)
        lost += [name for name in names if name not in there]
        if lost:
            raise VolumeError(
                f"domain {wanted['name']} needs {', '.join(map(str, lost))}, which is not there:"
                " take that there first"
            )
        for name, uuid in names.items():
            if there[name].uuid != uuid:
                raise VolumeError(
                    f"domain {wanted['name']} needs {name}, and what is called so there is another"
                    f" volume (UUID {there[name].uuid}, not {uuid}): move that there first, or"
                    " rename what is there"
                )
        self._arriving_domain().check(wanted)

    def _arriving_domain(self) -> ArrivingDomain:
        domains = self._domains()
        if domains is None:
            raise VolumeError("no gateway answers, which would define the domain: start it")
        return ArrivingDomain(domains)

    # What is sent

    def _receive(self, request: Message) -> Message:
        """Takes a stream, and says what the volume is then; older snapshots of the move go."""
        stream = Reader(cast(BinaryIO, ChunkReader(self._requests)))
        new = New()
        if stream.header.since is None:
            note = Note(self._of, _text(request, "from"))
            given = {str(k): str(v) for k, v in request.get("xattrs", {}).items()}
            new = New(
                thin=bool(request.get("thin")),
                key=request.get("key"),
                uuid=self._of,
                xattrs=given | {notes.XATTR: note.text},
            )
        else:
            present = self._arriving()
            if not self._is_coming(present) or present.path != _text(request, "to"):
                raise VolumeError(
                    f"volume {present.path} counts, or is of no move: it stays as it is"
                )
        made = self._receiver(request).receive(
            stream, new, lambda *_: None, movesnapshots.noted(self._of)
        )
        with suppress(TargetError, VolumeError):  # "clean" deletes what is left
            movesnapshots.delete(self._patient, made, keep=made.parent)
        return {
            "uuid": made.uuid,
            "size": made.size,
            "snapshot": (made.parent or "").partition("@")[2],
        }

    # When the source counts no more

    def _finish(self, request: Message) -> Message:
        """Has the volume be a disk; safe to repeat. `is_gone`: it is not there any more."""
        volume = self._found()
        if volume is None:
            return {"is_gone": True}
        if self._is_coming(volume):
            limits: dict[str, Any] = request.get("limits", {})
            if limits:
                limiting.put(self._volumes.client, volume.uuid, limits_of(limits))
            self._volumes.remove_xattr(volume.uuid, notes.XATTR)
        return {"path": volume.path}

    def _define(self, request: Message) -> Message:
        self._arriving_domain().define(
            _text(request, "domain"),
            _text(request, "xml"),
            autostart=bool(request.get("autostart")),
            again=bool(request.get("again")),
        )
        return {}

    def _start(self, request: Message) -> Message:
        self._arriving_domain().start(_text(request, "domain"))
        return {}

    def _clean(self, request: Message) -> Message:
        """Deletes the snapshots of the move."""
        movesnapshots.end(self._patient, self._arriving(), thin=bool(request.get("thin")))
        return {}

    def _cancel(self, request: Message) -> Message:
        """Deletes what has come of the volume.

        Raises:
            VolumeError: it counts.
        """
        self._receiver(request).take_back()
        volume = self._found()
        if volume is None:
            return {}
        if not self._is_coming(volume):
            raise VolumeError(f"volume {volume.path} is of no move, or counts: it stays")
        snapshots = movesnapshots.of(self._volumes, volume)
        self._patient.delete(volume.uuid)
        for each in snapshots:
            self._patient.delete(each.uuid, missing_ok=True)
        return {}


def refuse(answers: BinaryIO, why: str) -> None:
    """Says why something cannot be done; an OSError of `answers` passes through."""
    say(answers, {"error": " ".join(why.split())})


def _check_key(part: Volume, wanted: object) -> None:
    """Refuses to go on with what is encrypted otherwise than is asked for.

    Raises:
        VolumeError: it is.
    """
    if part.key != wanted:
        has = f"encrypted by key {part.key}" if part.key is not None else "not encrypted"
        asked = f"key {wanted}" if wanted is not None else "no key"
        raise VolumeError(
            f"what has come of volume {part.path} is {has}, and {asked} is asked for: name the same"
            " (--key), or give the move up first (--abort)"
        )


def _text(request: Message, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise VolumeError(f"what is asked for has no {name}")
    return value


def _number(request: Message, name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int):
        raise VolumeError(f"what is asked for has no {name}")
    return value
