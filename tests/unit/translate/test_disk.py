"""Which disks are ours, and what a disk of ours cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydataplane.domain.errors import Refusal, TranslateError
from pydataplane.domain.translate import Settings, VolumeRef, recognise
from pydataplane.domain.xml import boot
from pydataplane.domain.xml import disk as disks
from pydataplane.domain.xml.boot import carrier_dev, libvirt_order, place
from pydataplane.domain.xml.disk import Disk, index
from pydataplane.domain.xml.document import MAX_ELEMENTS, Document, NotXmlError
from tests.unit.translate.domains import SETTINGS, lvol


def disk(source: str, kind: str, *, device: str = "disk", bus: str = "scsi", more: str = "") -> str:
    return (
        f"<disk type='{kind}' device='{device}'><source {source}/>"
        f"<target dev='sda' bus='{bus}'/>{more}</disk>"
    )


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("dev='/dev/virtlun/lvs0/v-1'", "block"),
        ("file='/dev/virtlun/lvs0/v-1'", "file"),
        ("protocol='rbd' name='virtlun/lvs0/v-1'", "network"),
        ("protocol='lvol' name='lvs0/v-1'", "network"),
        ("pool='virtlun-lvs0' volume='v-1'", "volume"),
    ],
)
def test_the_five_ways_to_name_a_volume(source: str, kind: str) -> None:
    assert recognise(disk(source, kind), SETTINGS) == VolumeRef("lvs0", "v-1")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("dev='/dev/sda'", "block"),
        ("file='/dev/virtlun/lvs0/v'", "block"),
        ("file='/dev/virtlunx/lvs0/v'", "file"),
        ("protocol='rbd' name='images/lvs0/v'", "network"),
        ("protocol='nbd' name='virtlun/lvs0/v'", "network"),
        ("pool='default' volume='v'", "volume"),
        ("path='/run/virtlun/vhost/x'", "vhostuser"),
    ],
)
def test_other_disks_are_not_ours(source: str, kind: str) -> None:
    assert recognise(disk(source, kind), SETTINGS) is None


@pytest.mark.parametrize(
    "xml", ["", "<disk", "<interface type='user'/>", "<disk/><disk/>", "<disk/>"]
)
def test_what_is_no_single_disk_is_not_ours(xml: str) -> None:
    assert recognise(xml, SETTINGS) is None


@pytest.mark.parametrize(
    "xml",
    [
        "<!DOCTYPE disk [<!ENTITY p '/dev/virtlun/'>]>" + disk("dev='&p;lvs0/v'", "block"),
        disk("dev='/dev/virtlun/lvs0/v'", "block", more="<a/>" * MAX_ELEMENTS),
    ],
    ids=["document type", "elements"],
)
def test_what_is_not_read_and_may_be_ours_is_not_left_to_libvirtd(xml: str) -> None:
    with pytest.raises(TranslateError, match="may name virtlun volumes") as caught:
        recognise(xml, SETTINGS)
    assert caught.value.refusal is Refusal.BAD_XML


def test_ways_and_prefixes_are_configurable() -> None:
    off = Settings(rbd_prefix="", protocol="", pool_prefix="", path_prefix="/vol/")
    assert recognise(disk("protocol='rbd' name='virtlun/lvs0/v'", "network"), off) is None
    assert recognise(disk("protocol='lvol' name='lvs0/v'", "network"), off) is None
    assert recognise(disk("pool='virtlun-lvs0' volume='v'", "volume"), off) is None
    assert recognise(disk("dev='/dev/virtlun/lvs0/v'", "block"), off) is None
    assert recognise(disk("dev='/vol/lvs0/v'", "block"), off) == VolumeRef("lvs0", "v")


@pytest.mark.parametrize(
    "name",
    ["", "lvs0", "lvs0/", "/v", "a/b/c", "../v", "lvs0/..", "l vs/v", "lvs0/ä", "s/" + "v" * 64],
)
def test_a_malformed_name_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(TranslateError, match="is not LVSTORE/LVOL") as caught:
        recognise(disk(f"dev='/dev/virtlun/{name}'", "block"), SETTINGS)
    assert caught.value.refusal is Refusal.BAD_XML


def test_names_may_be_as_long_as_the_store_allows() -> None:
    ref = recognise(disk(f"dev='/dev/virtlun/{'s' * 63}/{'v' * 63}'", "block"), SETTINGS)
    assert ref == VolumeRef("s" * 63, "v" * 63)


OURS = "dev='/dev/virtlun/lvs0/v'"


def blockio(attributes: str) -> str:
    return disk(OURS, "block", more=f"<blockio {attributes}/>")


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        (
            disk(OURS, "block", device="cdrom"),
            r"cannot be a cdrom, nor its medium: .* \(device='disk'\)",
        ),
        (disk(OURS, "block", device="floppy"), "cannot be a floppy.* give the floppy a file"),
        (disk(OURS, "block", bus="sata"), "bus 'sata'.*use bus='scsi'"),
        (lvol("hda").replace(" bus='scsi'", ""), "bus 'ide'"),
        (disk(OURS, "block", more="<driver name='qemu' type='qcow2'/>"), "volumes are raw"),
        (
            disk(OURS, "block", more="<iotune><group_name>g</group_name></iotune>"),
            "<group_name> is not possible: each volume has limits of its own; give",
        ),
        (disk(OURS, "block", more="<transient/>"), "<transient> is not possible"),
        (
            disk(OURS, "block", more="<encryption format='luks'/>"),
            "<encryption> .*: the target encrypts",
        ),
        (blockio("logical_block_size='1024'"), "logical_block_size 1024 is not possible; use 512"),
        *(
            (
                blockio(f"physical_block_size='{size}'"),
                f"physical_block_size {size} is not possible; use a power of two from 512 to 2097",
            )
            for size in ("256", "3000", "4194304", "many")
        ),
        (
            blockio("logical_block_size='4096' physical_block_size='512'"),
            "physical_block_size of 512 is less than the logical_block_size of 4096",
        ),
    ],
)
def test_what_our_disks_cannot_be_is_refused_with_a_sentence(xml: str, words: str) -> None:
    with pytest.raises(TranslateError, match=words) as caught:
        recognise(xml, SETTINGS)
    assert caught.value.refusal is Refusal.UNSUPPORTED


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("<disk type='file'><source file='/dev/virtlun/l/v'/></disk>", "has no target dev"),
        (lvol("sdä"), "is no target dev"),
        (lvol("nvme0n1"), "is no target dev"),
        (lvol("sda", more="<serial>a;b</serial>"), "the serial may have"),
    ],
)
def test_bad_fields_are_refused_with_a_sentence(xml: str, words: str) -> None:
    with pytest.raises(TranslateError, match=words) as caught:
        recognise(xml, SETTINGS)
    assert caught.value.refusal is Refusal.BAD_XML


def test_what_does_not_concern_us_is_tolerated() -> None:
    more = (
        "<driver name='qemu' type='raw' cache='none' io='native' discard='unmap' iothread='1'/>"
        "<wwn>5000c50015ea71ad</wwn><vendor>V</vendor><backingStore/>"
        "<x:note xmlns:x='urn:example:note' thing='1'/>"
        "<blockio logical_block_size='512'/><address type='drive' controller='0' unit='1'/>"
    )
    assert recognise(lvol("sda", more=more), SETTINGS) is not None


@pytest.mark.parametrize(
    "attributes",
    [
        "logical_block_size='512' physical_block_size='512'",
        "logical_block_size='512' physical_block_size='4096'",
        "logical_block_size='4096' physical_block_size='4096'",
        "logical_block_size='4096'",
        "physical_block_size='4096'",
        "physical_block_size='2097152'",
    ],
)
def test_block_sizes_that_a_disk_can_have(attributes: str) -> None:
    assert recognise(blockio(attributes), SETTINGS) == VolumeRef("lvs0", "v")


def of(dev: str, bus: str) -> Disk:
    return Disk(dev, bus, "disk", None, None, None, False, False)


def test_disks_stand_where_libvirt_puts_them() -> None:
    named = [
        ("sdb", "scsi"),
        ("vdc", "virtio"),
        ("sda", "scsi"),
        ("hda", "ide"),
        ("vdaa", "virtio"),
        ("vda", "virtio"),
    ]
    order = [disk.dev for disk, _ in libvirt_order((of(dev, bus), False) for dev, bus in named)]
    assert order == ["sda", "sdb", "vda", "vdc", "vdaa", "hda"]
    assert place([], of("sda", "scsi")) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sda", "sdb", "sdc", "vda", "vdb", "sdaa", "x", "sd" + 7 * "a"]),
            st.sampled_from(["scsi", "virtio", "sata", ""]),
        ),
        max_size=20,
    )
)
def test_the_order_of_all_is_that_of_one_after_the_other(names: list[tuple[str, str]]) -> None:
    disks = [of(dev, bus) for dev, bus in names]
    one_by_one: list[Disk] = []
    for each in disks:
        one_by_one.insert(place(one_by_one, each), each)
    ordered = [disk for disk, _ in libvirt_order((disk, False) for disk in disks)]
    assert [id(disk) for disk in ordered] == [id(disk) for disk in one_by_one]


def test_each_of_many_disks_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str | None] = []

    def count(dev: str | None) -> int:
        looked.append(dev)
        return index(dev)

    monkeypatch.setattr(boot, "index", count)
    libvirt_order((of(f"sd{chr(97 + n % 26)}", "scsi"), False) for n in range(5000))
    assert len(looked) == 5000


def test_a_number_has_a_limit() -> None:
    assert index("sdzzzzzz") == 321_272_405 < 2**31
    assert index("sdaaaaaaa") == -1
    assert index("sd" + "a" * 1_000_000) == -1


@pytest.mark.parametrize("first", [False, True])
def test_a_carrier_that_finds_no_name_is_refused(*, first: bool) -> None:
    taken: list[str] = []
    with pytest.raises(TranslateError, match="is free for the virtlun controller") as caught:
        while len(taken) < 1000:
            taken.append(carrier_dev(first, taken))
    assert len(taken) == len(set(taken)) and caught.value.refusal is Refusal.UNSUPPORTED


PATH = "/dev/virtlun/lvs0/a"


@pytest.mark.parametrize(
    "text",
    [
        f"<disk><source file='{PATH}'/><target dev='sda'/></disk>",
        f'<disk type="file">\n  <source index="1" file="{PATH}"/>\n  <target dev="vda"/>\n</disk>',
        f"<disk><!-- <source file='{PATH}'/> --><source file='/dev/virtlun/lvs0/b'/></disk>",
        f"<disk><serial><![CDATA[<source file='{PATH}'/>]]></serial><target dev='sda'/></disk>",
        f"<disk><?a <source file='{PATH}'/>?><source file='{PATH}'/></disk>",
        f"<disk><source a='>' file='{PATH}'/></disk>",
        f"<disk><source a=\" file='{PATH}'\" file='/dev/virtlun/lvs0/b'/></disk>",
        f"<disk><source data-file='{PATH}' file='{PATH}'/></disk>",
        f"<disk><source dev='{PATH}'/><mirror><source file='{PATH}'/></mirror></disk>",
        f"<disk><source protocol='lvol' name='{PATH}'/><target dev='sda'/></disk>",
        f"<disk><source pool='virtlun-lvs0' volume='{PATH}'/><target dev='sda'/></disk>",
        f"<disk><source file='{PATH}&amp;'/></disk>",
        f"<disk><source file='{disks._ANY}'/><serial>{PATH}</serial></disk>",
        f"<disk><source file='{PATH}'/><serial>{disks._ANY}</serial></disk>",
        f"<disk><source file='{PATH}'/><serial>{PATH}</serial><driver type='aio'/></disk>",
        f"<disk><source file='{PATH}'></disk>",
        f"<disk><source file='{PATH}'/>",
        f"<x><source file='{PATH}'/></x>",
        "<disk/>",
        "",
    ],
)
def test_what_is_kept_of_a_disk_is_right_for_all_that_differ_in_their_path(text: str) -> None:
    """For each path, also where the text has it, or something like it, in another place."""

    def outcome(make: Callable[[], object]) -> object:
        try:
            return make()
        except NotXmlError:
            return NotXmlError

    for one in (text, text.replace(PATH, "/dev/virtlun/lvs0/other"), text):
        assert disks.stored(one) == disks._stored.__wrapped__(one)
        for live in (False, True):
            for indent in ("", "\n    "):
                given = (one, "sda", indent, live)
                plain = outcome(partial(disks._shown.__wrapped__, *given))
                assert outcome(partial(disks.shown, *given[:3], live=live)) == plain


def test_disks_of_many_domains_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's list of all domains translates each: what they have alike is not read again."""
    parsed: list[str] = []
    plain = Document.__init__

    def count(self: Document, text: str) -> None:
        parsed.append(text)
        plain(self, text)

    monkeypatch.setattr(Document, "__init__", count)
    for kept in (disks._stored, disks._shown):
        kept.cache_clear()

    def text(domain: int, disk: int) -> str:
        dev = "abcdefgh"[disk]
        path = f"/dev/virtlun/lvs0/d{domain}-{disk}"
        return f"<disk type='file'><source file='{path}'/><target dev='sd{dev}' bus='scsi'/></disk>"

    for domain in range(100):
        for disk in range(8):
            one = text(domain, disk)
            assert disks.stored(one) is not None
            assert f"d{domain}-{disk}'" in disks.shown(one, f"sd{disk}", "\n  ", live=False)
    assert len(parsed) == 2 * 8
