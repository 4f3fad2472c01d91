//! What a device with protection information says of it, and what an I/O that brings or wants some has
//! beside its data (SBC-4 4.22). The tuples themselves are of the crate `protection`.

use guestmem::Sg;

/// Bytes of the protection information of a block: guard, application tag, reference tag.
pub const TUPLE_LEN: usize = 8;

/// What the tags of a device's tuples mean (SBC-4 4.22.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtectionType {
    /// The reference tag is the lower half of the block's number.
    Type1,
    /// The reference tag is of whoever writes the block.
    Type3,
}

/// The protection information that a device's blocks have, and how the device shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// What the tags mean.
    pub kind: ProtectionType,
    /// SPDK's `md_interleave`: a tuple lies behind the data of its block.
    pub interleaved: bool,
    /// SPDK's `dif_is_head_of_md`: a tuple comes first in the metadata, which has nothing but it here.
    pub at_head: bool,
}

/// What is compared of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// The guard with the block's data.
    pub guard: bool,
    /// The application tag with this one.
    pub app_tag: Option<u16>,
    /// The reference tag with the block's number, where the type has it so.
    pub reference: bool,
}

impl Checks {
    /// What a device finds out by itself.
    pub const ALL: Checks = Checks { guard: true, app_tag: None, reference: true };
    /// Nothing.
    pub const NONE: Checks = Checks { guard: false, app_tag: None, reference: false };
}

/// Where the tuples of an I/O are.
#[derive(Clone, Copy, Debug)]
pub enum Tuples {
    /// Nowhere: the device makes those of a write, and keeps those of a read for itself.
    None,
    /// In a list of their own, one after the other.
    Apart(Sg),
    /// Each behind its block, in the list of the data.
    Behind,
    /// Of a write: this one is every block's; with type 1 the block's number is added to its reference tag.
    Like([u8; TUPLE_LEN]),
}

/// What an I/O has beside its data.
#[derive(Clone, Copy, Debug)]
pub struct Protected {
    /// The tuples.
    pub tuples: Tuples,
    /// What is checked of them, before anything is written, or given to whoever reads.
    pub checks: Checks,
}

impl Protected {
    /// An I/O without tuples of its own.
    pub const PLAIN: Protected = Protected { tuples: Tuples::None, checks: Checks::ALL };
}
