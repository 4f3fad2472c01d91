"""Whether a domain's QEMU is told to connect again: configured, or as the QEMU is that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from lxml import etree

from pydataplane.domain.translate import Settings, refitted, with_target, without_target
from tests.unit.translate.domains import canonical, carrier, domain, text, translated, tree

LIBVIRT_RNG = Path("/usr/share/libvirt/schemas/domain.rng")


def test_reconnect_is_asked_for_if_configured() -> None:
    xml = translated(text("plain"), Settings(reconnect_s=1)).xml
    reconnect = carrier(xml).find("source/reconnect")
    assert reconnect is not None
    assert dict(reconnect.attrib.items()) == {"enabled": "yes", "timeout": "1"}
    etree.RelaxNG(etree.parse(LIBVIRT_RNG)).assertValid(tree(xml))


def reconnect_s(xml: str) -> str | None:
    """Returns the interval that the carrier has, None for none."""
    node = carrier(xml).find("source/reconnect")
    return None if node is None else node.get("timeout")


NEWER = "/opt/qemu/bin/qemu-system-x86_64"


def newer(path: str | None, arch: str | None) -> bool:
    """Takes a QEMU of these tests for one that reconnects, and the default one for aarch64."""
    return path == NEWER or (path, arch) == (None, "aarch64")


@pytest.mark.parametrize(
    ("configured", "path", "expected"),
    [
        (None, NEWER, "1"),
        (None, "/usr/bin/qemu-system-x86_64", None),
        (0, NEWER, None),
        (7, NEWER, "7"),
        (7, "/usr/bin/qemu-system-x86_64", "7"),
    ],
)
def test_how_qemu_reconnects_follows_from_which_it_is(
    configured: int | None, path: str, expected: str | None
) -> None:
    settings = Settings(reconnect_s=configured, qemu_reconnects=newer)
    given = text("plain").replace("/usr/bin/qemu-system-x86_64", path)
    there = translated(given, settings).xml
    assert reconnect_s(there) == expected
    # Defined again it gets what is right then, and so does one that comes from another host.
    for before in (None, 5):
        old = translated(given, Settings(reconnect_s=before)).xml
        assert reconnect_s(translated(old, settings, current=old).xml) == expected
        fitted = refitted(old, settings)
        assert reconnect_s(fitted or old) == expected
        assert (fitted is None) == (reconnect_s(old) == expected)
        if fitted is not None:
            assert refitted(fitted, settings) is None
            assert canonical(fitted) == canonical(translated(given, settings).xml)
    alone = without_target(translated(domain(), settings).xml)
    assert alone is not None
    assert refitted(alone, settings) is None
    again = with_target(alone.replace("/usr/bin/qemu-system-x86_64", path), settings)
    assert again is not None
    assert reconnect_s(again) == expected


def test_without_an_emulator_it_is_the_one_of_the_architecture() -> None:
    bare = text("plain").replace("<emulator>/usr/bin/qemu-system-x86_64</emulator>", "")
    assert bare != text("plain")
    settings = Settings(qemu_reconnects=newer)
    assert reconnect_s(translated(bare, settings).xml) is None
    arm = bare.replace("x86_64", "aarch64")
    assert reconnect_s(translated(arm, settings).xml) == "1"


def test_what_libvirt_writes_of_a_reconnect_that_is_off_is_none() -> None:
    there = translated(text("plain"), Settings(reconnect_s=3)).xml
    off = there.replace("<reconnect enabled='yes' timeout='3'/>", "<reconnect enabled='no'/>")
    assert off != there
    assert refitted(off, Settings()) is None
    assert reconnect_s(refitted(off, Settings(reconnect_s=2)) or "") == "2"
    assert refitted(text("plain"), Settings(reconnect_s=2)) is None, "it has no controller"
