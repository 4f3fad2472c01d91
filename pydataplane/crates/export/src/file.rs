//! The folder and its one file: what is answered at once.

use bdev::Bdev;
use rustix::io::Errno;
use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::abi::{
    self, Attr, AttrOut, Dirent, EntryOut, InitOut, LseekIn, LseekOut, SetattrIn, StatfsOut, fattr,
    flag, whence,
};
use crate::request::{Limits, PAGE};

/// Requests that the kernel may have with one export, asynchronous ones; more wait with it. A loop
/// device has 128.
const MAX_BACKGROUND: u16 = 128;

/// Longest read ahead, in bytes; nothing is cached, so it hardly matters.
const MAX_READAHEAD: u32 = 128 * 1024;

/// Types in st_mode and in directories (stat(2), readdir(3)).
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const DT_DIR: u32 = 4;
const DT_REG: u32 = 8;

/// What does not change as long as it is exported.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Of the bdev, and the name of the file.
    pub uuid: Uuid,
    /// Whether changes are refused.
    pub read_only: bool,
    /// When it was mounted, in seconds since 1970.
    pub made_s: u64,
}

/// Settles abilities and limits; `None`: this kernel is too old.
pub(crate) fn init(minor: u32, readahead: u32, flags: u64, limits: Limits) -> Option<InitOut> {
    if minor < abi::MINOR_LEAST {
        return None;
    }
    let wanted = flag::BIG_WRITES | flag::ASYNC_DIO | flag::PARALLEL_DIROPS | flag::MAX_PAGES;
    let agreed = flags & (wanted | flag::INIT_EXT);
    Some(InitOut {
        major: abi::MAJOR,
        minor: abi::MINOR.min(minor),
        max_readahead: readahead.min(MAX_READAHEAD),
        // All that is agreed on stands in the low half.
        flags: agreed as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write: limits.max_write,
        time_gran: 1,
        max_pages: limits.max_pages,
        ..InitOut::default()
    })
}

/// What stat(2) shows of a node; the size follows the bdev.
pub(crate) fn attributes(node: u64, facts: &Facts, bdev: &dyn Bdev) -> Option<Attr> {
    let geometry = bdev.geometry();
    let owner = Attr {
        ino: node,
        atime: facts.made_s,
        mtime: facts.made_s,
        ctime: facts.made_s,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        blksize: PAGE,
        ..Attr::default()
    };
    match node {
        abi::ROOT => Some(Attr { mode: S_IFDIR | 0o755, nlink: 2, ..owner }),
        abi::FILE => Some(Attr {
            size: geometry.bytes(),
            // What is less than the size has tools look for holes.
            blocks: bdev.sparse().map_or(geometry.bytes(), |known| known.allocated_bytes()) / 512,
            mode: S_IFREG | if facts.read_only { 0o400 } else { 0o600 },
            nlink: 1,
            blksize: geometry.physical_block_size.max(PAGE),
            ..owner
        }),
        _ => None,
    }
}

/// Answers LOOKUP. Nothing is remembered by the kernel: sizes change.
pub(crate) fn lookup(
    node: u64,
    name: &[u8],
    facts: &Facts,
    bdev: &dyn Bdev,
) -> Result<EntryOut, Errno> {
    if node != abi::ROOT || name != facts.uuid.to_string().as_bytes() {
        return Err(Errno::NOENT);
    }
    let attr = attributes(abi::FILE, facts, bdev).ok_or(Errno::STALE)?;
    Ok(EntryOut { nodeid: abi::FILE, attr, ..EntryOut::default() })
}

/// Answers GETATTR, and SETATTR where that asks for what is.
pub(crate) fn getattr(
    node: u64,
    wanted: Option<&SetattrIn>,
    facts: &Facts,
    bdev: &dyn Bdev,
) -> Result<AttrOut, Errno> {
    let attr = attributes(node, facts, bdev).ok_or(Errno::STALE)?;
    if let Some(SetattrIn { valid, size, .. }) = wanted {
        let other = fattr::MODE | fattr::UID | fattr::GID;
        if valid & other != 0 || (valid & fattr::SIZE != 0 && *size != attr.size) {
            return Err(Errno::PERM);
        }
    }
    Ok(AttrOut { attr, ..AttrOut::default() })
}

/// Runs that one LSEEK looks at, at most; what is behind them is taken for data.
const RUNS: usize = 16;

