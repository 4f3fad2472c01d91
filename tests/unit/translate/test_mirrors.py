"""How a block copy is shown in a running domain's XML."""

from __future__ import annotations

import pytest

from pydataplane.domain.translate import Mirror, mirrored
from pydataplane.domain.xml.disk import parse_device, stored_text

DOMAIN = """\
<domain id='1'>
  <devices>
    <disk type='file'>
      <source file='/dev/virtlun/lvs0/a'/>
      <target dev='sda'/>
    </disk>
    <disk type='file'>
      <source file='/other'/>
      <target dev='sdb'/>
    </disk>
  </devices>
</domain>"""


@pytest.mark.parametrize(
    "disk_xml, ready, lines",
    [
        (
            "<disk type='file'><source file='/dev/virtlun/lvs1/b'/></disk>",
            True,
            '<mirror type="file" file="/dev/virtlun/lvs1/b" format="raw" job="copy" ready="yes">\n'
            "        <format type='raw'/>\n"
            '        <source file="/dev/virtlun/lvs1/b"/>\n'
            "      </mirror>",
        ),
        (
            "<disk type='network'><source protocol='rbd' name='virtlun/lvs1/&lt;b'/></disk>",
            False,
            '<mirror type="network" job="copy">\n'
            "        <format type='raw'/>\n"
            '        <source protocol="rbd" name="virtlun/lvs1/&lt;b"/>\n'
            "      </mirror>",
        ),
    ],
)
def test_it_stands_before_the_target(disk_xml: str, ready: bool, lines: str) -> None:
    made = mirrored(DOMAIN, {"sda": Mirror(disk_xml, ready)})
    assert made == DOMAIN.replace(
        "      <target dev='sda'/>", f"      {lines}\n      <target dev='sda'/>"
    )


def test_what_is_not_copied_stays() -> None:
    assert mirrored(DOMAIN, {"sdq": Mirror("<disk/>", True)}) == DOMAIN
    assert mirrored("<domain", {"sda": Mirror("<disk/>", True)}) == "<domain"


def test_it_is_not_kept() -> None:
    text = (
        "<disk><mirror><mirror/></mirror><target dev='sda'/><alias name='virtlun-disk-sda'/></disk>"
    )
    document = parse_device(text)
    assert document is not None
    assert stored_text(document, document.root) == "<disk><target dev='sda'/></disk>"
