//! Targets whose bdev is being copied to another, while their guests use them: which there are, and how
//! each ends.
//!
//! A copy is between two changes of what a target is made of: from its bdev to a [`Mirror`] of it, and from
//! that to the destination (pivot) or back (abort, failure). A thread of its own copies, and when the copy is
//! over without a pivot it gives the target its bdev back and lets go of the destination.
//!
//! Nothing of it is recorded before the pivot, which records that the target is on the destination while its
//! guest's requests wait. So after a crash the target is on the one or the other, as whoever asked for the
//! pivot was told, or will find it; a copy that was not pivoted is gone with the process. Of a volume that is
//! being moved the pivot notes at both which of them counts ([`crate::moves`]). A pivot that fails is taken
//! back before the target leaves the mirror, by which both have the same until then, or the old one has all.

mod change;
mod one;
mod pivot;
mod start;

pub use pivot::pivot;
pub use start::start;

use crate::app::App;
use bdev::Event;
use mirror::Progress;
use one::{Copy, Ending};
use parking_lot::{Mutex, MutexGuard};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long an abort waits until the destination is free.
const ABORT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the end of the process waits for a copy.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A target: its controller and its number.
type Key = (String, u8);

/// What is told of one.
pub struct CopyInfo {
    /// Name of the controller.
    pub ctrlr: String,
    /// Number of the target.
    pub number: u8,
    /// Name of the bdev that is copied.
    pub source: String,
    /// Name of the bdev that it is copied to.
    pub destination: String,
    /// How far it is.
    pub progress: Progress,
}

/// All copies that go on, and those that failed until somebody ends them.
#[derive(Default)]
pub struct Copies {
    all: Mutex<BTreeMap<Key, Arc<Copy>>>,
    /// Those whose targets are gone, until they have ended.
    left: Mutex<Vec<Weak<Copy>>>,
    /// Held while one begins or ends.
    turn: Mutex<()>,
    /// The process is about to end, or gives what it has to the next one.
    ended: AtomicBool,
}

impl Copies {
    /// Held, no copy begins or ends, but by itself.
    pub fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// Whether a bdev is being copied.
    pub fn has(&self, source: &str) -> bool {
        self.all.lock().values().any(|copy| copy.mirror.source().name() == source)
    }

    /// Why a pivot from a bdev that failed is not taken back yet, also of a target that is gone; None: there is no
    /// such one. Until then nobody goes on with another bdev: which one counts would depend on both.
    pub fn taking_back(&self, source: &str) -> Option<String> {
        let all: Vec<_> = self.all.lock().values().cloned().collect();
        let left: Vec<_> = self.left.lock().iter().filter_map(Weak::upgrade).collect();
        let mut of_it =
            all.iter().chain(&left).filter(|copy| copy.mirror.source().name() == source);
        of_it.find(|copy| !copy.is_taken_back()).map(|copy| copy.stuck.lock().clone())
    }

    /// Something happened to a bdev: the copies from it and to it are over.
    pub fn note(&self, event: &Event) {
        let (bdev, what) = match event {
            Event::Removed(bdev) => (bdev, "removed"),
            Event::Resized(bdev) => (bdev, "resized"),
            Event::Registered(_) | Event::Space { .. } => return,
        };
        self.all.lock().retain(|_, copy| {
            let (from, to) = (copy.mirror.source().name(), copy.mirror.destination().name());
            let name = bdev.name();
            if ![from, to].contains(&name) {
                return true;
            }
            if !copy.is(Ending::Pivoted) {
                copy.mirror.fail(format!(
                    "the copy of bdev {from} to bdev {to} ended: bdev {name} was {what}"
                ));
            }
            // Of one that is over nothing is to be kept but by who asks for it.
            !(copy.is(Ending::Over) && matches!(event, Event::Removed(_)))
        });
    }

    /// Those of a controller, or all, in the order of their targets.
    pub fn list(&self, ctrlr: Option<&str>, number: Option<u8>) -> Vec<CopyInfo> {
        let all = self.all.lock();
        let of = |copy: &&Arc<Copy>| {
            ctrlr.is_none_or(|name| name == copy.key.0) && number.is_none_or(|n| n == copy.key.1)
        };
        all.values().filter(of).map(|copy| copy.info()).collect()
    }

