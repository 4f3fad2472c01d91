//! A controller against a guest made of bytes: handshake, I/O, control and event queue, memory
//! changes, disconnects, and everything that a guest or a peer may do wrong.

mod control;
mod events;
mod fair;
mod fuzz;
mod guest;
mod handover;
mod handover_hostile;
mod handshake;
mod hold;
mod host;
mod hostile;
mod inflight;
mod io;
mod lifecycle;
mod migration;
mod owners;
mod peer;
mod removable;
mod room;
mod stuck;
mod suspended;
mod zero_copy;
