//! Work of commands that takes long, or that waits: each on a thread of its own. Threads begin where the one runs
//! that starts them, and a reactor may be bound to one processor, which is all guests'; so they go where the
//! thread may run that made the first unit, which is no reactor's.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::OnceLock;
use std::thread;

static CPUS: OnceLock<Option<CpuSet>> = OnceLock::new();

/// The calling thread is no reactor's: where it may run, so may what follows.
pub(crate) fn here() {
    CPUS.get_or_init(|| sched_getaffinity(None).ok());
}

/// Has it done by a thread called `name`; `false`: there is none.
#[must_use]
pub(crate) fn run(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let body = move || {
        if let Some(Some(cpus)) = CPUS.get() {
            // Else it is done all the same, at the cost of others.
            _ = sched_setaffinity(None, cpus);
        }
        work();
    };
    thread::Builder::new().name(name.to_owned()).spawn(body).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn what_a_bound_thread_begins_runs_elsewhere_too() {
        here();
        let mine = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| mine.is_set(*cpu)).unwrap();
        let (tell, told) = mpsc::channel();
        let bound = move || {
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).unwrap();
            assert!(run("aside", move || tell.send(sched_getaffinity(None).unwrap()).unwrap()));
        };
        thread::spawn(bound).join().unwrap();
        assert_eq!(told.recv().unwrap(), mine);
    }
}
