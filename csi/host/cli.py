"""The command `virtlun-csi-helper`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from csi import kernel
from csi.host.confined import Confined
from csi.host.local import EXPORT_DIR
from csi.host.server import Server, log
from csi.host.syscalls import Denial

VHOST_DIR = Path("/run/virtlun/vhost")
CAPABILITIES = frozenset({kernel.CAP_DAC_OVERRIDE, kernel.CAP_SYS_ADMIN, kernel.CAP_SYS_RESOURCE})
"""For the target's files, which are its user's; for mounts and loop devices; for ext4's growth."""


def main() -> None:
    """Does for the driver of this node what takes rights, and nothing else.

    It gives up all other rights when it starts, and denies itself and the programs that it runs the
    system calls that they do not need. What it has mounted stays when it ends.
    """
    parser = argparse.ArgumentParser(
        "virtlun-csi-helper",
        description="Mounts, makes loop devices and file systems for virtlun-csi, which then needs "
        "no right to. Gives up what it does not need for that.",
    )
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        default="/run/virtlun-csi/helper.sock",
        help="where the driver connects (default: %(default)s)",
    )
    parser.add_argument(
        "--uid",
        type=int,
        default=0,
        help="user of the driver, by number; others are refused (default: %(default)s)",
    )
    parser.add_argument(
        "--kubelet-dir",
        type=Path,
        metavar="PATH",
        default="/var/lib/kubelet",
        help="kubelet's folder: only its CSI volumes are mounted (default: %(default)s)",
    )
    for name, default, what in (
        ("export-dir", EXPORT_DIR, "exported volumes"),
        ("vhost-dir", VHOST_DIR, "vhost-user sockets"),
    ):
        text = f"the target's folder of {what}; of several targets, give each (default: {default})"
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", action="append", help=text)
    parser.add_argument(
        "--no-sandbox",
        action="store_true",
        help="allow every system call, to find a fault; without it those that neither the helper "
        "nor mkfs and the like need fail",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        confined = Confined(
            given.kubelet_dir, given.export_dir or [EXPORT_DIR], given.vhost_dir or [VHOST_DIR]
        )
        denial = None if given.no_sandbox else Denial(log)
        refused = denial.names if denial else list
        server = Server(given.socket, confined, given.uid, refused)  # it gives that to the user
        kernel.keep_capabilities(CAPABILITIES)
        if denial:
            denial.begin()
    except OSError as error:
        sys.exit(f"virtlun-csi-helper: cannot serve at {given.socket}: {error}")
    log("serving", socket=given.socket)
    server.serve()


if __name__ == "__main__":
    main()
