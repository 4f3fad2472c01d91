//! What is done with data between the initiator's buffers and the bounce buffer.

use crate::response::Fail;
use crate::sense::{Code, Key, Sense};
use guestmem::Sg;

/// Bytes that are copied or compared at a time.
const CHUNK: usize = 512;

/// Copies up to [`CHUNK`] bytes between lists; returns how many, never 0. What is beyond the end
/// of either list is dropped.
pub(super) fn copy(from: &Sg, from_at: usize, to: &Sg, to_at: usize) -> usize {
    let mut chunk = [0u8; CHUNK];
    let n = from.copy_to_slice(from_at, &mut chunk);
    to.copy_from_slice(to_at, &chunk[..n]);
    CHUNK
}

/// ORs `bytes` (whole [`CHUNK`]s) of `data`, from byte `data_at` on, into `medium`.
pub(super) fn or(data: &Sg, data_at: usize, medium: &Sg, bytes: usize) {
    let (mut a, mut b) = ([0u8; CHUNK], [0u8; CHUNK]);
    for offset in (0..bytes).step_by(CHUNK) {
        medium.copy_to_slice(offset, &mut a);
        data.copy_to_slice(data_at + offset, &mut b);
        a.iter_mut().zip(&b).for_each(|(to, from)| *to |= from);
        medium.copy_from_slice(offset, &a);
    }
}

/// Compares `bytes` (whole [`CHUNK`]s) of the medium with the initiator's data.
pub(super) fn compare(
    medium: &Sg,
    at: usize,
    data: &Sg,
    data_at: usize,
    bytes: usize,
) -> Result<(), Fail> {
    let (mut a, mut b) = ([0u8; CHUNK], [0u8; CHUNK]);
    for offset in (0..bytes).step_by(CHUNK) {
        medium.copy_to_slice(at + offset, &mut a);
        data.copy_to_slice(data_at + offset, &mut b);
        if a != b {
            return Err(Sense::new(Key::Miscompare, Code::MISCOMPARE_DURING_VERIFY).into());
        }
    }
    Ok(())
}
