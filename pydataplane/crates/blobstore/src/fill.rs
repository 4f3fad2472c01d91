//! How a cluster is filled before a blob owns it: with what its parent shows, and over that with what the
//! writes have that it is taken for. They need no second write then.

/// Data that lies over a part of a cluster.
pub struct Over {
    /// Its first byte within the cluster.
    pub at: u64,
    /// What lies there, within the cluster.
    pub data: Box<dyn AsRef<[u8]> + Send>,
}

/// A range of the disk to be filled. Nobody reads it yet.
#[derive(Clone, Copy)]
pub struct Fill<'a> {
    /// First byte of what is copied; `None`: zeros.
    pub from: Option<u64>,
    /// First byte of the range.
    pub to: u64,
    /// What lies over that; of two at one place, the later one.
    pub over: &'a [Over],
}

impl Over {
    fn bytes(&self) -> &[u8] {
        (*self.data).as_ref()
    }

    fn end(&self) -> u64 {
        self.at + self.bytes().len() as u64
    }
}

impl Fill<'_> {
    /// Where `len` bytes at byte `at` of the range are to be read from; `None`: they need not be.
    pub fn read_from(&self, at: u64, len: u64) -> Option<u64> {
        self.from.filter(|_| !covers(self.over, at, at + len)).map(|from| from + at)
    }

    /// Completes a part, from byte `at` of the range on, that was read where that was needed.
    pub fn complete(&self, at: u64, part: &mut [u8]) {
        let end = at + part.len() as u64;
        if self.from.is_none() && !covers(self.over, at, end) {
            part.fill(0);
        }
        for over in self.over {
            let (first, last) = (over.at.max(at), over.end().min(end));
            if first < last {
                let data = &over.bytes()[(first - over.at) as usize..(last - over.at) as usize];
                part[(first - at) as usize..(last - at) as usize].copy_from_slice(data);
            }
        }
    }
}

/// Whether these lie over each byte from `from` to before `to`.
pub(crate) fn covers(over: &[Over], from: u64, to: u64) -> bool {
    let mut covered = from;
    while covered < to {
        let reaches = |over: &&Over| over.at <= covered && over.end() > covered;
        match over.iter().find(reaches) {
            Some(over) => covered = over.end(),
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Piece by piece, whatever was in the buffer: what was read or zeros, and over that each data in
        /// turn; it is not read only where all of it lies under data.
        #[test]
        fn a_range_is_what_is_below_and_what_lies_over_it(
            overs in prop::collection::vec((0..16usize, 1..9usize), 0..8),
            copied in any::<bool>(),
            step in 1..17usize,
        ) {
            const LEN: usize = 16;
            let mut expected = vec![if copied { 200u8 } else { 0 }; LEN];
            let mut covered = [false; LEN];
            let mut over = Vec::new();
            for (tag, (at, len)) in (1u8..).zip(overs) {
                let len = len.min(LEN - at);
                expected[at..at + len].fill(tag);
                covered[at..at + len].fill(true);
                over.push(Over { at: at as u64, data: Box::new(vec![tag; len]) });
            }
            let fill = Fill { from: copied.then_some(1000), to: 0, over: &over };
            let mut found = vec![77u8; LEN];
            for at in (0..LEN).step_by(step) {
                let part = &mut found[at..(at + step).min(LEN)];
                let needed = copied && !covered[at..at + part.len()].iter().all(|c| *c);
                let from = fill.read_from(at as u64, part.len() as u64);
                prop_assert_eq!(from, needed.then_some(1000 + at as u64));
                if from.is_some() {
                    part.fill(200);
                }
                fill.complete(at as u64, part);
            }
            prop_assert_eq!(found, expected);
        }
    }
}
