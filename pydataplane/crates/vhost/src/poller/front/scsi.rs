//! virtio-scsi (virtio 1.2 5.6.6): a header with a CDB, data to the device, response, data from it; with
//! VIRTIO_SCSI_F_T10_PI, protection information before the data each way.

use ::scsi::{Kind, Lun, Outcome, Response, Status, Task, missing_lun};
use guestmem::Sg;
use virtqueue::Segments;
use zerocopy::IntoBytes;

use super::{Answer, FrontEnd};
use crate::defs::{
    LunAddress, ProtectedRequestHeader, RESPONSE_SIZE, RequestHeader, ResponseHeader, response,
    task_attribute,
};
use crate::poller::slot::Slot;
use crate::poller::units::Wants;
use crate::poller::{DevicePoller, MAX_DATA};

/// Bytes of a request that can have been written: the response and the longest transfer.
const MAX_WRITTEN: usize = RESPONSE_SIZE + MAX_DATA;
/// Bytes of the protection information of the longest transfer, of blocks of 512 bytes.
const MAX_TUPLES: usize = MAX_DATA / 512 * bdev::TUPLE_LEN;

/// The disks of a virtio-scsi controller; `PI`: requests may carry protection information.
pub(in crate::poller) struct ScsiWith<const PI: bool>;

/// Without it.
pub(in crate::poller) type Scsi = ScsiWith<false>;
/// With it.
pub(in crate::poller) type ProtectedScsi = ScsiWith<true>;

/// Bytes of a request's header.
const fn header_size(protected: bool) -> usize {
    match protected {
        false => size_of::<RequestHeader>(),
        true => size_of::<ProtectedRequestHeader>(),
    }
}

/// What a request is: header, data to the device, and space for data from it. `None`: it is too short.
#[inline(always)]
fn read(slot: &mut Slot) -> Option<(RequestHeader, Sg, Sg)> {
    // The header is copied out of guest memory once; from here on only the copy is looked at.
    let mut bytes = [0u8; header_size(false)];
    let halves = slot.segments.split(bytes.len(), RESPONSE_SIZE)?;
    halves.readable.0.copy_to_slice(0, &mut bytes);
    Some((zerocopy::transmute!(bytes), halves.readable.1, halves.writable.1))
}

/// As [`read`], with protection information before the data each way.
fn read_protected(slot: &mut Slot) -> Option<(RequestHeader, Sg, Sg)> {
    let mut bytes = [0u8; header_size(true)];
    let halves = slot.segments.split(bytes.len(), RESPONSE_SIZE)?;
    halves.readable.0.copy_to_slice(0, &mut bytes);
    let header: ProtectedRequestHeader = zerocopy::transmute!(bytes);
    let (out, into) = (header.pi_bytesout.get() as usize, header.pi_bytesin.get() as usize);
    let halves = slot.segments.split(out, into)?;
    slot.task.set_tuples(halves.readable.0, halves.writable.0);
    let mut plain = [0u8; header_size(false)];
    let (head, cdb) = plain.split_at_mut(header.head.len());
    head.copy_from_slice(&header.head);
    cdb.copy_from_slice(&header.cdb);
    Some((zerocopy::transmute!(plain), halves.readable.1, halves.writable.1))
}

impl<const PI: bool> FrontEnd for ScsiWith<PI> {
    const WAITS_FOR_DEVICE: bool = false;

