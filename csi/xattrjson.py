"""What the driver notes at an lvol, in a xattr, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True)
class XattrJson:
    """What stands in such a xattr: the fields of each kind."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns what a xattr says; what a newer driver wrote beside it is left out."""
        found = json.loads(text)
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})

    def written(self) -> str:
        """Returns the text of the xattr."""
        return json.dumps(asdict(self))
