//! Where this process runs.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// Binds the calling thread to `cpu`; returns where it was allowed to run before.
pub fn pin(cpu: usize) -> Result<CpuSet, Error> {
    let before = sched_getaffinity(None).map_err(|e| Error::os("ask for the CPUs")(e.into()))?;
    let mut only = CpuSet::new();
    let bound = cpu < CpuSet::MAX_CPU && {
        only.set(cpu);
        sched_setaffinity(None, &only).is_ok()
    };
    if !bound {
        return Err(Error::Usage(format!("CPU {cpu} is not one this process may run on")));
    }
    Ok(before)
}

/// Lets the calling thread run on `cpus` again.
pub fn unpin(cpus: &CpuSet) {
    let _ = sched_setaffinity(None, cpus);
}

/// Gives this process's scheduling group the most weight there is. Without that, every other
/// session on the machine counts as much as this one, whatever the nice value. Best effort.
pub fn leave_autogroup() {
    let _ = rustix::process::setsid();
    let _ = std::fs::write("/proc/self/autogroup", "-20");
}
