"""Whether a guest can carry protection information: as configured where it boots, then as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import (
    Settings,
    attach,
    check_protection,
    define,
    detach,
    plan,
    present,
    refitted,
    with_target,
    without_target,
)
from tests.unit.translate.domains import (
    NAMES,
    NEW_UUID,
    SETTINGS,
    canonical,
    domain,
    lvol,
    overrides,
    pretty,
    text,
    translated,
    tree,
)
from tests.unit.translate.test_reconnect import LIBVIRT_RNG

LACKS, UNKNOWN = "/opt/older", "/opt/wrapper"


def has_it(path: str | None, arch: str | None) -> bool | None:
    """Takes two of these tests' QEMUs for ones without it, and all others for ones with it."""
    assert arch in ("x86_64", None)
    return {LACKS: False, UNKNOWN: None}.get(path or "", True)


ON = Settings(protection=True, qemu_protects=has_it)
OFF = replace(ON, protection=False)
CLIENT = domain(lvol("sda"))


def offered(xml: str) -> bool:
    """Whether the controller of libvirtd's domain offers it, as QEMU reads that and as we do."""
    value = overrides(xml).get("t10_pi")
    assert value in (None, "true")
    found = plan(xml)
    assert found is None or found.protection == (value == "true")
    return value is not None


def of_qemu(path: str, xml: str = CLIENT) -> str:
    return xml.replace("/usr/bin/qemu-system-x86_64", path)


def test_it_is_off_unless_it_is_configured_and_qemu_is_known_to_have_it() -> None:
    assert not offered(translated(CLIENT).xml)
    assert offered(translated(CLIENT, ON).xml)
    assert "type='bool' value='true'" in translated(CLIENT, ON).xml
    assert offered(translated(domain(), ON).xml), "for the first disk that is attached"
    etree.RelaxNG(etree.parse(LIBVIRT_RNG)).assertValid(tree(translated(text("plain"), ON).xml))
    for settings, xml in ((OFF, CLIENT), (ON, of_qemu(LACKS)), (ON, of_qemu(UNKNOWN))):
        made = translated(xml, settings)
        assert not offered(made.xml)
        assert made.plan is not None and not made.plan.protection
    made = define(CLIENT, ON, new_uuid=NEW_UUID)
    assert made.plan == plan(made.xml) and made.plan is not None and made.plan.protection
    alone = define(domain(lvol("vda", bus="virtio")), ON, new_uuid=NEW_UUID)
    assert alone.plan is not None and not alone.plan.protection
    assert "t10_pi" not in alone.xml


@pytest.mark.parametrize("name", NAMES)
def test_a_client_sees_nothing_of_it(name: str) -> None:
    given = text(name)
    for settings in (ON, OFF):
        made = pretty(translated(given, settings).xml)
        assert "t10_pi" not in present(made, live=False)
        assert canonical(present(made, live=False)) == canonical(
            present(pretty(translated(given).xml), live=False)
        )


@pytest.mark.parametrize(("then", "now"), [(ON, OFF), (OFF, ON)])
def test_who_defines_a_domain_gets_what_is_configured_now(then: Settings, now: Settings) -> None:
    had = translated(CLIENT, then).xml
    for given in (CLIENT, had):
        assert offered(translated(given, now, current=had).xml) == (now is ON)


@pytest.mark.parametrize(("then", "now"), [(ON, OFF), (OFF, ON)])
@pytest.mark.parametrize("disks", [lvol("sda"), ""])
def test_a_guest_that_goes_on_keeps_it(then: Settings, now: Settings, disks: str) -> None:
    """By its own XML or a client's, on this host or another one, whatever is configured there."""
    had = pretty(translated(domain(disks), then).xml)
    shown = present(had, live=True)
    for given, current in ((had, None), (had, had), (shown, had)):
        gone_on = define(
            given,
            replace(now, vhost_dir="/run/elsewhere"),
            new_uuid=NEW_UUID,
            current_xml=current,
            controller=True,
            served_in=had,
            running=True,
            as_stored=given is shown,
        )
        assert offered(gone_on.xml) == (then is ON)
        assert gone_on.plan is not None and gone_on.plan.protection == (then is ON)


