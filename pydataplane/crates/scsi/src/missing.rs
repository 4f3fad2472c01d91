//! The answers for logical units that a target does not have.

use crate::inquiry::inquiry_missing;
use crate::opcode::{CDB_LEN, Cdb};
use crate::reply::send;
use crate::report::report_luns;
use crate::response::Outcome;
use crate::sense::{Code, Sense};
use guestmem::Sg;

/// The answer of a target to a command for a logical unit that it does not have while it has LUN 0
/// (SAM-5 4.7.4, SPC-4 6.6.2, 6.33, 6.39): INQUIRY says so (qualifier 011b, type 1Fh), REPORT LUNS
/// lists LUN 0, REQUEST SENSE reports LOGICAL UNIT NOT SUPPORTED (25h/00h) as data, and everything
/// else ends with it.
pub fn missing_lun(cdb: &[u8; CDB_LEN], data_in: &Sg) -> Outcome {
    const INQUIRY: u8 = 0x12;
    const REQUEST_SENSE: u8 = 0x03;
    const REPORT_LUNS: u8 = 0xA0;
    let cdb = Cdb(*cdb);
    let none = Sense::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED);
    let sent = match cdb.byte(0) {
        INQUIRY => inquiry_missing(&cdb, data_in),
        REQUEST_SENSE if cdb.bit(1, 0) => {
            send(data_in, usize::from(cdb.byte(4)), &none.descriptor())
        }
        REQUEST_SENSE => send(data_in, usize::from(cdb.byte(4)), &none.fixed()),
        REPORT_LUNS => report_luns(&cdb, data_in),
        _ => Err(none.into()),
    };
    sent.into()
}
