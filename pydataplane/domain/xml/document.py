"""XML as text with positions: a small read-only tree over bytes, and edits by byte range.

expat parses and says where each element begins and ends; edits splice the original bytes, so what
is not edited is not rewritten. Document types are refused (no entity of a client is ever expanded),
as are documents above libvirt's own limits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from xml.parsers import expat

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""libvirt's REMOTE_STRING_MAX."""
MAX_ELEMENTS = 50_000
"""A domain with every device that fits has some thousands. Each takes about 400 bytes parsed."""
MAX_DEPTH = 256
"""libxml2's default limit of nested elements."""
PART_BYTES = 128 * 1024
"""So much is given to expat at a time: it holds Python's interpreter lock meanwhile.

A start tag may have as much; of longer ones, which libvirt reads, those within two parts pass.
"""
DIGITS_MAX = 20
"""Of the largest number that libvirt reads, 64 bits."""

_START_TAG = re.compile(rb"<([^\s/>]++)(?:[^\"'>]++|\"[^\"]*+\"|'[^']*+')*+>")
_START = re.compile(rb"<[^!?/]")
_SPACE = b" \t\r\n"


class NotXmlError(ValueError):
    """Not well formed, too big, too deep, or with a document type."""


class UnreadError(NotXmlError):
    """Too big or with a document type: not read here, although libvirtd may take it."""


@dataclass(slots=True, eq=False)
class Node:
    """One element. Positions are byte offsets into the document."""

    name: str
    """Local name."""
    namespace: str
    """Namespace URI, '' for none."""
    attrs: dict[str, str]
    """Attributes without a namespace by name; others as 'URI name'."""
    start: int
    inner_start: int
    """End of the start tag."""
    parent: Node | None
    raw_name: str
    """As written, with its prefix."""
    declares: dict[str, str]
    """Namespace prefixes ('' for the default) that its start tag declares, and their URIs."""
    inner_end: int = 0
    """Start of the end tag; equal to `inner_start` for an empty-element tag."""
    end: int = 0
    children: Sequence[Node] = ()
    texts: Sequence[str] = ()

    @property
    def text(self) -> str:
        """Returns the element's own character data, CDATA included, comments left out."""
        return "".join(self.texts)

    @property
    def prefix(self) -> str:
        """Returns the element's prefix with its colon, '' for none."""
        prefix, colon, _ = self.raw_name.rpartition(":")
        return prefix + colon

    def child(self, name: str, namespace: str = "") -> Node | None:
        """Returns the first child element of this name, or None."""
        return next(self.every(name, namespace), None)

    def every(self, name: str, namespace: str = "") -> Iterator[Node]:
        """Yields the child elements of this name in order."""
        return (c for c in self.children if c.name == name and c.namespace == namespace)

    def at(self, *names: str) -> Node | None:
        """Returns the first element at a path of child names, or None."""
        node: Node | None = self
        for name in names:
            node = node.child(name) if node is not None else None
        return node

    def value(self, path: str, attribute: str) -> str | None:
        """Returns an attribute of the element at `path` ('a/b', '' for itself), or None."""
        node = self.at(*path.split("/")) if path else self
        return None if node is None else node.attrs.get(attribute)

    def scope(self) -> dict[str, str]:
        """Returns the namespace prefixes that are declared for this element, and their URIs."""
        found: dict[str, str] = {}
        node: Node | None = self
        while node is not None:
            found = node.declares | found
            node = node.parent
        return found

    def walk(self) -> Iterator[Node]:
        """Yields this element and all below it in document order."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))


class Document:
    """A parsed text: its bytes and its root element."""

    def __init__(self, text: str) -> None:
        """Parses `text`.

        Raises:
            NotXmlError: libvirtd, too, would refuse it, or nobody has reason to send it.
        """
        try:
            self.data = text.encode()
        except UnicodeEncodeError as error:
            raise NotXmlError(str(error)) from error
        if len(self.data) > MAX_DOCUMENT_BYTES:
            raise UnreadError(f"more than {MAX_DOCUMENT_BYTES} bytes")
        self.root = _Builder(self.data).build()

    def source(self, node: Node) -> str:
        """Returns the element as it was written."""
        return self.data[node.start : node.end].decode()

    def lead(self, node: Node) -> int:
        """Returns where the white space right before the element begins."""
        start = node.start
        while start > 0 and self.data[start - 1] in _SPACE:
            start -= 1
        return start

    def attributes_end(self, node: Node) -> int:
        """Returns where the element's start tag takes another attribute, behind those it has."""
        end = node.inner_start - 1
        if self.data[end - 1] == ord("/"):
            end -= 1
        while self.data[end - 1] in _SPACE:
            end -= 1
        return end

    def indent(self, node: Node) -> str:
        """Returns the line break and indentation before the element; '' if it begins no line."""
        space = self.data[self.lead(node) : node.start].decode()
        return space[space.rfind("\n") :] if "\n" in space else ""


