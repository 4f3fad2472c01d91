//! How a copy begins.

use super::one::{Copy, Ending};
use super::{Key, not_taken_back};
use crate::app::App;
use crate::errors;
use crate::moves::Marks;
use bdev::{Claim, ClaimMode, Registry};
use mirror::{Map, MapPage, Mirror, Options};
use parking_lot::{Condvar, Mutex};
use rpc::{Errno, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Ranges of one page of a map.
const PAGE: usize = 1024;

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

/// Holds the destination for the copy alone, and the source so that it stays.
fn claims(registry: &Registry, key: &Key, from: &str, to: &str) -> Result<(Claim, Claim), Error> {
    let owner = format!("the copy of target {} of controller {}", key.1, key.0);
    let destination = registry.claim(to, &owner).map_err(errors::registry)?;
    let source = registry.claim_as(from, &owner, ClaimMode::Reader).map_err(errors::registry)?;
    Ok((destination, source))
}

/// Closes the volume of a pool that a copy had open, which is over. Who ends one that is told still does so, but
/// for one that was given up.
fn let_go(app: &App, copy: Arc<Copy>) {
    let mut all = app.copies.all.lock();
    let mut is_told = all.get(&copy.key).is_some_and(|told| Arc::ptr_eq(told, &copy));
    if is_told && copy.given_up.load(Ordering::SeqCst) {
        all.remove(&copy.key);
        is_told = false;
    }
    drop((all, copy));
    if !is_told {
        app.close_unused_volumes_for_good();
    }
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
    let mirror = Mirror::new(source.clone(), to, how).map_err(|e| Error::os(Errno::Inval, e))?;
    let copy = Arc::new(Copy {
        key: key.clone(),
        mirror: mirror.clone(),
        options,
        claims: Mutex::new(Some(held)),
        written: Mutex::new(None),
        stuck: Mutex::new(String::new()),
        ending: Mutex::new(Ending::Not),
        changed: Condvar::new(),
        given_up: AtomicBool::new(false),
    });
    // Known before it begins: whatever happens to its bdevs ends it.
    app.copies.all.lock().insert(key.clone(), copy.clone());
    app.copies.ended.store(false, Ordering::SeqCst);
    let begun = app
        .controllers
        .replace(ctrlr, number, &source, mirror, None, Box::new(|| Ok(())))
        .map_err(errors::controller)
        .and_then(|()| {
            let (its, controllers) = (copy.clone(), app.controllers.clone());
            let its_app = Arc::downgrade(app);
            let thread = thread::Builder::new().name("lun-copy".into());
            let work = move || {
                its.run(&controllers);
                if let Some(app) = its_app.upgrade() {
                    let_go(&app, its);
                }
            };
            thread.spawn(work).map(drop).map_err(|e| {
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
