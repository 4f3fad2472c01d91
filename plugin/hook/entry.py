"""The program. libvirtd runs it as `virtlun [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA`.

The domain's XML is on standard input; libvirtd waits for the end, shows standard error and takes
the exit status as the answer:

- prepare begin: controller and LUNs exist, with the right volumes, before QEMU starts. If not, exit
  status 1 and one sentence: libvirtd shows it and does not start the domain.
- migrate begin, restore begin (the guest has run before, on another host or from its saved state):
  all its volumes are there, or exit status 1. Nothing is made. XML may be printed, which libvirtd
  takes instead: with <reconnect> as it is right for the QEMU here; for a guest without a disk of
  ours with the controller where a target answers, with QEMU's own device in its place where none
  does (see pydataplane.domain.xml.carrier).
- reconnect begin (libvirtd was restarted): as prepare, but no volume is made, and always exit
  status 0, for libvirtd kills a running domain whose hook fails here.
- release end: the controller goes, unless a QEMU is connected to it.
- anything else, and domains without our metadata: exit status 0 at once, with nothing imported.
"""

from __future__ import annotations

import sys

from pydataplane.domain.names import NAMESPACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

MAX_XML_BYTES = 16 << 20

USAGE = """\
usage: virtlun-hook [--config FILE] DOMAIN OPERATION SUBOPERATION EXTRA
       virtlun-hook --install FILE
libvirt runs the first, with the domain's XML on standard input. The second writes the hook as one
file that needs the system's Python only: install it as /etc/libvirt/hooks/qemu.d/virtlun
"""

OPERATIONS = {
    ("prepare", "begin"),
    ("migrate", "begin"),
    ("restore", "begin"),
    ("reconnect", "begin"),
    ("release", "end"),
}


def main(arguments: Sequence[str] | None = None, stdin: BinaryIO | None = None) -> int:
    """Runs the hook; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if given[:1] == ["--install"] and len(given) == 2:
        return _install(given[1])
    config_path = None
    if given[:1] == ["--config"] and len(given) > 1:
        config_path = given[1]
        given = given[2:]
    if len(given) < 3:
        sys.stderr.write(USAGE)
        return 2
    domain, operation, suboperation = given[:3]
    xml = (stdin or sys.stdin.buffer).read(MAX_XML_BYTES)
    if (operation, suboperation) not in OPERATIONS or NAMESPACE.encode() not in xml:
        return 0
    try:
        from plugin.hook.operations import attempt  # noqa: PLC0415 - most domains are not ours

        why, instead = attempt(operation, xml, config_path)
        if instead is not None:
            sys.stdout.write(instead)
    except Exception as error:
        why = f"internal error: {error!r}"
    if why is None:
        return 0
    sys.stderr.write(f"virtlun: domain {domain}: {why}\n")
    return 0 if operation == "reconnect" else 1


def _install(path: str) -> int:
    from plugin.hook.archive import install  # noqa: PLC0415 - not in the archive itself

    try:
        install(path)
    except OSError as error:
        sys.stderr.write(f"virtlun-hook: {path}: {error.strerror}\n")
        return 1
    return 0
