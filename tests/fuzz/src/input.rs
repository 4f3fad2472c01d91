//! Bytes of libFuzzer's as numbers.

/// What is left of an input; zeros when it ends.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from(self.u32()) | u64::from(self.u32()) << 32
    }

    /// Up to `len` bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u16) -> u16 {
        self.u16() % limit
    }

    /// One time in `of`; not where the input has ended.
    pub(crate) fn once_in(&mut self, of: u8) -> bool {
        self.u8() % of == of - 1
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
