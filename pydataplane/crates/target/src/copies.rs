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

use crate::app::App;
use crate::errors;
use crate::moves::{self, Marks};
use crate::state;
use bdev::{Claim, ClaimMode, Event, Registry};
use change::{Change, Record, options_there};
use mirror::{Map, MapPage, Mirror, Options, Phase, Progress};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rpc::{Errno, Error};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use vhost_scsi::{ControllerError, Controllers, Front, TargetOptions};

/// How long the destination may take to be flushed while the guest's requests go on.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// And while they wait.
const SEAL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an abort waits until the destination is free.
const ABORT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the end of the process waits for a copy.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long whoever looks whether a pivot is taken back waits for that.
const LOOK: Duration = Duration::from_millis(100);
/// How often a target that cannot be given its bdev back is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Ranges of one page of a map.
const PAGE: usize = 1024;

/// A target: its controller and its number.
type Key = (String, u8);

/// One copy.
struct Copy {
    key: Key,
    mirror: Arc<Mirror>,
    /// How the target was added.
    options: TargetOptions,
    /// Held until the copy is over, and the target has let go: the destination, and the source.
    claims: Mutex<Option<(Claim, Claim)>>,
    /// What a pivot that has begun may have written, until that is over or taken back.
    written: Mutex<Option<Change>>,
    /// Why that could not be taken back when it was tried last.
    stuck: Mutex<String>,
    /// How it goes on.
    ending: Mutex<Ending>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The target has the mirror.
    Not,
    /// It has the destination.
    Pivoted,
    /// It is gone, or is about to.
    TargetGone,
    /// Nothing of it is left but what is told.
    Over,
}

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
        // While nobody pivots, who has this for longer is taking it back.
        let is_not = |copy: &&Arc<Copy>| {
            copy.written.try_lock_for(LOOK).is_none_or(|written| written.is_some())
        };
        of_it.find(is_not).map(|copy| copy.stuck.lock().clone())
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
            if gone {
                copy.set(Ending::TargetGone);
                copy.mirror.fail("the target is gone".to_owned());
                let mut left = self.left.lock();
                left.retain(|copy| copy.strong_count() > 0);
                left.push(Arc::downgrade(copy));
            }
            !gone
        });
    }

    /// Ends all copies, for that reason: their targets are on their sources when this returns, unless
    /// something does not answer.
    pub fn end_all(&self, why: &str) {
        let all: Vec<_> = self.all.lock().values().cloned().collect();
        for copy in &all {
            let (from, to) = (copy.mirror.source().name(), copy.mirror.destination().name());
            if copy.mirror.progress().failure.is_none() {
                tracing::warn!("the copy of bdev {from} to bdev {to} is lost: {why}");
            }
            copy.mirror.fail(format!("the copy of bdev {from} to bdev {to} ended: {why}"));
        }
        let end = Instant::now() + END_TIMEOUT;
        for copy in all {
            copy.wait_until_over(end.saturating_duration_since(Instant::now()));
        }
        // With what they have of their bdevs, whose files another process is about to open. What has not ended has
        // it still, and is known in case that this process goes on after all: no other copy begins beside it.
        self.all.lock().retain(|_, copy| !copy.is(Ending::Over));
    }

    fn get(&self, ctrlr: &str, number: u8) -> Result<Arc<Copy>, Error> {
        let found = self.all.lock().get(&(ctrlr.to_owned(), number)).cloned();
        found.ok_or_else(|| {
            let what = format!("target {number} of controller {ctrlr} is not being copied");
            Error::os(Errno::NoDev, what)
        })
    }
}

impl Copy {
    fn is(&self, ending: Ending) -> bool {
        *self.ending.lock() == ending
    }

    fn set(&self, ending: Ending) {
        *self.ending.lock() = ending;
        self.changed.notify_all();
    }

    fn wait_until_over(&self, most: Duration) -> bool {
        let mut ending = self.ending.lock();
        let goes_on = |ending: &mut Ending| *ending != Ending::Over;
        !self.changed.wait_while_for(&mut ending, goes_on, most).timed_out()
    }

    /// What is copied, as messages name it.
    fn name(&self) -> String {
        format!("target {} of controller {}", self.key.1, self.key.0)
    }

    fn info(&self) -> CopyInfo {
        CopyInfo {
            ctrlr: self.key.0.clone(),
            number: self.key.1,
            source: self.mirror.source().name().to_owned(),
            destination: self.mirror.destination().name().to_owned(),
            progress: self.mirror.progress(),
        }
    }

