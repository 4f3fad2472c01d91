//! The REPORT LUNS well-known logical unit (SPC-4 8.2): it lists the logical units of all targets,
//! for initiators that address them through one controller.

use crate::inquiry::inquiry_well_known;
use crate::opcode::{CDB_LEN, Cdb};
use crate::reply::Reply;
use crate::report::request_sense;
use crate::response::{Fail, Outcome};
use crate::sense::{Code, Sense};
use guestmem::Sg;

/// Carries out a command that is addressed to the unit. `luns`: the logical units there are, each in
/// the transport's addressing, in the order in which they are listed (SPC-4 6.33).
#[cold]
pub fn report_luns_unit(
    cdb: &[u8; CDB_LEN],
    data_in: &Sg,
    luns: impl Iterator<Item = [u8; 8]> + Clone,
) -> Outcome {
    const TEST_UNIT_READY: u8 = 0x00;
    const REQUEST_SENSE: u8 = 0x03;
    const INQUIRY: u8 = 0x12;
    const REPORT_LUNS: u8 = 0xA0;
    let cdb = &Cdb(*cdb);
    let done = match cdb.byte(0) {
        TEST_UNIT_READY => Ok(0),
        REQUEST_SENSE => request_sense(None, cdb, data_in),
        INQUIRY => inquiry_well_known(cdb, data_in),
        REPORT_LUNS => list(cdb, data_in, luns),
        _ => Err(Sense::illegal(Code::INVALID_COMMAND_OPERATION_CODE).into()),
    };
    done.into()
}

fn list(cdb: &Cdb, data_in: &Sg, luns: impl Iterator<Item = [u8; 8]> + Clone) -> Result<u32, Fail> {
    let mut reply = Reply::new(data_in, cdb.be32(6) as usize);
    let bytes = luns.clone().count() * 8;
    reply.put(&(bytes as u32).to_be_bytes());
    reply.put(&[0; 4]);
    luns.for_each(|lun| reply.put(&lun));
    reply.end()
}
