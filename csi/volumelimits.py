"""How much I/O the volumes of this node may do: what their claims' VolumeAttributesClasses say.

A target keeps the limits of a volume in its lvstore by itself, until the volume is deleted. Of an
image of a pool of Ceph, which any node may have, they stand in its xattr `csi.limits`; a target has
them from when its node stages the image until it unstages it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog

from csi.attributes import Attributes
from csi.errors import precondition
from csi.lvols import Lvols
from csi.volumes import Owned
from pydataplane.domain import limiting
from pydataplane.domain.errors import ReconcileError
from pydataplane.domain.limits import NONE, Limits, limits_of
from pydataplane.errors import TargetError
from pydataplane.lvols import Volume

LIMITS_XATTR = "csi.limits"
"""JSON: those that are not 0, by virtlun_bdev_set_limits' names."""

log = structlog.get_logger()


class VolumeLimits:
    """The limits of one node's volumes; the caller holds the lock of the one that it means.

    Methods raise pydataplane.errors for the target's refusals, and FAILED_PRECONDITION where a
    target has no such limits.
    """

    def __init__(
        self, lvols: Lvols, wished: Callable[[Owned], Attributes | None] | None = None
    ) -> None:
        """Of `lvols`; `wished` tells the class that a volume is to have, None for none."""
        self._lvols = lvols
        self._wished = wished or (lambda _: None)

    def give(self, volume: Volume, wanted: Attributes) -> None:
        """Gives a volume the limits of a class, at once; idempotent."""
        if volume.pool is None:
            self._put(volume.uuid, wanted.onto(self._found(volume.uuid)))
            return
        limits = self._note(volume.uuid, wanted)
        if self._is_used(volume.uuid):
            self._put(volume.uuid, limits)

    def check_answers(self, volume: Volume) -> None:
        """Waits until an image's cluster says something, so that the caller waits without the lock.

        Raises:
            TargetError: it says nothing, or the target does not.
        """
        if volume.pool is not None:
            self._noted(volume.uuid)

    @contextmanager
    def in_use(self, owned: Owned) -> Iterator[None]:
        """Gives a volume its limits before the body, which has this node use it; idempotent."""
        volume = owned.volume
        self._before_use(volume, self._wished(owned))
        try:
            yield
        except Exception:
            with suppress(TargetError):  # the next attempt finds them
                if volume.pool is not None and not self._is_used(volume.uuid):
                    self.after_use(volume)
            raise

    def _before_use(self, volume: Volume, wished: Attributes | None) -> None:
        if volume.pool is not None:
            limits = self._note(volume.uuid, wished) if wished else self._noted(volume.uuid)
            self._put(volume.uuid, limits)
        elif wished is not None:
            self.give(volume, wished)

    def after_use(self, volume: Volume) -> None:
        """Takes an image's limits off this node's target, which does not use it any more."""
        if volume.pool is not None:
            self._put(volume.uuid, NONE)

    def _noted(self, handle: str) -> Limits:
        text = self._lvols.at(handle).xattrs(handle).get(LIMITS_XATTR)
        return limits_of(json.loads(text)) if text else NONE

    def _note(self, handle: str, wanted: Attributes) -> Limits:
        """Notes the limits of a class at an image, and returns what that has now."""
        before = self._noted(handle)
        limits = wanted.onto(before)
        volumes = self._lvols.at(handle)
        if limits == NONE != before:
            volumes.remove_xattr(handle, LIMITS_XATTR)
        elif limits != before:
            volumes.set_xattr(handle, LIMITS_XATTR, json.dumps(limits.given))
        return limits

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
