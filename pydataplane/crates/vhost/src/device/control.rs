//! The control queue: task management and asynchronous notification (virtio 1.2 5.6.6.2).
//!
//! A task management function is answered after every request that it is about has ended. The
//! answer comes as a countdown's message, so the thread goes on meanwhile.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use super::side::Chain;
use super::{AttachedTarget, Device, DeviceError, Worker};
use crate::defs::{AnRequest, CONTROL_QUEUE, LunAddress, TmfRequest, control, response};
use crate::mailbox::Countdown;
use crate::poller::Selector;

/// Bit that tells the countdowns of task management from those of targets being removed.
pub(crate) const TMF_ID: u64 = 1 << 63;

/// Task management functions that wait for their requests at a time; more stay in the ring until
/// one is answered. Each has every reactor look through its requests in flight.
const MAX_TMFS: usize = 8;
/// Chains of the control queue served before the controller's thread looks at its orders again.
const BATCH: usize = 32;

/// A task management function whose requests have not ended yet.
pub(super) struct PendingTmf {
    id: u64,
    chain: Chain,
    countdown: Arc<Countdown>,
}

/// What becomes of a task management function.
enum Verdict {
    /// Answered at once.
    Now(u8),
    /// Answered with FUNCTION COMPLETE when these have ended.
    After(Selector),
}

impl Device {
    /// The guest kicked the control queue.
    pub(crate) fn control_kick(&mut self) {
        if let Some(queue) = &mut self.control {
            queue.clear_kick();
        }
        self.serve_control();
    }

    /// Descriptor to wait on for [`Device::control_kick`].
    pub(crate) fn control_fd(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref()?.kick()
    }

    /// Whether the control queue must be looked at without being kicked.
    pub(crate) fn control_is_polled(&self) -> bool {
        self.control.as_ref().is_some_and(|q| q.kick().is_none() || self.catching_up)
    }

    /// How long what is over in the control queue or the event queue, more than was taken in one turn,
    /// is to wait; `None`: there is nothing.
    pub(crate) fn backlog(&self) -> Option<Duration> {
        match (self.event_backlog, self.control_backlog) {
            (true, _) => Some(Duration::ZERO),
            (false, true) => Some(self.control_budget.wait(Instant::now())),
            (false, false) => None,
        }
    }

    /// Serves what is in the control queue, a batch of it at most: a guest can add messages faster
    /// than they are answered. Each may be a call of every reactor, so in the long run they have the
    /// part of the time that [`Budget`](crate::budget::Budget) gives them.
    pub(super) fn serve_control(&mut self) {
        let begun = Instant::now();
        if !self.control_budget.wait(begun).is_zero() {
            self.control_backlog = true;
            return;
        }
        if self.serve_batch() > 0 {
            let now = Instant::now();
            self.control_budget.charge(now - begun, now);
        }
    }

    /// Serves a batch; how many it was.
    fn serve_batch(&mut self) -> usize {
        self.control_backlog = false;
        // A function that is answered must know all that it is about.
        self.catching_up = self.catching_up && self.replays();
        if self.catching_up || self.retired || self.held {
            return 0;
        }
        for served in 0..BATCH {
            // The answer to one of them is the next call.
            if self.tmfs.len() >= MAX_TMFS {
                return served;
            }
            let Some(queue) = &mut self.control else { return served };
            match queue.take() {
                Ok(Some(chain)) => self.serve(chain),
                Ok(None) => return served,
                Err(why) => {
                    self.counters.malformed.add(1);
                    self.queue_failed(CONTROL_QUEUE as u16, why);
                    return served;
                }
            }
        }
        self.control_backlog = true;
        BATCH
    }

    fn serve(&mut self, chain: Chain) {
        let mut bytes = [0u8; size_of::<TmfRequest>()];
        let len = bytes.len().min(chain.segments.readable_len() as usize);
        // Copied once; from here on only the copy is looked at.
        let taken = chain.segments.readable().copy_to_slice(0, &mut bytes[..len]) == len;
        let kind = U32::read_from_prefix(&bytes).map(|(kind, _)| kind.get());
        match kind {
            Ok(control::T_TMF) if taken && len == size_of::<TmfRequest>() => {
                let Ok(request) = TmfRequest::read_from_bytes(&bytes) else { return };
                match self.manage(&request) {
                    Verdict::Now(code) => self.answer(&chain, &[code]),
                    Verdict::After(selector) => self.wait_for(selector, chain),
                }
            }
            Ok(control::T_AN_QUERY | control::T_AN_SUBSCRIBE)
                if taken && len >= size_of::<AnRequest>() =>
            {
                let Ok((request, _)) = AnRequest::read_from_prefix(&bytes) else { return };
                // No asynchronous notification of MMC-5 exists for a disk: event_actual is 0.
                let [a, b, c, d] = 0u32.to_le_bytes();
                let there = self.address(&request.lun);
                let code = there.err().unwrap_or(response::OK);
                self.answer(&chain, &[a, b, c, d, code]);
            }
            _ => {
                self.counters.malformed.add(1);
                self.answer(&chain, &[response::FAILURE]);
            }
        }
    }

