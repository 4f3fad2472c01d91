//! What the kernel asks, checked. Pure functions of bytes.

use zerocopy::FromBytes;

use crate::abi::{
    FallocateIn, InHeader, InitIn, LseekIn, OpenIn, ReadIn, ReleaseIn, SetattrIn, WriteIn, flag, op,
};

/// Bytes of a request before the data of a write.
pub const HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// Bytes of the longest request but a write: a name has 255 bytes, and there may be extensions of
/// ours not known.
pub const SMALL_BYTES: usize = 512;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Its name, for the answer.
    pub unique: u64,
    /// Of what.
    pub node: u64,
    /// For what.
    pub body: Body<'a>,
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// To begin; abilities of the kernel.
    Init {
        /// Its minor version.
        minor: u32,
        /// Bytes that it would read ahead.
        max_readahead: u32,
        /// [`flag`].
        flags: u64,
    },
    /// The node of a name, without its terminator.
    Lookup(&'a [u8]),
    /// What stat(2) shows.
    Getattr,
    /// To change that.
    Setattr(SetattrIn),
    /// To open, with these flags of open(2).
    Open(u32),
    /// To open the folder.
    Opendir,
    /// To read.
    Read(ReadIn),
    /// To read the folder.
    Readdir(ReadIn),
    /// To write the data behind the head.
    Write(WriteIn),
    /// To close, the last time, what was opened under this handle.
    Release(u64),
    /// To make durable.
    Fsync,
    /// To allocate, or the contrary.
    Fallocate(FallocateIn),
    /// Where data or a hole is.
    Lseek(LseekIn),
    /// How much room there is.
    Statfs,
    /// Something that is always granted.
    Grant,
    /// Something that changes the folder.
    Change,
    /// Something that needs no answer.
    Silent,
    /// Something else.
    Unknown,
}

/// Why a packet is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Too short for a header: there is nobody to answer.
    NoHeader,
    /// Its body is not what its header says.
    Body {
        /// Its name.
        unique: u64,
    },
}

/// The request in a packet of `len` bytes that begins with `bytes`: all of it, or for a long one at
/// least [`HEAD_BYTES`].
///
/// # Errors
/// [`Malformed`].
pub fn parse(bytes: &[u8], len: usize) -> Result<Call<'_>, Malformed> {
    let (header, body) = InHeader::read_from_prefix(bytes).map_err(|_| Malformed::NoHeader)?;
    let InHeader { unique, nodeid: node, .. } = header;
    let malformed = Malformed::Body { unique };
    if header.len as usize != len {
        return Err(malformed);
    }
    let body = match header.opcode {
        op::INIT => {
            let init: InitIn = take(body, malformed)?;
            let more = body.get(size_of::<InitIn>()..).unwrap_or_default();
            let flags = u64::from(init.flags);
            let high = u32::read_from_prefix(more).map_or(0, |(high, _)| u64::from(high) << 32);
            let flags = flags | if flags & flag::INIT_EXT == 0 { 0 } else { high };
            // A kernel of a newer major version asks again in ours.
            Body::Init { minor: init.minor, max_readahead: init.max_readahead, flags }
        }
        op::LOOKUP => {
            let end = body.iter().position(|byte| *byte == 0).ok_or(malformed)?;
            Body::Lookup(&body[..end])
        }
        op::GETATTR => Body::Getattr,
        op::SETATTR => Body::Setattr(take(body, malformed)?),
        op::OPEN => Body::Open(take::<OpenIn>(body, malformed)?.flags),
        op::OPENDIR => Body::Opendir,
        op::READ => Body::Read(take(body, malformed)?),
        op::READDIR => Body::Readdir(take(body, malformed)?),
        op::WRITE => {
            let write: WriteIn = take(body, malformed)?;
            if len.checked_sub(HEAD_BYTES) != Some(write.size as usize) {
                return Err(malformed);
            }
            Body::Write(write)
        }
        op::RELEASE => Body::Release(take::<ReleaseIn>(body, malformed)?.fh),
        op::FSYNC => Body::Fsync,
        op::FALLOCATE => Body::Fallocate(take(body, malformed)?),
        op::LSEEK => Body::Lseek(take(body, malformed)?),
        op::STATFS => Body::Statfs,
        // The mount has default_permissions: the kernel has looked.
        op::ACCESS | op::RELEASEDIR | op::DESTROY => Body::Grant,
        op::SYMLINK
        | op::MKNOD
        | op::MKDIR
        | op::UNLINK
        | op::RMDIR
        | op::RENAME
        | op::LINK
        | op::CREATE
        | op::RENAME2 => Body::Change,
        op::FORGET | op::BATCH_FORGET => Body::Silent,
        // ENOSYS makes the kernel do without: FLUSH, INTERRUPT, xattrs, locks.
        _ => Body::Unknown,
    };
    Ok(Call { unique, node, body })
}