@pytest.mark.parametrize(("then", "now"), [(ON, OFF), (OFF, ON)])
def test_a_definition_gets_it_for_its_next_boot(then: Settings, now: Settings) -> None:
    """Also by a revert, of one from another host, or where another disk changes."""
    had = translated(CLIENT, then).xml
    other = translated(domain(lvol("sdb", "w")), now).xml
    for current in (had, other):
        made = define(
            had, now, new_uuid=NEW_UUID, current_xml=current, served_in=had, as_stored=True
        )
        assert offered(made.xml) == (now is ON)
    boots = lvol("sdc", "c", more="<boot order='1'/>")
    added = attach(had, boots, now, live=False)
    assert added is not None and added.redefine and added.domain_xml is not None
    assert offered(added.domain_xml) == (now is ON)
    assert added.plan is not None and added.plan.protection == (now is ON)
    gone = detach(added.domain_xml, boots, now, live=False)
    assert gone is not None and offered(gone.domain_xml or "") == (now is ON)
    # With its first LUN a domain gets its controller, and so what is configured now.
    blk = define(domain(lvol("vda", "v", bus="virtio")), then, new_uuid=NEW_UUID).xml
    first = attach(blk, lvol("sda", "w"), now, live=False)
    assert first is not None and offered(first.domain_xml or "") == (now is ON)


def test_a_guest_that_boots_gets_what_is_configured_now() -> None:
    for then, now in ((ON, OFF), (OFF, ON)):
        had = pretty(translated(CLIENT, then).xml)
        fitted = refitted(had, now, boots=True)
        assert fitted is not None and offered(fitted) == (now is ON)
        assert canonical(fitted) == canonical(pretty(translated(CLIENT, now).xml))
        assert refitted(fitted, now, boots=True) is None
        assert refitted(had, now) is None, "it does not boot"
        both = refitted(had, replace(now, reconnect_s=4), boots=True)
        assert both is not None and "timeout='4'" in both and offered(both) == (now is ON)
    for path in (LACKS, UNKNOWN):
        had = of_qemu(path, translated(CLIENT, ON).xml)
        assert offered(had)
        fitted = refitted(had, ON, boots=True)
        assert fitted is not None and not offered(fitted), "it starts without"
    assert refitted(CLIENT, ON, boots=True) is None


def test_nothing_stands_in_for_a_controller_that_offers_it() -> None:
    """QEMU's own would refuse the guest's state: "Features unsupported"."""
    assert without_target(translated(domain(), ON).xml) is None
    alone = without_target(translated(domain(), OFF).xml)
    assert alone is not None and not offered(alone)
    again = with_target(alone, ON)
    assert again is not None and not offered(again), "its guest was never offered it"
    gone_on = define(alone, ON, new_uuid=NEW_UUID, controller=True, served_in=alone, running=True)
    assert not offered(gone_on.xml)


def test_a_guest_that_has_it_needs_a_qemu_with_it() -> None:
    had = translated(CLIENT, ON).xml
    for path in ("/usr/bin/qemu-system-x86_64", UNKNOWN):
        check_protection(of_qemu(path, had), OFF)
    with pytest.raises(TranslateError, match=rf"domain 'small' .* \({LACKS}\) has none") as caught:
        check_protection(of_qemu(LACKS, had), OFF)
    assert caught.value.refusal == Refusal.UNSUPPORTED
    check_protection(of_qemu(LACKS, translated(CLIENT, OFF).xml), ON)
    check_protection(of_qemu(LACKS), ON)
    bare = had.replace("<emulator>/usr/bin/qemu-system-x86_64</emulator>", "")
    with pytest.raises(TranslateError, match=r"its QEMU \(the default one\) has none"):
        check_protection(bare, replace(SETTINGS, qemu_protects=lambda *_: False))
