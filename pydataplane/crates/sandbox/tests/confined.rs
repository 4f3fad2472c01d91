//! Each test runs itself again in a process of its own, which confines itself for good.

use sandbox::calls::{HOLDER, TARGET, TARGET_THAT_MOUNTS};
use sandbox::{Mode, confine, trap};
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
        confine(Mode::Enforce, &TARGET).unwrap();
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
        confine(Mode::Enforce, &TARGET).unwrap();
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
        confine(Mode::Enforce, &TARGET).unwrap();
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
        confine(Mode::Enforce, &TARGET).unwrap();
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
fn a_target_that_mounts_may() {
    let body = || {
        confine(Mode::Enforce, &TARGET_THAT_MOUNTS).unwrap();
        let nowhere = rustix::mount::unmount("/nowhere", rustix::mount::UnmountFlags::empty());
        assert!(nowhere.is_err());
        assert_eq!(trap::refused(), 0);
    };
    alone("a_target_that_mounts_may", body);
}

#[test]
fn a_target_with_a_network_has_that_and_nothing_else() {
    let body = || {
        confine(Mode::Enforce, &TARGET.with_network()).unwrap();
        TcpListener::bind("127.0.0.1:0").unwrap();
        UnixStream::pair().unwrap();
        assert_eq!(trap::refused(), 0);
        // SAFETY: numbers only.
        let packets = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
        assert_eq!(packets, -1);
        assert_eq!(Command::new("/bin/true").exec().kind(), ErrorKind::PermissionDenied);
        assert_eq!(trap::refused_calls(), ["socket", "execve"]);
    };
    alone("a_target_with_a_network_has_that_and_nothing_else", body);
}

#[test]
fn a_holder_mounts_fuse_and_does_nothing_else_that_root_may() {
    use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    let body = || {
        confine(Mode::Enforce, &HOLDER).unwrap();
        // As it mounts: the kernel itself refuses, for want of the place or of the right.
        let flags =
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        mount("x", "/nowhere/at/all", "fuse", flags, None).unwrap_err();
        unmount("/nowhere/at/all", UnmountFlags::DETACH).unwrap_err();
        assert_eq!(trap::refused(), 0);
        let refused = Err(rustix::io::Errno::PERM);
        assert_eq!(mount("x", "/nowhere", "proc", MountFlags::empty(), None), refused);
        assert_eq!(mount_bind("/", "/nowhere/at/all"), refused);
        assert_eq!(mount_remount("/nowhere/at/all", flags, ""), refused);
        assert_eq!(unmount("/nowhere/at/all", UnmountFlags::empty()), refused);
        assert_eq!(trap::refused(), 4);
        // SAFETY: it is refused, and would change nothing that Rust relies on.
        assert_eq!(unsafe { unshare_unsafe(UnshareFlags::NEWNS) }, refused);
        assert!(TcpListener::bind("127.0.0.1:0").is_err());
        assert_eq!(Command::new("/bin/true").exec().kind(), ErrorKind::PermissionDenied);
        // It has one thread.
        let thread = std::thread::Builder::new().spawn(|| ()).map(drop).unwrap_err();
        assert_eq!(thread.raw_os_error(), Some(libc::ENOSYS));
        let named = ["socket", "execve", "mount", "umount2", "unshare"];
        assert_eq!(trap::refused_calls(), named);
    };
    let test = "a_holder_mounts_fuse_and_does_nothing_else_that_root_may";
    if let Some(output) = alone(test, body) {
        let log = String::from_utf8(output.stderr).unwrap();
        for call in ["mount", "unshare", "execve"] {
            let named = format!("ERROR the sandbox refused the system call {call} (number ");
            assert_eq!(log.matches(&named).count(), 1, "{log}");
        }
    }
}

#[test]
fn switched_off_it_does_nothing() {
    let body = || {
        confine(Mode::Off, &TARGET).unwrap();
        assert_eq!(status("NoNewPrivs"), "0");
    };
    alone("switched_off_it_does_nothing", body);
}

// libtest runs a test beside its main thread: what needs a process with one thread stands in
// `user.rs`, which has no harness.