    /// The target is gone, or all of the controller are.
    pub fn forget(&self, ctrlr: &str, number: Option<u8>) {
        let mut all = self.all.lock();
        all.retain(|(name, n), copy| {
            let gone = name == ctrlr && number.is_none_or(|number| number == *n);
            if gone && !copy.is(Ending::Over) {
                copy.set(Ending::TargetGone);
                copy.mirror.fail("the target is gone".to_owned());
                let mut left = self.left.lock();
                left.retain(|copy| copy.strong_count() > 0);
                left.push(Arc::downgrade(copy));
            }
            !gone
        });
    }

    /// Ends all copies, for that reason: their targets are on their sources when this returns well, and nothing
    /// has their bdevs any more, whose files another process may be about to open.
    ///
    /// # Errors
    /// In one sentence: one has not ended in [`END_TIMEOUT`], and why. It goes on trying, and is known still in case
    /// that this process goes on: no other copy begins beside it.
    pub fn end_all(&self, why: &str) -> Result<(), String> {
        self.ended.store(true, Ordering::SeqCst);
        let mut all: Vec<_> = self.all.lock().values().cloned().collect();
        let left: Vec<_> = self.left.lock().iter().filter_map(Weak::upgrade).collect();
        // Others do not end for one that is known not to.
        for copy in left.iter().chain(&all) {
            if !copy.is(Ending::Over) && !copy.is_taken_back() {
                return Err(format!(
                    "the copy of {} has not ended: {}",
                    copy.name(),
                    copy.waits_for()
                ));
            }
        }
        for copy in &all {
            let (from, to) = (copy.mirror.source().name(), copy.mirror.destination().name());
            if copy.mirror.progress().failure.is_none() {
                tracing::warn!("the copy of bdev {from} to bdev {to} is lost: {why}");
            }
            copy.mirror.fail(format!("the copy of bdev {from} to bdev {to} ended: {why}"));
        }
        all.extend(left);
        let end = Instant::now() + END_TIMEOUT;
        let mut outcome = Ok(());
        for copy in all {
            let over = copy.wait_until_over(end.saturating_duration_since(Instant::now()));
            if !over && outcome.is_ok() {
                outcome =
                    Err(format!("the copy of {} has not ended: {}", copy.name(), copy.waits_for()));
            }
        }
        self.all.lock().retain(|_, copy| !copy.is(Ending::Over));
        outcome
    }

    /// Whether [`Copies::end_all`] was called, and none has begun since.
    pub fn are_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn get(&self, ctrlr: &str, number: u8) -> Result<Arc<Copy>, Error> {
        let found = self.all.lock().get(&(ctrlr.to_owned(), number)).cloned();
        found.ok_or_else(|| {
            let what = format!("target {number} of controller {ctrlr} is not being copied");
            Error::os(Errno::NoDev, what)
        })
    }
}

/// What is said of a bdev that a pivot has failed of, which is not taken back yet.
pub fn not_taken_back(source: &str, why: &str) -> String {
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    format!(
        "a pivot of bdev {source} failed, and is not taken back yet{why}: mend that, as by room in its lvstores and \
         the state directory, or by `virtlun bdev clear-flush-error`; the target tries again each second"
    )
}

/// Limits a copy to so many bytes a second; 0: as many as the disks can.
///
/// # Errors
/// There is none.
pub fn set_limit(app: &App, ctrlr: &str, number: u8, limit: u64) -> Result<(), Error> {
    app.copies.get(ctrlr, number)?.mirror.set_limit(limit);
    Ok(())
}

/// Ends a copy, one that failed as well: the target goes on with its bdev, and the destination is free.
///
/// # Errors
/// There is none; a pivot that failed cannot be taken back: the copy goes on. The destination does not answer:
/// the target goes on, and the rest follows, by itself.
pub fn abort(app: &App, ctrlr: &str, number: u8) -> Result<(), Error> {
    let _turn = app.copies.turn.lock();
    let copy = app.copies.get(ctrlr, number)?;
    copy.take_back().map_err(|why| {
        let its = copy.name();
        Error::os(
            Errno::Io,
            format_args!(
                "the pivot of {its} cannot be taken back, and its copy goes on: {why}; give it room, or where a disk \
                 has failed, `virtlun bdev clear-flush-error`"
            ),
        )
    })?;
    copy.mirror.stop();
    if !copy.wait_until_over(ABORT_TIMEOUT) && !copy.give_up() {
        let to = copy.mirror.destination().name();
        return Err(Error::os(
            Errno::Busy,
            format_args!("the copy is over, but bdev {to} stays in use until it has answered"),
        ));
    }
    app.copies.all.lock().remove(&copy.key);
    Ok(())
}
