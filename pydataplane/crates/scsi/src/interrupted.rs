//! The answer to a command that a crash has interrupted, and that cannot be done a second time.

use crate::copy::aborted;
use crate::opcode::CDB_LEN;
use crate::response::{Outcome, Response};
use crate::sense::{Code, Key, Sense};

/// How a command ends that is [unrepeatable](crate::Task::is_unrepeatable) and was under way when the target was
/// killed. How far it was nobody knows: the initiator is told that it was terminated, and has to look. COPY
/// ABORTED says of an EXTENDED COPY that some of it may have been done (SPC-4 4.5.6); of a COMPARE AND WRITE it is
/// ABORTED COMMAND, as MISCOMPARE would say that somebody else has written.
pub fn interrupted(cdb: &[u8; CDB_LEN]) -> Outcome {
    const THIRD_PARTY_COPY_OUT: u8 = 0x83;
    let sense = match cdb[0] {
        THIRD_PARTY_COPY_OUT => aborted(Code::IO_PROCESS_TERMINATED),
        _ => Sense::new(Key::AbortedCommand, Code::IO_PROCESS_TERMINATED),
    };
    Outcome::Done(Response::check(sense))
}
