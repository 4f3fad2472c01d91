"""Translates XML that a client gives for a running guest: migrated, saved, or restored.

Its disks have other names there at most: the same volume under a new one is known by its UUID.
"""

from __future__ import annotations

from functools import partial
from uuid import UUID

from plugin.gateway.call import Call
from pydataplane.domain import translate

_NO_UUID = UUID(int=0)


async def translated(
    call: Call, xml: str, current: str | None, *, running: bool = True, elsewhere: bool = False
) -> str:
    """Translates a client's XML for a running guest, which `current` describes.

    Without that, by which its disks are known, libvirtd gets what the client sent: it refuses a
    domain that is not the guest's, or says why nobody could read it. `running` is False for the
    definition that a guest has when it is started anew. `elsewhere`: it goes on at another host,
    where a volume may have a name that no target of this one knows.

    Raises:
        TranslateError: as `translate.define`; UNSUPPORTED where a volume is another, or no target
            says that it is the same.
    """
    services = call.services
    if current is None or not await services.parse(lambda: translate.has_devices(current)):
        return xml  # the guest has no controller, so it goes on without one
    carried = await services.parse(lambda: translate.has_controller(current))
    define = partial(
        services.define,
        xml,
        new_uuid=_NO_UUID,
        current_xml=current,
        controller=carried,
        client=call.parser,
        served_in=current,
        running=running,
        as_stored=True,
    )
    made = await define()
    if not running:
        return made.xml
    plan = await services.parse(lambda: translate.plan(current))
    had = {lun.dev: lun.volume.alias for lun in plan.luns} if plan is not None else {}
    luns = made.plan.luns if made.plan is not None else ()
    named = {lun.dev: lun.volume.alias for lun in luns if lun.volume.source is None}
    new = [alias for dev, alias in named.items() if had.get(dev) != alias]
    if new:  # the same volumes by other names, or others, which is refused
        found = await services.target.uuids(new)
        unknown = {} if elsewhere else dict.fromkeys(new, "")
        made = await define(uuids=unknown | found)
    return made.xml