def root_of(text: str) -> tuple[str, dict[str, str]]:
    """Returns name and attributes of a text's root element, reading no further than that.

    Raises:
        NotXmlError: it does not begin as XML does, or with a document type.
    """
    found: list[tuple[str, dict[str, str]]] = []

    def start(name: str, attrs: dict[str, str]) -> None:
        found.append((name, attrs))
        raise _RootFoundError

    def doctype(*_: object) -> None:
        raise NotXmlError("a document type declaration")

    parser = expat.ParserCreate("utf-8", " ")
    parser.StartElementHandler = start
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text.encode(), True)
    except _RootFoundError:
        return found[0]
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise NotXmlError(str(error)) from error
    raise NotXmlError("no element")


class _RootFoundError(Exception):
    """Ends `root_of`'s parsing."""


def texts_of(text: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Returns the root's name, and the text of its first child of each of these names.

    All of elements without a namespace, '' for a root in one. It reads no further than the last of
    those children, so what is behind it may be anything.

    Raises:
        NotXmlError: up to there, as `Document`.
    """
    path: list[str] = []
    found: dict[str, list[str]] = {}
    root, count, inside = "", 0, ""

    def start(name: str, _: object) -> None:
        nonlocal root, count, inside
        count += 1
        if count > MAX_ELEMENTS:
            raise UnreadError(f"more than {MAX_ELEMENTS} elements")
        if len(path) >= MAX_DEPTH:
            raise NotXmlError(f"more than {MAX_DEPTH} levels")
        path.append(name)
        if len(path) == 1:
            root = "" if " " in name else name
        elif len(path) == 2 and name in names and name not in found:
            found[name], inside = [], name

    def end(_: str) -> None:
        nonlocal inside
        path.pop()
        if len(path) == 1 and inside:
            inside = ""
            if len(found) == len(names):
                raise _RootFoundError

    def characters(data: str) -> None:
        if inside and len(path) == 2:
            found[inside].append(data)

    def doctype(*_: object) -> None:
        raise UnreadError("a document type declaration")

    parser = expat.ParserCreate("utf-8", " ")
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = doctype
    try:
        _feed(parser, text.encode())
    except _RootFoundError:
        pass
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise NotXmlError(str(error)) from error
    return root, {name: "".join(parts) for name, parts in found.items()}


def _feed(parser: expat.XMLParserType, data: bytes) -> None:
    """Has all of a text parsed, in parts.

    Raises:
        UnreadError: a start tag began before a part and does not end in it. All its attributes are
            read at once, for seconds if they are hundreds of thousands.
    """
    for start in range(0, len(data), PART_BYTES):
        parser.Parse(data[start : start + PART_BYTES], False)
        began = parser.CurrentByteIndex
        if 0 <= began < start and _START.match(data, began):
            raise UnreadError(f"a start tag of more than {PART_BYTES} bytes")
    parser.Parse(b"", True)


_NONE: dict[str, str] = {}
"""The namespaces that most elements declare."""


class _Builder:
    """expat's handlers; builds the tree of one document."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._root: Node | None = None
        self._open: list[Node] = []
        self._count = 0
        self._declares = _NONE
        parser = expat.ParserCreate("utf-8", " ")
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = self._doctype
        parser.StartNamespaceDeclHandler = self._declare
        self._parser = parser

    def build(self) -> Node:
        try:
            _feed(self._parser, self._data)
        except expat.ExpatError as error:
            raise NotXmlError(str(error)) from error
        assert self._root is not None
        return self._root

    def _start(self, name: str, attrs: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS:
            raise UnreadError(f"more than {MAX_ELEMENTS} elements")
        if len(self._open) >= MAX_DEPTH:
            raise NotXmlError(f"more than {MAX_DEPTH} levels")
        start = self._parser.CurrentByteIndex
        tag = _START_TAG.match(self._data, start)
        assert tag is not None
        namespace, _, local = name.rpartition(" ")
        parent = self._open[-1] if self._open else None
        raw_name, declares = tag[1].decode(), self._declares
        self._declares = _NONE
        node = Node(local, namespace, attrs, start, tag.end(), parent, raw_name, declares)
        if parent is None:
            self._root = node
        elif isinstance(parent.children, list):
            parent.children.append(node)
        else:  # most elements have none, and the collector looks at every list
            parent.children = [node]
        self._open.append(node)

    def _end(self, _name: str) -> None:
        node = self._open.pop()
        if self._data[node.inner_start - 2] == ord("/"):
            node.inner_end = node.end = node.inner_start
        else:
            node.inner_end = self._parser.CurrentByteIndex
            node.end = self._data.index(b">", node.inner_end) + 1

    def _text(self, data: str) -> None:
        node = self._open[-1]
        if isinstance(node.texts, list):
            node.texts.append(data)
        else:
            node.texts = [data]

    def _declare(self, prefix: str | None, uri: str | None) -> None:
        self._declares = {**self._declares, prefix or "": uri or ""}

    def _doctype(self, *_: object) -> None:
        raise UnreadError("a document type declaration")


class Edits:
    """Changes to one document, applied together. Ranges must not overlap."""

    def __init__(self, document: Document) -> None:
        """Begins with no change."""
        self._document = document
        self._edits: list[tuple[int, int, str]] = []

    def __bool__(self) -> bool:
        """Returns whether there is any change."""
        return bool(self._edits)

    def replace(self, start: int, end: int, text: str) -> None:
        """Puts `text` in the place of the bytes from `start` to `end`."""
        self._edits.append((start, end, text))

    def insert(self, at: int, text: str) -> None:
        """Puts `text` before the byte `at`; after what was put there earlier."""
        self._edits.append((at, at, text))

    def remove(self, node: Node) -> None:
        """Takes an element out, with the white space before it."""
        self._edits.append((self._document.lead(node), node.end, ""))

    def add_attributes(self, node: Node, values: dict[str, str]) -> None:
        """Writes attributes that the element lacks behind those it has."""
        place = self._document.attributes_end(node)
        for name, value in values.items():
            self.insert(place, f" {name}='{escape(value)}'")

    def insert_after(self, node: Node, lines: Lines) -> None:
        """Puts an element after its new sibling `node`, indented alike."""
        indent = self._document.indent(node)
        self.insert(node.end, indent + layout(lines, indent))

    def append(self, parent: Node, lines: Lines) -> None:
        """Puts an element at the end of `parent`, indented as its last child or two deeper."""
        document = self._document
        outer = document.indent(parent)
        last = parent.children[-1] if parent.children else None
        indent = document.indent(last) if last else (outer + "  " if outer else "")
        text = indent + layout(lines, indent)
        if parent.end == parent.inner_start:
            start = document.data.rindex(b"/", parent.start, parent.end)
            self.replace(start, parent.end, f">{text}{outer}</{parent.raw_name}>")
        elif last is not None:
            self.insert(last.end, text)
        elif (
            indent
            and parent.text.strip() == ""
            and b"\n" not in (document.data[parent.inner_start : parent.inner_end])
        ):
            self.insert(parent.inner_start, text + outer)
        else:
            self.insert(parent.inner_start, text)

    def apply(self) -> str:
        """Returns the text with all changes made."""
        data = self._document.data
        parts: list[bytes] = []
        done = 0
        # Insertions sort before a removal that begins at the same byte: they are outside of it.
        for start, end, text in sorted(self._edits, key=lambda e: (e[0], e[1])):
            assert start >= done, "edits overlap"
            parts += [data[done:start], text.encode()]
            done = end
        parts.append(data[done:])
        return b"".join(parts).decode()


Lines = list[tuple[int, str]]
"""An element to write: each line with its depth below the first."""


def layout(lines: Lines, indent: str) -> str:
    """Joins lines below `indent` (a line break and spaces); without one, in a single line."""
    if not indent:
        return "".join(line for _, line in lines)
    return indent.join("  " * depth + line for depth, line in lines)


def number(text: str | None) -> int | None:
    """Returns a decimal number of DIGITS_MAX digits at most, without a sign; None for all else."""
    if not text or len(text) > DIGITS_MAX or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def attributes(values: dict[str, str | None]) -> str:
    """Returns attributes as text, each with a space before it; those that are None left out."""
    return "".join(f' {name}="{escape(v)}"' for name, v in values.items() if v is not None)


def escape(text: str) -> str:
    """Returns `text` fit for character data and for attributes in either quotes."""
    for char, reference in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ('"', "&quot;"),
        ("'", "&apos;"),
        ("\t", "&#9;"),
        ("\n", "&#10;"),
        ("\r", "&#13;"),
    ):
        text = text.replace(char, reference)
    return text


def reindent(text: str, indent: str) -> str:
    """Moves an element's inner lines so that its end tag stands at `indent`.

    Only white space between elements moves; text, CDATA and comments keep every byte.
    """
    if not indent or "\n" not in text:
        return text
    document = Document(text)
    root = document.root
    tail = document.data[root.inner_start : root.inner_end].decode()
    tail = tail[len(tail.rstrip(" \t\r\n")) :]
    if "\n" not in tail or not indent:
        return text
    old = tail[tail.rfind("\n") :]
    if old == indent:
        return text
    edits = Edits(document)
    for node in root.walk():
        if not node.children or node.text.strip():
            continue
        gaps = [(document.lead(c), c.start) for c in node.children]
        close = node.inner_end
        while close > 0 and document.data[close - 1] in _SPACE:
            close -= 1
        for start, end in [*gaps, (close, node.inner_end)]:
            space = document.data[start:end].decode()
            if old in space:
                edits.replace(start, end, space.replace(old, indent))
    return edits.apply()
