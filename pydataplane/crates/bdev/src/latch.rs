//! A failed flush, remembered for the device.
//!
//! The kernel reports a writeback error once for each open file (fsync(2)), and a disk that lost
//! its cache says so once. All users of a device share that one report: without a memory the next
//! user's flush succeeds although what he wrote is lost. So the first failure is latched, and every
//! later flush fails until somebody has looked into it and cleared the latch. A thread may follow the
//! latch, to record it beyond this process.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, SystemTime};

/// What failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushCause {
    /// A flush.
    Flush,
    /// A write that was to be durable at once ([`crate::Io::fua`]).
    DurableWrite,
    /// A write of the metadata of an lvstore on the device.
    Metadata,
}

/// The first failure since the latch was last clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushFailure {
    /// What failed.
    pub cause: FlushCause,
    /// Positive errno of the operating system, where it gave one.
    pub errno: Option<i32>,
    /// When, in whole seconds.
    pub at: SystemTime,
}

impl fmt::Display for FlushFailure {
    /// A clause such as `a flush failed 12 s ago: Input/output error (os error 5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.cause {
            FlushCause::Flush => "a flush failed",
            FlushCause::DurableWrite => "a write that was to be durable (FUA) failed",
            FlushCause::Metadata => "a write of an lvstore's metadata failed",
        };
        let ago = self.at.elapsed().unwrap_or_default().as_secs();
        write!(f, "{what} {ago} s ago")?;
        match self.errno {
            Some(errno) => write!(f, ": {}", std::io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}

/// Remembers the first failed flush of a device. One load on the way of an I/O; never allocates or
/// locks.
#[derive(Debug, Default)]
pub struct FlushLatch {
    word: AtomicU64,
    /// How many failures there were, latched or not.
    failures: AtomicU64,
    /// Woken when a failure is latched.
    follower: OnceLock<Thread>,
}

/// Bits of the word: the cause (0: clear), the errno (0: none), seconds since 1970.
const ERRNO_SHIFT: u32 = 8;
const TIME_SHIFT: u32 = 24;

impl FlushLatch {
    /// Whether a flush failed and nobody cleared it since.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.word.load(Ordering::Acquire) != 0
    }

    /// Latches a failure; an earlier one stays. `errno` is positive.
    #[cold]
    pub fn set(&self, cause: FlushCause, errno: Option<i32>) {
        self.failures.fetch_add(1, Ordering::AcqRel);
        if self.latch(FlushFailure { cause, errno, at: SystemTime::now() })
            && let Some(follower) = self.follower.get()
        {
            follower.unpark();
        }
    }

    /// Latches what is known of an earlier process: before anybody uses the device.
    pub fn restore(&self, failure: FlushFailure) {
        self.latch(failure);
    }

    /// Failures of this process so far: what was written before a flush is durable after it only if
    /// there was none meanwhile, also where somebody has cleared the latch since.
    #[inline]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Has `thread` unparked whenever a failure is latched from now on; the first call counts.
    pub fn follow(&self, thread: Thread) {
        _ = self.follower.set(thread);
    }

    /// Whether it was clear before.
    fn latch(&self, failure: FlushFailure) -> bool {
        let word = encode(failure);
        self.word.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The failure, while it is latched.
    pub fn failure(&self) -> Option<FlushFailure> {
        decode(self.word.load(Ordering::Acquire))
    }

    /// Lets flushes through again. Returns the failure that was latched.
    pub fn clear(&self) -> Option<FlushFailure> {
        decode(self.word.swap(0, Ordering::AcqRel))
    }
}

fn encode(failure: FlushFailure) -> u64 {
    let since_1970 = failure.at.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since_1970.unwrap_or_default().as_secs();
    let errno = failure.errno.and_then(|e| u16::try_from(e).ok()).unwrap_or(0);
    (failure.cause as u64 + 1) | u64::from(errno) << ERRNO_SHIFT | seconds << TIME_SHIFT
}

fn decode(word: u64) -> Option<FlushFailure> {
    let cause = match word as u8 {
        0 => return None,
        1 => FlushCause::Flush,
        2 => FlushCause::DurableWrite,
        _ => FlushCause::Metadata,
    };
    let errno = Some(i32::from((word >> ERRNO_SHIFT) as u16)).filter(|errno| *errno != 0);
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(word >> TIME_SHIFT);
    Some(FlushFailure { cause, errno, at })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_stays_until_it_is_cleared() {
        let latch = FlushLatch::default();
        assert!(!latch.is_set() && latch.failure().is_none() && latch.clear().is_none());
        latch.set(FlushCause::Metadata, None);
        latch.set(FlushCause::Flush, Some(libc::EIO));
        let failure = latch.failure().unwrap();
        assert_eq!((failure.cause, failure.errno), (FlushCause::Metadata, None));
        assert!(latch.is_set());
        assert_eq!(latch.clear(), Some(failure));
        assert!(!latch.is_set());
        latch.set(FlushCause::Flush, Some(libc::EIO));
        let text = latch.failure().unwrap().to_string();
        assert!(text.starts_with("a flush failed "), "{text}");
        assert!(text.ends_with(" s ago: Input/output error (os error 5)"), "{text}");
    }

    #[test]
    fn what_an_earlier_process_knew_is_latched_as_it_was() {
        let latch = FlushLatch::default();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let failure = FlushFailure { cause: FlushCause::DurableWrite, errno: Some(5), at };
        latch.restore(failure);
        latch.set(FlushCause::Flush, None);
        assert_eq!(latch.failure(), Some(failure));
    }

    #[test]
    fn a_follower_is_woken_by_the_first_failure() {
        let latch = FlushLatch::default();
        std::thread::scope(|s| {
            let follower = s.spawn(|| {
                while !latch.is_set() {
                    std::thread::park();
                }
            });
            latch.follow(follower.thread().clone());
            latch.set(FlushCause::Flush, None);
        });
    }
}
