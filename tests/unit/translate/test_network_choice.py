"""A domain says which of its disks over the network are ours, and what follows of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.model import Settings
from pydataplane.domain.names import NETWORK_NAMESPACE
from pydataplane.domain.translate import (
    attach,
    define,
    detach,
    identify,
    is_foreign,
    listing,
    may_be_far,
    names_network,
    networkchoice,
    present,
    recognise,
    stays_qemus,
    update,
)
from tests.unit.translate.domains import NEW_UUID, ROOT, SETTINGS, canonical, domain, lvol, plain
from tests.unit.translate.domains import translated as made_for_a_run
from tests.unit.translate.test_network import ALLOWED, RBD
from tests.unit.translate.test_network import NBD as EXPORT

HOST = replace(SETTINGS, network=frozenset({"rbd"}), allowed=ALLOWED)
"""Serves images of Ceph, and lets nobody ask for more."""
ASKED = replace(SETTINGS, on_request=frozenset({"rbd"}), allowed=ALLOWED)
"""Serves none, unless a domain asks for images of Ceph."""
BOTH = replace(HOST, on_request=frozenset({"nbd"}))


NBD = EXPORT.replace("<source", "<driver name='qemu' type='raw'/><source", 1)
"""As libvirt writes it."""


def element(serve: str, prefix: str = "virtlun") -> str:
    return f'<{prefix}:network xmlns:{prefix}="{NETWORK_NAMESPACE}" serve="{serve}"/>'


def saying(serve: str | None, disks: str = RBD + NBD, more: str = "") -> str:
    """Returns a client's domain."""
    inside = f"{element(serve) if serve is not None else ''}{more}"
    extra = f"<metadata>{inside}</metadata>" if inside else ""
    return domain(plain("vda", "virtio") + disks, extra=extra)


def ours(xml: str) -> list[str]:
    """Returns the target devs of the disks of libvirtd's XML that are ours."""
    return sorted(networkchoice.served_in(xml))


@pytest.mark.parametrize(
    ("settings", "serve", "devs"),
    [
        (HOST, None, ["sdb"]),
        (HOST, "", []),
        (HOST, "rbd", ["sdb"]),
        (ASKED, None, []),
        (ASKED, "", []),
        (ASKED, "rbd", ["sdb"]),
        (BOTH, None, ["sdb"]),
        (BOTH, "nbd", ["sdc"]),
        (BOTH, " nbd\trbd ", ["sdb", "sdc"]),
    ],
)
def test_a_domain_goes_before_its_host(
    settings: Settings, serve: str | None, devs: list[str]
) -> None:
    given = saying(serve)
    made = made_for_a_run(given, settings)
    assert ours(made.xml) == devs
    assert made.plan is not None
    assert sorted(lun.dev for lun in made.plan.luns) == devs
    # What clients see is theirs, and makes the same again.
    shown = present(made.xml, live=False)
    assert canonical(shown) == canonical(given)
    assert made_for_a_run(shown, settings, made.xml).plan == made.plan
    assert made_for_a_run(made.xml, settings).plan == made.plan


@pytest.mark.parametrize(
    ("settings", "serve", "protocol"),
    [(HOST, "nbd", "nbd"), (HOST, "rbd nbd", "nbd"), (SETTINGS, "rbd", "rbd")],
)
def test_what_its_host_does_not_allow_is_refused_in_one_sentence(
    settings: Settings, serve: str, protocol: str
) -> None:
    with pytest.raises(TranslateError) as refused:
        made_for_a_run(saying(serve), settings)
    assert refused.value.refusal is Refusal.UNSUPPORTED
    assert refused.value.message == (
        "domain 'small' asks in its metadata (<network serve=>) that virtlun serves its"
        f" {protocol} disks, which this host does not allow: add {protocol} to"
        " serve_network_on_request in virtlun.toml, or leave it out of serve"
    )
    # Also where such a source is wrong, and not where there is none.
    with pytest.raises(TranslateError, match="which this host does not allow"):
        made_for_a_run(saying("rbd", RBD.replace("<host name", "<host x")), SETTINGS)
    assert ours(made_for_a_run(saying(serve, lvol("sda")), settings).xml) == []
    qemus = RBD.replace('device="disk"', 'device="cdrom"').replace('"sdb"', '"sdd"')
    assert ours(made_for_a_run(saying("nbd", qemus), SETTINGS).xml) == []


