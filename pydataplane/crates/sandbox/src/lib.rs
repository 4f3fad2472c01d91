//! Confines a process: a user of its own, no capability or few, an allow-list of system calls.
//!
//! Guests and their QEMU are hostile, and one process serves many of them. Should one of them find a
//! way to run code in it, what that code can do is what this crate leaves: read and write the files
//! that the target's user may, and make the system calls that the target itself makes. It cannot
//! start a program, become another user, trace a process or load a module.
//!
//! - [`user`]: who the process becomes, and that no capability stays.
//! - [`calls`]: the allow-lists, of the target and of the holder of its exports, each group with its
//!   reason. The only place to change when one of them begins to make another system call.
//! - `filter`: makes the seccomp programs of a list and installs them.
//! - [`trap`]: what is refused fails with `EPERM` and is logged with its name.
//! - [`panics`]: a panic ends the process.
//!
//! What it is not: io_uring carries out reads, writes, opens and sockets without a system call of
//! their own, so the list does not bound those; the user's rights do, and the unit's
//! `PrivateNetwork=`.
//!
//! [`confine`] is called by each program once, before it starts a thread; threads inherit everything.

pub mod calls;
mod filter;
pub mod panics;
pub mod trap;
pub mod user;

pub use calls::Calls;
pub use user::{Account, UserError};

/// How far the process is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A system call that is not on the list fails with `EPERM` and is logged.
    Enforce,
    /// It succeeds; the kernel's audit log names it by number (`SECCOMP_RET_LOG`).
    Log,
    /// Every system call is allowed.
    Off,
}

/// Why the process cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The list cannot be made a seccomp program, or the kernel does not take it.
    #[error(
        "the system calls cannot be confined: {0}; the kernel needs CONFIG_SECCOMP_FILTER, or \
         start with --no-sandbox"
    )]
    Filter(#[from] seccompiler::Error),
    /// The list has a rule that seccomp cannot express.
    #[error("the list of system calls cannot be compiled: {0}")]
    Compile(#[from] seccompiler::BackendError),
    /// The handler of refused calls cannot be installed.
    #[error("refused system calls cannot be reported: {0}")]
    Trap(#[source] std::io::Error),
}

/// Lets this thread, and all that it starts from now on, make only `calls`, and
/// never gain a privilege (`no_new_privs`). There is no way back.
///
/// # Errors
/// [`Error`] when the kernel has no seccomp; nothing is confined then.
pub fn confine(mode: Mode, calls: &Calls) -> Result<(), Error> {
    match mode {
        Mode::Off => Ok(()),
        Mode::Log => filter::install(seccompiler::SeccompAction::Log, calls),
        Mode::Enforce => {
            trap::install().map_err(Error::Trap)?;
            filter::install(seccompiler::SeccompAction::Trap, calls)
        }
    }
}
