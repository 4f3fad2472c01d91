//! Which chunks of the source are copied, and which are written to: a word each, shared by all threads.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a chunk, at least.
pub const MIN_CHUNK: u64 = 256 << 10;
/// Chunks, at most: larger devices have larger ones.
const MOST: u64 = 1 << 20;

/// The state in the two highest bits.
const STATE: u32 = 3 << 30;
const TO_COPY: u32 = 0;
const COPYING: u32 = 1 << 30;
const COPIED: u32 = 2 << 30;
/// It was written to since the copy began; writes in flight are counted in the bits below.
const TOUCHED: u32 = 1 << 29;
const WRITERS: u32 = TOUCHED - 1;

/// A chunk is being copied: a write to it waits.
#[derive(Debug)]
pub struct Copying;

/// The words of all chunks.
pub struct Chunks {
    words: Box<[AtomicU32]>,
    /// Bytes of a chunk, a power of two; the last one may be shorter.
    size: u64,
}

impl Chunks {
    /// Those of a device of so many bytes, all to be copied.
    pub fn of(bytes: u64) -> Self {
        let size = MIN_CHUNK.max(bytes.div_ceil(MOST).next_power_of_two());
        let words = (0..bytes.div_ceil(size)).map(|_| AtomicU32::new(TO_COPY)).collect();
        Chunks { words, size }
    }

    /// Bytes of a chunk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.words.len()
    }

    /// The chunks that `length` bytes (at least one, within the device) from `offset` on touch.
    pub fn touched_by(&self, offset: u64, length: u64) -> RangeInclusive<u32> {
        let last = (self.words.len() - 1) as u64;
        let of = |at: u64| (at / self.size).min(last) as u32;
        of(offset)..=of(offset + length - 1)
    }

    /// A write to these chunks begins: whether any is copied, so that the destination has to have it.
    ///
    /// # Errors
    /// One of them is being copied; nothing changed.
    pub fn begin_write(&self, chunks: RangeInclusive<u32>) -> Result<bool, Copying> {
        let mut copied = false;
        for at in chunks.clone() {
            let add = |word: u32| {
                debug_assert!(word & WRITERS < WRITERS, "that many writes cannot be in flight");
                (word & STATE != COPYING).then_some((word + 1) | TOUCHED)
            };
            let word = &self.words[at as usize];
            match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, add) {
                Ok(before) => copied |= before & STATE == COPIED,
                Err(_) => {
                    (*chunks.start()..at).for_each(|begun| self.end(begun));
                    return Err(Copying);
                }
            }
        }
        Ok(copied)
    }

    /// A write to these chunks has ended.
    pub fn end_write(&self, chunks: RangeInclusive<u32>) {
        chunks.for_each(|at| self.end(at));
    }

    fn end(&self, at: u32) {
        let before = self.words[at as usize].fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before & WRITERS > 0, "a write ends once");
    }

    /// No write begins on a chunk from now on.
    pub fn begin_copy(&self, at: usize) {
        self.words[at].fetch_or(COPYING, Ordering::AcqRel);
    }

    /// Whether no write is in flight on a chunk.
    pub fn is_quiet(&self, at: usize) -> bool {
        self.words[at].load(Ordering::Acquire) & WRITERS == 0
    }

    /// Whether a chunk was written to since the copy began.
    pub fn was_written(&self, at: usize) -> bool {
        self.words[at].load(Ordering::Acquire) & TOUCHED != 0
    }

    /// A chunk that was being copied is.
    pub fn end_copy(&self, at: usize) {
        // From COPYING to COPIED at once, whatever stands below.
        self.words[at].fetch_xor(COPYING | COPIED, Ordering::AcqRel);
    }

    /// Both may have something else of a chunk to which a write is in flight: if it was copied, it is to be again.
    pub fn copy_again(&self, at: u32) {
        let copied = |word: u32| (word & STATE == COPIED).then_some(word & !STATE | TO_COPY);
        // One that is still to be copied, or waits for that write to be, is anyhow.
        _ = self.words[at as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, copied);
    }

    /// Whether a chunk is to be copied.
    pub fn is_to_copy(&self, at: usize) -> bool {
        self.words[at].load(Ordering::Acquire) & STATE == TO_COPY
    }

    /// A chunk of which there is nothing to copy is copied, unless it was ever written to.
    pub fn skip(&self, at: usize) -> bool {
        let word = &self.words[at];
        word.compare_exchange(TO_COPY, COPIED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_waits_for_the_copy_of_a_chunk_and_the_copy_for_the_write() {
        let chunks = Chunks::of(3 * MIN_CHUNK + 1);
        assert_eq!((chunks.count(), chunks.size()), (4, MIN_CHUNK));
        assert_eq!(chunks.touched_by(MIN_CHUNK - 1, 2), 0..=1);
        assert!(!chunks.begin_write(0..=1).unwrap());
        chunks.begin_copy(1);
        assert!(!chunks.is_quiet(1) && chunks.was_written(1));
        assert!(chunks.begin_write(0..=2).is_err());
        chunks.end_write(0..=1);
        // What was refused left nothing behind.
        assert!(chunks.is_quiet(0) && chunks.is_quiet(1) && !chunks.was_written(2));
        chunks.end_copy(1);
        assert!(chunks.begin_write(0..=2).unwrap(), "one of them is copied");
        chunks.end_write(0..=2);
        assert!(!chunks.begin_write(0..=0).unwrap());
        chunks.end_write(0..=0);
        assert!(chunks.skip(3) && !chunks.skip(0) && !chunks.skip(3));
        assert!(chunks.begin_write(3..=3).unwrap());
        // To be copied again, as soon as the write is over.
        (0..=3).for_each(|at| chunks.copy_again(at));
        assert!((0..=3).all(|at| chunks.is_to_copy(at as usize)) && !chunks.is_quiet(3));
        assert!(!chunks.begin_write(1..=1).unwrap() && chunks.was_written(3));
    }

    #[test]
    fn a_large_device_has_larger_chunks() {
        let chunks = Chunks::of(1 << 42);
        assert_eq!((chunks.size(), chunks.count()), (4 << 20, 1 << 20));
    }
}
