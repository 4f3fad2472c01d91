//! The system calls that programs make: a list for each.
//!
//! A call that is missing is refused with `EPERM` and logged with its name, see [`crate::trap`]; the
//! tests fail then. To add one: put it into the group whose reason is yours, or make a group and say
//! why. Calls that only x86-64 has (the older form of another) stand in `OLDER_FORMS`.

mod holder;
mod target;

pub use holder::HOLDER;
pub use target::{TARGET, TARGET_THAT_MOUNTS};

use libc::c_long;

/// What one program may call.
#[derive(Clone, Copy, Debug)]
pub struct Calls {
    /// Whatever the arguments are: groups, each with its reason.
    pub(crate) always: &'static [&'static [c_long]],
    /// As those, for this program alone.
    pub(crate) also: &'static [c_long],
    /// With some arguments only.
    pub(crate) with: &'static [(c_long, Argument)],
    /// Whether it may make threads. Processes none may.
    pub(crate) threads: bool,
    /// Whether it may talk to servers in the network.
    pub(crate) network: bool,
}

impl Calls {
    /// As these, for a program that talks to servers in the network.
    #[must_use]
    pub const fn with_network(self) -> Calls {
        Calls { network: true, ..self }
    }
}

/// What an argument of a call has to be. The first argument is 0; flags, numbers and descriptors are
/// 32 bits wide, or have nothing above them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    /// One of these values.
    OneOf(u8, &'static [u32]),
    /// Without any of these bits.
    Without(u8, u32),
    /// This process's number, as the first.
    OwnPid,
}

/// Of mmap and mprotect: memory is never executable.
const NOT_EXECUTABLE: Argument = Argument::Without(2, libc::PROT_EXEC as u32);

/// Of socket and socketpair.
const UNIX: &[u32] = &[libc::AF_UNIX as u32];

/// Of socket, of a program with a network. The kernel's own tells which addresses the host has.
pub(crate) const SOCKETS_OF_NETWORK: Argument = Argument::OneOf(
    0,
    &[libc::AF_UNIX as u32, libc::AF_INET as u32, libc::AF_INET6 as u32, libc::AF_NETLINK as u32],
);

/// Also called by a program with a network: names of servers are asked for in several messages at a time, and
/// the library that is a client of Ceph calls older forms.
pub(crate) const OF_NETWORK: &[c_long] = &[
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
];

/// Calls that make threads or processes, see `filter`. What is not allowed of theirs fails with
/// `ENOSYS`, which cannot be logged.
pub(crate) const PROCESSES: &[c_long] = &[
    libc::SYS_clone,
    libc::SYS_clone3,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
];
