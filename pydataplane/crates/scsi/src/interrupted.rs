//! The answer to a command that a crash has interrupted, and that cannot be done a second time.

use crate::copy::aborted;
use crate::mode::Modes;
use crate::opcode::CDB_LEN;
use crate::response::{Outcome, Response};
use crate::sense::{Code, Key, Sense};
use crate::shared::LunShared;

/// How a command ends that is [unrepeatable](crate::Task::is_unrepeatable) and was under way when the target was
/// killed. How far it was nobody knows: the initiator is told that it was terminated, and has to look. COPY
/// ABORTED says of an EXTENDED COPY that some of it may have been done (SPC-4 4.5.6); of a COMPARE AND WRITE it is
/// ABORTED COMMAND, as MISCOMPARE would say that somebody else has written. In the format that `unit` is to have, if it
/// is there already.
pub fn interrupted(cdb: &[u8; CDB_LEN], unit: Option<&LunShared>) -> Outcome {
    const THIRD_PARTY_COPY_OUT: u8 = 0x83;
    let sense = match cdb[0] {
        THIRD_PARTY_COPY_OUT => aborted(Code::IO_PROCESS_TERMINATED),
        _ => Sense::new(Key::AbortedCommand, Code::IO_PROCESS_TERMINATED),
    };
    let mut response = Response::check(sense);
    if unit.is_some_and(|unit| unit.has_mode(Modes::DESCRIPTOR_SENSE)) {
        response.in_descriptors();
    }
    Outcome::Done(response)
}
