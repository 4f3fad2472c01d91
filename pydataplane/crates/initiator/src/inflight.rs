//! The in-flight region as its keeper sees it (vhost-user, "Inflight I/O tracking").

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guestmem::{GuestMemory, RegionSpec};
use serde::Serialize;

use crate::error::Error;

/// What GET_INFLIGHT_FD answers and SET_INFLIGHT_FD says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes of the region.
    pub bytes: u64,
    /// Byte of the file where it begins.
    pub offset: u64,
    /// Virtqueues.
    pub queues: u16,
    /// Descriptors of each.
    pub queue_size: u16,
}

/// `QueueRegionSplit` without what is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueueState {
    /// 0: the target has not used it yet.
    pub version: u16,
    /// Descriptors.
    pub desc_num: u16,
    /// The last head that was given back.
    pub last_batch_head: u16,
    /// The used index that the marks are as of.
    pub used_idx: u16,
    /// Heads marked as in flight, the first taken first.
    pub in_flight: Vec<u16>,
}

/// A region that outlives connections.
#[derive(Debug)]
pub struct Inflight {
    extent: Extent,
    fd: OwnedFd,
    memory: GuestMemory,
}

impl Inflight {
    /// Maps what the target made.
    pub fn new(extent: Extent, fd: OwnedFd) -> Result<Inflight, Error> {
        let spec = RegionSpec {
            guest_addr: 0,
            size: extent.bytes,
            user_addr: 0,
            mmap_offset: extent.offset,
        };
        let copy = fd.try_clone().map_err(Error::os("duplicate the in-flight region"))?;
        let memory = GuestMemory::map(vec![(spec, copy)])?;
        Ok(Inflight { extent, fd, memory })
    }

    /// Where it is in its file.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Its file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What the region says of queue `index`.
    pub fn state(&self, index: u16) -> Result<QueueState, Error> {
        let size = u64::from(self.extent.queue_size);
        let part = (16 + 16 * size).next_multiple_of(64);
        let found = self.memory.range(part * u64::from(index), part);
        let range = found.ok_or(Error::NoQueue(usize::from(index)))?;
        let mut marked = Vec::new();
        for head in 0..self.extent.queue_size {
            let at = 16 + 16 * usize::from(head);
            if range.get::<u8>(at)? == 1 {
                marked.push((range.get::<u64>(at + 8)?, head));
            }
        }
        marked.sort_unstable();
        Ok(QueueState {
            version: range.get(8)?,
            desc_num: range.get(10)?,
            last_batch_head: range.get(12)?,
            used_idx: range.get(14)?,
            in_flight: marked.into_iter().map(|(_, head)| head).collect(),
        })
    }
}
