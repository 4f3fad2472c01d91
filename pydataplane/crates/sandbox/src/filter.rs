//! The seccomp programs of the list, with conditions on the arguments where a call could do more
//! than is needed.

use crate::Error;
use crate::calls::{ALLOWED, Extra, IOCTLS, PRCTLS, PROCESSES};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// What clone(2) has to be asked for: a thread.
const THREAD: &[i32] = &[libc::CLONE_THREAD, libc::CLONE_VM];

/// What it must not be asked for: namespaces of its own, in which a process has every capability.
const NAMESPACES: &[i32] = &[
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Compiled<T> = Result<T, BackendError>;

/// Installs the list for this thread and its descendants; what is not on it meets `refusal`.
pub(crate) fn install(refusal: SeccompAction, extra: &[Extra]) -> Result<(), Error> {
    let without_processes = without_processes()?;
    let allow_list = allow_list(refusal, extra)?;
    // The list is last, for it does not have seccomp(2). Of two verdicts the stricter one counts.
    seccompiler::apply_filter(&without_processes)?;
    seccompiler::apply_filter(&allow_list)?;
    Ok(())
}

/// Calls that must fail without a signal: the C library blocks all signals around them, and the
/// kernel ends a process that blocks the SIGSYS it is to get.
///
/// clone3(2) has its flags in memory, where seccomp cannot look; the C library takes `ENOSYS` for an
/// older kernel, and calls clone(2). That makes threads only.
fn without_processes() -> Compiled<BpfProgram> {
    let bit = |bit: &i32| *bit as u64;
    let not_a_thread = THREAD.iter().map(|b| without(0, bit(b)));
    let namespaces = NAMESPACES.iter().map(|b| masked(0, bit(b), bit(b)));
    let processes = not_a_thread.chain(namespaces).collect::<Compiled<_>>()?;
    let rules = Rules::from([
        (libc::SYS_clone, processes),
        (libc::SYS_clone3, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_fork, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_vfork, vec![]),
    ]);
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, ARCH)?.try_into()
}

fn allow_list(refusal: SeccompAction, extra: &[Extra]) -> Compiled<BpfProgram> {
    let always = ALLOWED.iter().copied().chain(extra.iter().map(|e| e.calls())).flatten();
    let mut rules: Rules = always.map(|call| (*call, vec![])).collect();
    // The other program refuses what is not a thread.
    rules.extend(PROCESSES.iter().map(|call| (*call, vec![])));
    rules.extend(conditional()?);
    SeccompFilter::new(rules, refusal, SeccompAction::Allow, ARCH)?.try_into()
}

/// Calls that are allowed with some arguments only.
fn conditional() -> Compiled<Rules> {
    let own_pid = u64::from(std::process::id());
    let no_exec = || Ok(vec![without(2, libc::PROT_EXEC as u64)?]);
    Ok(Rules::from([
        (libc::SYS_mmap, no_exec()?),
        (libc::SYS_mprotect, no_exec()?),
        (libc::SYS_socket, vec![equal(0, libc::AF_UNIX as u64)?]),
        (libc::SYS_socketpair, vec![equal(0, libc::AF_UNIX as u64)?]),
        (libc::SYS_kill, vec![equal(0, own_pid)?]),
        (libc::SYS_tgkill, vec![equal(0, own_pid)?]),
        // A new program that does not come up is ended, through a descriptor of its process: of the
        // same user, or the kernel says no.
        (libc::SYS_pidfd_send_signal, vec![equal(1, libc::SIGKILL as u64)?]),
        (libc::SYS_ioctl, any_of(1, IOCTLS)?),
        (libc::SYS_prctl, any_of(0, PRCTLS)?),
    ]))
}

fn condition(argument: u8, op: SeccompCmpOp, value: u64) -> Compiled<SeccompRule> {
    // Flags, numbers and descriptors are 32 bits wide in all of these calls; clone's are not on
    // every architecture, but nothing is defined above them.
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)?;
    SeccompRule::new(vec![condition])
}

fn equal(argument: u8, value: u64) -> Compiled<SeccompRule> {
    condition(argument, SeccompCmpOp::Eq, value)
}

fn masked(argument: u8, mask: u64, value: u64) -> Compiled<SeccompRule> {
    condition(argument, SeccompCmpOp::MaskedEq(mask), value)
}

fn without(argument: u8, bits: u64) -> Compiled<SeccompRule> {
    masked(argument, bits, 0)
}

fn any_of(argument: u8, values: &[u32]) -> Compiled<Vec<SeccompRule>> {
    values.iter().map(|value| equal(argument, u64::from(*value))).collect()
}
