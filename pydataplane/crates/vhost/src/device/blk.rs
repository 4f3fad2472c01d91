//! What a driver of virtio-blk reads of its disk, and how it is told that this changed.
//!
//! The front end, which has a copy of the configuration space, is told over the back-end channel
//! (SET_BACKEND_REQ_FD) by CONFIG_CHANGE_MSG, and reads it anew. QEMU does that in the midst of whatever
//! it waits for (6.0 to 7.2), and takes the answer to one question for that to another; so it is told only
//! when it has said nothing for a while. It is also told once in each session: what changed while no
//! target was there it does not ask for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};
use virtio_blk::{Config, Disk, F_FLUSH, SECTOR};

use super::Device;
use crate::defs::MAX_REQUEST_QUEUES;
use crate::front::{DISK, Front};

/// How long the front end must have said nothing before it is told.
const QUIET: Duration = Duration::from_millis(100);

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no body.
const CONFIG_CHANGE: [u32; 3] = [2, 1, 0];

/// What the front end is to be told, and how.
#[derive(Debug, Default)]
pub(super) struct ConfigChannel {
    socket: Option<OwnedFd>,
    /// It is to be told, at this time.
    due: Option<Instant>,
    /// It was told, or is to be, in this session.
    begun: bool,
}

impl Device {
    /// Features that it offers: those of its disk among them.
    pub(crate) fn offered_features(&self) -> u64 {
        let own = match self.front {
            Front::Scsi => 0,
            Front::Blk => self.disk().features(),
        };
        self.front.features() | own
    }

    /// The disk as it is now; without one, of no size.
    fn disk(&self) -> Disk {
        let attached = self.attached[usize::from(DISK)].as_ref().filter(|a| !a.leaving);
        let Some(attached) = attached else {
            return Disk {
                sectors: 0,
                block_size: SECTOR as u32,
                physical_exponent: 0,
                read_only: false,
                discard: false,
                discard_granularity: 0,
                write_zeroes: false,
                unmap_zeroes: false,
                optimal_blocks: 0,
                max_transfer: SECTOR as u32,
            };
        };
        let (unit, features) = (&attached.shared, attached.shared.features());
        Disk {
            sectors: unit.capacity() * (u64::from(unit.block_size()) / SECTOR),
            block_size: unit.block_size(),
            physical_exponent: unit.physical_exponent(),
            read_only: unit.is_read_only(),
            discard: features.unmap,
            discard_granularity: features.unmap_granularity,
            write_zeroes: features.write_zeroes,
            unmap_zeroes: features.unmap_zeroes,
            optimal_blocks: features.optimal_blocks,
            max_transfer: unit.max_transfer().try_into().unwrap_or(u32::MAX),
        }
    }

    /// The configuration space.
    pub(crate) fn blk_config(&self) -> Config {
        self.disk().config(MAX_REQUEST_QUEUES as u16)
    }

    /// A driver that cannot flush has every write durable when it ends (5.2.6.2).
    pub(super) fn apply_write_through(&self) {
        let on = self.front == Front::Blk && self.features & F_FLUSH == 0;
        self.workers.iter().for_each(|w| w.call(move |p| p.set_write_through(on)));
    }

    /// SET_BACKEND_REQ_FD: the front end listens at the other end of `socket`.
    pub(crate) fn set_config_channel(&mut self, socket: Option<OwnedFd>) {
        self.config_channel.socket = socket;
        self.config_may_have_changed();
    }

    /// The channel, for whoever goes on with this session.
    pub(super) fn config_channel(&self) -> Option<BorrowedFd<'_>> {
        self.config_channel.socket.as_ref().map(AsFd::as_fd)
    }

    /// The front end is to read the configuration space again.
    pub(super) fn config_may_have_changed(&mut self) {
        self.config_channel.due = Some(Instant::now());
    }

    /// The front end said something: it is not to be told at once.
    pub(crate) fn heard(&mut self) {
        let channel = &mut self.config_channel;
        if channel.socket.is_some() && !channel.begun && self.rings.iter().any(|r| r.running) {
            (channel.begun, channel.due) = (true, Some(Instant::now()));
        }
        if let Some(due) = &mut channel.due {
            *due = Instant::now() + QUIET;
        }
    }

    /// When the front end is to be told next that the configuration space changed.
    pub(crate) fn config_due(&self) -> Option<Instant> {
        let channel = &self.config_channel;
        // QEMU does not listen to it before the device runs.
        let tells = channel.begun && channel.socket.is_some() && !self.held && !self.retired;
        channel.due.filter(|_| tells)
    }

    /// Tells it, if it is time to.
    pub(crate) fn tell_config(&mut self) {
        if self.config_due().is_none_or(|due| due > Instant::now()) {
            return;
        }
        self.config_channel.due = None;
        let Some(socket) = &self.config_channel.socket else { return };
        let message: Vec<u8> = CONFIG_CHANGE.iter().flat_map(|word| word.to_ne_bytes()).collect();
        // It never blocks: a front end that takes nothing is told nothing more.
        match send(socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) if sent == message.len() => {
                if let Some(attached) = &self.attached[usize::from(DISK)] {
                    attached.times.told_of_resize();
                }
            }
            _ => {
                tracing::warn!(
                    controller = self.name,
                    "the front end does not take messages of its back end any more: its guest will not \
                     see that the size of the disk changes"
                );
                self.config_channel.socket = None;
            }
        }
    }
}
