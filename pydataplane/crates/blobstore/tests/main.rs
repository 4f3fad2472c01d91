//! The crate's tests, as one program: compiled once for each kind of device, and linked once.

mod check;
mod crash;
mod damage;
mod extents;
mod hostile;
mod power;
mod share;
mod simulate;
mod simulator;
mod store;
#[path = "../src/testing.rs"]
mod testing;
mod zeros;
