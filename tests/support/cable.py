"""Two hosts with a network each, and the cable between them, which can be pulled."""

from __future__ import annotations

import os

from tests.support.network import ip


class Cable:
    """A network namespace for each of two hosts, and a link between the two; a context manager.

    Nothing else is reached from there by a network; files and sockets in them are. Needs root.
    """

    def __init__(self) -> None:
        """Makes them, with an address each."""
        number = os.getpid()
        self.networks = (f"vlh{number}a", f"vlh{number}b")
        """Names of the namespaces, of the first host and of the second."""
        self.addresses = ("10.95.0.1", "10.95.0.2")
        """Theirs in this order; they are no addresses of this machine."""
        made = []
        try:
            for name in self.networks:
                ip("netns", "add", name)
                made.append(name)
            first, second = self.networks
            ends = ("peer", "name", "cable", "netns", second)
            ip("-n", first, "link", "add", "cable", "type", "veth", *ends)
            for name, address in zip(self.networks, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except BaseException:
            for name in made:
                ip("netns", "delete", name)
            raise

    def pull(self) -> None:
        """Nothing goes through any more, and neither end is told."""
        ip("-n", self.networks[1], "link", "set", "cable", "down")

    def plug(self) -> None:
        """It is as it was."""
        ip("-n", self.networks[1], "link", "set", "cable", "up")

    def __enter__(self) -> Cable:
        """Returns it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it away; what runs in the namespaces goes on without a name for them."""
        for name in self.networks:
            ip("netns", "delete", name)
