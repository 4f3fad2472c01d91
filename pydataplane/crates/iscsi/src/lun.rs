//! Which LUN it is.

use uuid::Uuid;

/// What tells one LUN from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lun {
    /// Made of the target's name and the LUN's identification.
    pub identity: Uuid,
    /// Bytes.
    pub block_size: u32,
}

impl Lun {
    /// # Errors
    /// A clause: `is` is another one.
    pub(crate) fn check(self, is: Lun) -> Result<(), String> {
        if is.identity != self.identity {
            return Err(
                "another LUN is there than before: it has another identification".to_owned()
            );
        }
        if is.block_size != self.block_size {
            return Err(format!(
                "its blocks are {} bytes now, not {}",
                is.block_size, self.block_size
            ));
        }
        Ok(())
    }
}
