"""The page of the programs of others that tests run: see tests.support.clients."""

from __future__ import annotations

from tests.support.clients import CLIENTS

HEAD = """\
# Clients that are tried

Programs of others, unmodified, that the tests run against virtlun, or virtlun against them. Each
run of the tests prints the versions that it finds; a test compares this table with them.

| program | version | tried by |
| --- | --- | --- |
"""
FOOT = """
libvirt 11.3 and QEMU 10.0 of Debian's backports run the day's tests of `tests/libvirt` by night,
and some of the night's: every virsh command, limits of I/O, polkit.
Kubernetes, its sidecars and KubeVirt have [rows of their own](what-works.md#versions).
"""


def page() -> str:
    """Returns the page."""
    rows = []
    for each in CLIENTS:
        tests = ", ".join(f"[{name}](../../../tests/{name})" for name in each.tests)
        version = f"{each.version} and newer" if each.updated else each.version
        rows.append(f"| {each.name} | {version} | {tests} |\n")
    return HEAD + "".join(rows) + FOOT