@pytest.mark.parametrize("serve", ["rbd", ""])
def test_what_a_domain_has_stays_whose_it_is(serve: str) -> None:
    """Of a guest that comes from another host, is restored, or whose other disk changes."""
    before = made_for_a_run(saying(serve, RBD + lvol("sda")), ASKED).xml
    devs = ["sdb"] if serve else []
    assert ours(before) == devs
    for settings in (SETTINGS, HOST, BOTH):
        again = define(before, settings, new_uuid=NEW_UUID, served_in=before, running=True)
        assert ours(again.xml) == devs
        for live in (False, True):
            gone = detach(before, lvol("sda"), settings, live=live)
            assert gone is not None
        assert gone is not None and gone.domain_xml is None
        gone = detach(before, lvol("sda"), settings, live=False)
        assert gone is not None and gone.domain_xml is not None
        assert ours(gone.domain_xml) == devs
        assert element(serve) in gone.domain_xml
        if devs:
            changed = update(before, RBD, settings, live=True)
            assert changed is not None


def test_what_is_attached_is_as_the_domain_says() -> None:
    for settings, serve, qemus in (
        (HOST, None, False),
        (HOST, "", True),
        (HOST, "rbd", False),
        (ASKED, None, True),
        (ASKED, "rbd", False),
        (SETTINGS, None, True),
    ):
        running = made_for_a_run(saying(serve, ""), settings).xml
        for live in (True, False):
            assert stays_qemus(running, RBD, settings, live=live) is qemus
            assert (attach(running, RBD, settings, live=live) is None) is qemus
    elsewhere = made_for_a_run(saying("rbd", ""), ASKED).xml
    for act in (stays_qemus, attach):
        with pytest.raises(TranslateError, match="which this host does not allow: add rbd"):
            act(elsewhere, RBD, SETTINGS, live=True)
    assert attach(elsewhere, lvol("sda"), SETTINGS, live=True) is not None
    assert stays_qemus("<domain", RBD, HOST, live=True)
    # A source that is wrong is for QEMU to judge where it is QEMU's.
    wrong = RBD.replace("<auth", '<config file="/home/me/ceph.conf"/><auth', 1).replace(
        "</source>", "", 1
    )
    wrong = wrong.replace("</auth>", "</auth></source>", 1)
    assert stays_qemus(made_for_a_run(saying("", ""), HOST).xml, wrong, HOST, live=True)
    with pytest.raises(TranslateError, match="its config file"):
        stays_qemus(made_for_a_run(saying("rbd", ""), HOST).xml, wrong, HOST, live=True)


def test_a_disk_of_ours_gets_another_source_as_the_domain_says() -> None:
    with_volume = made_for_a_run(saying("rbd", lvol("sdb")), ASKED).xml
    changed = update(with_volume, RBD, ASKED, live=False)
    assert changed is not None and changed.lun.volume.source is not None
    without = made_for_a_run(saying("", lvol("sdb")), HOST).xml
    for given, settings in ((without, HOST), (with_volume, replace(ASKED, network=frozenset()))):
        if given is without:
            with pytest.raises(TranslateError, match="no virtlun volume"):
                update(given, RBD, settings, live=False)
    image = made_for_a_run(saying("rbd", RBD), BOTH).xml
    export = NBD.replace("sdc", "sdb")
    with pytest.raises(TranslateError, match="no virtlun volume"):
        update(image, export, replace(BOTH, network=frozenset({"rbd", "nbd"})), live=False)


