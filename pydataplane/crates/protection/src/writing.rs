//! Which blocks are being written, by any channel of a disk: a read through the page cache may show such
//! a one half old and half new, for as long as whoever writes it is kept from its processor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counters of a disk, and blocks in a row that have the same one.
const COUNTERS: usize = 64;
const IN_A_ROW: u64 = 64;

/// What all channels of a disk write.
#[derive(Default)]
pub(crate) struct Writing(Counters);

struct Counters([AtomicU32; COUNTERS]);

impl Default for Counters {
    fn default() -> Self {
        Counters([const { AtomicU32::new(0) }; COUNTERS])
    }
}

/// A channel's part in it, which ends with the channel.
pub(crate) struct Writer {
    all: Arc<Writing>,
    own: [u32; COUNTERS],
}

/// The counters of blocks.
fn counters(lba: u64, blocks: u64) -> impl Iterator<Item = usize> {
    let first = lba / IN_A_ROW;
    let last = lba.saturating_add(blocks.saturating_sub(1)) / IN_A_ROW;
    let count = match blocks {
        0 => 0,
        _ => (last - first).saturating_add(1).min(COUNTERS as u64),
    };
    (first..first + count).map(|nth| (nth % COUNTERS as u64) as usize)
}

impl Writer {
    pub(crate) fn new(all: &Arc<Writing>) -> Writer {
        Writer { all: Arc::clone(all), own: [0; COUNTERS] }
    }

    /// These blocks are going to be written.
    #[inline]
    pub(crate) fn begin(&mut self, lba: u64, blocks: u64) {
        for nth in counters(lba, blocks) {
            self.own[nth] += 1;
            self.all.0.0[nth].fetch_add(1, Ordering::SeqCst);
        }
    }

    /// They are written.
    #[inline]
    pub(crate) fn end(&mut self, lba: u64, blocks: u64) {
        for nth in counters(lba, blocks) {
            self.own[nth] -= 1;
            self.all.0.0[nth].fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Whether somebody may be writing block `lba`.
    pub(crate) fn is_written(&self, lba: u64) -> bool {
        counters(lba, 1).any(|nth| self.all.0.0[nth].load(Ordering::SeqCst) > 0)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        for (nth, own) in self.own.iter().enumerate() {
            self.all.0.0[nth].fetch_sub(*own, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_written_while_any_channel_has_it() {
        let all = Arc::default();
        let (mut a, mut b) = (Writer::new(&all), Writer::new(&all));
        a.begin(100, 8);
        b.begin(60, 8);
        let written = |w: &Writer| [0, 63, 64, 127, 128].map(|lba| w.is_written(lba));
        assert_eq!(written(&a), [true, true, true, true, false]);
        b.end(60, 8);
        assert_eq!(written(&b), [false, false, true, true, false]);
        drop(a);
        assert_eq!(written(&b), [false; 5]);
        b.begin(5, u64::MAX - 5);
        assert!(b.is_written(77) && b.is_written(1 << 40));
        b.end(5, u64::MAX - 5);
        b.begin(5, 0);
        assert_eq!(written(&b), [false; 5]);
    }
}
