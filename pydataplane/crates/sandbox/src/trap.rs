//! What happens to a system call that is not on the list: it fails with `EPERM`, and one line on
//! standard error names it and its thread, once for each call. The process goes on: a call that was
//! forgotten must not take every guest's disk away, and one that an intruder tries fails.
//!
//! A number that is younger than this program fails with `ENOSYS`, as on an older kernel, so that a
//! newer C library takes the older call.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use syscalls::Sysno;

/// `si_code` of a SIGSYS that seccomp raised (asm-generic/siginfo.h).
const SYS_SECCOMP: i32 = 1;

/// Numbers that have a bit of their own in [`LOGGED`]; greater ones share the last.
const NUMBERS: usize = 512;

/// Refused calls so far.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// Calls that were logged, a bit for each number.
static LOGGED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// Whether lines are JSON objects.
static JSON: AtomicBool = AtomicBool::new(false);

/// How many system calls were refused since the process started.
pub fn refused() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Names of the system calls that were refused, each once.
pub fn refused_calls() -> Vec<&'static str> {
    let is_logged = |n: &usize| LOGGED[n / 64].load(Ordering::Relaxed) >> (n % 64) & 1 == 1;
    (0..NUMBERS).filter(is_logged).map(name).collect()
}

/// Writes JSON objects from now on, for a log of such.
pub fn log_as_json() {
    JSON.store(true, Ordering::Relaxed);
}

fn name(number: usize) -> &'static str {
    Sysno::new(number).map_or("unknown", |call| call.name())
}

/// Installs the handler of SIGSYS, for the whole process.
pub(crate) fn install() -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all-zero is a valid sigaction: no flags, an empty mask, SIG_DFL.
    let action = unsafe { action.assume_init_mut() };
    action.sa_sigaction = on_sigsys as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the action is initialised, and its handler does only what is safe in a signal handler.
    match unsafe { libc::sigaction(libc::SIGSYS, action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The handler: nothing that allocates, locks or changes `errno`.
extern "C" fn on_sigsys(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo and a ucontext, valid during the handler
    // and nobody else's.
    let (info, context) = unsafe { (&*info, &mut *context.cast::<libc::ucontext_t>()) };
    if info.si_code != SYS_SECCOMP {
        return;
    }
    let result = result_register(context);
    let number = usize::try_from(result.0).unwrap_or(usize::MAX);
    let known = Sysno::new(number).is_some();
    *result.1 = -i64::from(if known { libc::EPERM } else { libc::ENOSYS }) as _;
    REFUSED.fetch_add(1, Ordering::Relaxed);
    let slot = number.min(NUMBERS - 1);
    let bit = 1 << (slot % 64);
    if LOGGED[slot / 64].fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        report(number, known);
    }
}

/// The number of the call that was refused, and where its result goes. The kernel puts the registers
/// back as they were before the call (seccomp(2), SECCOMP_RET_TRAP).
#[cfg(target_arch = "x86_64")]
fn result_register(context: &mut libc::ucontext_t) -> (i64, &mut i64) {
    let register = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    (*register, register)
}

#[cfg(target_arch = "aarch64")]
fn result_register(context: &mut libc::ucontext_t) -> (i64, &mut u64) {
    let number = context.uc_mcontext.regs[8] as i64;
    (number, &mut context.uc_mcontext.regs[0])
}

/// Writes the line.
fn report(number: usize, known: bool) {
    let mut thread = [0u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, with a terminator (prctl(2)).
    unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
    let len = thread.iter().position(|b| *b == 0).unwrap_or(thread.len());
    for byte in &mut thread[..len] {
        if !(byte.is_ascii_alphanumeric() || b" _.-".contains(byte)) {
            *byte = b'?';
        }
    }
    let json = JSON.load(Ordering::Relaxed);
    let (begin, end) = match json {
        true => ("{\"level\":\"ERROR\",\"message\":\"", "\"}\n"),
        false => ("ERROR ", "\n"),
    };
    let mut line = Line::default();
    line.text(begin.as_bytes()).text(b"the sandbox refused the system call ");
    line.text(name(number).as_bytes()).text(b" (number ").number(number).text(b") of thread ");
    line.text(&thread[..len]).text(b": it fails with ");
    line.text(if known { b"EPERM" } else { b"ENOSYS" });
    line.text(b"; report this, and start with --no-sandbox if something does not work");
    line.text(end.as_bytes());
    // rustix calls the kernel itself and so leaves errno alone. Where nobody reads, nothing is lost.
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

/// A line of limited length, made without allocation.
struct Line {
    bytes: [u8; 320],
    len: usize,
}

impl Default for Line {
    fn default() -> Line {
        Line { bytes: [0; 320], len: 0 }
    }
}

impl Line {
    fn text(&mut self, text: &[u8]) -> &mut Line {
        let room = &mut self.bytes[self.len..];
        let len = text.len().min(room.len());
        room[..len].copy_from_slice(&text[..len]);
        self.len += len;
        self
    }

    fn number(&mut self, number: usize) -> &mut Line {
        let mut digits = [0u8; 20];
        let mut at = digits.len();
        let mut rest = number;
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                return self.text(&digits[at..]);
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_made_of_text_and_numbers_and_is_cut_off_at_its_end() {
        let mut line = Line::default();
        line.text(b"call ").number(0).text(b" ").number(usize::MAX);
        assert_eq!(line.as_bytes(), b"call 0 18446744073709551615");
        line.text(&[b'x'; 400]);
        assert_eq!(line.as_bytes().len(), 320);
    }

    #[test]
    fn calls_have_names() {
        assert_eq!(name(libc::SYS_execve as usize), "execve");
        assert_eq!(name(usize::MAX), "unknown");
    }
}
