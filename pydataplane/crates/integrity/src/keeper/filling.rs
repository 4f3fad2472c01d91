//! Making the checksums of regions anew that were written to when the process, or the host, ended.

use super::Keeper;
use super::states::{State, first_block};
use crate::format;
use crate::layout::{self, PAGE, REGION_BLOCKS};
use bdev::AlignedBuf;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Blocks that are read at a time.
const AT_ONCE: u16 = 64;

impl Keeper {
    /// Goes on with that; returns whether there is more to do now.
    pub(super) fn fill(&mut self) -> bool {
        if self.base.features().read_only {
            return false;
        }
        let Some((region, from)) = self.filling.or_else(|| self.next_to_fill()) else {
            return false;
        };
        let Some(at) = self.table.peek(region) else {
            // There was no room for it.
            self.filling = None;
            return false;
        };
        let page = self.table.page(at);
        let left = self.table.blocks().saturating_sub(first_block(region));
        let end = REGION_BLOCKS.min(u16::try_from(left).unwrap_or(REGION_BLOCKS));
        let count = AT_ONCE.min(end.saturating_sub(from));
        if count > 0 {
            if !page.holds.hold(u32::from(from), u32::from(count)) {
                // By a write, which is over soon.
                std::thread::yield_now();
                return true;
            }
            let mut bytes = AlignedBuf::zeroed(usize::from(count) * PAGE);
            let at = layout::locate(first_block(region) + u64::from(from)).page;
            match self.medium.read(at, &mut bytes) {
                Ok(()) => {
                    for (block, nth) in bytes.chunks_exact(PAGE).zip(usize::from(from)..) {
                        if page.entry(nth) == 0 {
                            page.set_entry(nth, format::entry(block));
                        }
                    }
                }
                // Who reads them is told.
                Err(e) => tracing::error!("blocks are left without checksums: {e}"),
            }
            page.holds.let_go(u32::from(from), u32::from(count));
        }
        if from + count < end {
            self.filling = Some((region, from + count));
        } else {
            self.filling = None;
            // Nobody has to have written to it meanwhile.
            let long_ago = self.table.clock.load(Ordering::Relaxed).wrapping_sub(self.times.quiet);
            self.states.filled(region, long_ago);
            page.changed.store(true, Ordering::Release);
            self.count();
        }
        true
    }

    /// Those first that are used already.
    fn next_to_fill(&mut self) -> Option<(u32, u16)> {
        let region = self.states.next_stale(|region| self.table.peek(region).is_some())?;
        debug_assert_eq!(self.states.get(region), State::Stale);
        if self.table.peek(region).is_none() {
            self.load(&BTreeSet::from([region]));
        }
        self.table.peek(region)?;
        self.filling = Some((region, 0));
        self.filling
    }
}
