//! Why an EXTENDED COPY(LID1) has failed, for RECEIVE COPY FAILURE DETAILS.

use super::Copies;
use crate::copy::work::Ended;
use crate::opcode::Cdb;
use crate::reply::send;
use crate::response::{Fail, Status};
use crate::sense::{SENSE_LEN, Sense};
use crate::shared::LunShared;
use guestmem::Sg;
use std::sync::atomic::Ordering;

impl Copies {
    /// A reset, or the end of a nexus: why they failed is told no more.
    pub(crate) fn forget_failures(&self) {
        let operations = self.operations.lock();
        operations.iter().for_each(|operation| operation.is_told.store(true, Ordering::Relaxed));
    }
}

/// RECEIVE COPY FAILURE DETAILS(LID1) (SPC-4 6.23). They are told once, as a whole.
///
/// # Errors
/// INVALID FIELD IN CDB for a list identifier that no EXTENDED COPY(LID1) is held of, or of which one goes on.
pub(crate) fn failure1(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    const LID1: u8 = 0x00;
    /// Bytes before the sense data.
    const HEADER: usize = 60;
    let operation = unit.copies.operation(cdb.byte(2).into())?;
    let ended = operation.ended.get().filter(|_| operation.action == LID1);
    let ended = ended.ok_or(Sense::invalid_cdb(2, None))?;
    let allocation = cdb.be32(10) as usize;
    let mut data = [0; HEADER + SENSE_LEN];
    let length = match ended {
        _ if operation.is_told.load(Ordering::Relaxed) => 4,
        Ok(()) => 4,
        Err(Ended::Cancelled) => {
            data[56] = Status::TaskAborted as u8;
            HEADER
        }
        Err(Ended::Failed(sense)) => {
            data[56] = Status::CheckCondition as u8;
            data[58..60].copy_from_slice(&(SENSE_LEN as u16).to_be_bytes());
            data[HEADER..].copy_from_slice(&sense.fixed());
            data.len()
        }
    };
    data[..4].copy_from_slice(&((length - 4) as u32).to_be_bytes());
    let sent = send(data_in, allocation, &data[..length])?;
    if allocation == 0 || allocation >= length {
        operation.is_told.store(true, Ordering::Relaxed);
    }
    Ok(sent)
}
