"""What the service manager is told, if one has started us (sd_notify(3))."""

from __future__ import annotations

import os
import socket

import structlog

_log = structlog.get_logger(__name__)


def tell(state: str) -> None:
    """Tells it something, such as "READY=1"; failure is logged and no more."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address)
    except OSError as error:
        _log.warning("the service manager could not be told", state=state, error=str(error))