    #[inline(always)]
    fn begin(poller: &mut DevicePoller, at: usize, index: u16, now: u64) -> bool {
        let slot = &mut poller.slots[index];

        let read = if PI { read_protected(slot) } else { read(slot) };
        let Some((header, data_out, data_in)) = read else {
            poller.counters.malformed.add(1);
            poller.queues[at].refuse::<Self>(&mut poller.slots, index);
            return true;
        };

        let outcome = match LunAddress::decode(&header.lun) {
            LunAddress::Unit { target, lun: 0 } => {
                // Of longer buffers no command takes more.
                let bytes = (data_out.len() + data_in.len()).min(MAX_DATA) as u32;
                let (kind, attribute) = (Kind::of(header.cdb[0]), header.task_attr);
                let wants = Wants { kind, attribute, bytes, counted: false };
                match poller.units.admits(target, wants) {
                    Some(at_once) => {
                        slot.task.prepare(&header.cdb, data_out, data_in);
                        (slot.id, slot.attribute) = (header.id.get(), attribute);
                        slot.kind = kind;
                        return poller.accept::<Self>((at, index), (target, bytes), now, at_once);
                    }
                    None => Err(response::BAD_TARGET),
                }
            }
            LunAddress::Unit { target, .. } if poller.units.find(target).is_some() => {
                Ok(missing_lun(&header.cdb, &data_in))
            }
            LunAddress::ReportLuns => Ok(poller.units.well_known(&header.cdb, &data_in)),
            LunAddress::Unit { .. } | LunAddress::Invalid => Err(response::BAD_TARGET),
        };
        let ticks = poller.sample(now);
        poller.finish::<Self>(at, index, outcome, ticks);
        true
    }

    #[inline(always)]
    fn start(lun: &mut Lun, task: &mut Task, attribute: u8) -> Outcome {
        match attribute {
            task_attribute::ACA => Outcome::Done(Response::no_aca()),
            _ => lun.start(task),
        }
    }

    #[inline(always)]
    fn answer(slot: &mut Slot, end: Result<Outcome, u8>, stopping: bool) -> Answer {
        // Both parts were long enough when it began.
        let tuples = if PI { slot.task.tuples() } else { (0, 0) };
        let data_in = slot.segments.writable_len() - (RESPONSE_SIZE + tuples.1) as u32;
        let data_out = slot.segments.readable_len() - (header_size(PI) + tuples.0) as u32;
        let data = data_out + data_in;
        let mut header = ResponseHeader::default();
        let mut sense: &[u8] = &[];
        let mut transferred = 0;
        let answer;
        match end {
            Ok(Outcome::Done(done)) => {
                answer = match done.status {
                    Status::TaskAborted if stopping && slot.ended_by == response::OK => {
                        Response::bare(Status::Busy)
                    }
                    _ => done,
                };
                header.status = answer.status as u8;
                header.response = match answer.status {
                    Status::TaskAborted => slot.ended_by,
                    _ => response::OK,
                };
                sense = &answer.sense[..usize::from(answer.sense_len)];
                transferred = answer.transferred;
            }
            Ok(Outcome::Overrun) => header.response = response::OVERRUN,
            Ok(Outcome::Pending | Outcome::Suspended(_)) => {
                unreachable!("a request that is pending or suspended is not finished")
            }
            Err(code) => header.response = code,
        }
        let is_good = header.response == response::OK && header.status == Status::Good as u8;
        header.sense_len = (sense.len() as u32).into();
        header.residual = data.saturating_sub(transferred).into();

        let space = slot.segments.writable();
        space.copy_from_slice(0, header.as_bytes());
        if !sense.is_empty() {
            space.copy_from_slice(size_of::<ResponseHeader>(), sense);
        }
        // With what was read before an error, but not buffers that no command fills: marking
        // takes time for each page.
        let longest = (MAX_WRITTEN + if PI { MAX_TUPLES } else { 0 })
            .min(slot.segments.writable_len() as usize);
        slot.segments.mark_written(0, longest);
        // The whole response area counts as written, as with QEMU's and the kernel's devices.
        let used = (RESPONSE_SIZE + tuples.1) as u32 + transferred.min(data_in);
        Answer { is_good, transferred, used }
    }

    #[cold]
    fn refuse(segments: &Segments) -> u32 {
        let header = ResponseHeader { response: response::FAILURE, ..Default::default() };
        let written = segments.writable().copy_from_slice(0, header.as_bytes());
        segments.mark_written(0, written);
        written as u32
    }
}