    fn answer(&mut self, chain: &Chain, bytes: &[u8]) {
        if let Some(queue) = &mut self.control {
            queue.answer(chain, bytes);
        }
    }

    /// The target that a control message is about, or the response code of one for nobody.
    fn address(&self, lun: &[u8; 8]) -> Result<u8, u8> {
        let LunAddress::Unit { target, lun } = LunAddress::decode(lun) else {
            return Err(response::BAD_TARGET);
        };
        match self.attached.get(usize::from(target)) {
            Some(Some(attached)) if !attached.leaving => match lun {
                0 => Ok(target),
                _ => Err(response::INCORRECT_LUN),
            },
            _ => Err(response::BAD_TARGET),
        }
    }

    fn manage(&mut self, request: &TmfRequest) -> Verdict {
        let target = match self.address(&request.lun) {
            Ok(target) => target,
            Err(code) => return Verdict::Now(code),
        };
        let task = Selector::Task(target, request.id.get());
        let all = Selector::Target(target);
        match request.subtype.get() {
            control::TMF_ABORT_TASK => self.abort(task, response::ABORTED, |_| ()),
            control::TMF_ABORT_TASK_SET | control::TMF_CLEAR_TASK_SET => {
                self.abort(all, response::ABORTED, |_| ())
            }
            control::TMF_LOGICAL_UNIT_RESET => {
                self.abort(all, response::RESET, |attached| attached.shared.reset())
            }
            control::TMF_I_T_NEXUS_RESET => self.abort(all, response::RESET, |attached| {
                attached.shared.reset_nexus(&attached.nexus);
            }),
            control::TMF_QUERY_TASK => self.query(task),
            control::TMF_QUERY_TASK_SET => self.query(all),
            // CLEAR ACA among them: NormACA is 0, there is none.
            _ => Verdict::Now(response::FUNCTION_REJECTED),
        }
    }

    /// Ends the selected requests, of one target, with the response `code`: once all reactors have marked theirs and
    /// `reset` was done.
    fn abort(&self, selector: Selector, code: u8, reset: impl FnOnce(&AttachedTarget)) -> Verdict {
        self.workers.iter().for_each(|w| w.call(move |p| p.mark_ended(selector, code)));
        let attached = selector.target().and_then(|at| self.attached[usize::from(at)].as_ref());
        if let Some(attached) = attached {
            reset(attached);
        }
        let end = |w: &Worker| w.call(move |p| p.end_marked(selector, code));
        let found: u32 = self.workers.iter().map(end).sum();
        match found {
            0 => Verdict::Now(response::OK),
            _ => Verdict::After(selector),
        }
    }

    fn query(&self, selector: Selector) -> Verdict {
        let found: u32 = self.workers.iter().map(|w| w.call(move |p| p.count(selector))).sum();
        Verdict::Now(match found {
            0 => response::OK,
            _ => response::FUNCTION_SUCCEEDED,
        })
    }

    fn wait_for(&mut self, selector: Selector, chain: Chain) {
        let id = TMF_ID | self.next_tmf;
        self.next_tmf += 1;
        let countdown = self.start_drain(selector, Some(id));
        self.tmfs.push(PendingTmf { id, chain, countdown });
    }

    /// The requests of a task management function have ended.
    pub(crate) fn tmf_drained(&mut self, id: u64) {
        if let Some(at) = self.tmfs.iter().position(|t| t.id == id) {
            let tmf = self.tmfs.swap_remove(at);
            self.answer(&tmf.chain, &[response::OK]);
            self.serve_control();
        }
    }

    /// Answers the task management functions whose requests have all ended.
    pub(super) fn answer_drained_tmfs(&mut self) {
        for at in (0..self.tmfs.len()).rev() {
            if self.tmfs[at].countdown.is_zero() {
                let tmf = self.tmfs.swap_remove(at);
                self.answer(&tmf.chain, &[response::OK]);
            }
        }
    }

    /// Waits for all task management functions and answers them: the control queue stops.
    pub(super) fn finish_tmfs(&mut self) -> Result<(), DeviceError> {
        while let Some(tmf) = self.tmfs.first() {
            self.wait(&tmf.countdown, "a task management function")?;
            let tmf = self.tmfs.swap_remove(0);
            self.answer(&tmf.chain, &[response::OK]);
        }
        Ok(())
    }
}
