//! The logical unit, from CDB to response, against a disk that records what it is asked.

mod attention;
mod backends;
mod block_size;
mod blocks;
mod characteristics;
mod errors;
mod fuzz;
mod identity;
mod mode;
mod provisioning;
mod removable;
mod report;
mod reserve;
mod rig;
mod tasks;
mod together;
