//! One copy: its thread, and how the target has its bdev again.

use super::change::Change;
use super::{CopyInfo, Key, not_taken_back};
use crate::moves;
use bdev::{Bdev, Claim};
use mirror::Mirror;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use vhost_scsi::{Controllers, TargetOptions};

/// How often a target that cannot be given its bdev back is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// How long whoever looks whether a pivot is taken back waits for that.
const LOOK: Duration = Duration::from_millis(100);

/// One copy.
pub(super) struct Copy {
    pub key: Key,
    pub mirror: Arc<Mirror>,
    /// How the target was added.
    pub options: TargetOptions,
    /// Held until the copy is over, and the target has let go: the destination, and the source.
    pub claims: Mutex<Option<(Claim, Claim)>>,
    /// What a pivot that has begun may have written, until that is over or taken back.
    pub written: Mutex<Option<Change>>,
    /// Why that could not be taken back when it was tried last.
    pub stuck: Mutex<String>,
    /// How it goes on.
    pub ending: Mutex<Ending>,
    pub changed: Condvar,
    /// Who aborted it did not get to see its end: it is told no more when it is over.
    pub given_up: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The target has the mirror.
    Not,
    /// It has the destination.
    Pivoted,
    /// It is gone, or is about to.
    TargetGone,
    /// Nothing of it is left but what is told.
    Over,
}

impl Copy {
    pub fn is(&self, ending: Ending) -> bool {
        *self.ending.lock() == ending
    }

    pub fn set(&self, ending: Ending) {
        *self.ending.lock() = ending;
        self.changed.notify_all();
    }

    pub fn wait_until_over(&self, most: Duration) -> bool {
        let mut ending = self.ending.lock();
        let goes_on = |ending: &mut Ending| *ending != Ending::Over;
        !self.changed.wait_while_for(&mut ending, goes_on, most).timed_out()
    }

    /// Nobody waits for its end any more. Whether that has come meanwhile, so that its thread may not know.
    pub fn give_up(&self) -> bool {
        self.given_up.store(true, Ordering::SeqCst);
        self.is(Ending::Over)
    }

    /// Whether nothing is left of a pivot that has failed.
    pub fn is_taken_back(&self) -> bool {
        // While nobody pivots, who has this for longer is taking it back.
        self.written.try_lock_for(LOOK).is_some_and(|written| written.is_none())
    }

    /// Why one that was to end has not, in one clause.
    pub fn waits_for(&self) -> String {
        match () {
            () if !self.is_taken_back() => {
                not_taken_back(self.mirror.source().name(), &self.stuck.lock())
            }
            () if self.mirror.is_quiet() => "I/O of its VM has not ended".to_owned(),
            () => format!("bdev {} has not answered", self.mirror.destination().name()),
        }
    }

    /// What is copied, as messages name it.
    pub fn name(&self) -> String {
        format!("target {} of controller {}", self.key.1, self.key.0)
    }

    pub fn info(&self) -> CopyInfo {
        CopyInfo {
            ctrlr: self.key.0.clone(),
            number: self.key.1,
            source: self.mirror.source().name().to_owned(),
            destination: self.mirror.destination().name().to_owned(),
            progress: self.mirror.progress(),
        }
    }

    /// Copies, and ends it in order: the thread of the copy.
    pub fn run(self: &Arc<Copy>, controllers: &Controllers) {
        self.mirror.run();
        if let Some(why) = self.mirror.progress().failure {
            tracing::warn!(ctrlr = self.key.0, target = self.key.1, "{why}");
        }
        while self.is(Ending::Not) && !self.give_back(controllers) {
            let mut ending = self.ending.lock();
            self.changed.wait_while_for(&mut ending, |ending| *ending == Ending::Not, RETRY);
        }
        // What the destination has not answered keeps it in use, and what is not taken back both.
        while self.take_back().is_err() || !self.mirror.is_quiet() {
            thread::sleep(RETRY);
        }
        *self.claims.lock() = None;
        self.set(Ending::Over);
    }

    /// Takes back what a pivot has written that failed; whatever lasts says then that the target is on its
    /// source.
    ///
    /// # Errors
    /// It cannot be, and is to be tried again: until then the target is to stay on the mirror.
    pub fn take_back(&self) -> Result<(), String> {
        let mut written = self.written.lock();
        if let Some(change) = &*written {
            moves::stay(change).inspect_err(|why| {
                tracing::error!("the pivot of {} is not taken back: {why}", self.name());
                self.stuck.lock().clone_from(why);
            })?;
            *written = None;
        }
        Ok(())
    }

    /// Gives the target its bdev again; whether that is done, or not needed. One that was pivoted meanwhile
    /// stays where it is.
    pub fn give_back(self: &Arc<Copy>, controllers: &Controllers) -> bool {
        let (name, number) = (&self.key.0, self.key.1);
        // That may take long: the guest's requests, which go to the mirror still, are not to wait for it.
        if self.take_back().is_err() {
            return false;
        }
        let copy = Arc::clone(self);
        let between = Box::new(move || {
            // A pivot that was before this in the controller's order has said so by now, and so has whoever removed
            // the target while its pivot was taken back, before there was another one of that number.
            if !copy.is(Ending::Not) {
                return Err("it is not on its copy any more".to_owned());
            }
            if copy.written.try_lock().is_none_or(|written| written.is_some()) {
                return Err("what its pivot has written is not taken back".to_owned());
            }
            match copy.mirror.is_quiet() {
                true => Ok(()),
                false => Err("the destination of its copy has not answered".to_owned()),
            }
        });
        let (mirror, source) = (self.as_bdev(), Arc::clone(self.mirror.source()));
        let Err(why) = controllers.replace(name, number, &mirror, source, None, between) else {
            return true;
        };
        tracing::debug!("{why}");
        // What is on something else, or gone, has nothing of this.
        !controllers.unit(name, number).is_ok_and(|(_, unit)| Arc::ptr_eq(unit.bdev(), &mirror))
    }

    /// What the target is on while it is copied.
    pub fn as_bdev(&self) -> Arc<dyn Bdev> {
        self.mirror.clone()
    }
}
