"""What a <disk> that is changed while its guest runs keeps where the new XML does not name it."""

from __future__ import annotations

from pydataplane.domain.xml.disk import QUEUES
from pydataplane.domain.xml.document import Document, Edits, attributes

_KEPT = {"driver": QUEUES, "blockio": ("physical_block_size",)}


def completed(text: str, before: str, *, queues: bool) -> str:
    """Returns a stored <disk> with the queues and physical block of the one before it.

    Those that it names are as it names them. `before` is the stored <disk> that its guest has;
    `queues`: it has some of its own.
    """
    document, had = Document(text), Document(before)
    edits = Edits(document)
    kept = _KEPT if queues else {"blockio": _KEPT["blockio"]}
    for element, names in kept.items():
        values = {
            name: value
            for name in names
            if (value := had.root.value(element, name)) is not None
            and document.root.value(element, name) is None
        }
        if not values:
            continue
        node = document.root.child(element)
        if node is not None:
            edits.add_attributes(node, values)
        else:
            edits.append(document.root, [(0, f"<{element}{attributes(dict(values))}/>")])
    return edits.apply()
