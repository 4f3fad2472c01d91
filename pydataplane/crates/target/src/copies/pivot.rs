//! How a target goes on with its copy.

use super::END_TIMEOUT;
use super::change::{Change, Record, options_there};
use super::one::Ending;
use crate::app::App;
use crate::errors;
use crate::moves::{self, Marks};
use crate::state;
use mirror::Phase;
use rpc::{Errno, Error};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_scsi::Front;

/// How long the destination may take to be flushed while the guest's requests go on.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
/// And while they wait.
const SEAL_TIMEOUT: Duration = Duration::from_secs(3);

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
        app.controllers.replace(ctrlr, number, &copy.as_bdev(), destination, volume, between)
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
