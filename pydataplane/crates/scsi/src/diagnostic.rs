//! SEND DIAGNOSTIC (SPC-4 6.42): the default self-test.

use crate::block::{self, Extent, PlanContext};
use crate::job::Job;
use crate::opcode::{CDB_LEN, Cdb};
use crate::response::Fail;
use guestmem::Sg;

/// The default self-test reads the first block, and ends as a VERIFY of it would; without SELFTEST there is
/// nothing to do, as there are no diagnostic pages. Nothing goes offline, whatever DEVOFFL and UNITOFFL allow.
pub(crate) fn send(cx: &mut PlanContext, cdb: &Cdb) -> Result<Job, Fail> {
    const SELFTEST: u8 = 2;
    if !cdb.bit(1, SELFTEST) {
        return Ok(Job::IDLE);
    }
    let first = Extent { lba: 0, blocks: cx.unit.num_blocks().min(1), length_at: 0 };
    block::verify(cx, first, &Cdb([0; CDB_LEN]), &Sg::EMPTY)
}
