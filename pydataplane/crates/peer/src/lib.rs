//! The process at the other end of a UNIX socket, told from all others.
//!
//! Owns: what the kernel says about the process that connected (SO_PEERCRED, SO_PEERPIDFD), and
//! whether that process, or one that noted its number, is still there. Never decides who may do what. Called by `vhost`, for which
//! a controller belongs to one process, by the target's method that names that process, and by who
//! serves some users only: the holder, and a target that gives way to a new program.
//!
//! A process number is reused, so it names nobody: an [`Identity`] has the time at which the process
//! started with it, the boot in which that was, and, on kernels that number processes once for all
//! (pidfs, Linux 6.9), that number. A process of another PID namespace, as one of a container, may
//! have no number here: then it is known by its pidfd while this process runs, and by its user alone
//! after that. Nothing here needs a capability.

#![forbid(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::socket::{getsockopt, sockopt};
use nix::time::{ClockId, clock_gettime};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// `statfs` type of the file system of pidfds, whose inode numbers are never reused (linux/magic.h).
const PID_FS_MAGIC: i64 = 0x5049_4446;

/// The kernel's flag of a thread that ends (linux/sched.h).
const PF_EXITING: u64 = 4;

/// SIGKILL in the masks of `/proc/PID/status`.
const SIGKILL: u64 = 1 << 8;

/// Bytes of a command's name that are shown (TASK_COMM_LEN).
const MAX_COMMAND: usize = 16;

/// Who connected, by SO_PEERCRED (unix(7)): as it was then.
///
/// Not rustix's `socket_peercred`, for which a peer has a number in any case: one of another
/// container has none, and its answer is taken for a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Number of the user that it ran as, in our user namespace.
    pub uid: u32,
    /// Its number in our PID namespace; `None`: it has none here.
    pub pid: Option<Pid>,
}

impl Credentials {
    /// Of the process that connected `stream`.
    ///
    /// # Errors
    /// The system's; `stream` is no UNIX socket.
    pub fn of_peer(stream: impl AsFd) -> io::Result<Credentials> {
        let user = getsockopt(&stream.as_fd(), sockopt::PeerCredentials)?;
        Ok(Credentials { uid: user.uid(), pid: Pid::from_raw(user.pid()) })
    }
}

/// What tells a process from all others, in a form that can be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Number of the user that it ran as when it connected, in our user namespace.
    pub uid: u32,
    /// Its number in our PID namespace; 0: it has none here.
    pub pid: u32,
    /// When it started, in clock ticks since the boot (proc(5), field 22 of `stat`); 0: not known.
    pub start_time: u64,
    /// Inode number of its pidfd; 0: the kernel does not number processes so.
    pub inode: u64,
    /// The boot of the host in which it runs (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

/// A process, gone or not.
#[derive(Debug)]
pub struct Process {
    identity: Identity,
    /// Readable when the process has ended. `None`: the kernel gives none.
    pidfd: Option<OwnedFd>,
    command: String,
}

impl Process {
    /// The process that connected `stream`.
    ///
    /// # Errors
    /// The kernel does not say who it is: it may be gone already.
    pub fn of_peer(stream: impl AsFd) -> io::Result<Process> {
        let fd = stream.as_fd();
        let Credentials { uid, pid } = Credentials::of_peer(fd)?;
        let pid = pid.map_or(0, |pid| pid.as_raw_pid().unsigned_abs());
        let pidfd = match getsockopt(&fd, sockopt::PeerPidfd) {
            Ok(pidfd) => Some(pidfd),
            // Before Linux 6.5. The number could be another process's by now: of the same user at
            // least, as what connected.
            Err(nix::errno::Errno::ENOPROTOOPT) => open(pid)?,
            Err(why) => return Err(why.into()),
        };
        Process::new(uid, pid, pidfd)
    }

    /// The process with the number `pid` in our PID namespace.
    ///
    /// # Errors
    /// There is none, or it is not visible here.
    pub fn of_pid(pid: u32) -> io::Result<Process> {
        use std::os::unix::fs::MetadataExt;
        let pidfd = open(pid)?;
        let uid = fs::metadata(format!("/proc/{pid}"))?.uid();
        Process::new(uid, pid, pidfd)
    }

    /// The process that `identity` was recorded of, unless it is known to be gone. One without a
    /// number here cannot be looked for: it counts as there. So does one that cannot be looked at
    /// now, for want of descriptors.
    pub fn find(identity: &Identity) -> Option<Process> {
        if identity.boot_id != boot_id() {
            return None;
        }
        let pidfd = match identity.pid {
            0 => None,
            pid => match open(pid) {
                Ok(pidfd) => pidfd,
                Err(why) if says_absent(&why) => return None,
                Err(_) => None,
            },
        };
        let found = Process::new(identity.uid, identity.pid, pidfd).ok()?;
        let same = |recorded: u64, now: u64| recorded == 0 || now == 0 || recorded == now;
        let is_it = identity.pid == 0
            || same(identity.start_time, found.identity.start_time)
                && same(identity.inode, found.identity.inode);
        let process = Process { identity: identity.clone(), ..found };
        (is_it && !process.is_gone()).then_some(process)
    }

