//! A failed flush of a bdev, as it is recorded and as people are told.

use bdev::{FlushCause, FlushFailure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime};

/// What failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Cause {
    /// A flush.
    Flush,
    /// A write that was to be durable at once (FUA).
    DurableWrite,
    /// A write of the metadata of an lvstore on the bdev.
    Metadata,
}

/// A failed flush as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlushError {
    /// What failed.
    cause: Cause,
    /// Positive errno of the operating system, where it gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
    /// When, in seconds since 1970.
    at: u64,
}

impl From<FlushFailure> for FlushError {
    fn from(failure: FlushFailure) -> FlushError {
        let cause = match failure.cause {
            FlushCause::Flush => Cause::Flush,
            FlushCause::DurableWrite => Cause::DurableWrite,
            FlushCause::Metadata => Cause::Metadata,
        };
        let at = failure.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        FlushError { cause, errno: failure.errno, at }
    }
}

impl From<&FlushError> for FlushFailure {
    fn from(error: &FlushError) -> FlushFailure {
        let cause = match error.cause {
            Cause::Flush => FlushCause::Flush,
            Cause::DurableWrite => FlushCause::DurableWrite,
            Cause::Metadata => FlushCause::Metadata,
        };
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(error.at));
        FlushFailure { cause, errno: error.errno, at: at.unwrap_or(SystemTime::UNIX_EPOCH) }
    }
}

/// Why every flush of a bdev fails until that is cleared, as a clause for people.
pub fn sentence(failure: FlushFailure, bdev: &str) -> String {
    format!(
        "{failure}; what was written before may be lost, so flushes fail until that is cleared with \
         `virtlun bdev clear-flush-error {bdev}` (virtlun_bdev_clear_flush_error)"
    )
}
