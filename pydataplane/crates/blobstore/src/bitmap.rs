//! Used and free pages and clusters, one bit each.

/// Consecutive clusters of the device (or bits of a bitmap).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// Bits with a count and a cursor where the search for a free one begins.
pub(crate) struct Bitmap {
    words: Vec<u64>,
    bits: u64,
    used: u64,
    cursor: u64,
    /// No bit below is free.
    lowest: u64,
}

impl Bitmap {
    /// `bits` bits, all free.
    pub fn new(bits: u64) -> Self {
        let words = vec![0; bits.div_ceil(64) as usize];
        Bitmap { words, bits, used: 0, cursor: 0, lowest: 0 }
    }

    /// `bits` bits, as many as before or more; the new ones are free.
    pub fn grow(&mut self, bits: u64) {
        assert!(bits >= self.bits, "from {} to {bits} bits", self.bits);
        self.words.resize(bits.div_ceil(64) as usize, 0);
        self.bits = bits;
    }

    pub fn len(&self) -> u64 {
        self.bits
    }

    pub fn free(&self) -> u64 {
        self.bits - self.used
    }

    pub fn get(&self, bit: u64) -> bool {
        bit < self.bits && self.words[(bit / 64) as usize] >> (bit % 64) & 1 == 1
    }

    /// Marks a free bit used; `false` if it was used already.
    pub fn set(&mut self, bit: u64) -> bool {
        assert!(bit < self.bits, "bit {bit} of {}", self.bits);
        let mask = 1 << (bit % 64);
        let word = &mut self.words[(bit / 64) as usize];
        let fresh = *word & mask == 0;
        *word |= mask;
        self.used += u64::from(fresh);
        fresh
    }

    /// Marks a used bit free; it must be used.
    pub fn clear(&mut self, bit: u64) {
        assert!(self.get(bit), "bit {bit} is free already");
        self.words[(bit / 64) as usize] &= !(1 << (bit % 64));
        self.used -= 1;
        self.lowest = self.lowest.min(bit);
    }

    /// Bits `64 * index` and those that follow, the first one lowest.
    pub fn word(&self, index: usize) -> u64 {
        self.words[index]
    }

    /// The first free bit at or after `from`.
    pub fn next_free(&self, from: u64) -> Option<u64> {
        let mut at = from;
        while at < self.bits {
            let word = !self.words[(at / 64) as usize] >> (at % 64);
            if word != 0 {
                let bit = at + u64::from(word.trailing_zeros());
                return (bit < self.bits).then_some(bit);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// Takes the lowest free bit.
    pub fn take_lowest(&mut self) -> Option<u64> {
        let bit = self.next_free(self.lowest)?;
        self.set(bit);
        self.lowest = bit + 1;
        Some(bit)
    }

    /// Takes a free bit, going on where the last search ended: what was freed rests for a while.
    pub fn take_one(&mut self) -> Option<u64> {
        let from = if self.cursor < self.bits { self.cursor } else { 0 };
        let bit = self.next_free(from).or_else(|| self.next_free(0))?;
        self.set(bit);
        self.cursor = bit + 1;
        Some(bit)
    }

    /// Takes `n` free bits as few runs, going on where the last search ended; `None`, and nothing
    /// taken, when there are not so many.
    pub fn take_runs(&mut self, n: u64) -> Option<Vec<Run>> {
        if self.free() < n {
            return None;
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut left = n;
        while left > 0 {
            let bit = self.take_one().expect("as many are free");
            match runs.last_mut() {
                Some(r) if r.first + r.count == bit => r.count += 1,
                _ => runs.push(Run { first: bit, count: 1 }),
            }
            left -= 1;
        }
        Some(runs)
    }

    /// The bits as little-endian bytes, for part `index` of parts of `bytes` bytes each.
    pub fn part(&self, index: usize, bytes: usize, out: &mut [u8]) {
        let per = bytes / 8;
        let words = self.words.iter().skip(index * per).take(per);
        for (chunk, word) in out.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The reverse of [`Bitmap::part`]; `false` if a bit past the end is set.
    pub fn set_part(&mut self, index: usize, bytes: usize, from: &[u8]) -> bool {
        let base = (index * bytes * 8) as u64;
        for (i, byte) in from.iter().enumerate().filter(|(_, b)| **b != 0) {
            for bit in (0..8).filter(|b| byte >> b & 1 == 1) {
                let bit = base + i as u64 * 8 + bit;
                if bit >= self.bits {
                    return false;
                }
                self.set(bit);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_each_bit_once_and_goes_round() {
        let mut b = Bitmap::new(130);
        let all = b.take_runs(130).unwrap();
        assert_eq!(all, [Run { first: 0, count: 130 }]);
        assert_eq!((b.free(), b.take_one()), (0, None));
        for bit in [3, 4, 64, 129] {
            b.clear(bit);
        }
        assert!(b.take_runs(5).is_none());
        assert_eq!(b.free(), 4, "nothing was taken");
        let runs = b.take_runs(4).unwrap();
        let count: u64 = runs.iter().map(|r| r.count).sum();
        assert_eq!((count, b.free()), (4, 0));
        b.clear(100);
        b.clear(2);
        assert_eq!([b.take_lowest(), b.take_lowest(), b.take_lowest()], [Some(2), Some(100), None]);
        b.grow(190);
        assert_eq!((b.free(), b.take_lowest()), (60, Some(130)));
        assert_eq!(b.take_runs(59).unwrap(), [Run { first: 131, count: 59 }]);
        assert_eq!((b.len(), b.take_one()), (190, None));
    }

    #[test]
    fn parts_are_the_format_s_bytes() {
        let mut b = Bitmap::new(200);
        for bit in [0, 7, 9, 64, 199] {
            b.set(bit);
        }
        let mut part = [0; 16];
        b.part(0, 16, &mut part);
        assert_eq!((part[0], part[1], part[8]), (0x81, 2, 1));
        let mut c = Bitmap::new(200);
        for i in 0..2 {
            let mut part = [0; 16];
            b.part(i, 16, &mut part);
            assert!(c.set_part(i, 16, &part));
        }
        assert!((0..200).all(|i| b.get(i) == c.get(i)) && b.free() == c.free());
        assert!(!c.set_part(1, 16, &[0xff; 16]), "bits past the end");
    }
}
