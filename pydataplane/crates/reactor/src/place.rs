//! Which thread runs on which CPU, and who has it first.

use std::io;
use std::mem::size_of;

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

/// Slice of a reactor, the longest that the scheduler takes: 100 ms.
const SLICE_NS: u64 = 100_000_000;

/// Has the calling thread give way at once to others that wake up on its CPU.
///
/// The kernel ends direct writes in threads of its own on the CPU of the interrupt, and a fallocate of the
/// file waits for them with the file's lock held, as do all its reads then. Behind a reactor that is never
/// out of work they would wait for the rest of its slice, 2 ms. One with a long slice makes way for those
/// with a shorter one (EEVDF of Linux 6.12 and later; older ones leave it at that), and none has less
/// of the CPU than before.
///
/// # Errors
/// The kernel's.
pub(crate) fn give_way() -> io::Result<()> {
    let mut attr = scheduling()?;
    if attr.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attr.sched_runtime = SLICE_NS;
    // SAFETY: the kernel only reads `attr`, whose size stands in it.
    if unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// How the calling thread is scheduled.
fn scheduling() -> io::Result<libc::sched_attr> {
    let size = size_of::<libc::sched_attr>() as libc::c_uint;
    let mut attr = libc::sched_attr {
        size,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes no more than `size` bytes of `attr`, which is of integers alone.
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(attr)
}

/// Binds the calling thread, and those that it starts from now on, to some of the CPUs; none: leaves it
/// where the scheduler puts it.
///
/// # Errors
/// None of them is there for this process, or one cannot be (INVAL).
pub fn bind(cpus: &[usize]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there is no such CPU"));
        }
        set.set(*cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
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
    use crate::{Idle, Reactors};

    fn mine() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
    }

    /// The calling thread's policy, its nice value and its slice.
    fn scheduled() -> (u32, i32, u64) {
        let attr = scheduling().unwrap();
        (attr.sched_policy, attr.sched_nice, attr.sched_runtime)
    }

    #[test]
    fn a_thread_is_bound_to_cpus_that_there_are() {
        std::thread::spawn(|| {
            let before = mine();
            bind(&[]).unwrap();
            assert_eq!(mine(), before);
            bind(&before[..1]).unwrap();
            assert_eq!(mine(), before[..1]);
            assert!(bind(&[1023]).is_err() && bind(&[CpuSet::MAX_CPU]).is_err());
            assert_eq!(mine(), before[..1]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_gives_way_keeps_all_but_its_slice() {
        std::thread::spawn(|| {
            // SAFETY: it takes no pointers. A thread of its own has this value.
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 5) }, 0);
            let (_, _, usual) = scheduled();
            give_way().unwrap();
            let (policy, nice, slice) = scheduled();
            assert_eq!((policy, nice), (libc::SCHED_OTHER as u32, 5));
            // Before Linux 6.12 a thread like this one has none.
            assert!(slice == SLICE_NS || (usual, slice) == (0, 0), "{usual} {slice}");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn every_reactor_gives_way() {
        let gives_way = || give_way().map(|()| scheduled());
        let wanted = std::thread::spawn(gives_way).join().unwrap().unwrap();
        let idle = Idle::Adaptive { spin_us: 0 };
        let reactors = Reactors::start(&[None, Some(mine()[0])], idle).unwrap();
        for reactor in reactors.handles() {
            assert_eq!(reactor.call(|_| scheduled()), wanted);
        }
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
