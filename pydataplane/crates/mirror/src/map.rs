//! Where a bdev may hold anything but zeros, as whoever has it copied knows it.

/// Some parts of a bdev that may hold anything but zeros, in order; all else before `next` reads as zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapPage {
    /// Offset and length, in bytes.
    pub parts: Vec<(u64, u64)>,
    /// Where the next page begins, in bytes; `None`: this was the last.
    pub next: Option<u64>,
}

/// Tells of a bdev, from a byte on, which parts may hold anything but zeros; `None`: nothing is known.
pub type Map = Box<dyn Fn(u64) -> Option<MapPage> + Send + Sync>;
