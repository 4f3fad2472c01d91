//! The end of a session: what is in flight ends or is left for the next one, and all is closed.
//!
//! An orderly end has two steps. [`Device::retire`] while the peer is connected: nothing is taken
//! any more, what is in flight ends, and the guest is told; then the indexes of its rings are final,
//! and the connection may be closed ([`Device::disconnect`]). A peer that left by itself comes to
//! the second step at once.
//!
//! I/O that does not end in time ([`super::DeviceError::Stuck`]) cannot be taken back: the kernel has
//! pinned the guest's pages for the disk, and a cancellation reaches only what still waits for one of
//! its workers. So such a session ends, but its memory stays mapped, its volumes stay claimed, no step
//! follows and nothing that waited begins, and no other session does until all of it has ended: a
//! guest that connects again finds its requests submitted again after that, never overtaken by what
//! was late. What may still land in its memory is what was with devices, no more than a session may
//! have there (`poller/in_flight`), in the buffers of requests that were never answered. A guest that is
//! reset meanwhile may have other things there: only a device that owns the bus could stop that.

use std::time::Duration;

use bdev::GuestEvent;

use super::{Device, Worker};
use crate::defs::response;
use crate::past::Past;
use crate::poller::{DevicePoller, Selector};

impl Device {
    /// The session is about to end: nothing is taken any more, from any queue.
    /// [`crate::mailbox::Order::Drained`] with `id` follows when what was in flight has ended, and
    /// the guest was told. A request of many I/Os is stopped between two of them where it is known
    /// to be submitted again, and then not told of: also where the session is `kept`.
    pub(crate) fn retire(&mut self, id: u64, kept: bool) {
        (self.retired, self.kept) = (true, kept);
        let again = self.is_submitted_again();
        // What is ORDERED is not done before others that are left to the next one.
        self.hold_back();
        self.workers.iter().for_each(|w| w.call(move |p| p.leave(again)));
        self.start_drain(Selector::All, Some(id));
    }

    /// The peer is gone: no request is taken any more. Memory stays mapped and volumes stay open
    /// until the last one in flight has ended; [`crate::mailbox::Order::Drained`] with `id` follows
    /// then, and [`Device::close_all`]. `muted`: what ends is not told to the guest, which was told
    /// or has to assume that the rings are its own again. So it is where the peer keeps what is in
    /// flight: it is submitted again in the next session.
    pub(crate) fn disconnect(&mut self, id: u64, muted: bool) {
        let muted = muted || self.is_submitted_again();
        self.ended_muted = muted;
        let knows_busy = self.front.knows_busy();
        self.hold_back();
        for Worker { reactor, poller } in &self.workers {
            let poller = *poller;
            reactor.call(move |cx| {
                let ended = cx.poller_mut::<DevicePoller>(poller).map(|p| {
                    p.pause();
                    if !knows_busy {
                        p.let_go(true);
                        p.give_back_all();
                    }
                    if muted {
                        p.mute();
                    }
                    // A guest can have given work for minutes; each request ends with its next I/O. Not
                    // where its driver would be told of an error.
                    if muted || knows_busy {
                        p.abort_all(response::ABORTED);
                    }
                    p.hold_back_no_more();
                    p.kick_fds()
                });
                ended.into_iter().flatten().for_each(|fd| cx.unwatch(fd));
            });
        }
        if !self.kept {
            self.tell_disks(GuestEvent::Gone);
        }
        if !muted {
            self.answer_drained_tmfs();
        }
        self.control = None;
        self.end_events();
        self.tmfs.clear();
        self.start_drain(Selector::All, Some(id));
    }

    /// Nothing that waits begins on any reactor until that one is told how what it has ends.
    pub(super) fn hold_back(&self) {
        self.workers.iter().for_each(|w| w.call(|p| p.hold_back(Selector::All)));
    }

    /// Waits until the last I/O of a session whose peer is gone has ended, `timeout` at most; whether
    /// it has.
    pub(crate) fn wait_until_ended(&self, timeout: Duration) -> bool {
        let what = format!("the end of a session of {}", self.name);
        self.start_drain(Selector::All, None).wait(&what, timeout)
    }

    /// Closes everything and lets go of the memory, with nothing in flight. Returns who was at the
    /// other end, and what is known of its rings.
    pub(crate) fn close_all(&mut self) -> (String, Past) {
        let drained = self.workers.iter().flat_map(|w| w.call(|p| p.drained_queues())).collect();
        // What could not be started is not known in the next session either.
        let past = match self.ended_muted {
            true => {
                Past { unknown: self.past.unknown.union(self.mark.queues()), drained: Vec::new() }
            }
            false => Past { unknown: self.past.unknown, drained },
        };
        self.mark.keep(past.unknown);
        for Worker { reactor, poller } in self.workers.drain(..) {
            reactor.call(move |cx| {
                // Dropped here: channels belong to this thread.
                drop(cx.remove_poller(poller));
            });
        }
        (self.mark.peer().to_owned(), past)
    }
}
