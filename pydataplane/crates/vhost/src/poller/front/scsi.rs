//! virtio-scsi (virtio 1.2 5.6.6): a header with a CDB, data to the device, response, data from it; with
//! VIRTIO_SCSI_F_T10_PI, protection information before the data each way.

use ::scsi::{Kind, Outcome, Response, Status, interrupted, missing_lun};
use virtqueue::{Halves, Segments};
use zerocopy::IntoBytes;

use super::{Answer, FrontEnd, Read};
use crate::defs::{
    LunAddress, ProtectedRequestHeader, RESPONSE_SIZE, RequestHeader, ResponseHeader, response,
};
use crate::poller::slot::Slot;
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

/// Cuts off the header of a request and the protection information before its data each way; the header
/// becomes `plain`, one without it.
fn read_protected(slot: &mut Slot, plain: &mut [u8; header_size(false)]) -> Option<Halves> {
    let mut bytes = [0u8; header_size(true)];
    let halves = slot.segments.split(bytes.len(), RESPONSE_SIZE)?;
    halves.readable.0.copy_to_slice(0, &mut bytes);
    let header: ProtectedRequestHeader = zerocopy::transmute!(bytes);
    let (out, into) = (header.pi_bytesout.get() as usize, header.pi_bytesin.get() as usize);
    let halves = slot.segments.split(out, into)?;
    slot.task.set_tuples(halves.readable.0, halves.writable.0);
    let (head, cdb) = plain.split_at_mut(header.head.len());
    head.copy_from_slice(&header.head);
    cdb.copy_from_slice(&header.cdb);
    Some(halves)
}

/// A request's header, and what is behind header and response. `None`: it is too short.
#[inline(always)]
fn header_and_data<const PI: bool>(slot: &mut Slot) -> Option<(RequestHeader, Halves)> {
    // The header is copied out of guest memory once; from here on only the copy is looked at.
    let mut bytes = [0u8; header_size(false)];
    let halves = if PI {
        read_protected(slot, &mut bytes)?
    } else {
        let halves = slot.segments.split(bytes.len(), RESPONSE_SIZE)?;
        halves.readable.0.copy_to_slice(0, &mut bytes);
        halves
    };
    Some((zerocopy::transmute!(bytes), halves))
}

impl<const PI: bool> FrontEnd for ScsiWith<PI> {
    const WAITS_FOR_DEVICE: bool = false;

    #[inline(always)]
    fn read(poller: &mut DevicePoller, index: u16) -> Read {
        let slot = &mut poller.slots[index];
        let Some((header, halves)) = header_and_data::<PI>(slot) else { return Read::Nothing };
        let Halves { readable: (_, data_out), writable: (_, data_in) } = halves;

        match LunAddress::decode(&header.lun) {
            LunAddress::Unit { target, lun: 0 } => {
                slot.task.prepare(&header.cdb, data_out, data_in);
                (slot.target, slot.id, slot.attribute) =
                    (target, header.id.get(), header.task_attr);
                slot.kind = Kind::of(header.cdb[0]);
                // Of longer buffers no command takes more.
                slot.bytes = (data_out.len() + data_in.len()).min(MAX_DATA) as u32;
                Read::Request
            }
            LunAddress::Unit { target, .. } if !poller.units.is_hidden(target) => {
                Read::End(Ok(missing_lun(&header.cdb, &data_in)))
            }
            LunAddress::ReportLuns => Read::End(Ok(poller.units.well_known(&header.cdb, &data_in))),
            LunAddress::Unit { .. } | LunAddress::Invalid => Read::End(Err(response::BAD_TARGET)),
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
    fn interrupted(poller: &mut DevicePoller, index: u16) -> Option<Outcome> {
        let (header, _) = header_and_data::<PI>(&mut poller.slots[index])?;
        let unit = match LunAddress::decode(&header.lun) {
            LunAddress::Unit { target, lun: 0 } => poller.units.at(target),
            _ => None,
        };
        Some(interrupted(&header.cdb, unit.map(|unit| &**unit.lun.shared())))
    }

    #[cold]
    fn refuse(segments: &Segments) -> u32 {
        let header = ResponseHeader { response: response::FAILURE, ..Default::default() };
        let written = segments.writable().copy_from_slice(0, header.as_bytes());
        segments.mark_written(0, written);
        written as u32
    }
}