    fn new(uid: u32, pid: u32, pidfd: Option<OwnedFd>) -> io::Result<Process> {
        let inode = pidfd.as_ref().map_or(Ok(0), inode)?;
        let stat = stat(pid).ok().flatten();
        let (start_time, command) = stat.map_or((0, String::new()), |s| (s.start_time, s.command));
        let identity = Identity { uid, pid, start_time, inode, boot_id: boot_id().to_owned() };
        Ok(Process { identity, pidfd, command })
    }

    /// What tells it from all others.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Name of its command, as it was when it was looked at; empty where that is not visible.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Whether it has ended. One that nothing can be learnt of counts as there.
    pub fn is_gone(&self) -> bool {
        let Identity { pid, start_time, .. } = self.identity;
        match &self.pidfd {
            Some(pidfd) => {
                let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
                let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                poll(&mut fds, Some(&now)).is_ok_and(|ready| ready != 0)
            }
            None if pid == 0 || start_time == 0 => false,
            None => stat(pid)
                .is_ok_and(|stat| stat.is_none_or(|s| s.ended || s.start_time != start_time)),
        }
    }

    /// Whether its end will be seen here: not that of a recorded process of another PID namespace.
    pub fn is_watched(&self) -> bool {
        let Identity { pid, start_time, .. } = self.identity;
        self.pidfd.is_some() || (pid != 0 && start_time != 0)
    }

    /// Whether `other`, which is there now, is this process as far as can be known. Processes
    /// without a number here, and without one that is good for ever, are told apart by their user.
    pub fn is_same(&self, other: &Process) -> bool {
        let (own, its) = (&self.identity, &other.identity);
        if own.inode != 0 && its.inode != 0 {
            // A recorded process of another namespace may be gone: nobody can tell.
            let may_be_gone = own.pid == 0 && self.pidfd.is_none();
            return own.inode == its.inode || (may_be_gone && own.uid == its.uid);
        }
        if own.pid == 0 || its.pid == 0 {
            return own.pid == its.pid && own.uid == its.uid;
        }
        let started = own.start_time == 0 || its.start_time == 0;
        own.pid == its.pid && (started || own.start_time == its.start_time)
    }
}

/// `process 1234 (qemu-system-x86) of user 107`.
impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity { uid, pid, .. } = self.identity;
        match pid {
            0 => write!(f, "a process of another PID namespace")?,
            _ => write!(f, "process {pid}")?,
        }
        if !self.command.is_empty() {
            write!(f, " ({})", self.command)?;
        }
        write!(f, " of user {uid}")
    }
}

/// A pidfd of the process `pid`; `None` where the kernel has none (before Linux 5.3).
fn open(pid: u32) -> io::Result<Option<OwnedFd>> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let number = number.ok_or(io::ErrorKind::NotFound)?;
    match pidfd_open(number, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(rustix::io::Errno::NOSYS) => Ok(None),
        Err(why) => Err(why.into()),
    }
}

/// The number of a process that is never given again; 0 where the kernel has none.
fn inode(pidfd: &OwnedFd) -> io::Result<u64> {
    match rustix::fs::fstatfs(pidfd)?.f_type {
        PID_FS_MAGIC => Ok(rustix::fs::fstat(pidfd)?.st_ino),
        _ => Ok(0),
    }
}

/// Whether no process `pid` runs any longer: it is gone, a zombie, or on its way there, as one that
/// was killed is while the kernel closes what it had open. One that cannot be looked at runs.
pub fn is_ending(pid: u32) -> bool {
    match stat(pid) {
        Ok(Some(stat)) => stat.ended || stat.exiting || is_killed(pid),
        Ok(None) => true,
        Err(_) => false,
    }
}

/// Whether SIGKILL waits for the process `pid`, which will not run its own instructions again.
fn is_killed(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| {
        let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        let signals = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        signals.is_some_and(|mask| mask & SIGKILL != 0)
    })
}

/// What `/proc/PID/stat` says.
struct Stat {
    command: String,
    ended: bool,
    exiting: bool,
    start_time: u64,
}

/// `None`: there is no such process here. An error says nothing of the process.
fn stat(pid: u32) -> io::Result<Option<Stat>> {
    if pid == 0 {
        return Ok(None);
    }
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => Ok(parse_stat(&String::from_utf8_lossy(&text))),
        Err(why) if says_absent(&why) => Ok(None),
        Err(why) => Err(why),
    }
}

/// Whether no process has the number: none, or only a thread that is not its process's first.
fn says_absent(why: &io::Error) -> bool {
    use rustix::io::Errno;
    let absent = [Errno::SRCH, Errno::NOENT, Errno::INVAL];
    why.kind() == io::ErrorKind::NotFound
        || Errno::from_io_error(why).is_some_and(|errno| absent.contains(&errno))
}

