//! The logical unit, from CDB to response, against a disk that records what it is asked.

mod app_tags;
mod atomic;
mod attention;
mod backends;
mod block_size;
mod blocks;
mod characteristics;
mod copy;
mod errors;
mod format;
mod fuzz;
mod identity;
mod mode;
mod ports;
mod protect;
mod provisioning;
mod removable;
mod report;
mod reserve;
mod rig;
mod sanitize;
mod select;
mod tasks;
mod together;
mod token;
mod unit;
