//! Who may use a controller: one process, and no other while that process is there.
//!
//! The controller of a VM shows its volumes to whoever connects, and every QEMU of a host may run as
//! the same user: rights on the socket's file do not tell one VM from another. So a controller
//! belongs to the process whose message came first, until that process has ended; the record
//! ([`OwnerJournal`]) outlives a restart of ours, when all sockets listen without a peer. Before a
//! process is known, the user that may be first can be named.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peer::{Identity, Process};

/// Number of the user that is no stranger where no process owns the controller: it may do anything
/// on the host anyway.
const ROOT: u32 = 0;

/// Refusals that are a line in the log, of a controller and second.
const MAX_LOGGED_REFUSALS: u32 = 4;
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Where it is recorded which process a controller belongs to.
pub trait OwnerJournal: Send + Sync {
    /// Records that the controller `name` belongs to `owner`. When it returns, the record survives
    /// the end of this process, however it ends. It need not survive the host's, with which `owner`
    /// ends too: the guest waits for this, and is not to wait for a disk that others use. Called by the
    /// controller's thread, before the process's first message is served.
    ///
    /// # Errors
    /// It is not recorded.
    fn record(&self, name: &str, owner: &Identity) -> io::Result<()>;
}

/// Who a controller is to belong to.
#[derive(Debug, Default)]
pub struct NamedOwner {
    /// Number of the user whose processes may be the first, beside root's; `None`: any that may open
    /// the socket.
    pub uid: Option<u32>,
    /// Only a process that started no earlier may be the first, as [`peer::now`] counts; 0: any.
    pub not_before: u64,
    /// The process. `None`: nobody yet.
    pub process: Option<Process>,
}

/// Who a controller belongs to, as it is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerInfo {
    /// Number of the user whose processes may be the first; `None`: any that may open the socket.
    pub uid: Option<u32>,
    /// When such a process must have started at the earliest; 0: at any time.
    pub not_before: u64,
    /// The process that it belongs to.
    pub process: Option<Identity>,
    /// Name of that process's command, where it is visible.
    pub command: String,
}

/// Who a controller belongs to.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    uid: Option<u32>,
    not_before: u64,
    process: Option<Arc<Process>>,
    /// The one that used it last, whom it belongs to or not.
    served: Option<Arc<Process>>,
}

/// Why a process may not connect.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("it belongs to {0}, which is still there")]
    Owned(Arc<Process>),
    #[error("only processes of user {0} may be the first")]
    OtherUser(u32),
    #[error("it started before the VM that this is for")]
    TooOld,
    #[error("that has ended already")]
    Gone,
}

impl Owner {
    /// Whether `comer` may connect. An owner that is gone is forgotten.
    pub(crate) fn admit(&mut self, comer: &Process) -> Result<(), Refusal> {
        self.process = self.process.take().filter(|process| !process.is_gone());
        if comer.is_gone() {
            return Err(Refusal::Gone);
        }
        if let Some(owner) = &self.process {
            return match owner.is_same(comer) {
                true => Ok(()),
                false => Err(Refusal::Owned(Arc::clone(owner))),
            };
        }
        let started = comer.identity().start_time;
        if started != 0 && started < self.not_before {
            return Err(Refusal::TooOld);
        }
        match self.uid {
            Some(uid) if ![uid, ROOT].contains(&comer.identity().uid) => {
                Err(Refusal::OtherUser(uid))
            }
            _ => Ok(()),
        }
    }

    /// Whether it belongs to this process.
    pub(crate) fn is(&self, process: &Process) -> bool {
        self.process.as_ref().is_some_and(|owner| owner.is_same(process))
    }

    /// Whether it belongs to this process, and will be free when that has ended. Not where the owner
    /// was recorded, is of another PID namespace, and so is known by its user alone: `process` has a
    /// pidfd, and is to be bound.
    pub(crate) fn is_bound_to(&self, process: &Process) -> bool {
        let owner = self.process.as_ref().filter(|owner| owner.is_same(process));
        owner.is_some_and(|owner| owner.is_watched() || !process.is_watched())
    }

    /// Whether it is new to this process, that is, whether another used it last. Where that is not known,
    /// the process before that of this program may have served it: then it is new to all but its owner.
    pub(crate) fn is_new_to(&self, process: &Process) -> bool {
        match &self.served {
            Some(last) => !last.is_same(process),
            None => !self.is(process),
        }
    }

    /// `process` uses it.
    pub(crate) fn serves(&mut self, process: Arc<Process>) {
        self.served = Some(process);
    }

    /// From now on it belongs to `process`.
    pub(crate) fn bind(&mut self, process: Arc<Process>) {
        self.process = Some(process);
    }

    /// From now on it belongs to whom somebody named.
    pub(crate) fn set(&mut self, named: NamedOwner) {
        let NamedOwner { uid, not_before, process } = named;
        let served = self.served.take();
        *self = Owner { uid, not_before, process: process.map(Arc::new), served };
    }

