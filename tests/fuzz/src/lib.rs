//! Harnesses: each takes arbitrary bytes, does with them what a hostile peer could, and panics where
//! an invariant does not hold. One module a boundary; the targets in `fuzz_targets/` only call them.

pub mod commands;
mod harness;

pub use harness::{memory, ring};
