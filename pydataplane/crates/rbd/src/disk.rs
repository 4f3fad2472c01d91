//! The bdev.

use std::sync::Arc;

use bdev::{Bdev, Channel, Closed, Features, Geometry, GuestEvent, OpenError, Registry, Stats};
use reactor::IoContext;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::channel::RbdChannel;
use crate::image::{Image, OpenedImage, Source};
use crate::{Cluster, Error};

/// An image of Ceph as a bdev.
pub struct Disk {
    name: String,
    alias: Option<String>,
    uuid: Uuid,
    image: Arc<Image>,
    features: Features,
    stats: Arc<Stats>,
}

/// I/O of an image that waits, as long as this is there.
pub struct HeldBack(Arc<Image>);

impl Drop for HeldBack {
    fn drop(&mut self) {
        self.0.hold.go_on();
    }
}

impl Disk {
    /// What [`Bdev::product_name`] says, as SPDK's.
    pub const PRODUCT: &'static str = "Ceph Rbd Disk";

    /// The bdev `name` on an image, not registered yet, with another name if there is an `alias`; `uuid`: one
    /// that the image has everywhere for `None`. Waits for the cluster as long as that takes ([`crate::within`]).
    ///
    /// # Errors
    /// Blocks that no bdev has; somebody else writes to the image; what Ceph says.
    pub fn create(
        registry: &Registry,
        (name, alias): (&str, Option<String>),
        opened: OpenedImage,
        block_size: u32,
        uuid: Option<Uuid>,
    ) -> Result<Arc<Disk>, Error> {
        // Its own number of blocks is looked at below.
        Geometry::checked(block_size, 0, 1)
            .map_err(|why| Error::Invalid(format!("bdev {name}: {why}")))?;
        let image = Image::new(opened, registry, name, block_size)?;
        if image.num_blocks() == 0 {
            let path = image.source().path();
            return Err(Error::Invalid(format!("image {path} has not a single block")));
        }
        let granularity = image.discard_granularity() / u64::from(block_size);
        let features = Features {
            read_only: !image.is_written(),
            // An image may have a cache of librbd's, by a setting of its own (`rbd config image`).
            volatile_cache: true,
            fua: false,
            unmap: true,
            unmap_zeroes: true,
            // Parts of less than the granularity stay.
            unmap_skips: true,
            write_zeroes: true,
            thin: true,
            unmap_granularity: u32::try_from(granularity).unwrap_or(0).max(1),
            optimal_blocks: u32::try_from(image.object_size() / u64::from(block_size)).unwrap_or(0),
            max_blocks: 0,
            boot: None,
            remote: true,
        };
        let uuid = uuid.unwrap_or(image.uuid());
        Ok(Arc::new(Disk {
            name: name.to_owned(),
            alias,
            uuid,
            image,
            features,
            stats: Stats::new(),
        }))
    }

    /// Which image it is.
    pub fn source(&self) -> &Source {
        self.image.source()
    }

    /// What says in the image that it is had by this bdev, for [`Source::generation`] of the next process.
    pub fn generation(&self) -> &str {
        self.image.generation()
    }

    /// Whose image it is.
    pub fn cluster(&self) -> &Arc<Cluster> {
        self.image.cluster()
    }

    /// Whether the cluster has fenced this host, or another host had the image while a guest was to have it
    /// here: then every I/O fails.
    pub fn is_fenced(&self) -> bool {
        self.image.is_fenced()
    }

    /// Whether it is locked for this host; `None`: it is not to be.
    pub fn is_locked(&self) -> Option<bool> {
        self.image.is_locked()
    }

    /// Gives the image a new size, in bytes, and tells of it. Waits for the cluster as long as that takes.
    ///
    /// # Errors
    /// What Ceph says.
    pub fn resize(&self, bytes: u64) -> Result<(), Error> {
        self.image.resize(bytes)
    }

    /// Takes over the size that the image has now, which another client may have changed, and tells of it. Waits
    /// for the cluster as long as that takes.
    pub fn look_again(&self) {
        self.image.look_again();
    }

    /// Has I/O that begins from now on wait, and the image stay locked for this host, until what is returned is
    /// dropped; what is in flight goes on. `None`: the image is not locked for this host.
    pub fn hold_back(&self) -> Option<HeldBack> {
        let locked = self.is_locked() == Some(true) && self.image.hold.hold_back();
        locked.then(|| HeldBack(Arc::clone(&self.image)))
    }

    /// Tells when the image is closed, some time after the bdev and its channels are gone.
    pub fn closing(&self) -> Closed {
        self.image.closing()
    }
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        &self.name
    }
    fn aliases(&self) -> Vec<String> {
        self.alias.iter().cloned().collect()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        Disk::PRODUCT
    }
    fn geometry(&self) -> Geometry {
        let block_size = self.image.block_size();
        Geometry {
            block_size,
            physical_block_size: block_size,
            num_blocks: self.image.num_blocks(),
        }
    }
    fn features(&self) -> Features {
        self.features
    }
    fn open(&self, io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        let (image, stats) = (Arc::clone(&self.image), self.stats.channel());
        Ok(Box::new(RbdChannel::new(image, self.features, stats, io)))
    }
    fn driver_specific(&self) -> Value {
        let (source, cluster) = (self.source(), self.cluster());
        let mut rbd = json!({
            "pool_name": source.pool,
            "rbd_name": source.image,
            "cluster_name": cluster.name(),
            "object_size": self.image.object_size(),
            "shared": source.shared,
            "fenced": self.is_fenced(),
        });
        if let Some(locked) = self.is_locked() {
            rbd["locked"] = json!(locked);
        }
        if let Some(user) = &cluster.options().user {
            rbd["user_id"] = json!(user);
        }
        json!({"rbd": rbd})
    }
    fn on_guest(&self, event: GuestEvent) {
        self.image.on_guest(event);
    }
    fn stats(&self) -> Option<&Arc<Stats>> {
        Some(&self.stats)
    }
}
