"""The mount options that a class may name: those that end at the volume itself.

Left out is what names another device or file (journal_path=, logdev=), and what stops the node
(errors=panic). The kernel has the last word on a value.
"""

from __future__ import annotations

import re

from csi import kernel
from csi.hosterrors import HostError

FLAGS: dict[str, tuple[int, int]] = {
    "defaults": (0, 0),
    "ro": (kernel.MS_RDONLY, 0),
    "rw": (0, kernel.MS_RDONLY),
    "nosuid": (kernel.MS_NOSUID, 0),
    "suid": (0, kernel.MS_NOSUID),
    "nodev": (kernel.MS_NODEV, 0),
    "dev": (0, kernel.MS_NODEV),
    "noexec": (kernel.MS_NOEXEC, 0),
    "exec": (0, kernel.MS_NOEXEC),
    "sync": (kernel.MS_SYNCHRONOUS, 0),
    "async": (0, kernel.MS_SYNCHRONOUS),
    "dirsync": (kernel.MS_DIRSYNC, 0),
    "noatime": (kernel.MS_NOATIME, 0),
    "atime": (0, kernel.MS_NOATIME),
    "nodiratime": (kernel.MS_NODIRATIME, 0),
    "diratime": (0, kernel.MS_NODIRATIME),
    "relatime": (kernel.MS_RELATIME, 0),
    "norelatime": (0, kernel.MS_RELATIME),
    "strictatime": (kernel.MS_STRICTATIME, 0),
    "nostrictatime": (0, kernel.MS_STRICTATIME),
    "lazytime": (kernel.MS_LAZYTIME, 0),
    "nolazytime": (0, kernel.MS_LAZYTIME),
}
"""Words of mount(8) by the flags of mount(2) that they set and clear."""
NUMBER, SIZE = r"=\d{1,9}", r"=\d{1,9}[kKmMgG]?"
PLAIN = {
    "ext4": (
        "acl noacl user_xattr nouser_xattr discard nodiscard barrier nobarrier delalloc nodelalloc "
        "auto_da_alloc noauto_da_alloc journal_checksum nojournal_checksum journal_async_commit "
        "dioread_lock dioread_nolock init_itable noinit_itable block_validity noblock_validity "
        "grpid nogrpid bsdgroups sysvgroups bsddf minixdf i_version noload norecovery nombcache "
        "quota noquota usrquota grpquota prjquota data=ordered data=writeback data=journal "
        "errors=continue errors=remount-ro"
    ),
    "xfs": (
        "nouuid attr2 noattr2 discard nodiscard filestreams grpid nogrpid bsdgroups sysvgroups "
        "inode32 inode64 largeio nolargeio noalign norecovery swalloc wsync quota noquota usrquota "
        "uquota uqnoenforce grpquota gquota gqnoenforce prjquota pquota pqnoenforce qnoenforce"
    ),
}
VALUED = {
    "ext4": (
        f"(?:barrier|commit|journal_ioprio|max_batch_time|min_batch_time|stripe|init_itable|resuid|"
        f"resgid|inode_readahead_blks|max_dir_size_kb){NUMBER}"
    ),
    "xfs": f"(?:allocsize|logbsize){SIZE}|(?:logbufs|sunit|swidth){NUMBER}",
}


def parse(fs_type: str, options: list[str]) -> tuple[int, str]:
    """Returns the flags of mount(2), and its data.

    Each of `options` may be several, with commas between them.

    Raises:
        HostError: there is no such file system or option.
    """
    if fs_type not in PLAIN:
        raise HostError(f"file system '{fs_type}' is not one of {', '.join(PLAIN)}")
    flags, data = 0, []
    for option in ",".join(options).split(","):
        if option in FLAGS:
            added, taken = FLAGS[option]
            flags = (flags | added) & ~taken
        elif option in PLAIN[fs_type].split() or re.fullmatch(VALUED[fs_type], option):
            data.append(option)
        elif option:
            raise HostError(
                f"mount option '{option}' of {fs_type} is not allowed: leave it out of the "
                "StorageClass's mountOptions, or the PersistentVolume's"
            )
    return flags, ",".join(data)