    /// As it is now: without a process that has ended.
    pub(crate) fn info(&self) -> OwnerInfo {
        let process = self.process.as_ref().filter(|process| !process.is_gone());
        OwnerInfo {
            uid: self.uid,
            not_before: self.not_before,
            process: process.map(|p| p.identity().clone()),
            command: process.map(|p| p.command().to_owned()).unwrap_or_default(),
        }
    }
}

/// Lines in the log about what was refused, which may come as often as peers like.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog {
    /// When the present second began, and the lines in it.
    since: Option<Instant>,
    logged: u32,
    unlogged: u64,
}

impl RefusalLog {
    /// `what` was refused.
    pub(crate) fn refused(
        &mut self,
        controller: &str,
        what: &dyn fmt::Display,
        why: &dyn fmt::Display,
    ) {
        if self.since.is_none_or(|since| since.elapsed() >= REFUSAL_LOG_INTERVAL) {
            self.since = Some(Instant::now());
            self.logged = 0;
        }
        if self.logged == MAX_LOGGED_REFUSALS {
            self.unlogged += 1;
            return;
        }
        self.logged += 1;
        match std::mem::take(&mut self.unlogged) {
            0 => tracing::warn!(controller, "refused {what}: {why}"),
            more => tracing::warn!(controller, "refused {what}: {why}; {more} more before it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A process of its own, which ends when it is told to.
    struct Other(Child);

    impl Other {
        fn new() -> Other {
            let cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
            Other(cat.unwrap())
        }

        fn process(&self) -> Process {
            Process::of_pid(self.0.id()).unwrap()
        }

        fn end(mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn it_belongs_to_one_process_until_that_has_ended() {
        let (first, second) = (Other::new(), Other::new());
        let mut owner = Owner::default();
        assert!(owner.admit(&first.process()).is_ok());
        owner.bind(Arc::new(first.process()));
        assert!(owner.admit(&first.process()).is_ok(), "it comes again");
        let why = owner.admit(&second.process()).unwrap_err().to_string();
        let named = format!("belongs to process {} (cat) of user", first.0.id());
        assert!(why.contains(&named), "{why}");
        assert_eq!(owner.info().process.unwrap().pid, first.0.id());
        first.end();
        assert_eq!(owner.info(), OwnerInfo::default());
        assert!(owner.admit(&second.process()).is_ok());
        let gone = second.process();
        second.end();
        assert!(matches!(owner.admit(&gone), Err(Refusal::Gone)));
    }

    #[test]
    fn an_owner_that_is_known_by_its_user_alone_is_bound_again() {
        let other = Other::new();
        let comer = other.process();
        // As it was recorded where it had no number: of a PID namespace that is not ours.
        let recorded = Identity { pid: 0, start_time: 0, ..comer.identity().clone() };
        let mut owner = Owner::default();
        owner.bind(Arc::new(Process::find(&recorded).unwrap()));
        assert!(owner.admit(&comer).is_ok());
        assert!(!owner.is_bound_to(&comer), "nobody would see that it ended");
        owner.bind(Arc::new(other.process()));
        assert!(owner.is_bound_to(&comer));
        other.end();
        assert_eq!(owner.info(), OwnerInfo::default());
    }

    #[test]
    fn it_is_new_to_whoever_did_not_use_it_last() {
        let (first, second) = (Other::new(), Other::new());
        let mut owner = Owner::default();
        // As another program left it.
        owner.bind(Arc::new(first.process()));
        assert!(!owner.is_new_to(&first.process()));
        assert!(owner.is_new_to(&second.process()));
        owner.serves(Arc::new(first.process()));
        // Named before it comes, and whether or not anybody looked meanwhile.
        let named = || NamedOwner { process: Some(second.process()), ..NamedOwner::default() };
        owner.set(named());
        assert!(owner.is_new_to(&second.process()));
        owner.serves(Arc::new(second.process()));
        owner.set(named());
        assert!(!owner.is_new_to(&second.process()), "it comes again");
        first.end();
        second.end();
    }

    #[test]
    fn only_the_user_that_was_named_and_root_may_be_first() {
        let other = Other::new();
        let process = other.process();
        let own = process.identity().uid;
        let mut owner = Owner::default();
        let named = |uid| NamedOwner { uid, ..NamedOwner::default() };
        owner.set(named(Some(own)));
        assert!(owner.admit(&process).is_ok());
        owner.set(named(Some(own + 1)));
        assert_eq!(owner.admit(&process).is_ok(), own == ROOT);
        owner.set(named(None));
        assert!(owner.admit(&process).is_ok());
        other.end();
    }

    #[test]
    fn only_a_process_that_started_late_enough_may_be_first() {
        let (old, set) = (Other::new(), peer::now() + 1);
        while peer::now() < set {
            std::thread::sleep(Duration::from_millis(1));
        }
        let young = Other::new();
        let mut owner = Owner::default();
        owner.set(NamedOwner { not_before: set, ..NamedOwner::default() });
        assert!(matches!(owner.admit(&old.process()), Err(Refusal::TooOld)));
        assert!(owner.admit(&young.process()).is_ok());
        // Who is named is meant.
        owner.bind(Arc::new(old.process()));
        assert!(owner.admit(&old.process()).is_ok());
        old.end();
        young.end();
    }
}