/// Answers LSEEK: where a hole, or data, is at `offset` or behind it.
///
/// A bdev that does not know is data. What is said to be data may hold zeros; a hole does.
pub(crate) fn lseek(wanted: &LseekIn, bdev: &dyn Bdev) -> Result<LseekOut, Errno> {
    let geometry = bdev.geometry();
    let (size, block) = (geometry.bytes(), u64::from(geometry.block_size));
    let hole = match wanted.whence {
        whence::DATA => false,
        whence::HOLE => true,
        _ => return Err(Errno::INVAL),
    };
    let mut at = wanted.offset;
    if at >= size {
        return Err(Errno::NXIO);
    }
    let Some(sparse) = bdev.sparse() else {
        return Ok(LseekOut { offset: if hole { size } else { at } });
    };
    for _ in 0..RUNS {
        let run = sparse.run(at / block);
        // One that shrinks meanwhile has no more.
        if run.blocks == 0 || at >= size {
            break;
        }
        if run.hole == hole {
            return Ok(LseekOut { offset: at });
        }
        at = (at / block).saturating_add(run.blocks).saturating_mul(block);
    }
    match hole {
        true => Ok(LseekOut { offset: size }),
        false if at < size => Ok(LseekOut { offset: at }),
        false => Err(Errno::NXIO),
    }
}

/// Answers READDIR into `out`, from entry `offset` on and at most `room` bytes; returns how many.
pub(crate) fn readdir(offset: u64, room: u32, facts: &Facts, out: &mut [u8]) -> usize {
    let name = facts.uuid.to_string();
    let entries =
        [(abi::ROOT, DT_DIR, "."), (abi::ROOT, DT_DIR, ".."), (abi::FILE, DT_REG, &*name)];
    let room = out.len().min(room as usize);
    let mut len = 0;
    for (off, (ino, kind, name)) in (1u64..).zip(entries) {
        let whole = (size_of::<Dirent>() + name.len()).next_multiple_of(8);
        if off <= offset {
            continue;
        }
        let Some(place) = out[..room].get_mut(len..len + whole) else { break };
        let entry = Dirent { ino, off, namelen: name.len() as u32, kind };
        let (head, tail) = place.split_at_mut(size_of::<Dirent>());
        head.copy_from_slice(entry.as_bytes());
        tail.fill(0);
        tail[..name.len()].copy_from_slice(name.as_bytes());
        len += whole;
    }
    len
}

/// Answers STATFS: there is no room for anything.
pub(crate) fn statfs() -> StatfsOut {
    StatfsOut { bsize: PAGE, frsize: PAGE, namelen: 255, ..StatfsOut::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn facts() -> Facts {
        Facts { uuid: Uuid::from_u128(7), read_only: false, made_s: 1 }
    }

    #[test]
    fn abilities_are_those_that_both_have() {
        let limits = Limits { max_write: 1 << 19, max_pages: 256 };
        let out = init(44, 1 << 20, u64::MAX, limits).unwrap();
        assert_eq!(out.flags, 0x4044_8020);
        assert_eq!((out.minor, out.max_pages, out.max_readahead), (38, 256, 128 * 1024));
        assert_eq!(out.max_write, 1 << 19);
        let out = init(31, 4096, flag::ASYNC_DIO, limits).unwrap();
        assert_eq!((out.minor, out.flags, out.max_readahead), (31, 0x8000, 4096));
        assert!(init(27, 0, 0, limits).is_none());
    }

    #[test]
    fn a_folder_is_read_in_pieces() {
        let facts = facts();
        let mut out = [0xff; 4096];
        let whole = readdir(0, 4096, &facts, &mut out);
        assert_eq!(whole, 32 + 32 + 64);
        let (entry, name) = Dirent::read_from_prefix(&out[64..]).unwrap();
        assert_eq!((entry.ino, entry.off, entry.namelen), (2, 3, 36));
        assert_eq!(&name[..36], facts.uuid.to_string().as_bytes());
        assert_eq!(name[36..40], [0; 4]);
        assert_eq!(readdir(0, 100, &facts, &mut out), 64);
        assert_eq!(readdir(2, 100, &facts, &mut out), 64);
        assert_eq!(readdir(3, 4096, &facts, &mut out), 0);
        assert_eq!(readdir(u64::MAX, 4096, &facts, &mut out), 0);
    }
}
