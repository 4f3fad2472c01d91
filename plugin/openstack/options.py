"""What a backend's section of cinder.conf has of this driver."""

from __future__ import annotations

from oslo_config import cfg

from pydataplane import sockets
from pydataplane.client import DEFAULT_TIMEOUT_S

OPTIONS = [
    cfg.StrOpt("virtlun_lvstore", help="The lvstore that has this backend's volumes."),
    cfg.StrOpt(
        "virtlun_rpc_socket",
        default=sockets.DEFAULT,
        help="The JSON-RPC socket of the target that has it.",
    ),
    cfg.FloatOpt(
        "virtlun_timeout",
        default=DEFAULT_TIMEOUT_S,
        min=1,
        help="Seconds that the target may take to answer.",
    ),
    cfg.FloatOpt(
        "virtlun_zeroing_timeout",
        default=3600,
        min=1,
        help="Seconds that it may take to make or grow a volume, all of which it zeroes if the "
        "volume is thick.",
    ),
    cfg.StrOpt(
        "virtlun_compute_host",
        help="What nova-compute on this host is called (its option host), where that is not the "
        "name of cinder-volume's host.",
    ),
]