def test_what_a_domain_may_have_a_word_about_is_known_before_that_is_read() -> None:
    for disk in (RBD, NBD, RBD.replace("rbd", "&#114;bd")):
        assert names_network(disk)
        assert may_be_far(disk, SETTINGS)
    assert not names_network(lvol("sda"))
    assert not may_be_far(RBD.replace("volumes/volume-1", "virtlun/lvs0/v"), ASKED)
    assert not may_be_far(lvol("sda"), ASKED)
    assert not may_be_far(RBD.replace("</disk>", ""), ASKED)
    assert recognise(RBD, ASKED) is None
    given = saying("rbd", RBD.replace("rbd", "&#114;bd"))
    assert not is_foreign(given, SETTINGS)
    assert ours(made_for_a_run(given, ASKED).xml) == ["sdb"]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (element("rdb"), "'rdb' is none of iscsi, nbd, rbd"),
        (element("rbd").replace("serve", "served"), "it has the attribute serve"),
        (element("rbd").replace("/>", " disk='sda'/>"), "and nothing else"),
        (element("rbd").replace("/>", ">sdb</virtlun:network>"), "and nothing else"),
        (element("rbd").replace("/>", "><a/></virtlun:network>"), "and nothing else"),
        (element("rbd").replace(":network", ":networks"), "<networks> is not known there"),
        (element("rbd") + element("nbd", "b"), "several"),
    ],
)
def test_what_cannot_be_understood_is_refused(inside: str, why: str) -> None:
    """And what was never to be understood keeps nothing else from going on."""
    with pytest.raises(TranslateError) as refused:
        made_for_a_run(saying(None, RBD, inside), ASKED)
    assert refused.value.refusal is Refusal.BAD_XML
    assert why in refused.value.message
    assert f"<network> of {NETWORK_NAMESPACE} is wrong" in refused.value.message
    had = made_for_a_run(saying("rbd", RBD + lvol("sda")), ASKED).xml
    damaged = had.replace(element("rbd"), inside)
    assert ours(define(damaged, ASKED, new_uuid=NEW_UUID, served_in=damaged).xml) == ["sdb"]
    assert detach(damaged, lvol("sda"), ASKED, live=False) is not None
    assert attach(damaged, lvol("sdd", "w"), ASKED, live=True) is not None
    assert identify(damaged, {"lvs0/v": "0" * 8}) is not None


def test_it_is_as_its_schema_says() -> None:
    schema = etree.RelaxNG(etree.parse(ROOT / "schemas/network-metadata.rng"))
    for serve in ("", "rbd", "nbd iscsi rbd"):
        schema.assertValid(etree.fromstring(element(serve)))
    for wrong in (element("rdb"), f'<network xmlns="{NETWORK_NAMESPACE}"/>'):
        assert not schema.validate(etree.fromstring(wrong))


def test_a_domain_says_something_else() -> None:
    stored = made_for_a_run(saying("rbd", RBD), ASKED).xml
    for text, devs in (('<network serve=""/>', []), (None, []), (element("rbd", "x"), ["sdb"])):
        said = networkchoice.saying(stored, text)
        assert said.count(NETWORK_NAMESPACE) == (text is not None)
        again = define(said, ASKED, new_uuid=NEW_UUID, current_xml=said)
        assert ours(again.xml) == devs
        assert etree.fromstring(again.xml.encode()).find("metadata") is not None
    first = networkchoice.saying(domain(RBD), "<network serve='rbd'/>")
    assert ours(made_for_a_run(first, ASKED).xml) == ["sdb"]
    for wrong in ("<network", "<network/>", "<disks serve='rbd'/>", "<a:network serve=''/>"):
        with pytest.raises(TranslateError) as refused:
            networkchoice.saying(stored, wrong)
        assert refused.value.refusal is Refusal.BAD_XML


def test_a_snapshot_that_is_defined_anew_has_what_its_own_domain_says() -> None:
    current = made_for_a_run(saying("", RBD), ASKED).xml
    for serve in ("rbd", ""):
        inner = saying(serve, RBD)
        xml = f"<domainsnapshot><name>s</name>{inner}</domainsnapshot>"
        made = listing.define_inside(xml, current, ASKED).xml
        start, end = made.index("<domain "), made.index("</domain>") + len("</domain>")
        assert ours(made[start:end]) == (["sdb"] if serve else [])


@pytest.mark.parametrize("had", [True, False])
def test_a_snapshot_that_is_defined_anew_keeps_what_it_had(had: bool) -> None:
    """Whatever this host serves, and the domain has by now, where it says nothing itself."""
    theirs, served = (
        define(domain(RBD), Settings(network=network), new_uuid=NEW_UUID, controller=True).xml
        for network in (frozenset[str](), frozenset({"rbd"}))
    )
    host = Settings(network=frozenset() if had else frozenset({"rbd"}))
    then, now = (served, theirs) if had else (theirs, served)
    xml = f"<domainsnapshot><name>s</name>{domain(RBD)}</domainsnapshot>"
    for current, held_in in ((then, None), (now, then)):
        made = listing.define_inside(xml, current, host, held_in).xml
        start, end = made.index("<domain "), made.index("</domain>") + len("</domain>")
        assert ours(made[start:end]) == (["sdb"] if had else [])
    assert listing.name_of(xml) == "s"
