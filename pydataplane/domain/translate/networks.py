"""Disks over the network that are ours: what they take otherwise.

A row of FIELDS goes before the one of the same path in `fields` and `blkfields`.
"""

from __future__ import annotations

from pydataplane.domain.translate.fieldkinds import Effect, Field, done, never

_TLS = "the target's NBD client has no TLS: leave the disk to QEMU, or use a network that is safe"


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
another bus than `scsi` and `virtio`, a CD-ROM, and one that is encrypted, not raw, transient, over
TLS, or has `snapshot='external'`, is QEMU's.
"""
