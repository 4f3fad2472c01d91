//! Which thread runs on which CPU.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to one CPU; `None`: leaves it where the scheduler puts it.
///
/// # Errors
/// There is no such CPU, or this process may not use it.
pub(crate) fn pin(cpu: Option<usize>) -> io::Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is no such CPU"));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|e| match e {
        rustix::io::Errno::INVAL => io::Error::new(
            io::ErrorKind::InvalidInput,
            "this process may not use that CPU: choose one of its cpuset",
        ),
        e => e.into(),
    })
}

/// The CPUs on which the calling thread may run and no reactor is bound; `None`: there are no others,
/// or `cpus` are none.
pub(crate) fn beside(cpus: &[usize]) -> Option<CpuSet> {
    let mut set = sched_getaffinity(None).ok()?;
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.unset(*cpu));
    (!cpus.is_empty() && set.count() > 0).then_some(set)
}

/// Has the calling thread, and those that it starts from now on, leave `cpus` to the reactors that
/// are bound to them: a message of one guest, or a management call, must not take the CPU from a
/// reactor that serves all guests. Returns whether it did; not where it may run nowhere else.
///
/// # Errors
/// The kernel's.
pub fn leave(cpus: &[usize]) -> io::Result<bool> {
    let Some(set) = beside(cpus) else { return Ok(false) };
    sched_setaffinity(None, &set)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mine() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
    }

    #[test]
    fn a_thread_leaves_the_reactors_cpus_to_them_unless_there_are_no_others() {
        // A thread of its own: others of the test keep all CPUs.
        std::thread::spawn(|| {
            let all = mine();
            assert!(!leave(&all).unwrap());
            assert!(!leave(&[]).unwrap());
            assert_eq!(mine(), all);
            let (first, rest) = all.split_first().unwrap();
            assert_eq!(leave(&[*first, CpuSet::MAX_CPU]).unwrap(), !rest.is_empty());
            if !rest.is_empty() {
                assert_eq!(mine(), rest);
                assert_eq!(std::thread::spawn(mine).join().unwrap(), rest);
            }
        })
        .join()
        .unwrap();
    }
}
