//! What each block should contain.

/// Bytes between two stamps.
const STEP: usize = 512;

/// The generation of every block, and which are being written.
#[derive(Debug)]
pub struct Ledger {
    generation: Vec<u32>,
    busy: Vec<bool>,
    seed: u64,
}

impl Ledger {
    /// A ledger of `blocks` blocks that nobody has written.
    pub fn new(blocks: u64, seed: u64) -> Ledger {
        let blocks = blocks as usize;
        Ledger { generation: vec![0; blocks], busy: vec![false; blocks], seed }
    }

    /// Takes `block` for one I/O; `false` if another has it.
    pub fn take(&mut self, block: u64) -> bool {
        !std::mem::replace(&mut self.busy[block as usize], true)
    }

    /// Gives `block` back.
    pub fn release(&mut self, block: u64) {
        self.busy[block as usize] = false;
    }

    /// Whether `block` was ever written.
    pub fn is_written(&self, block: u64) -> bool {
        self.generation[block as usize] != 0
    }

    /// Fills `data` with the next generation of `block`.
    pub fn stamp(&mut self, block: u64, data: &mut [u8]) {
        self.generation[block as usize] += 1;
        let generation = self.generation[block as usize];
        for (i, part) in data.chunks_mut(STEP).enumerate() {
            let stamp = self.mark(block, generation, i as u64);
            for (j, bytes) in part.chunks_mut(8).enumerate() {
                let value = stamp.rotate_left(j as u32).to_le_bytes();
                bytes.copy_from_slice(&value[..bytes.len()]);
            }
        }
    }

    /// Whether `data` is the last generation of `block`.
    pub fn matches(&self, block: u64, data: &[u8]) -> bool {
        let generation = self.generation[block as usize];
        data.chunks(STEP).enumerate().all(|(i, part)| {
            let stamp = self.mark(block, generation, i as u64);
            part.chunks(8).enumerate().all(|(j, bytes)| {
                bytes == &stamp.rotate_left(j as u32).to_le_bytes()[..bytes.len()]
            })
        })
    }

    fn mark(&self, block: u64, generation: u32, part: u64) -> u64 {
        let mut x = self.seed ^ block << 24 ^ u64::from(generation) << 8 ^ part;
        // splitmix64's finalizer: every bit of the input changes half of the output.
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_write_of_the_same_block_matches() {
        let mut ledger = Ledger::new(4, 7);
        let (mut old, mut new, mut other) = ([0; 4096], [0; 4096], [0; 4096]);
        assert!(!ledger.is_written(2));
        ledger.stamp(2, &mut old);
        ledger.stamp(2, &mut new);
        ledger.stamp(3, &mut other);
        assert!(ledger.is_written(2) && ledger.matches(2, &new));
        assert!(!ledger.matches(2, &old) && !ledger.matches(2, &other));
        new[4095] ^= 1;
        assert!(!ledger.matches(2, &new));
    }

    #[test]
    fn a_block_is_taken_once() {
        let mut ledger = Ledger::new(2, 0);
        assert!(ledger.take(1) && !ledger.take(1) && ledger.take(0));
        ledger.release(1);
        assert!(ledger.take(1));
    }
}
