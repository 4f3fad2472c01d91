"""Disks over the network that are ours: how they are known, and what they take otherwise.

The identity of one is made of what it is opened by, so that it is the same on every host, and
another one where anything of that differs: no domain gets by it what its own secret is not for.

A row of FIELDS goes before the one of the same path in `fields` and `blkfields`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from uuid import UUID, uuid5

from pydataplane.domain.model import NetworkSource
from pydataplane.domain.translate.fieldkinds import Effect, Field, done, never

_SPACE = UUID("8d0c5f0e-3c0b-4b55-9d3f-0f6f2a5c1c77")
_TLS = "the target's NBD client has no TLS: leave the disk to QEMU, or use a network that is safe"


def identity(source: NetworkSource) -> str:
    """Returns the UUID of the bdev that a source is, which is also its name."""
    ordered = replace(source, hosts=tuple(sorted(source.hosts, key=lambda host: host.text)))
    return str(uuid5(_SPACE, json.dumps(asdict(ordered), sort_keys=True)))


FIELDS: tuple[Field, ...] = (
    done("@type", "", "network"),
    done(
        "@snapshot",
        "with `no` or `manual` a snapshot of the domain leaves the disk out; it can take none",
        "internal no manual",
        "its snapshots are taken where it is; use 'no', or remove it",
    ),
    done("source@protocol", "`rbd`, `nbd`: those of `serve_network`"),
    done("source@name", "of rbd POOL/IMAGE or POOL/NAMESPACE/IMAGE; of nbd the export"),
    Field("source/host", Effect.HONOURED, "monitors of Ceph; of nbd one server", whole=True),
    Field(
        "source/auth",
        Effect.HONOURED,
        "user and secret, which is asked of libvirt in the client's name",
        whole=True,
    ),
    Field("auth", Effect.HONOURED, "as in `<source>`", whole=True),
    Field(
        "source/config",
        Effect.HONOURED,
        "a configuration in /etc/ceph, which the target's user can read",
        whole=True,
    ),
    Field("source/snapshot", Effect.HONOURED, "of rbd, with `<readonly/>`", whole=True),
    done("source@tls", "", "no", _TLS),
    never("source@tlsHostname", _TLS),
    done(
        "source@startupPolicy",
        "what is not there fails the start",
        "mandatory",
        "what is not there always fails the start; use 'mandatory', or remove it",
    ),
)

BY_PATH = {field.path: field for field in FIELDS}

HEAD = """
## Over the network

What a disk takes otherwise that `serve_network` of virtlun.toml has the target serve. One with
another bus than `scsi` and `virtio`, a CD-ROM, and one that is encrypted, or not raw, is QEMU's.
"""
