//! Each test runs itself again in a process of its own, which confines itself for good.

use sandbox::{Extra, Mode, confine, trap};
use std::fs;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

const CHILD: &str = "SANDBOX_TEST_CHILD";

/// Runs `body` in a new process, which is this test again; its output.
fn alone(test: &str, body: fn()) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        body();
        return None;
    }
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stdout));
    Some(output)
}

fn status(key: &str) -> String {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(key)).unwrap().to_owned();
    line.split_once(':').unwrap().1.trim().to_owned()
}

#[test]
fn a_call_that_is_not_listed_fails_and_is_named_once() {
    let body = || {
        confine(Mode::Enforce, &[]).unwrap();
        assert_eq!(status("Seccomp"), "2");
        assert_eq!(status("NoNewPrivs"), "1");
        for _ in 0..3 {
            assert_eq!(rustix::system::sethostname(b"x"), Err(rustix::io::Errno::PERM));
        }
        // What is allowed with some arguments only.
        let refused = TcpListener::bind("127.0.0.1:0").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert_eq!(trap::refused_calls(), ["socket", "sethostname"]);
        assert_eq!(trap::refused(), 4);
    };
    if let Some(output) = alone("a_call_that_is_not_listed_fails_and_is_named_once", body) {
        let log = String::from_utf8(output.stderr).unwrap();
        let named = "ERROR the sandbox refused the system call sethostname (number ";
        assert_eq!(log.matches(named).count(), 1, "{log}");
        assert!(log.contains(") of thread a_call_that_is_: it fails with EPERM; "), "{log}");
    }
}

#[test]
fn programs_cannot_be_started_and_processes_not_made() {
    let body = || {
        confine(Mode::Enforce, &[]).unwrap();
        let error = Command::new("/bin/true").status().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSYS));
        // In the place of this one.
        let error = Command::new("/bin/true").exec();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        // Threads are what it is made of.
        std::thread::spawn(|| assert_eq!(status("Seccomp"), "2")).join().unwrap();
        UnixStream::pair().unwrap();
        assert_eq!(trap::refused_calls(), ["execve"]);
    };
    alone("programs_cannot_be_started_and_processes_not_made", body);
}

#[test]
fn a_call_of_the_future_is_unknown_rather_than_forbidden() {
    let body = || {
        confine(Mode::Enforce, &[]).unwrap();
        // SAFETY: no such call exists, and it would have no arguments.
        let result = unsafe { libc::syscall(2000) };
        let error = std::io::Error::last_os_error();
        assert_eq!((result, error.raw_os_error()), (-1, Some(libc::ENOSYS)));
    };
    alone("a_call_of_the_future_is_unknown_rather_than_forbidden", body);
}

#[test]
fn a_log_of_json_gets_json() {
    let body = || {
        trap::log_as_json();
        confine(Mode::Enforce, &[]).unwrap();
        assert!(rustix::system::sethostname(b"x").is_err());
    };
    if let Some(output) = alone("a_log_of_json_gets_json", body) {
        let log = String::from_utf8(output.stderr).unwrap();
        let begin = "{\"level\":\"ERROR\",\"message\":\"the sandbox refused the system call seth";
        let line = log.lines().find(|l| l.starts_with(begin)).unwrap_or_else(|| panic!("{log}"));
        assert!(line.ends_with("\"}"), "{line}");
    }
}

#[test]
fn extra_calls_are_allowed_where_asked_for() {
    let body = || {
        confine(Mode::Enforce, &[Extra::Mount]).unwrap();
        let nowhere = rustix::mount::unmount("/nowhere", rustix::mount::UnmountFlags::empty());
        assert!(nowhere.is_err());
        assert_eq!(trap::refused(), 0);
    };
    alone("extra_calls_are_allowed_where_asked_for", body);
}

#[test]
fn switched_off_it_does_nothing() {
    let body = || {
        confine(Mode::Off, &[]).unwrap();
        assert_eq!(status("NoNewPrivs"), "0");
    };
    alone("switched_off_it_does_nothing", body);
}

// libtest runs a test beside its main thread: what needs a process with one thread stands in
// `user.rs`, which has no harness.
