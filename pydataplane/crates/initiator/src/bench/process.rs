//! What a target process used, from /proc.

use std::fs;

/// CPU time of all threads of `pid` so far, in nanoseconds; `None` if it is gone.
pub fn cpu_ns(pid: u32) -> Option<u64> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let path = task.ok()?.path().join("schedstat");
        // A thread may end while we look.
        let Ok(text) = fs::read_to_string(path) else { continue };
        total += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(total)
}

/// Resident memory of `pid` in KiB: (anonymous and files, shared memory left out; all).
pub fn rss_kib(pid: u32) -> Option<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let (anon, file) = (field("RssAnon:")?, field("RssFile:")?);
    Some((anon + file, field("VmRSS:")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_process_has_used_cpu_and_memory() {
        let me = std::process::id();
        let before = cpu_ns(me).expect("cpu");
        let mut x = 1u64;
        while cpu_ns(me).expect("cpu") < before + 2_000_000 {
            (0..100_000).for_each(|i| x = std::hint::black_box(x.wrapping_mul(3) + i));
        }
        let (own, all) = rss_kib(me).expect("rss");
        assert!(own > 100 && all >= own);
        assert_eq!(cpu_ns(u32::MAX), None);
    }
}
