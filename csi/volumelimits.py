"""How much I/O the volumes of this node may do: what their claims' VolumeAttributesClasses say.

A target keeps the limits of a volume in its lvstore by itself, until the volume is deleted. Of an
image of a pool of Ceph, which any node may have, they stand in its xattr `csi.limits`; a target has
them from when its node stages the image until it unstages it. An image that never had a class has
no such xattr, and what somebody has limited by hand stays with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from csi.attributes import Attributes
from csi.errors import Failure, precondition
from csi.lvols import Lvols
from csi.volumes import OwnedVolume
from pydataplane.domain import limiting
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limits import NONE, Limits, limits_of
from pydataplane.errors import TargetError
from pydataplane.lvols import Volume

LIMITS_XATTR = "csi.limits"
"""JSON: those that are not 0, by virtlun_bdev_set_limits' names; `{}` where a class has none."""

log = structlog.get_logger()


class VolumeLimits:
    """The limits of one node's volumes; the caller holds the lock of the one that it means.

    Methods raise pydataplane.errors for the target's refusals, and FAILED_PRECONDITION where a
    target has no such limits.
    """

    def __init__(
        self, lvols: Lvols, wished: Callable[[OwnedVolume], Attributes | None] | None = None
    ) -> None:
        """Of `lvols`; `wished` tells the class that a volume is to have, None for none."""
        self._lvols = lvols
        self._wished = wished or (lambda _: None)

    def give(self, volume: Volume, wanted: Attributes) -> None:
        """Gives a volume the limits of a class, at once; idempotent."""
        if volume.pool is None:
            self._put(volume.uuid, wanted.onto(self._found(volume.uuid)))
        else:
            noted = self._noted(volume.uuid)
            self._give_image(volume.uuid, noted, wanted.onto(noted or NONE))

    def begin(self, volume: Volume, wanted: Attributes) -> None:
        """Gives a volume that nobody has yet the limits of a class alone, at once; idempotent.

        An earlier call, whose answer was lost, may have given it those of another class.
        """
        limits = wanted.onto(NONE)
        if volume.pool is None:
            self._put(volume.uuid, limits)
        else:
            self._give_image(volume.uuid, self._noted(volume.uuid), limits)

    def check_answers(self, volume: Volume) -> None:
        """Waits until an image's cluster says something, so that the caller waits without the lock.

        Raises:
            TargetError: it says nothing, or the target does not.
        """
        if volume.pool is not None:
            self._noted(volume.uuid)

    @contextmanager
    def in_use(self, owned: OwnedVolume) -> Iterator[None]:
        """Gives a volume its limits before the body, which has this node use it; idempotent."""
        volume = owned.volume
        self._before_use(volume, self._wished(owned))
        try:
            yield
        except Exception:
            with suppress(TargetError, Failure):  # the next attempt finds them
                if volume.pool is not None and not self._is_used(volume.uuid):
                    self.after_use(volume)
            raise

    def _before_use(self, volume: Volume, wished: Attributes | None) -> None:
        if volume.pool is None:
            if wished is not None:
                self.give(volume, wished)
            return
        noted = self._noted(volume.uuid)
        limits = noted if wished is None else wished.onto(noted or NONE)
        if limits is not None:
            self._put(volume.uuid, limits)
            self._note(volume.uuid, noted, limits)

    def after_use(self, volume: Volume) -> None:
        """Takes an image's limits off this node's target, which does not use it any more.

        Not those of one that has had no class: somebody has set them by hand.
        """
        if volume.pool is not None and self._noted(volume.uuid) is not None:
            self._put(volume.uuid, NONE)

    def _give_image(self, handle: str, noted: Limits | None, limits: Limits) -> None:
        """Limits an image where this node uses it, and notes that once the target has taken it."""
        if self._is_used(handle):
            self._put(handle, limits)
        self._note(handle, noted, limits)

    def _noted(self, handle: str) -> Limits | None:
        """Returns the limits that are noted at an image; None: it has had no class."""
        text = self._lvols.at(handle).xattrs(handle).get(LIMITS_XATTR)
        if text is None:
            return None
        try:
            return limits_of(dict(json.loads(text)))
        except (TypeError, ValueError, RecursionError):
            log.error("the limits noted at an image make no sense", volume_id=handle, noted=text)
            return None

    def _note(self, handle: str, before: Limits | None, limits: Limits) -> None:
        if limits != before:
            volumes = self._lvols.at(handle)
            volumes.set_xattr(handle, LIMITS_XATTR, json.dumps(limits.given))

    def _found(self, handle: str) -> Limits:
        return limiting.found(self._lvols.targets.of(handle), handle)

    def _put(self, handle: str, limits: Limits) -> None:
        if self._found(handle) == limits:
            return
        try:
            limiting.put(self._lvols.targets.of(handle), handle, limits)
        except ReconcileError as error:
            raise precondition(f"volume {handle} is not limited: {error}") from error
        log.info("limited", volume_id=handle, **limits.given)

    def _is_used(self, handle: str) -> bool:
        """Whether somebody has an image on this node's target."""
        (bdev,) = self._lvols.targets.of(handle).call("bdev_get_bdevs", name=handle)
        return bool(bdev["claimed"])
