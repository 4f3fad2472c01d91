//! What the guest of a controller sees: one device of virtio's or another, and what follows for its
//! virtqueues and features.

use crate::defs::{
    CONTROL_QUEUE, EVENT_QUEUE, F_ANY_LAYOUT, F_EVENT_IDX, F_INDIRECT_DESC, F_LOG_ALL,
    F_PROTOCOL_FEATURES, F_VERSION_1, FIRST_REQUEST_QUEUE, MAX_REQUEST_QUEUES, OFFERED_FEATURES,
};

/// The device that the guest of a controller sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Front {
    /// A SCSI host adapter (virtio 1.2 5.6), whose targets come and go.
    #[default]
    Scsi,
    /// One disk (5.2): the target [`DISK`].
    Blk,
}

/// Number of the target that is the disk of [`Front::Blk`].
pub(crate) const DISK: u8 = 0;

/// What a virtqueue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Task management.
    Control,
    /// What the guest is told.
    Events,
    /// Requests; the number among those.
    Requests(usize),
}

/// Feature bits that a virtio-blk device offers whatever its disk is. The packed ring is not among them.
const BLK_FEATURES: u64 =
    F_LOG_ALL | F_ANY_LAYOUT | F_INDIRECT_DESC | F_EVENT_IDX | F_PROTOCOL_FEATURES | F_VERSION_1;

impl Front {
    /// Index of the first request queue.
    pub(crate) const fn first_request_queue(self) -> usize {
        match self {
            Front::Scsi => FIRST_REQUEST_QUEUE,
            Front::Blk => 0,
        }
    }

    /// Virtqueues at most.
    pub(crate) const fn queues(self) -> usize {
        self.first_request_queue() + MAX_REQUEST_QUEUES
    }

    /// What the virtqueue of that index is for.
    pub(crate) const fn role(self, index: usize) -> Role {
        match (self, index) {
            (Front::Scsi, CONTROL_QUEUE) => Role::Control,
            (Front::Scsi, EVENT_QUEUE) => Role::Events,
            (_, index) => Role::Requests(index - self.first_request_queue()),
        }
    }

    /// Whether its driver sends again what ends as BUSY.
    pub(crate) const fn knows_busy(self) -> bool {
        matches!(self, Front::Scsi)
    }

    /// Feature bits that are offered whatever the disks are.
    pub(crate) const fn features(self) -> u64 {
        match self {
            Front::Scsi => OFFERED_FEATURES,
            Front::Blk => BLK_FEATURES,
        }
    }

    /// Feature bits that a peer may acknowledge. A disk may have changed since they were offered, as after
    /// a restart.
    pub(crate) const fn known_features(self) -> u64 {
        match self {
            Front::Scsi => OFFERED_FEATURES,
            Front::Blk => BLK_FEATURES | virtio_blk::KNOWN_FEATURES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_its_part() {
        let roles = |front: Front| (0..3).map(|index| front.role(index)).collect::<Vec<_>>();
        assert_eq!(roles(Front::Scsi), [Role::Control, Role::Events, Role::Requests(0)]);
        assert_eq!(roles(Front::Blk), [Role::Requests(0), Role::Requests(1), Role::Requests(2)]);
        assert_eq!((Front::Scsi.queues(), Front::Blk.queues()), (66, 64));
    }

    #[test]
    fn no_packed_ring_is_offered() {
        const PACKED: u64 = 1 << 34;
        for front in [Front::Scsi, Front::Blk] {
            assert_eq!(front.known_features() & PACKED, 0);
            assert_eq!(front.features() & !front.known_features(), 0);
        }
    }
}
