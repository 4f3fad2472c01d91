"""Nothing of any volume is left, before a test and after it."""

from __future__ import annotations

from tests.kubernetes.driver import Deployment
from tests.support.wait import until

CONVERGE_S = 120.0
"""What was cut off, or is on two nodes, has come to its end after so many seconds."""


def wait_nothing(deployment: Deployment, deadline_s: float = 60.0) -> None:
    """Waits until nothing of any volume is left on a node, for pods or for virtual machines."""
    deployment.wait_clean(deadline_s)
    target = deployment.client
    until(
        lambda: not target.call("vhost_get_controllers"),
        lambda: f"no controllers; left: {target.call('vhost_get_controllers')}",
        deadline_s,
    )
