//! A volume of a pool, as its pool tells of it.

use uuid::Uuid;

/// A volume of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Name of the image, or of the disk of an array.
    pub image: String,
    /// Number that the disk of an array has there; of an image 0.
    pub number: u32,
    /// Name of the snapshot.
    pub snapshot: Option<String>,
    /// Identity, the same on every host.
    pub uuid: Uuid,
    /// Size in bytes.
    pub size: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of an object.
    pub object_size: u64,
    /// Bytes that it takes there, as far as that is known; else its size.
    pub allocated: u64,
    /// Whether it takes room as it is written.
    pub thin: bool,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// The image's snapshot before it, or what it is a clone of, in the same pool.
    pub parent: Option<String>,
    /// Whether it is a clone, of whatever pool.
    pub is_clone: bool,
    /// Names of what has it as its parent.
    pub clones: Vec<String>,
    /// Why it cannot be used, as a clause, if so.
    pub problem: Option<String>,
}

impl Volume {
    /// `IMAGE` or `IMAGE@SNAPSHOT`.
    pub fn name(&self) -> String {
        match &self.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", self.image),
            None => self.image.clone(),
        }
    }

    /// An image, or a snapshot of one, whose blocks are so long.
    pub fn image_of(volume: rbd::Volume, block_size: u32) -> Volume {
        let rbd::Volume { image, snapshot, uuid, size, object_size, allocated, .. } = volume;
        let rbd::Volume { parent, is_clone, clones, .. } = volume;
        let read_only = snapshot.is_some();
        Volume {
            image,
            number: 0,
            snapshot,
            uuid,
            size,
            block_size,
            object_size,
            allocated,
            thin: true,
            read_only,
            parent,
            is_clone,
            clones,
            problem: None,
        }
    }
}
