//! The seccomp programs of the list, with conditions on the arguments where a call could do more
//! than is needed.

use crate::Error;
use crate::calls::{Argument, Calls, OF_NETWORK, PROCESSES, SOCKETS_OF_NETWORK};
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
pub(crate) fn install(refusal: SeccompAction, calls: &Calls) -> Result<(), Error> {
    let without_processes = without_processes(calls.threads)?;
    let allow_list = allow_list(refusal, calls)?;
    // The list is last, for it does not have seccomp(2). Of two verdicts the stricter one counts.
    seccompiler::apply_filter(&without_processes)?;
    seccompiler::apply_filter(&allow_list)?;
    Ok(())
}

/// Calls that must fail without a signal: the C library blocks all signals around them, and the
/// kernel ends a process that blocks the SIGSYS it is to get.
///
/// clone3(2) has its flags in memory, where seccomp cannot look; the C library takes `ENOSYS` for an
/// older kernel, and calls clone(2). That makes threads only, if `threads` are allowed.
fn without_processes(threads: bool) -> Compiled<BpfProgram> {
    let bit = |bit: &i32| *bit as u64;
    let not_a_thread = THREAD.iter().map(|b| without(0, bit(b)));
    let namespaces = NAMESPACES.iter().map(|b| masked(0, bit(b), bit(b)));
    let processes = not_a_thread.chain(namespaces).collect::<Compiled<Vec<_>>>()?;
    let rules = Rules::from([
        // No rule: whatever the arguments are.
        (libc::SYS_clone, if threads { processes } else { vec![] }),
        (libc::SYS_clone3, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_fork, vec![]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_vfork, vec![]),
    ]);
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, ARCH)?.try_into()
}

fn allow_list(refusal: SeccompAction, calls: &Calls) -> Compiled<BpfProgram> {
    let always = calls.always.iter().copied().flatten().chain(calls.also);
    // The other program refuses those of PROCESSES that are not allowed.
    let always = always.chain(PROCESSES);
    let mut rules: Rules = always.map(|call| (*call, vec![])).collect();
    for (call, argument) in calls.with {
        rules.insert(*call, rule(*argument)?);
    }
    if calls.network {
        rules.insert(libc::SYS_socket, rule(SOCKETS_OF_NETWORK)?);
        rules.extend(OF_NETWORK.iter().map(|call| (*call, vec![])));
    }
    SeccompFilter::new(rules, refusal, SeccompAction::Allow, ARCH)?.try_into()
}

fn rule(argument: Argument) -> Compiled<Vec<SeccompRule>> {
    match argument {
        Argument::OneOf(at, values) => {
            values.iter().map(|value| equal(at, u64::from(*value))).collect()
        }
        Argument::Without(at, bits) => Ok(vec![without(at, u64::from(bits))?]),
        Argument::OwnPid => Ok(vec![equal(0, u64::from(std::process::id()))?]),
    }
}

fn condition(argument: u8, op: SeccompCmpOp, value: u64) -> Compiled<SeccompRule> {
    // As `Argument` says. clone's flags are wider on some architectures, with nothing defined there.
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
