//! A controller against a guest made of bytes: handshake, I/O, control and event queue, memory
//! changes, disconnects, and everything that a guest or a peer may do wrong.

mod blk;
mod blk_full;
mod blk_half_done;
mod blk_overtaken;
mod blk_suspended;
mod coalescing;
mod control;
mod copying;
mod events;
mod fair;
mod following;
mod fuzz;
mod guest;
mod handover;
mod handover_hostile;
mod handshake;
mod hold;
mod host;
mod hostile;
mod idle;
mod inflight;
mod io;
mod lifecycle;
mod limits;
mod migration;
mod moving;
mod owners;
mod peer;
mod protection;
mod removable;
mod replace;
mod room;
mod stuck;
mod suspended;
mod zero_copy;
