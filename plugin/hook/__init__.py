"""The libvirt hook: makes a domain's controller and LUNs exist before QEMU starts.

    entry        the program: what libvirtd runs; imports nothing for domains that are not ours
    operations   what is done for ours: prepare, reconnect, release, migrate, restore
    rpc, config  the target's JSON-RPC within a deadline; its few keys of virtlun.toml
    archive      all of it, and what it is made of, as one file for /etc/libvirt/hooks/qemu.d/

What it decides is the gateway's own code, of pydataplane.domain: `xml` reads the domain, `missing`
looks for its volumes, `reconcile` makes the target match. It never calls libvirt (that would hang
libvirtd), never takes longer than its deadline, and needs Python's standard library only.
"""

from __future__ import annotations

from plugin.hook.entry import main

__all__ = ["main"]