/// Its second field is a name in parentheses, which may have any characters.
fn parse_stat(text: &str) -> Option<Stat> {
    let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    // Field 9; the state is field 3.
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    Some(Stat {
        command: name.chars().take(MAX_COMMAND).flat_map(char::escape_default).collect(),
        ended: matches!(state, "Z" | "X" | "x"),
        exiting: flags & PF_EXITING != 0,
        // Field 22.
        start_time: fields.nth(12)?.parse().ok()?,
    })
}

/// The time as [`Identity::start_time`] counts it: clock ticks (100 a second) since the boot.
pub fn now() -> u64 {
    /// What the kernel counts with towards programs on x86 and Arm (USER_HZ).
    const TICKS_PER_S: u64 = 100;
    // The C library's: rustix would ask with prctl for the vDSO, which is not among the calls that
    // the target makes.
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has this clock");
    now.tv_sec() as u64 * TICKS_PER_S + now.tv_nsec() as u64 / (1_000_000_000 / TICKS_PER_S)
}

/// The boot of the host that this is.
pub fn boot_id() -> &'static str {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    BOOT_ID.get_or_init(|| {
        let read = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        read.map(|id| id.trim().to_owned()).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    fn identity(uid: u32, pid: u32, start_time: u64, inode: u64) -> Identity {
        Identity { uid, pid, start_time, inode, boot_id: boot_id().into() }
    }

    fn known(identity: Identity) -> Process {
        Process { identity, pidfd: None, command: String::new() }
    }

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (near, _far) = UnixStream::pair().unwrap();
        let peer = Process::of_peer(&near).unwrap();
        assert_eq!(peer.identity().pid, std::process::id());
        assert!((1..=now()).contains(&peer.identity().start_time));
        assert!(!peer.is_gone());
        assert!(peer.is_same(&Process::of_pid(std::process::id()).unwrap()));
        let found = Process::find(peer.identity()).expect("it runs");
        assert!(found.is_same(&peer) && peer.is_same(&found));
        assert!(peer.to_string().contains(" of user "), "{peer}");
    }

    #[test]
    fn a_process_that_ended_is_gone_and_not_found_again() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let process = Process::of_pid(child.id()).unwrap();
        assert!(!process.is_gone());
        let without = known(Identity { inode: 0, ..process.identity().clone() });
        assert!(!without.is_gone());
        assert!(Process::find(process.identity()).is_some());
        assert!(!is_ending(child.id()));
        child.kill().unwrap();
        assert!(is_ending(child.id()), "killed, and perhaps not ended");
        child.wait().unwrap();
        assert!(is_ending(child.id()));
        assert!(process.is_gone());
        assert!(without.is_gone());
        assert!(Process::find(process.identity()).is_none());
        assert!(Process::of_pid(child.id()).is_err());
    }

    #[test]
    fn another_process_with_the_number_and_another_boot_are_not_it() {
        let own = Process::of_pid(std::process::id()).unwrap();
        let mut other = own.identity().clone();
        other.start_time += 1;
        assert!(Process::find(&other).is_none());
        other = own.identity().clone();
        other.boot_id = "another".into();
        assert!(Process::find(&other).is_none());
        if own.identity().inode != 0 {
            other = own.identity().clone();
            other.inode += 1;
            assert!(Process::find(&other).is_none());
        }
    }

    #[test]
    fn processes_are_told_apart_by_the_best_that_is_known() {
        let same = |a: Identity, b: Identity| known(a).is_same(&known(b));
        assert!(same(identity(1, 7, 9, 0), identity(1, 7, 9, 0)));
        assert!(!same(identity(1, 7, 9, 0), identity(1, 7, 10, 0)), "started later");
        assert!(!same(identity(1, 7, 9, 0), identity(1, 8, 9, 0)));
        assert!(!same(identity(1, 7, 9, 5), identity(1, 7, 9, 6)), "numbered for ever");
        assert!(same(identity(1, 0, 0, 0), identity(1, 0, 0, 0)), "by their user alone");
        assert!(!same(identity(1, 0, 0, 0), identity(2, 0, 0, 0)));
        assert!(!same(identity(1, 0, 0, 0), identity(1, 7, 9, 0)), "of another namespace");
        // Recorded, and looked for in vain: perhaps it was started anew.
        assert!(same(identity(1, 0, 0, 5), identity(1, 0, 0, 6)));
        assert!(!same(identity(1, 0, 0, 5), identity(2, 0, 0, 6)));
    }

    #[test]
    fn a_command_may_have_any_name() {
        let line = "7 (a) (b\n c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.command.as_str(), stat.start_time), ("a) (b\\n c", 4242));
        assert!(!stat.ended && stat.exiting, "flags 7");
        assert!(parse_stat("7 (a) S 1").is_none());
        assert!(parse_stat("").is_none());
    }
}
