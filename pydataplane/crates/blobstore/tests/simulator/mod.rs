//! A store beside a model of it, on a device whose faults a seed chooses.
//!
//! | file | noun |
//! | --- | --- |
//! | `device` | a device with a volatile and a durable half, and its faults |
//! | `model` | what a store should hold, and what of it may be lost |
//! | `ops` | operations of every kind: chosen, and done |
//! | `run` | one seed: operations, crashes, faults, loads |

pub mod device;
pub mod model;
pub mod ops;
pub mod run;
