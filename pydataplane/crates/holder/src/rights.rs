//! What this process may do to its host, by the kernel's own word (proc_pid_status(5)): for who cannot
//! see the process, as from another container.

use std::fs;

/// One line: `uid=N capabilities=HEX no_new_privs=0|1 seccomp=0|2 refused=CALL,CALL`, of which the
/// capabilities are those that are in effect and `refused` are the calls that were tried in vain.
///
/// # Errors
/// A sentence: the kernel does not say.
pub(crate) fn text() -> Result<String, String> {
    let path = "/proc/thread-self/status";
    let status = fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))?;
    Ok(line(&status, &sandbox::trap::refused_calls()))
}

fn line(status: &str, refused: &[&str]) -> String {
    let value = |key: &str| {
        let mut fields = status.lines().filter_map(|line| line.split_once(":\t"));
        let value = fields.find(|(name, _)| *name == key).map_or("", |(_, value)| value);
        value.trim().to_owned()
    };
    let uids = value("Uid");
    // Real, effective, saved and of files.
    let uid = uids.split('\t').nth(1).unwrap_or_default();
    format!(
        "uid={uid} capabilities={} no_new_privs={} seccomp={} refused={}",
        value("CapEff"),
        value("NoNewPrivs"),
        value("Seccomp"),
        refused.join(","),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_one_line() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nCapEff:\t0000000000200003\nNoNewPrivs:\t1\n\
                      Seccomp:\t2\nSeccomp_filters:\t2\n";
        let expected = "uid=2 capabilities=0000000000200003 no_new_privs=1 seccomp=2 refused=a,b";
        assert_eq!(line(status, &["a", "b"]), expected);
        assert!(text().unwrap().starts_with("uid="));
    }
}
