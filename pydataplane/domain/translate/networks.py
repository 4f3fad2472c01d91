"""Disks over the network that are ours: what they take otherwise.

A row of FIELDS goes before the one of the same path in `fields` and `blkfields`.
"""

from __future__ import annotations

from pydataplane.domain.translate.fieldkinds import Effect, Field, done, never

_TLS = "the target does not use TLS for it: leave the disk to QEMU, or use a network that is safe"


FIELDS: tuple[Field, ...] = (
    done("@type", "", "network"),
    done(
        "@snapshot",
        "with `no` or `manual` a snapshot of the domain leaves the disk out; it can take none",
        "internal no manual",
        "its snapshots are taken where it is; use 'no', or remove it",
    ),
    done(
        "source@protocol",
        "`rbd`, `nbd`, `iscsi`: those of `serve_network` or of its domain",
    ),
    done(
        "source@name",
        "of rbd POOL/IMAGE or POOL/NAMESPACE/IMAGE; of nbd the export; of iscsi TARGET/LUN",
    ),
    Field(
        "source/host", Effect.HONOURED, "monitors of Ceph; of nbd and iscsi one server", whole=True
    ),
    Field(
        "source/initiator",
        Effect.HONOURED,
        "of iscsi; without, iqn.2008-11.org.linux-kvm:UUID of the domain, as QEMU has it",
        whole=True,
    ),
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

What a disk takes otherwise that the target serves: as
[its domain](../../docs/pages/how-to/ceph.md#vm-by-vm) asks for it, else as `serve_network` of
virtlun.toml says. One with another bus than `scsi` and `virtio`, a CD-ROM, a LUN of iSCSI with
`device='lun'`, and one that is encrypted, not raw, transient, over TLS, or has
`snapshot='external'`, is QEMU's.
"""