    /// Copies, and ends it in order: the thread of the copy.
    fn run(self: &Arc<Copy>, controllers: &Controllers) {
        self.mirror.run();
        if let Some(why) = self.mirror.progress().failure {
            tracing::warn!(ctrlr = self.key.0, target = self.key.1, "{why}");
        }
        while self.is(Ending::Not) && !self.give_back(controllers) {
            let mut ending = self.ending.lock();
            self.changed.wait_while_for(&mut ending, |ending| *ending == Ending::Not, RETRY);
        }
        // What the destination has not answered keeps it in use, and what is not taken back both.
        while !self.mirror.is_quiet() || self.take_back().is_err() {
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
    fn take_back(&self) -> Result<(), String> {
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
    fn give_back(self: &Arc<Copy>, controllers: &Controllers) -> bool {
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
        let source = Arc::clone(self.mirror.source());
        match controllers.replace(name, number, source, None, between) {
            Ok(()) => true,
            Err(ControllerError::NotFound(_) | ControllerError::NoTarget { .. }) => true,
            Err(why) => {
                tracing::debug!("{why}");
                false
            }
        }
    }
}

/// What an lvol has, asked of its map: whatever the bdev is otherwise, nothing is known.
fn map_of(app: &Arc<App>, bdev: &str) -> Option<Map> {
    app.lvstores.lvol(bdev).ok()?;
    let (app, name) = (Arc::downgrade(app), bdev.to_owned());
    Some(Box::new(move |from| {
        let page = app.upgrade()?.lvstores.ranges(&name, None, from, PAGE).ok()?;
        let parts = page.ranges.iter().map(|range| (range.offset, range.length)).collect();
        Some(MapPage { parts, next: page.next_offset })
    }))
}

/// What is said of a bdev that a pivot has failed of, which is not taken back yet.
pub fn not_taken_back(source: &str, why: &str) -> String {
    let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
    format!(
        "a pivot of bdev {source} failed, and is not taken back yet{why}: mend that, as by room in its lvstores and \
         the state directory, or by `virtlun bdev clear-flush-error`; the target tries again each second"
    )
}

/// Holds the destination for the copy alone, and the source so that it stays.
fn claims(registry: &Registry, key: &Key, from: &str, to: &str) -> Result<(Claim, Claim), Error> {
    let owner = format!("the copy of target {} of controller {}", key.1, key.0);
    let destination = registry.claim(to, &owner).map_err(errors::registry)?;
    let source = registry.claim_as(from, &owner, ClaimMode::Reader).map_err(errors::registry)?;
    Ok((destination, source))
}

/// Begins to copy the bdev of a target to another, `to`, with at most `limit` bytes a second (0: as many as
/// the disks can).
///
/// # Errors
/// There is no such target or bdev; it is copied already, or an earlier pivot from its bdev is not taken back; the
/// bdev is in use, another volume is being moved to it, or it cannot take it.
pub fn start(app: &Arc<App>, ctrlr: &str, number: u8, to: &str, limit: u64) -> Result<(), Error> {
    let _turn = app.copies.turn.lock();
    let key: Key = (ctrlr.to_owned(), number);
    let (from, unit) = app.controllers.unit(ctrlr, number).map_err(errors::controller)?;
    let options = app.controllers.options(ctrlr, number).map_err(errors::controller)?;
    let busy = |why: String| Error::os(Errno::Busy, why);
    if let Ok(copy) = app.copies.get(ctrlr, number) {
        if !copy.is(Ending::Over) {
            return Err(busy(format!(
                "target {number} of controller {ctrlr} is being copied to bdev {}; pivot or abort that first",
                copy.mirror.destination().name()
            )));
        }
        app.copies.all.lock().remove(&key);
    }
    if options.shareable {
        return Err(busy(format!(
            "target {number} of controller {ctrlr} is shareable: who else writes to bdev {from} is not known"
        )));
    }
    if let Some(why) = app.copies.taking_back(&from) {
        return Err(busy(not_taken_back(&from, &why)));
    }
    let to = app.bdev(to)?;
    Marks::of(app, ctrlr, &from, to.name())?;
    let held = claims(&app.registry, &key, &from, to.name())?;
    let source = Arc::clone(held.1.bdev());
    let its = (to.geometry().block_size, unit.block_size());
    if its.0 > its.1 {
        return Err(Error::os(
            Errno::Inval,
            format_args!(
                "bdev {} has blocks of {} bytes, and the disk of {}",
                to.name(),
                its.0,
                its.1
            ),
        ));
    }
    let maps = (map_of(app, source.name()), map_of(app, to.name()));
    let how = Options { limit, source_map: maps.0, destination_map: maps.1 };
    let mirror = Mirror::new(source, to, how).map_err(|e| Error::os(Errno::Inval, e))?;
    let copy = Arc::new(Copy {
        key: key.clone(),
        mirror: mirror.clone(),
        options,
        claims: Mutex::new(Some(held)),
        written: Mutex::new(None),
        stuck: Mutex::new(String::new()),
        ending: Mutex::new(Ending::Not),
        changed: Condvar::new(),
    });
    // Known before it begins: whatever happens to its bdevs ends it.
    app.copies.all.lock().insert(key.clone(), copy.clone());
    let begun = app
        .controllers
        .replace(ctrlr, number, mirror, None, Box::new(|| Ok(())))
        .map_err(errors::controller)
        .and_then(|()| {
            let (its, controllers) = (copy.clone(), app.controllers.clone());
            let thread = thread::Builder::new().name("lun-copy".into());
            thread.spawn(move || its.run(&controllers)).map(drop).map_err(|e| {
                copy.mirror.stop();
                copy.give_back(&app.controllers);
                Error::os(Errno::NoMem, format_args!("a thread cannot be started: {e}"))
            })
        });
    if begun.is_err() {
        app.copies.all.lock().remove(&key);
    }
    begun
}

/// Limits a copy to so many bytes a second; 0: as many as the disks can.
///
/// # Errors
/// There is none.
pub fn set_limit(app: &App, ctrlr: &str, number: u8, limit: u64) -> Result<(), Error> {
    app.copies.get(ctrlr, number)?.mirror.set_limit(limit);
    Ok(())
}

/// Has a target whose bdev is copied go on with the copy, as the same disk to its guest. It is recorded when
/// this returns, and the copy is over.
///
/// # Errors
/// There is none; not all is copied; the copy failed; the guest's I/O does not end, or the change cannot be
/// recorded: then the copy goes on.
pub fn pivot(app: &Arc<App>, ctrlr: &str, number: u8) -> Result<(), Error> {
    let _turn = app.copies.turn.lock();
    let copy = app.copies.get(ctrlr, number)?;
    let progress = copy.mirror.progress();
    if progress.phase != Phase::Ready {
        let errno = if progress.phase == Phase::Copying { Errno::Busy } else { Errno::Io };
        let why = copy.mirror.seal(Duration::ZERO).err();
        return Err(Error::os(errno, why.unwrap_or_else(|| "the copy is over".to_owned())));
    }
    let io = |why: String| Error::os(Errno::Io, why);
    copy.take_back().map_err(io)?;
    let source = copy.mirror.source().name();
    let marks = Marks::of(app, ctrlr, source, copy.mirror.destination().name())?.map(Arc::new);
    // What takes time first: the guest's requests wait for the rest alone.
    copy.mirror.seal(FLUSH_TIMEOUT).map_err(io)?;
    let (_, unit) = app.controllers.unit(ctrlr, number).map_err(errors::controller)?;
    let destination = Arc::clone(copy.mirror.destination());
    let options = options_there(&copy, &unit, &*destination);
    let front = app.controllers.front(ctrlr).map_err(errors::controller)?;
    let (record, owner) = match front {
        Front::Scsi => {
            let key = state::target_key(ctrlr, u64::from(number));
            (Record::of_lun(app, key, &options, &*destination), copy.name())
        }
        Front::Blk => {
            let record = Record::of_blk(app, ctrlr, &options, &*destination);
            (record, format!("controller {ctrlr}"))
        }
    };
    let volume = copy.claims.lock().as_ref().map(|(claim, _)| claim.also(&owner));
    let volume = volume.ok_or_else(|| Error::os(Errno::Io, "the copy is over"))?;
    let mut change = Some(Change::new(app, marks.clone(), record));
    let prepared = match marks {
        // It writes now already, and from here on it can be taken back by whoever ends the copy.
        Some(_) => {
            let mut written = copy.written.lock();
            *written = change.take();
            written.as_ref().map_or(Ok(()), moves::prepare)
        }
        None => Ok(()),
    };
    let its = copy.clone();
    let between = Box::new(move || {
        its.mirror.seal(SEAL_TIMEOUT)?;
        let mut written = its.written.lock();
        if let Some(change) = change {
            *written = Some(change);
        }
        moves::go_over(written.as_ref().ok_or("the copy is over")?)?;
        // From here on nobody gives the target its bdev back, as whoever ends the copy may be about to.
        *written = None;
        its.set(Ending::Pivoted);
        Ok(())
    });
    let waits = Instant::now();
    let replaced = || {
        let volume = Some((volume, options));
        app.controllers.replace(ctrlr, number, destination, volume, between)
    };
    let pivoted = prepared.map_err(io).and_then(|()| replaced().map_err(errors::controller));
    if let Err(e) = pivoted {
        // What cannot be taken back now is before anything else is done with the copy.
        _ = copy.take_back();
        return Err(e);
    }
    if let Some(marks) = marks {
        marks.measured(app, waits.elapsed());
    }
    copy.mirror.stop();
    copy.wait_until_over(END_TIMEOUT);
    app.copies.all.lock().remove(&copy.key);
    Ok(())
}

/// Ends a copy, one that failed as well: the target goes on with its bdev, and the destination is free.
///
/// # Errors
/// There is none; a pivot that failed cannot be taken back: the copy goes on. The destination does not answer:
/// the target goes on, and the rest follows.
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
    if !copy.wait_until_over(ABORT_TIMEOUT) {
        let to = copy.mirror.destination().name();
        return Err(Error::os(
            Errno::Busy,
            format_args!("the copy is over, but bdev {to} stays in use until it has answered"),
        ));
    }
    app.copies.all.lock().remove(&copy.key);
    Ok(())
}
