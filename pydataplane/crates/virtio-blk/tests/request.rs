//! What becomes of headers and segments as a driver may write them.

use bdev::Op;
use guestmem::{IoVec, Sg};
use proptest::prelude::*;
use virtio_blk::{
    Access, Header, MAX_DISCARD_BYTES, MAX_WRITE_ZEROES_BYTES, Request, SECTOR, status,
};

mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

const FLAG_UNMAP: u32 = 1;

fn header(kind: u32, sector: u64) -> Header {
    Header { kind: kind.into(), reserved: 0.into(), sector: sector.into() }
}

/// What becomes of a request with this data to the device, and so much space for data from it.
fn decode(kind: u32, sector: u64, out: &[u8], space: usize) -> Result<Request, u8> {
    let (mut out, mut space) = (out.to_vec(), vec![0; space]);
    // SAFETY: both vectors, and the runs, outlive the lists.
    let (to, from) = unsafe {
        (IoVec::new(out.as_mut_ptr(), out.len()), IoVec::new(space.as_mut_ptr(), space.len()))
    };
    let list = |run: &IoVec| match run.is_empty() {
        true => Sg::EMPTY,
        // SAFETY: as above.
        false => unsafe { Sg::new(std::slice::from_ref(run)) },
    };
    let (data_out, data_in) = (list(&to), list(&from));
    Request::decode(&header(kind, sector), &data_out, &data_in)
}

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn access(op: Op, sector: u64, sectors: u64, may_unmap: bool) -> Result<Request, u8> {
    Ok(Request::Access(Access { op, may_unmap, sector, sectors }))
}

#[test]
fn reads_and_writes_are_as_long_as_their_data() {
    assert_eq!(decode(kind::IN, 7, &[], 1024), access(Op::Read, 7, 2, false));
    assert_eq!(decode(kind::OUT, u64::MAX, &[0; 512], 0), access(Op::Write, u64::MAX, 1, false));
    for (out, space) in [(0, 511), (0, 513), (512, 512)] {
        let data = vec![0; out];
        assert_eq!(decode(kind::IN, 0, &data, space), Err(status::IOERR), "{out} {space}");
    }
    for (out, space) in [(511, 0), (1, 0), (512, 512), (512, 1)] {
        let data = vec![0; out];
        assert_eq!(decode(kind::OUT, 0, &data, space), Err(status::IOERR), "{out} {space}");
    }
}

#[test]
fn ranges_have_one_segment_within_the_limits_and_known_flags() {
    let most = (MAX_DISCARD_BYTES / SECTOR) as u32;
    let discard = |out: &[u8]| decode(kind::DISCARD, 99, out, 0);
    assert_eq!(discard(&segment(5, most, 0)), access(Op::Unmap, 5, most.into(), false));
    assert_eq!(discard(&segment(5, most + 1, 0)), Err(status::IOERR));
    assert_eq!(discard(&segment(5, 8, FLAG_UNMAP)), Err(status::UNSUPP));
    assert_eq!(discard(&segment(5, 8, 2)), Err(status::UNSUPP));
    let two = [segment(5, 8, 0), segment(50, 8, 0)].concat();
    for out in [&two[..15], &two[..17], &two[..], &[]] {
        assert_eq!(discard(out), Err(status::IOERR), "{} bytes", out.len());
    }
    assert_eq!(decode(kind::DISCARD, 0, &segment(5, 8, 0), 1), Err(status::IOERR));
    let zeroes = |out: &[u8]| decode(kind::WRITE_ZEROES, 99, out, 0);
    let most = (MAX_WRITE_ZEROES_BYTES / SECTOR) as u32;
    assert_eq!(zeroes(&segment(5, most, 0)), access(Op::WriteZeroes, 5, most.into(), false));
    assert_eq!(zeroes(&segment(5, most + 1, 0)), Err(status::IOERR));
    assert_eq!(zeroes(&segment(5, 8, FLAG_UNMAP)), access(Op::WriteZeroes, 5, 8, true));
    assert_eq!(zeroes(&segment(5, 8, 0x8000_0001)), Err(status::UNSUPP));
}

#[test]
fn whatever_else_is_asked_for_is_not_supported() {
    assert_eq!(decode(kind::FLUSH, 3, &[], 0), access(Op::Flush, 0, 0, false));
    assert_eq!(decode(kind::GET_ID, 0, &[], 20), Ok(Request::Id));
    assert_eq!(decode(kind::GET_ID, 0, &[1], 20), Err(status::IOERR));
    // SCSI commands, lifetime, secure erase, zones, barriers.
    for kind in [2, 3, 5, 10, 14, 15, 16, 18, 1 << 31, (1 << 31) | 1, u32::MAX] {
        assert_eq!(decode(kind, 0, &[], 0), Err(status::UNSUPP), "{kind}");
    }
}

proptest! {
    #[test]
    fn any_request_is_refused_or_within_what_its_data_or_the_limits_say(
        kind in prop_oneof![0..20u32, any::<u32>()],
        sector in any::<u64>(),
        out in prop::collection::vec(any::<u8>(), 0..64),
        space in 0..4096usize,
    ) {
        if let Ok(Request::Access(access)) = decode(kind, sector, &out, space) {
            match access.op {
                Op::Read => prop_assert_eq!(access.sectors * SECTOR, space as u64),
                Op::Write => prop_assert_eq!(access.sectors * SECTOR, out.len() as u64),
                Op::Flush => prop_assert_eq!(access.sectors, 0),
                Op::Unmap => prop_assert!(access.sectors <= MAX_DISCARD_BYTES / SECTOR),
                Op::WriteZeroes => {
                    prop_assert!(access.sectors <= MAX_WRITE_ZEROES_BYTES / SECTOR);
                }
            }
        }
    }
}