fn take<T: FromBytes>(body: &[u8], malformed: Malformed) -> Result<T, Malformed> {
    T::read_from_prefix(body).map(|(taken, _)| taken).map_err(|_| malformed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    /// A request as the kernel writes it.
    fn packet(opcode: u32, unique: u64, nodeid: u64, body: &[u8]) -> Vec<u8> {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader { len, opcode, unique, nodeid, ..InHeader::default() };
        [header.as_bytes(), body].concat()
    }

    #[test]
    fn abilities_from_bit_32_on_count_only_where_they_are_announced() {
        let body: Vec<u8> = [7, 44, 4096, 1 << 15, 1 << 7]
            .iter()
            .flat_map(|word: &u32| word.to_ne_bytes())
            .collect();
        let bytes = packet(op::INIT, 2, 0, &body);
        let parsed = parse(&bytes, 60).unwrap();
        assert!(matches!(parsed.body, Body::Init { minor: 44, flags: 0x8000, .. }), "{parsed:?}");
        let mut body = body;
        body[12..16].copy_from_slice(&(1u32 << 30).to_ne_bytes());
        let bytes = packet(op::INIT, 2, 0, &body);
        let parsed = parse(&bytes, 60).unwrap();
        let Body::Init { flags, .. } = parsed.body else { panic!("{parsed:?}") };
        assert_eq!(flags, flag::INIT_EXT | flag::HAS_RESEND);
        // An old kernel's is shorter.
        assert!(parse(&packet(op::INIT, 2, 0, &body[..16]), 56).is_ok());
        assert!(parse(&packet(op::INIT, 2, 0, &body[..12]), 52).is_err());
    }

    #[test]
    fn a_write_has_the_length_that_it_says() {
        let write = WriteIn { size: 4096, ..WriteIn::default() };
        let mut bytes = packet(op::WRITE, 6, 2, write.as_bytes());
        bytes[..4].copy_from_slice(&(4176u32).to_ne_bytes());
        assert!(matches!(parse(&bytes, 4176).unwrap().body, Body::Write(w) if w.size == 4096));
        bytes[..4].copy_from_slice(&(4175u32).to_ne_bytes());
        assert_eq!(parse(&bytes, 4175).unwrap_err(), Malformed::Body { unique: 6 });
        // Shorter than its head.
        assert!(parse(&packet(op::WRITE, 6, 2, &[0; 8]), 48).is_err());
    }

    #[test]
    fn a_name_ends_where_it_ends() {
        let bytes = packet(op::LOOKUP, 4, 1, b"name\0rest\0");
        assert!(matches!(parse(&bytes, 50).unwrap().body, Body::Lookup(b"name")));
        assert!(parse(&packet(op::LOOKUP, 4, 1, b"name"), 44).is_err());
        assert_eq!(parse(&bytes[..39], 39).unwrap_err(), Malformed::NoHeader);
        assert_eq!(parse(&bytes, 51).unwrap_err(), Malformed::Body { unique: 4 });
    }

    proptest! {
        /// Whatever stands in a packet: a request whose parts are within it, or a refusal that names
        /// it.
        #[test]
        fn anything_is_a_request_or_refused(
            opcode in prop_oneof![0u32..64, any::<u32>()],
            body in proptest::collection::vec(any::<u8>(), 0..SMALL_BYTES - 40),
            len in prop_oneof![Just(None), any::<u32>().prop_map(Some)],
            cut in 0usize..SMALL_BYTES,
        ) {
            let mut bytes = packet(opcode, 77, 2, &body);
            let len = len.unwrap_or(bytes.len() as u32);
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            bytes.truncate(bytes.len().max(cut) - cut.min(bytes.len()));
            match parse(&bytes, len as usize) {
                Ok(call) => {
                    prop_assert_eq!(call.unique, 77);
                    if let Body::Write(write) = call.body {
                        prop_assert_eq!(HEAD_BYTES + write.size as usize, len as usize);
                    }
                    if let Body::Lookup(name) = call.body {
                        prop_assert!(name.len() < bytes.len());
                    }
                }
                Err(Malformed::NoHeader) => prop_assert!(bytes.len() < 40),
                Err(Malformed::Body { unique }) => prop_assert_eq!(unique, 77),
            }
        }
    }
}
