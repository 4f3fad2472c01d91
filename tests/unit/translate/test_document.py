"""The text tree: positions, edits and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from pydataplane.domain.xml.document import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    PART_BYTES,
    Document,
    Edits,
    NotXmlError,
    UnreadError,
    escape,
    layout,
    reindent,
    texts_of,
)

TRICKY = """<?xml version="1.0"?>
<!-- <a> -->
<p:r xmlns:p='urn:p' xmlns="urn:d" a='>/"' ><b
  c="'/>"/><![CDATA[<no/>]]><?pi <x>?><b>ä/></b><c></c ><d e='&lt;&#10;'/>
</p:r>
"""


def test_each_element_is_found_at_its_bytes() -> None:
    document = Document(TRICKY)
    assert [document.source(node) for node in document.root.children] == [
        '<b\n  c="\'/>"/>',
        "<b>ä/></b>",
        "<c></c >",
        "<d e='&lt;&#10;'/>",
    ]
    assert document.root.name == "r"
    assert document.root.namespace == "urn:p"
    assert document.root.raw_name == "p:r"
    assert document.root.attrs == {"a": '>/"'}
    assert document.root.children[0].namespace == "urn:d"
    assert document.root.children[3].attrs == {"e": "<\n"}
    assert document.root.children[1].scope() == {"p": "urn:p", "": "urn:d"}


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        "<a b=1/>",
        "<a>&undefined;</a>",
        "<p:a/>",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>",
        "<!DOCTYPE a SYSTEM 'http://localhost/'><a/>",
        "<a>\ud800</a>",
        "<a>\x00</a>",
        "<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1),
        f"<a>{'x' * (4 << 20)}</a>",
    ],
)
def test_what_is_not_well_formed_or_dangerous_is_refused(bad: str) -> None:
    with pytest.raises(NotXmlError):
        Document(bad)


NAMES = st.sampled_from(["a", "b", "p:c"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=6)


def element(name: str, attribute: str, text: str, children: list[str]) -> str:
    return f"<{name} x='{escape(attribute)}'>{escape(text)}{''.join(children)}</{name}>"


ELEMENTS = st.recursive(
    st.builds(lambda name: f"<{name}/>", NAMES),
    lambda inner: st.builds(element, NAMES, TEXTS, TEXTS, st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(ELEMENTS)
def test_the_tree_is_the_one_that_lxml_sees(inner: str) -> None:
    xml = f"<r xmlns:p='urn:p'>{inner}</r>"
    document = Document(xml)
    theirs = list(etree.fromstring(xml.encode()).iter())
    ours = list(document.root.walk())
    assert [etree.QName(e).localname for e in theirs] == [n.name for n in ours]
    assert [etree.QName(e).namespace or "" for e in theirs] == [n.namespace for n in ours]
    assert [e.get("x") for e in theirs] == [n.attrs.get("x") for n in ours]
    for node in ours:
        assert document.source(node).startswith(f"<{node.raw_name}")
        assert document.source(node).endswith(">")


@given(ELEMENTS, st.data())
def test_taking_out_an_element_leaves_the_rest_byte_for_byte(
    inner: str, data: st.DataObject
) -> None:
    xml = f"<r xmlns:p='urn:p'>{inner}</r>"
    document = Document(xml)
    node = data.draw(st.sampled_from(list(document.root.walk())[1:]))
    edits = Edits(document)
    edits.replace(node.start, node.end, "")
    raw = xml.encode()
    assert edits.apply().encode() == raw[: node.start] + raw[node.end :]


def test_edits_at_the_same_place_stand_in_the_order_given() -> None:
    document = Document("<a>\n  <b/>\n</a>")
    node = document.root.children[0]
    edits = Edits(document)
    edits.insert(document.lead(node), "1")
    edits.insert(document.lead(node), "2")
    edits.remove(node)
    edits.insert(node.end, "3")
    assert edits.apply() == "<a>123\n</a>"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<a>\n  <b/>\n</a>", "<a>\n  <b/>\n  <n>\n    <m/>\n  </n>\n</a>"),
        ("<a><b/></a>", "<a><b/><n><m/></n></a>"),
        ("<a/>", "<a><n><m/></n></a>"),
        ("<a x='/' />", "<a x='/' ><n><m/></n></a>"),
        ("<a></a>", "<a><n><m/></n></a>"),
        ("<r>\n <a/>\n</r>", "<r>\n <a>\n   <n>\n     <m/>\n   </n>\n </a>\n</r>"),
        ("<r>\n <a></a>\n</r>", "<r>\n <a>\n   <n>\n     <m/>\n   </n>\n </a>\n</r>"),
        ("<r>\n <a>\n </a>\n</r>", "<r>\n <a>\n   <n>\n     <m/>\n   </n>\n </a>\n</r>"),
    ],
)
def test_an_appended_element_is_indented_like_its_neighbours(before: str, after: str) -> None:
    document = Document(before)
    root = document.root
    parent = root if root.name == "a" else root.children[0]
    edits = Edits(document)
    edits.append(parent, [(0, "<n>"), (1, "<m/>"), (0, "</n>")])
    assert edits.apply() == after


def test_reindent_moves_only_white_space_between_elements() -> None:
    before = "<d>\n  <a>x\n  y</a>\n  <!-- c\n  d -->\n  <b>\n    <c/>\n  </b>\n</d>"
    after = (
        "<d>\n      <a>x\n  y</a>\n  <!-- c\n  d -->\n      <b>\n        <c/>\n      </b>\n    </d>"
    )
    assert reindent(before, "\n    ") == after
    assert reindent("<d><a/></d>", "\n    ") == "<d><a/></d>"
    assert reindent(before, "") == before


def test_layout_without_indentation_is_one_line() -> None:
    assert layout([(0, "<a>"), (1, "<b/>"), (0, "</a>")], "") == "<a><b/></a>"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<a/>", "<a x='1' y='&lt;&apos;'/>"),
        ("<a></a>", "<a x='1' y='&lt;&apos;'></a>"),
        ('<a b="/" \n/>', "<a b=\"/\" x='1' y='&lt;&apos;' \n/>"),
        ("<a b='>' >/</a >", "<a b='>' x='1' y='&lt;&apos;' >/</a >"),
        ("<a b='ä/'><a/></a>", "<a b='ä/' x='1' y='&lt;&apos;'><a/></a>"),
    ],
)
def test_attributes_go_behind_those_that_are_there(before: str, after: str) -> None:
    document = Document(before)
    edits = Edits(document)
    edits.add_attributes(document.root, {"x": "1", "y": "<'"})
    assert edits.apply() == after


def test_more_elements_than_any_domain_has_are_refused() -> None:
    with pytest.raises(NotXmlError, match="more than 50000 elements"):
        Document(f"<a>{'<a/>' * MAX_ELEMENTS}</a>")
    Document(f"<a>{'<a/>' * (MAX_ELEMENTS - 1)}</a>")


def test_a_start_tag_has_no_end_of_attributes() -> None:
    """expat reads them at once, holding the interpreter's lock for seconds."""
    many = " ".join(f"a{i}=''" for i in range(PART_BYTES // 4))
    for before in (0, 1, PART_BYTES - 1, PART_BYTES):
        with pytest.raises(UnreadError, match="start tag"):
            Document(f"<a>{' ' * before}<b {many}/></a>")
        value = "'" + ">" * (PART_BYTES - len("<b c=''/>")) + "'"
        assert Document(f"<a>{' ' * before}<b c={value}/></a>").root.children[0].attrs


@pytest.mark.parametrize("before", [0, 1, PART_BYTES - 9, PART_BYTES - 1, PART_BYTES])
def test_what_is_long_is_read_in_parts(before: int) -> None:
    long = "é" * (2 * PART_BYTES)
    text = (
        f"{' ' * before}<a><!--{long}--><b x='é'>{long}<![CDATA[{long}]]></b><?p {long}?><c/></a>\n"
    )
    document = Document(text + " " * 3 * PART_BYTES)
    b, c = document.root.children
    assert b.text == long + long
    assert document.source(b) == f"<b x='é'>{long}<![CDATA[{long}]]></b>"
    assert document.source(c) == "<c/>"


@pytest.mark.parametrize(
    ("xml", "found"),
    [
        ("<d><b>1</b><a>x<!-- y --><![CDATA[z]]>&#33;</a>not well formed", ("d", "xz!", "1")),
        ("<d><c><a>no</a></c><a> 1<e>no</e>2 </a><a>second</a></d>", ("d", " 12 ", None)),
        ("<d xmlns='u'><a>no</a></d>", ("", None, None)),
        ("<d><x:a xmlns:x='u'>no</x:a></d>", ("d", None, None)),
        ("<a>1</a>", ("a", None, None)),
    ],
)
def test_the_first_texts_of_a_root(xml: str, found: tuple[str | None, ...]) -> None:
    root, texts = texts_of(xml, ("a", "b"))
    assert (root, texts.get("a"), texts.get("b")) == found


@pytest.mark.parametrize(
    "xml",
    [
        "",
        "<d><a>1</a>",
        "<!DOCTYPE d><d><a>1</a><b>2</b></d>",
        "\ud800",
        f"<d>{'<c/>' * MAX_ELEMENTS}<a/></d>",
        "<d>" * (MAX_DEPTH + 1),
    ],
)
def test_what_has_no_such_texts_within_its_bounds(xml: str) -> None:
    with pytest.raises(NotXmlError):
        texts_of(xml, ("a", "b"))
