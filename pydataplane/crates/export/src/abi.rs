//! FUSE's packets as they stand on `/dev/fuse`: linux/fuse.h of Linux 6.18, as far as a folder with
//! one file needs them. All numbers are in the machine's own byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version that is spoken.
pub const MAJOR: u32 = 7;
/// Newest minor version whose additions are known.
pub const MINOR: u32 = 38;
/// Oldest minor version that is served: Linux 4.20, with `max_pages`.
pub const MINOR_LEAST: u32 = 28;

/// Node of the folder (`FUSE_ROOT_ID`).
pub const ROOT: u64 = 1;
/// Node of the file.
pub const FILE: u64 = 2;

/// A request that is sent again carries this bit in `unique` (`FUSE_UNIQUE_RESEND`).
pub const UNIQUE_RESEND: u64 = 1 << 63;
/// What is asked of the kernel by a packet with `unique` 0 (`FUSE_NOTIFY_RESEND`).
pub const NOTIFY_RESEND: i32 = 7;

/// Operations (`enum fuse_opcode`).
pub mod op {
    #![allow(missing_docs, reason = "the names are the kernel's")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
}

/// Abilities in `fuse_init_in` and `fuse_init_out`; those from bit 32 on stand in `flags2`.
pub mod flag {
    /// Writes longer than a page, before Linux 4.2.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Direct I/O is asynchronous; without it a loop device has one I/O in flight.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Look-ups in one folder at a time.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// `max_pages` counts.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// `flags2` counts.
    pub const INIT_EXT: u64 = 1 << 30;
    /// The kernel knows [`super::NOTIFY_RESEND`]: Linux 6.9.
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Flags of an opened file (`FOPEN_*`).
pub mod fopen {
    /// Nothing of the file is cached.
    pub const DIRECT_IO: u32 = 1;
    /// No FLUSH at close(2).
    pub const NOFLUSH: u32 = 1 << 5;
    /// Writes need not wait for each other.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// What a write is to be durable by, when it is answered: a flag of open(2) that comes with each write
/// of a file that was opened so, and with one that has RWF_DSYNC (pwritev2(2)). O_SYNC has it, too.
pub const O_DSYNC: u32 = 0o10000;

/// What LSEEK looks for (lseek(2)).
pub mod whence {
    /// The next byte that is not in a hole.
    pub const DATA: u32 = 3;
    /// The next byte that is; the end is one.
    pub const HOLE: u32 = 4;
}

/// What SETATTR changes (`FATTR_*`).
pub mod fattr {
    /// Permissions.
    pub const MODE: u32 = 1;
    /// Owner.
    pub const UID: u32 = 1 << 1;
    /// Group.
    pub const GID: u32 = 1 << 2;
    /// Size.
    pub const SIZE: u32 = 1 << 3;
}

macro_rules! packets {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* } = $bytes:literal)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[allow(missing_docs, reason = "the names are the kernel's")]
        pub struct $name { $(pub $field: $kind,)* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    )*};
}

packets! {
    /// Begins each request.
    InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    } = 40
    /// Begins each answer; `error` is 0 or -errno.
    OutHeader { len: u32, error: i32, unique: u64, } = 16
    /// INIT, its first four words; kernels before 5.17 send no more.
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32, } = 16
    /// INIT.
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16,
        congestion_threshold: u16, max_write: u32, time_gran: u32, max_pages: u16,
        map_alignment: u16, flags2: u32, unused: [u32; 7],
    } = 64
    /// What stat(2) shows.
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32,
        blksize: u32, flags: u32,
    } = 88
    /// LOOKUP.
    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: Attr,
    } = 128
    /// GETATTR and SETATTR.
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, } = 104
    /// SETATTR.
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, times: [u64; 3],
        nsecs: [u32; 3], mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    } = 88
    /// OPEN and OPENDIR.
    OpenIn { flags: u32, open_flags: u32, } = 8
    /// OPEN and OPENDIR.
    OpenOut { fh: u64, open_flags: u32, padding: u32, } = 16
    /// RELEASE.
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, } = 24
    /// READ and READDIR.
    ReadIn {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    } = 40
    /// WRITE; the data follows.
    WriteIn {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32,
        padding: u32,
    } = 40
    /// WRITE.
    WriteOut { size: u32, padding: u32, } = 8
    /// FALLOCATE.
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, } = 32
    /// LSEEK, of which only what lseek(2) calls SEEK_DATA and SEEK_HOLE comes.
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32, } = 24
    /// LSEEK.
    LseekOut { offset: u64, } = 8
    /// STATFS.
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32, padding: u32, spare: [u32; 6],
    } = 80
    /// An entry of READDIR; the name follows, and zeros up to a multiple of 8 bytes.
    Dirent { ino: u64, off: u64, namelen: u32, kind: u32, } = 24
}
