//! virtio-blk (virtio 1.2 5.2.6): a header, data to the device, data from it, and a byte of status at the
//! end. There is one disk, unit 0.
//!
//! A driver knows no status that means "later": what a full device does not take waits here for the end
//! of another of its requests, and what a stop must not leave half done ends before it, or stays marked
//! as in flight; what waits because an I/O failed is given back to whoever goes on (`poller/suspended`).

use ::scsi::{Kind, Lun, Outcome, Plain, Response, Status, Task};
use bdev::Op;
use virtio_blk::{Access, HEADER_SIZE, Header, ID_SIZE, Request, SECTOR, status};
use virtqueue::Segments;

use super::{Answer, FrontEnd};
use crate::defs::response;
use crate::front::DISK;
use crate::poller::slot::Slot;
use crate::poller::units::Wants;
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
    fn begin(poller: &mut DevicePoller, at: usize, index: u16, now: u64) -> bool {
        let slot = &mut poller.slots[index];

        // The header is copied out of guest memory once; from here on only the copy is looked at.
        let mut bytes = [0u8; HEADER_SIZE];
        let space = (slot.segments.writable_len() as usize).checked_sub(STATUS);
        let halves = space.and_then(|space| slot.segments.split(HEADER_SIZE, space));
        let Some(halves) = halves else {
            poller.counters.malformed.add(1);
            poller.queues[at].refuse::<Self>(&mut poller.slots, index);
            return true;
        };
        halves.readable.0.copy_to_slice(0, &mut bytes);
        let header: Header = zerocopy::transmute!(bytes);
        let (data_out, data_in) = (halves.readable.1, halves.writable.0);

        let end = match (poller.units.find(DISK), Request::decode(&header, &data_out, &data_in)) {
            (None, _) => Err(response::BAD_TARGET),
            (Some(_), Err(status)) => Err(refusal(status)),
            (Some(unit), Ok(Request::Id)) => {
                let mut id = [0; ID_SIZE];
                let serial = unit.lun.shared().serial().as_bytes();
                let len = serial.len().min(ID_SIZE);
                id[..len].copy_from_slice(&serial[..len]);
                let transferred = data_in.copy_from_slice(0, &id[..ID_SIZE.min(data_in.len())]);
                let transferred = transferred as u32;
                Ok(Outcome::Done(Response { transferred, ..Response::bare(Status::Good) }))
            }
            (Some(unit), Ok(Request::Access(access))) => {
                match plain(&unit.lun, access, poller.write_through) {
                    Err(status) => Err(refusal(status)),
                    Ok(task) => {
                        // Of longer buffers none is taken.
                        let bytes = (data_out.len() + data_in.len()).min(MAX_DATA) as u32;
                        let kind = kind_of(access.op);
                        let wants = Wants { kind, attribute: SIMPLE, bytes, counted: false };
                        let admitted = poller.units.admits(DISK, wants);
                        slot.task.prepare_plain(task, data_out, data_in);
                        (slot.id, slot.attribute, slot.kind) = (0, SIMPLE, kind);
                        let at_once = admitted == Some(true);
                        return poller.accept::<Self>((at, index), (DISK, bytes), now, at_once);
                    }
                }
            }
        };
        let ticks = poller.sample(now);
        poller.finish::<Self>(at, index, end, ticks);
        true
    }

    #[inline(always)]
    fn start(lun: &mut Lun, task: &mut Task, _attribute: u8) -> Outcome {
        lun.start(task)
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
        if op == Op::WriteZeroes && may_unmap && features.unmap && features.unmap_zeroes {
            op = Op::Unmap;
        } else if !(if op == Op::Unmap { features.unmap } else { features.write_zeroes }) {
            return Err(status::UNSUPP);
        }
    }
    Ok(Plain { op, durable, lba: sector >> shift, blocks: sectors >> shift })
}
