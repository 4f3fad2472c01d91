//! One block and its tuple, as they lie on the bdev below.

use crate::tuple::{Mismatch, Tuple};
use bdev::{Protected, ProtectionType, TUPLE_LEN, Tuples};
use guestmem::Sg;

/// The tuple behind the data of a block. Its bits are inverted, so that a block of zeros is one that was
/// never written, or unmapped: files and memory stay sparse.
fn stored(tuple: [u8; TUPLE_LEN]) -> [u8; TUPLE_LEN] {
    tuple.map(|byte| !byte)
}

/// The number of the `nth` block of an I/O for whoever submits it, which is block `lba` here.
fn number(with: &Protected, nth: usize, lba: u64) -> u64 {
    with.first.map_or(lba, |first| u64::from(first.wrapping_add(nth as u32)))
}

/// The tuple with this application tag, unless it is one by which nothing is checked.
fn tagged(tuple: Tuple, kind: ProtectionType, tag: Option<u16>) -> Tuple {
    match tag {
        Some(app_tag) if !tuple.escapes(kind) => Tuple { app_tag, ..tuple },
        _ => tuple,
    }
}

/// A tuple as it lies of a block that nobody wrote.
pub(crate) const NOTHING: [u8; TUPLE_LEN] = [0; TUPLE_LEN];

/// The tuple that lies as those bytes.
pub(crate) fn lying(stored: &[u8; TUPLE_LEN]) -> Tuple {
    Tuple::from_bytes(self::stored(*stored))
}

/// Makes `data` and `last`, its tuple as it lies, what is to lie there of the `nth` block of a write, which is
/// block `lba` of the disk. Everything of the writer's is copied, then looked at.
pub(crate) fn take(
    (data, last): (&mut [u8], &mut [u8; TUPLE_LEN]),
    kind: ProtectionType,
    (nth, lba): (usize, u64),
    sg: &Sg,
    with: &Protected,
) -> Result<(), Mismatch> {
    let len = data.len() + TUPLE_LEN;
    let number = number(with, nth, lba);
    let given = match with.tuples {
        Tuples::Like(like) => {
            sg.copy_to_slice(nth * data.len(), data);
            let tuple = Tuple::from_bytes(like).at(kind, number);
            tagged(tuple, kind, with.tags.of(nth as u64)).to_bytes()
        }
        Tuples::None => {
            sg.copy_to_slice(nth * data.len(), data);
            let made = tagged(Tuple::of(kind, lba, data), kind, with.tags.of(nth as u64));
            *last = stored(made.to_bytes());
            return Ok(());
        }
        Tuples::Apart(tuples, skipped) => {
            sg.copy_to_slice(nth * data.len(), data);
            tuples.copy_to_slice((skipped as usize + nth) * TUPLE_LEN, last);
            *last
        }
        Tuples::Behind => {
            sg.copy_to_slice(nth * len, data);
            sg.copy_to_slice(nth * len + data.len(), last);
            *last
        }
    };
    let given = Tuple::from_bytes(given);
    given.check(kind, with.checks_of(nth as u64), number, data)?;
    *last = stored(given.moved(kind, number, lba).to_bytes());
    Ok(())
}

/// The other way: gives whoever reads what lies there of the `nth` block of a read.
pub(crate) fn give(
    (data, last): (&[u8], &[u8; TUPLE_LEN]),
    kind: ProtectionType,
    (nth, lba): (usize, u64),
    sg: &Sg,
    with: &Protected,
) -> Result<(), Mismatch> {
    let len = data.len() + TUPLE_LEN;
    let tuple = lying(last);
    tuple.check(kind, with.checks_of(nth as u64), lba, data)?;
    let tuple = tuple.moved(kind, lba, number(with, nth, lba)).to_bytes();
    match with.tuples {
        Tuples::None | Tuples::Like(_) => {
            sg.copy_from_slice(nth * data.len(), data);
        }
        Tuples::Apart(tuples, skipped) => {
            sg.copy_from_slice(nth * data.len(), data);
            tuples.copy_from_slice((skipped as usize + nth) * TUPLE_LEN, &tuple);
        }
        Tuples::Behind => {
            sg.copy_from_slice(nth * len, data);
            sg.copy_from_slice(nth * len + data.len(), &tuple);
        }
    }
    Ok(())
}

/// A block as it lies with its tuple behind it.
pub(crate) fn cut(block: &mut [u8]) -> (&mut [u8], &mut [u8; TUPLE_LEN]) {
    block.split_last_chunk_mut().expect("a block has a tuple")
}
