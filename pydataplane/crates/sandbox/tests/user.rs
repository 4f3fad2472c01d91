//! Becoming another user, in a process with one thread (so without libtest). Needs root.

use rustix::thread::CapabilitySet;
use sandbox::{Account, user};
use std::fs;
use std::process::{Command, ExitCode};

fn status(key: &str) -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(key)).unwrap().to_owned();
    line.split_once(':').unwrap().1.trim().to_owned()
}

const NONE: &str = "0000000000000000";

fn another_user_has_nothing_of_roots() {
    let account = Account::find("54321:54322").unwrap();
    user::become_user(&account, &[77, 54322]).unwrap();
    assert_eq!(status("Uid"), "54321\t54321\t54321\t54321");
    assert_eq!(status("Gid"), "54322\t54322\t54322\t54322");
    assert_eq!(status("Groups"), "77 54322");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(set), NONE, "{set}");
    }
    assert!(fs::read("/etc/shadow").is_err());
    assert!(user::become_user(&Account::find("0").unwrap(), &[]).is_err());
}

fn root_can_stay_with_what_it_needs() {
    user::keep_capabilities(CapabilitySet::CHOWN).unwrap();
    assert_eq!(status("Uid"), "0\t0\t0\t0");
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(status(set), "0000000000000001", "{set}");
    }
    for set in ["CapInh", "CapAmb"] {
        assert_eq!(status(set), NONE, "{set}");
    }
}

fn with_threads_nothing_changes() {
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || ended.recv());
    // ThreadSanitizer has one of its own.
    let threads = fs::read_dir("/proc/self/task").unwrap().count();
    assert!(threads >= 2);
    let e = user::become_user(&Account::find("54321").unwrap(), &[]).unwrap_err();
    assert_eq!(
        e.to_string(),
        format!(
            "the process has {threads} threads already: it can only change its user before that"
        )
    );
    assert_eq!(status("Uid"), "0\t0\t0\t0");
    drop(end);
    let _ = thread.join();
}

const TESTS: [(&str, fn()); 3] = [
    ("another_user_has_nothing_of_roots", another_user_has_nothing_of_roots),
    ("root_can_stay_with_what_it_needs", root_can_stay_with_what_it_needs),
    ("with_threads_nothing_changes", with_threads_nothing_changes),
];

fn main() -> ExitCode {
    const CHILD: &str = "SANDBOX_TEST_CHILD";
    if let Ok(child) = std::env::var(CHILD) {
        TESTS.iter().find(|(name, _)| *name == child).unwrap().1();
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return ExitCode::SUCCESS;
    }
    let mut failed = false;
    for (name, _) in TESTS {
        let program = std::env::current_exe().unwrap();
        let passed = Command::new(program).env(CHILD, name).status().unwrap().success();
        println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
        failed |= !passed;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
