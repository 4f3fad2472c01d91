//! virtio-blk (virtio 1.2 5.2.6): a header, data to the device, data from it, and a byte of status at the
//! end. There is one disk, unit 0.
//!
//! A driver knows no status that means "later": what a full device does not take waits here for the end
//! of another of its requests, or where there is none for a moment, and what a stop must not leave half done
//! ends before it, or stays marked as in flight; what waits because an I/O failed, or for others, is given back
//! to whoever goes on (`poller/suspended`).

use ::scsi::{Kind, Lun, Outcome, Plain, Response, Status};
use bdev::Op;
use virtio_blk::{Access, HEADER_SIZE, Header, ID_SIZE, Request, SECTOR, status};
use virtqueue::Segments;

use super::{Answer, FrontEnd, Read};
use crate::defs::response;
use crate::front::DISK;
use crate::poller::slot::Slot;
use crate::poller::{DevicePoller, MAX_DATA};

/// Bytes of a response.
const STATUS: usize = 1;

/// The response code of virtio-scsi's that stands for VIRTIO_BLK_S_UNSUPP; any other is an error.
const UNSUPPORTED: u8 = response::FUNCTION_REJECTED;

/// The disk of a virtio-blk controller.
pub(in crate::poller) struct Blk;

impl FrontEnd for Blk {
    const WAITS_FOR_DEVICE: bool = true;

    #[inline(always)]
    fn read(poller: &mut DevicePoller, index: u16) -> Read {
        let slot = &mut poller.slots[index];

        // The header is copied out of guest memory once; from here on only the copy is looked at.
        let mut bytes = [0u8; HEADER_SIZE];
        let space = (slot.segments.writable_len() as usize).checked_sub(STATUS);
        let halves = space.and_then(|space| slot.segments.split(HEADER_SIZE, space));
        let Some(halves) = halves else { return Read::Nothing };
        halves.readable.0.copy_to_slice(0, &mut bytes);
        let header: Header = zerocopy::transmute!(bytes);
        let (data_out, data_in) = (halves.readable.1, halves.writable.0);

        let Some(unit) = poller.units.find(DISK) else {
            return Read::End(Err(response::BAD_TARGET));
        };
        let access = match Request::decode(&header, &data_out, &data_in) {
            Err(status) => return Read::End(Err(refusal(status))),
            Ok(Request::Id) => {
                let mut id = [0; ID_SIZE];
                let serial = unit.lun.shared().serial().as_bytes();
                let len = serial.len().min(ID_SIZE);
                id[..len].copy_from_slice(&serial[..len]);
                let transferred = data_in.copy_from_slice(0, &id[..ID_SIZE.min(data_in.len())]);
                let transferred = transferred as u32;
                let answer = Response { transferred, ..Response::bare(Status::Good) };
                return Read::End(Ok(Outcome::Done(answer)));
            }
            Ok(Request::Access(access)) => access,
        };
        match plain(&unit.lun, access, poller.write_through) {
            Err(status) => Read::End(Err(refusal(status))),
            Ok(plain) => {
                slot.task.prepare_plain(plain, data_out, data_in);
                (slot.target, slot.id, slot.attribute) = (DISK, 0, SIMPLE);
                slot.kind = kind_of(access.op);
                // Of longer buffers none is taken.
                slot.bytes = (data_out.len() + data_in.len()).min(MAX_DATA) as u32;
                Read::Request
            }
        }
    }

    #[inline(always)]
    fn answer(slot: &mut Slot, end: Result<Outcome, u8>, _stopping: bool) -> Answer {
        let (code, transferred) = match end {
            Ok(Outcome::Done(Response { status: Status::Good, transferred, .. })) => {
                (status::OK, transferred)
            }
            Ok(Outcome::Pending | Outcome::Suspended(_)) => {
                unreachable!("a request that is pending or suspended is not finished")
            }
            Err(UNSUPPORTED) => (status::UNSUPP, 0),
            Ok(Outcome::Done(_) | Outcome::Overrun) | Err(_) => (status::IOERR, 0),
        };
        // There is a byte for the status, or it had not begun.
        let space = slot.segments.writable_len() as usize - STATUS;
        slot.segments.writable().copy_from_slice(space, &[code]);
        // With what was read before an error, but not buffers that no request fills: marking takes time
        // for each page.
        slot.segments.mark_written(0, space.min(MAX_DATA));
        slot.segments.mark_written(space, STATUS);
        // The status byte is the last one.
        let used = slot.segments.writable_len();
        Answer { is_good: code == status::OK, transferred, used }
    }

    fn interrupted(_: &mut DevicePoller, _: u16) -> Option<Outcome> {
        None
    }

    #[cold]
    fn refuse(segments: &Segments) -> u32 {
        let len = segments.writable_len();
        if let Some(at) = (len as usize).checked_sub(STATUS) {
            segments.writable().copy_from_slice(at, &[status::IOERR]);
            segments.mark_written(at, STATUS);
        }
        len
    }
}

/// The task attribute of all requests: in any order.
const SIMPLE: u8 = 0;

#[cold]
fn refusal(code: u8) -> u8 {
    if code == status::UNSUPP { UNSUPPORTED } else { response::FAILURE }
}

#[inline(always)]
fn kind_of(op: Op) -> Kind {
    match op {
        Op::Read => Kind::Read,
        Op::Write | Op::WriteZeroes => Kind::Write,
        Op::Flush => Kind::Flush,
        Op::Unmap => Kind::Other,
    }
}

/// The request in the unit's blocks, or the status of one that this unit does not have.
#[inline(always)]
fn plain(lun: &Lun, access: Access, durable: bool) -> Result<Plain, u8> {
    let unit = lun.shared();
    let block_sectors = u64::from(unit.block_size()) / SECTOR;
    let Access { mut op, may_unmap, sector, sectors } = access;
    // A power of two.
    if (sector | sectors) & (block_sectors - 1) != 0 {
        return Err(status::IOERR);
    }
    let shift = block_sectors.trailing_zeros();
    if matches!(op, Op::Unmap | Op::WriteZeroes) {
        let features = unit.features();
        if op == Op::WriteZeroes && may_unmap && features.zeroing() == Some(Op::Unmap) {
            op = Op::Unmap;
        } else if !(if op == Op::Unmap { features.unmap } else { features.write_zeroes }) {
            return Err(status::UNSUPP);
        }
    }
    Ok(Plain { op, durable, lba: sector >> shift, blocks: sectors >> shift })
}
