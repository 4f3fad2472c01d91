//! Targets whose requests wait because an I/O failed, as their error policy has it.
//!
//! That is told ([`Controllers::suspended`](crate::Controllers::suspended)) until it is over: the requests
//! went on, the guest did after a pause, or its session has ended. Whoever is to pause the guest may be
//! late or not there at all, so while the guest runs its requests are tried again now and then, and go on
//! by themselves when there is room.

use std::time::{Duration, Instant};

use bdev::IoError;

use super::Controller;
use super::server::Server;
use crate::device::Device;
use crate::lun::Suspension;

/// How often suspended requests of a guest that runs are tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Suspensions of one session that are a line in the log: a guest can have them again and again.
const MAX_LOGGED: u32 = 16;

impl Controller {
    /// Nothing waits any more because an I/O failed.
    pub(crate) fn forget_suspensions(&self) {
        self.targets().iter().flatten().for_each(|target| *target.suspended.lock() = None);
    }

    /// The targets whose requests wait: number, bdev, since when and for what.
    pub(crate) fn suspended(&self) -> Vec<(u8, String, Suspension)> {
        let targets = self.targets();
        let there = targets.iter().flatten().filter(|t| !t.leaving);
        there.filter_map(|t| Some((t.number, t.bdev_name().into(), t.suspended()?))).collect()
    }
}

impl Server {
    /// An I/O of a target failed, and its requests wait.
    pub(super) fn suspended(&mut self, number: u8, error: IoError) {
        let targets = self.controller.targets();
        let Some(target) = targets[usize::from(number)].as_ref().filter(|t| !t.leaving) else {
            return;
        };
        let mut suspended = target.suspended.lock();
        if suspended.is_none() {
            *suspended = Some(Suspension::new(error));
            self.suspensions_logged = self.suspensions_logged.saturating_add(1);
            if self.suspensions_logged <= MAX_LOGGED {
                tracing::warn!(
                    controller = self.controller.name,
                    target = number,
                    "requests to {} wait: {error}; they are tried again when the guest is resumed, or \
                     every {} s while it runs",
                    target.bdev_name(),
                    RETRY.as_secs()
                );
            }
        }
        self.retry_at.get_or_insert(Instant::now() + RETRY);
    }

    /// Begins what waits on `target`, or on all; of how many.
    pub(super) fn resume(&mut self, target: Option<u8>) -> usize {
        let of = |number| target.is_none_or(|target| target == number);
        let all = self.controller.suspended();
        let numbers: Vec<_> = all.into_iter().map(|(n, ..)| n).filter(|n| of(*n)).collect();
        for number in &numbers {
            if let Some(target) = &self.controller.targets()[usize::from(*number)] {
                *target.suspended.lock() = None;
            }
            self.with_device(|d| d.resume(*number));
        }
        numbers.len()
    }

    /// Tries again, if it is time to, what waits in a guest that runs.
    pub(super) fn retry_suspended(&mut self) {
        if self.retry_at.is_none_or(|at| at > Instant::now()) {
            return;
        }
        self.retry_at = None;
        if self.with_device(|d| d.runs()) != Some(true) {
            return;
        }
        for (number, ..) in self.controller.suspended() {
            if self.with_device(|d: &mut Device| d.is_suspended(number)) == Some(true) {
                self.with_device(|d| d.resume(number));
                self.retry_at = Some(Instant::now() + RETRY);
            } else if let Some(target) = &self.controller.targets()[usize::from(number)] {
                *target.suspended.lock() = None;
            }
        }
    }
}
