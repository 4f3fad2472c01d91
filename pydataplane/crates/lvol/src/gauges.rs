//! What everybody may know of an lvstore without asking its thread.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// Written by the metadata thread.
#[derive(Default)]
pub(crate) struct Gauges {
    pub data_clusters: AtomicU64,
    /// With those that only wait for their last readers.
    pub free_clusters: AtomicU64,
    pub format_version: AtomicU32,
    /// Whether clusters can have several owners.
    pub shares_clusters: AtomicBool,
    pub stopped: Mutex<Option<String>>,
}
