//! Bdevs for tests of faults: each shows another bdev, its base, as it is, until somebody asks for errors
//! or delays.
//!
//! Owns: [`Failing`], SPDK's error injection bdev, and [`Delaying`], SPDK's delay bdev. They are for who
//! tests what lies above: a guest, a file system, a cluster. Never knows what that is, nor JSON-RPC; the
//! target's methods call it.
//!
//! | file | noun |
//! | --- | --- |
//! | `layer` | [`Layer`]: what both have of a bdev on another |
//! | `flight` | what is in flight on a queue pair of the base |
//! | `failing`, `injection` | [`Failing`]; [`Injection`]: what goes wrong, how often |
//! | `delaying` | [`Delaying`]: what takes how long |
//! | `registered` | both, found by their bases, and ended |

#![forbid(unsafe_code)]

mod delaying;
mod failing;
mod flight;
mod injection;
mod layer;
mod registered;

pub use delaying::{Delaying, Latencies, Latency};
pub use failing::Failing;
pub use injection::{Fault, Injection};
pub use layer::Layer;
pub use registered::{end_all, follow, on};

#[cfg(test)]
mod tests;
