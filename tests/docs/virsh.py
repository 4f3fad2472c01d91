"""Every virsh command about disks, snapshots, pools and jobs, as it goes through the gateway.

`ROWS` are carried out in this order, on a running domain `vm`: vda, a qcow2 file, and sdz, an
empty CD-ROM, are libvirtd's own, sda is a volume. tests/libvirt/test_virsh_commands.py does it with
a real libvirtd, and compares what came out with docs/pages/reference/virsh.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from plugin.gateway.procedures import By
from plugin.gateway.procs import Proc
from tests.docs.reference import REFERENCE, answered_by

PAGE = REFERENCE / "virsh.md"

GROUPS = ("domain", "monitor", "snapshot", "checkpoint", "backup", "pool", "volume")
"""Of `virsh help`."""

CONCERNED = re.compile(
    r"(attach-d|detach-d|blk|block|domblk|change-media|update-device|save|restore|managedsave"
    r"|migrate|domjob|create$|define$|undefine$|start$|destroy$|dumpxml$|edit$|domstats$|dump$"
    r"|domxml-|domfs|dom-fd|domdirtyrate|guestinfo|iothread"
    r"|snapshot-|checkpoint-|backup-|pool-|vol-|find-storage)"
)
"""Commands of these groups that the page has to name."""


OF_NO_ROW = frozenset(
    {
        # Of clients' events and identity, for which there is no command of these groups.
        *(Proc.SET_IDENTITY, Proc.CALLBACK_REGISTER_ANY, Proc.CALLBACK_DEREGISTER_ANY),
        *(Proc.EVENT_REGISTER_ANY, Proc.EVENT_DEREGISTER_ANY),
        # Older or other forms of what a row calls.
        *(Proc.DEFINE_XML, Proc.CREATE_WITH_FLAGS, Proc.CREATE_WITH_FILES),
        *(Proc.CREATE_XML_WITH_FILES, Proc.ATTACH_DEVICE, Proc.DETACH_DEVICE, Proc.BLOCK_STATS),
        *(Proc.SAVE_FLAGS, Proc.SAVE_PARAMS, Proc.RESTORE_FLAGS, Proc.RESTORE_PARAMS),
        *(Proc.GET_JOB_INFO, Proc.ABORT_JOB_FLAGS, Proc.BLOCK_PULL, Proc.BLOCK_JOB_SET_SPEED),
        Proc.CHECKPOINT_LIST_ALL_CHILDREN,
        *(Proc.NUM_OF_STORAGE_POOLS, Proc.LIST_STORAGE_POOLS),
        *(Proc.NUM_OF_DEFINED_STORAGE_POOLS, Proc.LIST_DEFINED_STORAGE_POOLS),
        *(Proc.STORAGE_POOL_LOOKUP_BY_UUID, Proc.STORAGE_POOL_LOOKUP_BY_TARGET_PATH),
        *(Proc.STORAGE_POOL_GET_AUTOSTART, Proc.STORAGE_POOL_IS_ACTIVE),
        *(Proc.STORAGE_POOL_IS_PERSISTENT, Proc.STORAGE_POOL_NUM_OF_VOLUMES),
        *(Proc.STORAGE_POOL_LIST_VOLUMES, Proc.STORAGE_VOL_LOOKUP_BY_KEY),
        *(Proc.STORAGE_VOL_GET_INFO_FLAGS, Proc.STORAGE_POOL_EVENT_REGISTER_ANY),
        Proc.STORAGE_POOL_EVENT_DEREGISTER_ANY,
        # Of commands that are not about disks, or that virsh does not have.
        *(Proc.GET_STATE, Proc.SUSPEND, Proc.BLOCK_PEEK, Proc.GET_METADATA, Proc.SET_METADATA),
        # `migrate`, which is not in this run.
        *(Proc.MIGRATE_BEGIN3, Proc.MIGRATE_BEGIN3_PARAMS),
        *(Proc.MIGRATE_PREPARE3, Proc.MIGRATE_PREPARE3_PARAMS),
        *(Proc.MIGRATE_PREPARE_TUNNEL3, Proc.MIGRATE_PREPARE_TUNNEL3_PARAMS),
        *(Proc.MIGRATE_PERFORM3, Proc.MIGRATE_PERFORM3_PARAMS),
    }
)
"""Calls that the gateway looks into and that no row names."""


@dataclass(frozen=True)
class Row:
    """A command; `{FOLDER}` in it is a scratch directory.

    `calls` are those of libvirt that it stands for; none: the gateway looks into none of them.
    `fails`: virsh says no, and the page has its sentence.
    """

    words: str
    calls: tuple[Proc, ...] = ()
    fails: bool = False
    who: str = ""
    """Who answers, where `calls` do not say it."""

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.words.split()[0]


ROWS = (
    Row("attach-disk vm /dev/virtlun/lvs0/b sdb --live --config", (Proc.ATTACH_DEVICE_FLAGS,)),
    Row("update-device vm {FOLDER}/readonly.xml --config", (Proc.UPDATE_DEVICE_FLAGS,)),
    Row("update-device vm {FOLDER}/readonly.xml --live", (Proc.UPDATE_DEVICE_FLAGS,), fails=True),
    Row("change-media vm sdb --eject --live", fails=True, who="virsh: no removable medium"),
    Row(
        "change-media vm sdz /dev/virtlun/lvs0/b --insert --live",
        (Proc.UPDATE_DEVICE_FLAGS,),
        fails=True,
    ),
    Row(
        "change-media vm sdz {FOLDER}/medium.iso --insert --live",
        (Proc.UPDATE_DEVICE_FLAGS,),
        who="libvirtd",
    ),
    Row("change-media vm sdz --eject --live", (Proc.UPDATE_DEVICE_FLAGS,), who="libvirtd"),
    Row("detach-disk vm sdb --live --config", (Proc.DETACH_DEVICE_FLAGS,)),
    Row("attach-device vm {FOLDER}/alias.xml --live", (Proc.ATTACH_DEVICE_FLAGS,)),
    Row("detach-device-alias vm ua-b --live", (Proc.DETACH_DEVICE_ALIAS,)),
    Row("attach-device vm {FOLDER}/alias.xml --live", (Proc.ATTACH_DEVICE_FLAGS,)),
    Row("detach-device vm {FOLDER}/alias.xml --live", (Proc.DETACH_DEVICE_FLAGS,)),
    Row("domblklist vm", (Proc.GET_XML_DESC,)),
    Row("domblkinfo vm sda", (Proc.GET_BLOCK_INFO,)),
    Row("domblkstat vm sda", (Proc.BLOCK_STATS_FLAGS,)),
    Row("domblkerror vm", (Proc.GET_DISK_ERRORS,)),
    Row("domstats vm --block", (Proc.GET_ALL_DOMAIN_STATS,)),
    Row("iothreadadd vm 1 --live"),
    Row("iothreadset vm 1 --poll-max-ns 1000 --live"),
    Row("iothreadpin vm 1 0 --live"),
    Row("iothreadinfo vm"),
    Row("iothreaddel vm 1 --live"),
    Row("domfsinfo vm", (Proc.GET_FSINFO,), fails=True, who="libvirtd"),
    Row("domfsfreeze vm", fails=True),
    Row("domfsthaw vm", fails=True),
    Row("domfstrim vm", fails=True),
    Row("guestinfo vm --disk", (Proc.GET_GUEST_INFO,), fails=True, who="libvirtd"),
    Row("blockresize vm sda 32M", (Proc.BLOCK_RESIZE,)),
    Row("blockresize vm sda 8M", (Proc.BLOCK_RESIZE,), fails=True),
    Row("blkdeviotune vm sda", (Proc.GET_BLOCK_IO_TUNE,)),
    Row("blkdeviotune vm sda --total-iops-sec 100 --live --config", (Proc.SET_BLOCK_IO_TUNE,)),
    Row("blkdeviotune vm sda --group-name g --live", (Proc.SET_BLOCK_IO_TUNE,), fails=True),
    Row("domblkthreshold vm sda 8M", (Proc.SET_BLOCK_THRESHOLD,)),
    Row("blockjob vm sda", (Proc.GET_BLOCK_JOB_INFO,)),
    Row("blockjob vm sda --abort", (Proc.BLOCK_JOB_ABORT,), fails=True),
    Row("blockcopy vm sda {FOLDER}/copy --transient-job", (Proc.BLOCK_COPY,), fails=True),
    Row("blockcopy vm sda --dest /dev/virtlun/lvs0/copy", (Proc.BLOCK_COPY,), fails=True),
    Row(
        "blockcopy vm sda --dest /dev/virtlun/lvs0/copy --transient-job --wait --finish",
        (Proc.BLOCK_COPY, Proc.GET_BLOCK_JOB_INFO, Proc.BLOCK_JOB_ABORT),
    ),
    Row("blockpull vm sda --wait", (Proc.BLOCK_REBASE,)),
    Row("blockcommit vm sda --active", (Proc.BLOCK_COMMIT,), fails=True),
    Row(
        "snapshot-create-as vm t --disk-only --no-metadata --diskspec vda,snapshot=no",
        (Proc.SNAPSHOT_CREATE_XML,),
    ),
    Row("blockcommit vm sda --active --pivot", (Proc.BLOCK_COMMIT, Proc.BLOCK_JOB_ABORT)),
    Row("snapshot-create-as vm s", (Proc.SNAPSHOT_CREATE_XML,), fails=True),
    Row("snapshot-create-as vm s --disk-only --quiesce", (Proc.SNAPSHOT_CREATE_XML,), fails=True),
    Row("snapshot-create-as vm s --disk-only", (Proc.SNAPSHOT_CREATE_XML,)),
    Row(
        "snapshot-create-as vm left --disk-only --diskspec sda,snapshot=no",
        (Proc.SNAPSHOT_CREATE_XML,),
    ),
    Row("snapshot-create-as vm m --memspec file={FOLDER}/m", (Proc.SNAPSHOT_CREATE_XML,)),
    Row("snapshot-create vm {FOLDER}/snapshot.xml --disk-only", (Proc.SNAPSHOT_CREATE_XML,)),
    Row("snapshot-list vm"),
    Row("snapshot-info vm s"),
    Row("snapshot-current vm --name"),
    Row("snapshot-parent vm s2"),
    Row("snapshot-dumpxml vm s", (Proc.SNAPSHOT_GET_XML_DESC,)),
    Row("snapshot-revert vm s", (Proc.REVERT_TO_SNAPSHOT,), fails=True),
    Row("snapshot-revert vm m", (Proc.REVERT_TO_SNAPSHOT,), fails=True),
    Row(
        "snapshot-create-as vm v --disk-only --diskspec vda,snapshot=no",
        (Proc.SNAPSHOT_CREATE_XML,),
    ),
    Row(
        "snapshot-create-as vm w --diskspec vda,snapshot=no",
        (Proc.SNAPSHOT_CREATE_XML,),
    ),
    Row("snapshot-revert vm v --running", (Proc.REVERT_TO_SNAPSHOT,)),
    Row("snapshot-revert vm w --force", (Proc.REVERT_TO_SNAPSHOT,)),
    Row("snapshot-delete vm w", (Proc.SNAPSHOT_DELETE,)),
    Row("snapshot-delete vm v", (Proc.SNAPSHOT_DELETE,)),
    *(
        Row(f"snapshot-delete vm {name} --metadata", (Proc.SNAPSHOT_DELETE,))
        for name in ("s2", "m", "left")
    ),
    Row("checkpoint-create-as vm c", (Proc.CHECKPOINT_CREATE_XML,), fails=True),
    Row("checkpoint-create-as vm ours --diskspec sda", (Proc.CHECKPOINT_CREATE_XML,)),
    Row(
        "checkpoint-create-as vm c --diskspec vda --diskspec sda,checkpoint=no",
        (Proc.CHECKPOINT_CREATE_XML,),
        who="libvirtd",
    ),
    Row(
        "checkpoint-create vm {FOLDER}/checkpoint.xml",
        (Proc.CHECKPOINT_CREATE_XML,),
        who="libvirtd",
    ),
    Row("checkpoint-list vm", (Proc.LIST_ALL_CHECKPOINTS,)),
    Row("checkpoint-info vm ours", (Proc.CHECKPOINT_LOOKUP_BY_NAME,)),
    Row("checkpoint-parent vm c2", (Proc.CHECKPOINT_GET_PARENT,), who="libvirtd"),
    Row("checkpoint-dumpxml vm ours", (Proc.CHECKPOINT_GET_XML_DESC,)),
    Row("checkpoint-delete vm c2 --metadata", (Proc.CHECKPOINT_DELETE,), who="libvirtd"),
    Row("backup-begin vm", (Proc.BACKUP_BEGIN,), fails=True),
    Row("backup-begin vm {FOLDER}/backup.xml", (Proc.BACKUP_BEGIN,), who="libvirtd"),
    Row("backup-dumpxml vm", (Proc.BACKUP_GET_XML_DESC,), who="libvirtd"),
    Row("domjobabort vm", (Proc.ABORT_JOB,), who="libvirtd"),
    Row("backup-begin vm {FOLDER}/ours.xml", (Proc.BACKUP_BEGIN,)),
    Row("backup-dumpxml vm", (Proc.BACKUP_GET_XML_DESC,)),
    Row("domjobinfo vm", (Proc.GET_JOB_STATS,)),
    Row("domjobabort vm", (Proc.ABORT_JOB,)),
    Row("checkpoint-delete vm ours", (Proc.CHECKPOINT_DELETE,)),
    Row("migrate-setmaxdowntime vm 300"),
    Row("migrate-getmaxdowntime vm"),
    Row("migrate-setspeed vm 100"),
    Row("migrate-getspeed vm"),
    Row("migrate-compcache vm --size 67108864"),
    Row("migrate-postcopy vm", fails=True),
    Row("domdirtyrate-calc vm --seconds 1"),
    Row("dump vm {FOLDER}/core --memory-only"),
    Row("dumpxml vm --migratable", (Proc.GET_XML_DESC,)),
    Row("domxml-to-native qemu-argv --domain vm", (Proc.XML_TO_NATIVE,)),
    Row("domxml-from-native qemu-argv {FOLDER}/vm.xml", fails=True),
    Row("destroy vm"),
    Row("snapshot-delete vm s --metadata", (Proc.SNAPSHOT_DELETE,)),
    Row("checkpoint-delete vm c --metadata"),
    Row("define {FOLDER}/vm.xml", (Proc.DEFINE_XML_FLAGS,)),
    Row("start vm", (Proc.CREATE,)),
    Row("managedsave vm", (Proc.MANAGED_SAVE,)),
    Row("managedsave-dumpxml vm", (Proc.MANAGED_SAVE_GET_XML_DESC,)),
    Row("managedsave-define vm {FOLDER}/vm.xml", (Proc.MANAGED_SAVE_DEFINE_XML,)),
    Row("managedsave-remove vm"),
    Row("start vm", (Proc.CREATE,)),
    Row("save vm {FOLDER}/saved.img", (Proc.SAVE,)),
    Row("save-image-dumpxml {FOLDER}/saved.img", (Proc.SAVE_IMAGE_GET_XML_DESC,)),
    Row("save-image-define {FOLDER}/saved.img {FOLDER}/vm.xml", (Proc.SAVE_IMAGE_DEFINE_XML,)),
    Row("restore {FOLDER}/saved.img", (Proc.RESTORE,)),
    Row("destroy vm"),
    Row("checkpoint-create-as vm last --diskspec sda", (Proc.CHECKPOINT_CREATE_XML,)),
    Row("undefine vm", (Proc.UNDEFINE,), fails=True),
    Row("undefine vm --checkpoints-metadata", (Proc.UNDEFINE_FLAGS,)),
    Row("create {FOLDER}/vm.xml", (Proc.CREATE_XML,)),
    Row("pool-list --all", (Proc.LIST_ALL_STORAGE_POOLS,)),
    Row("pool-info virtlun-lvs0", (Proc.STORAGE_POOL_GET_INFO,)),
    Row("pool-name 00000000-0000-4000-8000-000000000000", fails=True, who="libvirtd"),
    Row("pool-uuid virtlun-lvs0", (Proc.STORAGE_POOL_LOOKUP_BY_NAME,)),
    Row("pool-dumpxml virtlun-lvs0", (Proc.STORAGE_POOL_GET_XML_DESC,)),
    Row("pool-refresh virtlun-lvs0", (Proc.STORAGE_POOL_REFRESH,)),
    Row("pool-autostart virtlun-lvs0", (Proc.STORAGE_POOL_SET_AUTOSTART,)),
    Row("pool-autostart virtlun-lvs0 --disable", (Proc.STORAGE_POOL_SET_AUTOSTART,), fails=True),
    Row("pool-build virtlun-lvs0", (Proc.STORAGE_POOL_BUILD,), fails=True),
    Row("vol-create-as virtlun-lvs0 v 8M", (Proc.STORAGE_VOL_CREATE_XML,)),
    Row("vol-create virtlun-lvs0 {FOLDER}/ours-volume.xml", (Proc.STORAGE_VOL_CREATE_XML,)),
    Row(
        "vol-create-from virtlun-lvs0 {FOLDER}/clone.xml v --inputpool virtlun-lvs0",
        (Proc.STORAGE_VOL_CREATE_XML_FROM,),
    ),
    Row("vol-clone v w --pool virtlun-lvs0", (Proc.STORAGE_VOL_CREATE_XML_FROM,)),
    Row("vol-list virtlun-lvs0", (Proc.STORAGE_POOL_LIST_ALL_VOLUMES,)),
    Row("vol-info v --pool virtlun-lvs0", (Proc.STORAGE_VOL_GET_INFO,)),
    Row("vol-dumpxml v --pool virtlun-lvs0", (Proc.STORAGE_VOL_GET_XML_DESC,)),
    Row("vol-key v --pool virtlun-lvs0", (Proc.STORAGE_VOL_LOOKUP_BY_NAME,)),
    Row("vol-path v --pool virtlun-lvs0", (Proc.STORAGE_VOL_GET_PATH,)),
    Row("vol-name /dev/virtlun/lvs0/v", (Proc.STORAGE_VOL_LOOKUP_BY_PATH,)),
    Row("vol-pool /dev/virtlun/lvs0/v", (Proc.STORAGE_POOL_LOOKUP_BY_VOLUME,)),
    Row("vol-upload v {FOLDER}/volume.xml --pool virtlun-lvs0", (Proc.STORAGE_VOL_UPLOAD,)),
    Row("vol-download v {FOLDER}/copy --pool virtlun-lvs0", (Proc.STORAGE_VOL_DOWNLOAD,)),
    Row("vol-resize v 16M --pool virtlun-lvs0", (Proc.STORAGE_VOL_RESIZE,)),
    Row("vol-wipe v --pool virtlun-lvs0", (Proc.STORAGE_VOL_WIPE,)),
    Row(
        "vol-wipe v --pool virtlun-lvs0 --algorithm trim",
        (Proc.STORAGE_VOL_WIPE_PATTERN,),
        fails=True,
    ),
    *(
        Row(f"vol-delete {name} --pool virtlun-lvs0", (Proc.STORAGE_VOL_DELETE,))
        for name in ("v", "w", "c", "x")
    ),
    Row("vol-delete a --pool virtlun-lvs0", (Proc.STORAGE_VOL_DELETE,), fails=True),
    Row("pool-destroy virtlun-lvs0", (Proc.STORAGE_POOL_DESTROY,)),
    Row("pool-delete virtlun-lvs0", (Proc.STORAGE_POOL_DELETE,), fails=True),
    Row("pool-undefine virtlun-lvs0", (Proc.STORAGE_POOL_UNDEFINE,)),
    Row("pool-define {FOLDER}/ours-pool.xml", (Proc.STORAGE_POOL_DEFINE_XML,)),
    Row("pool-start virtlun-lvs0", (Proc.STORAGE_POOL_CREATE,)),
    Row("pool-create {FOLDER}/ours-pool.xml", (Proc.STORAGE_POOL_CREATE_XML,), fails=True),
    Row("pool-destroy virtlun-lvs0", (Proc.STORAGE_POOL_DESTROY,)),
    Row("pool-create {FOLDER}/ours-pool.xml", (Proc.STORAGE_POOL_CREATE_XML,)),
    Row("pool-destroy virtlun-lvs0", (Proc.STORAGE_POOL_DESTROY,)),
    Row(
        "pool-create-as virtlun-lvs0 zfs --source-name lvs0",
        (Proc.STORAGE_POOL_CREATE_XML,),
    ),
    Row(
        "pool-define-as virtlun-other zfs --source-name other",
        (Proc.STORAGE_POOL_DEFINE_XML,),
        fails=True,
    ),
    Row("pool-capabilities"),
    Row("pool-event --list"),
    Row("pool-define {FOLDER}/pool.xml"),
    Row("pool-build p"),
    Row("pool-start p"),
    Row("pool-autostart p"),
    Row("pool-refresh p"),
    Row("pool-info p"),
    Row("pool-name 0d3f1c52-7b0d-4c55-9a0e-3d5f0b7a1c42"),
    Row("pool-uuid p"),
    Row("pool-dumpxml p"),
    Row("vol-create-as p a 1M"),
    Row("vol-create p {FOLDER}/volume.xml"),
    Row("vol-create-from p {FOLDER}/second.xml a --inputpool p"),
    Row(
        "vol-create-from p {FOLDER}/second.xml a --inputpool virtlun-lvs0",
        (Proc.STORAGE_VOL_CREATE_XML_FROM,),
        fails=True,
    ),
    Row(
        "vol-create-from virtlun-lvs0 {FOLDER}/clone.xml a --inputpool p",
        (Proc.STORAGE_VOL_CREATE_XML_FROM,),
        fails=True,
    ),
    Row("vol-clone a d --pool p"),
    Row("vol-list p"),
    Row("vol-info a --pool p"),
    Row("vol-dumpxml a --pool p"),
    Row("vol-key a --pool p"),
    Row("vol-path a --pool p"),
    Row("vol-name {FOLDER}/pool/a"),
    Row("vol-pool {FOLDER}/pool/a"),
    Row("vol-upload a {FOLDER}/volume.xml --pool p"),
    Row("vol-download a {FOLDER}/copy --pool p"),
    Row("vol-resize a 2M --pool p"),
    Row("vol-wipe a --pool p"),
    *(Row(f"vol-delete {name} --pool p") for name in "abcd"),
    Row("pool-destroy p"),
    Row("pool-delete p"),
    Row("pool-undefine p"),
    Row("pool-create {FOLDER}/pool.xml --build"),
    Row("pool-destroy p"),
    Row("pool-define-as q dir --target {FOLDER}/pool"),
    Row("pool-undefine q"),
    Row("pool-create-as q dir --target {FOLDER}/pool"),
    Row("pool-destroy q"),
)

ELSEWHERE = {
    "migrate": "works where both hosts have the volume with the same content: "
    "`tests/libvirt/test_migration.py`",
    "edit": "as `dumpxml` and `define`",
    "managedsave-edit": "as `managedsave-dumpxml` and `managedsave-define`",
    "save-image-edit": "as `save-image-dumpxml` and `save-image-define`",
    "snapshot-edit": "as `snapshot-dumpxml` and `snapshot-create --redefine`",
    "checkpoint-edit": "as `checkpoint-dumpxml` and `checkpoint-create --redefine`",
    "blkiotune": "weights of a whole domain: libvirtd, as ever",
    "dom-fd-associate": "files for `<source fdgroup=...>` of disks of libvirtd's own",
    "pool-edit": "as `pool-dumpxml` and `pool-define`: `tests/libvirt/test_pool_programs.py`",
    "find-storage-pool-sources": "looks for pools of other kinds: libvirtd, as ever",
    "find-storage-pool-sources-as": "the same",
}
"""Commands that are not carried out here, and why."""

_WHO = {
    By.GATEWAY: "gateway",
    By.LIBVIRTD: "libvirtd, changed by the gateway",
    By.NOBODY: "gateway",
}


def page(said: dict[Row, str]) -> str:
    """Returns the page; `said` is what virsh printed where it said no."""
    parts = [
        "<!-- Made by tests/libvirt/test_virsh_commands.py; do not edit. -->\n\n# virsh\n",
        "Each was run with a real virsh and libvirtd through the gateway, in this order, on a "
        "running domain with a qcow2 file `vda`, an empty CD-ROM `sdz` and a volume `sda`. "
        "*libvirtd*: the gateway does not look into the call. "
        "*libvirtd, changed by the gateway*: it changes arguments or result, or prepares for it. "
        "[Which call is which](calls.md) of libvirt's protocol.\n\n"
        "The domain has no guest agent. With one `domfsinfo` and `guestinfo --disk` name virtlun "
        "disks by their device of the guest, and `domfsfreeze`, `domfsthaw` and `domfstrim` do "
        "what they do for other disks.\n",
        "| command | outcome | who answers |\n| --- | --- | --- |",
    ]
    for row in ROWS:
        parts.append(f"| `{_shown(row.words)}` | {outcome(row, said)} | {answered(row)} |")
    parts.append("\n## Not in this run\n\n| command | |\n| --- | --- |")
    parts += [f"| `{name}` | {why} |" for name, why in sorted(ELSEWHERE.items())]
    parts.append(
        "\n## Pools and their volumes\n\nCommands on libvirtd's own pools (`p` and `q` here) are "
        "libvirtd's alone; those of `virtlun-lvs0` are about lvstore `lvs0`. "
        "[How to use them](../how-to/storage-pools.md).\n"
    )
    return "\n".join(parts)


def outcome(row: Row, said: dict[Row, str]) -> str:
    """Returns whether a command works, as the page has it; `said` is as for `page`."""
    return f"no: *{_plain(said[row])}*" if row.fails else "works"


def answered(row: Row) -> str:
    """Returns who answers to a command, as the page has it."""
    if row.who or not row.calls:
        return row.who or "libvirtd"
    if row.fails:
        return _WHO[By.NOBODY]
    return ", ".join(sorted({_WHO[answered_by(call)] for call in row.calls}))


def _shown(words: str) -> str:
    return words.replace("{FOLDER}/", "")


def _plain(sentence: str) -> str:
    return sentence.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def sentence(said: str, folder: str) -> str:
    """Returns libvirt's sentence in what virsh printed, without what differs between two runs."""
    last = said.rsplit("error: ", 1)[-1].strip()
    text = " ".join(last.replace(f"{folder}/", "").split())
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text)
