//! VMs' sessions that the holder keeps while this process is away, as after it was killed.
//!
//! The connection to the holder is another one than that of the exports. Controllers' threads wait for
//! its answers, and VMs for those threads: so one that does not answer is asked by none of them for a
//! while.

use holder::{Client, ClientError};
use parking_lot::Mutex;
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vhost_scsi::{Controllers, SessionKeeper};

/// How often a holder that is gone is looked for.
const HOLDER_POLL: Duration = Duration::from_millis(200);

/// How long an answer is waited for: it takes some 100 microseconds.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long one that was late is not asked again.
const PAUSE: Duration = Duration::from_secs(5);

/// The holder, as controllers need it.
#[derive(Debug)]
pub struct HeldSessions {
    client: Client,
    /// Tells the sessions of this target from those of others of this holder.
    tag: String,
    /// Until when it is not asked.
    late: Mutex<Option<Instant>>,
    /// It answers, and has kept what it was last given.
    works: AtomicBool,
}

impl HeldSessions {
    /// Those of the target whose state is in the folder `state_dir` that the holder at `socket` has.
    pub fn of(socket: &Path, state_dir: &Path) -> HeldSessions {
        // One that is not there is no target's.
        let folder = fs::metadata(state_dir).map(|folder| (folder.dev(), folder.ino()));
        let (device, inode) = folder.unwrap_or_default();
        HeldSessions {
            client: Client::with_timeout(socket, TIMEOUT),
            tag: format!("{device:x}-{inode:x}/"),
            late: Mutex::new(None),
            works: AtomicBool::new(false),
        }
    }

    /// Has `controllers` keep the sessions of controllers that are made from now on with `held`, also with
    /// a holder that is started anew.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn keep(held: &Arc<HeldSessions>, controllers: &Controllers) -> io::Result<()> {
        controllers.keep_sessions(held.clone());
        let (watched, controllers) = (held.clone(), controllers.clone());
        let watch = thread::Builder::new().name("session-holder".into());
        watch.spawn(move || watched.watch(&controllers))?;
        Ok(())
    }

    /// Whether the holder answers, and has kept what it was last given.
    pub fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    fn watch(&self, controllers: &Controllers) {
        let mut missed = false;
        loop {
            self.client.wait_lost();
            match self.asked(Client::answers) {
                Ok(()) => {
                    self.works.store(true, Ordering::Relaxed);
                    controllers.keep_sessions_again();
                    missed = false;
                }
                Err(e) => {
                    if !std::mem::replace(&mut missed, true) {
                        tracing::error!("VMs lose their disks if this process is killed: {e}");
                        self.works.store(false, Ordering::Relaxed);
                        // They find out, and say so.
                        controllers.keep_sessions_again();
                    }
                    thread::sleep(HOLDER_POLL);
                }
            }
        }
    }

    /// Lets go of the sessions of this target but those of controllers of which `goes_on` is true.
    pub fn end_others(&self, goes_on: impl Fn(&str) -> bool) {
        match self.asked(Client::vms) {
            Ok(names) => {
                let ours = names.iter().filter_map(|name| name.strip_prefix(&self.tag));
                ours.filter(|name| !goes_on(name)).for_each(|name| self.end(name));
            }
            Err(e) => tracing::debug!("{e}"),
        }
    }

    fn name(&self, controller: &str) -> String {
        format!("{}{controller}", self.tag)
    }

    /// Asks the holder, unless it was late a moment ago.
    fn asked<T>(&self, ask: impl FnOnce(&Client) -> Result<T, ClientError>) -> io::Result<T> {
        // One asks at a time, so that the others do not wait one after the other, too.
        let mut late = self.late.lock();
        if late.is_some_and(|until| Instant::now() < until) {
            return Err(io::Error::other("virtlun-holder does not answer"));
        }
        let answer = ask(&self.client);
        let is_late = matches!(answer, Err(ClientError::Late { .. }));
        *late = is_late.then(|| Instant::now() + PAUSE);
        answer.map_err(io::Error::other)
    }
}

impl SessionKeeper for HeldSessions {
    fn keep(&self, controller: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let most = holder::wire::FDS_MAX;
        if fds.len() > most {
            let why = format!("it has {} descriptors, and {most} can be kept", fds.len());
            return Err(io::Error::other(why));
        }
        let kept = self.asked(|client| client.keep_vm(&self.name(controller), fds));
        self.works.store(kept.is_ok(), Ordering::Relaxed);
        kept
    }

    fn end(&self, controller: &str) {
        if let Err(e) = self.asked(|client| client.end_vm(&self.name(controller))) {
            tracing::debug!(controller, "{e}");
        }
    }

    fn take(&self, controller: &str) -> io::Result<Option<Vec<OwnedFd>>> {
        self.asked(|client| match client.take_vm(&self.name(controller)) {
            // One that is not there, or does not know of it, has nothing.
            Err(ClientError::Absent { .. } | ClientError::Refused { .. }) => Ok(None),
            taken => taken,
        })
    }
}
