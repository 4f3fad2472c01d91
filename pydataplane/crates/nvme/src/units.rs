//! The namespaces of a controller that are bdevs: more may come, none goes.

use std::ops::Index;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use bdev::{Features, Geometry};

use crate::identify::{self, Most, NAMESPACES_MAX, Namespace};

/// A namespace that is a bdev.
pub(crate) struct Unit {
    pub namespace: Namespace,
    pub most: Most,
    pub features: Features,
    num_blocks: AtomicU64,
}

impl Unit {
    pub(crate) fn new(
        namespace: Namespace,
        controller: &identify::Controller,
        write_through: bool,
    ) -> Unit {
        let num_blocks = AtomicU64::new(namespace.geometry.num_blocks);
        let features = namespace.features(controller, write_through);
        Unit { namespace, most: Most::of(controller, &namespace), features, num_blocks }
    }

    #[inline]
    pub(crate) fn block_size(&self) -> u64 {
        u64::from(self.namespace.geometry.block_size)
    }

    #[inline]
    pub(crate) fn geometry(&self) -> Geometry {
        Geometry { num_blocks: self.num_blocks.load(Relaxed), ..self.namespace.geometry }
    }

    /// Takes a number of blocks over; whether it is another one.
    pub(crate) fn resize(&self, num_blocks: u64) -> bool {
        self.num_blocks.swap(num_blocks, Relaxed) != num_blocks
    }

    /// Whether guests that use it can go on with what a controller says of it.
    ///
    /// # Errors
    /// A clause: they cannot.
    pub(crate) fn can_go_on(
        &self,
        with: &Namespace,
        controller: &identify::Controller,
        write_through: bool,
    ) -> Result<(), String> {
        with.can_replace(&self.namespace)?;
        let (nsid, most) = (with.nsid, Most::of(controller, with));
        if most.transfer < self.most.transfer
            || most.zeroed < self.most.zeroed
            || most.deallocated < self.most.deallocated
            || most.compared < self.most.compared
        {
            return Err(format!("its controller takes less at once of namespace {nsid}"));
        }
        let (has, had) = (with.features(controller, write_through), &self.features);
        if had.unmap && !has.unmap
            || had.unmap_zeroes && !has.unmap_zeroes
            || had.write_zeroes && !has.write_zeroes
        {
            return Err(format!(
                "its controller cannot deallocate or zero namespace {nsid} as before"
            ));
        }
        Ok(())
    }
}

/// See the file's comment. One thread adds, any looks.
pub(crate) struct Units {
    units: Box<[OnceLock<Unit>]>,
    count: AtomicUsize,
}

impl Units {
    pub(crate) fn new(first: impl Iterator<Item = Unit>) -> Units {
        let units = std::iter::repeat_with(OnceLock::new).take(NAMESPACES_MAX).collect();
        let made = Units { units, count: AtomicUsize::new(0) };
        first.for_each(|unit| _ = made.add(unit));
        made
    }

    /// Its number; `None`: there are as many as there may be.
    pub(crate) fn add(&self, unit: Unit) -> Option<usize> {
        let at = self.count.load(Relaxed);
        self.units.get(at)?.set(unit).ok()?;
        self.count.store(at + 1, Release);
        Some(at)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count.load(Acquire)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unit> {
        self.units.iter().map_while(OnceLock::get)
    }

    /// The number of that with a number of the controller's.
    pub(crate) fn position(&self, nsid: u32) -> Option<usize> {
        self.iter().position(|unit| unit.namespace.nsid == nsid)
    }
}

impl Index<usize> for Units {
    type Output = Unit;

    #[inline]
    fn index(&self, at: usize) -> &Unit {
        self.units[at].get().expect("it was added")
    }
}
