"""Other limits for a disk of ours: what changes in one side of a domain."""

from __future__ import annotations

from dataclasses import replace

from pydataplane.domain.limits import Limits
from pydataplane.domain.model import Change, Settings
from pydataplane.domain.translate.applying import applied
from pydataplane.domain.translate.operations import meant
from pydataplane.domain.xml import iotune
from pydataplane.domain.xml import view as views


def tuned(
    domain_xml: str, path: str, limits: Limits, settings: Settings, *, live: bool
) -> Change | None:
    """Gives the disk that `path` means these limits; None if it is not of ours.

    Args:
        domain_xml: as for `attach`.
        path: target dev, source path or LVSTORE/LVOL.
        limits: all that it is to have.
        settings: of the configuration.
        live: the side is the running domain's.

    Raises:
        TranslateError: our metadata is damaged (BAD_XML).
    """
    view = views.required(domain_xml)
    metadata = view.metadata
    if metadata is None:
        return None
    lun = meant([e.lun for e in metadata.entries], path, settings)
    entry = metadata.by_dev(lun.dev) if lun is not None else None
    if entry is None:
        return None
    lun = replace(entry.lun, limits=limits)
    new = replace(entry, lun=lun, text=iotune.replaced(entry.text, limits))
    after = metadata.without(entry).with_entry(new)
    return applied(view, after, new, settings, live=live, same=True)
