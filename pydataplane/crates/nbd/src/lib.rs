//! A bdev whose base is an NBD server.
//!
//! Owns: the client's side of the NBD protocol (fixed newstyle, simple replies), connections and their
//! loss. Never knows JSON-RPC or what lies above; the target's methods call it.
//!
//! A server that serves several connections as one (CAN_MULTI_CONN) has one of each channel, which its
//! thread's io_uring works on; any other has one, and a thread that carries the I/O of all channels.
//! Connections are made by a thread of the device, the keeper: nothing here blocks a reactor.
//!
//! # When a connection is lost
//!
//! I/O waits, and what was in flight is sent again on the next connection. That is right because
//!
//! - a request that was answered is never sent again, and one that was not is still the guest's to wait
//!   for: done twice with the same bytes it is as done once, late. A guest that has two overlapping writes
//!   in flight has no promise of their order, with or without a loss;
//! - nothing is sent on a new connection before the server has ended the old one: its end is read to the
//!   last byte, so no request of it can be carried out later, over newer data. A server that hangs is
//!   therefore waited for, not connected to anew;
//! - a FLUSH stands for writes that were answered before. Where a server that comes back may have lost
//!   those (its host went down), each write is sent with FUA instead ([`Options::write_through`]): by
//!   default where it is another host. A server on this one is taken to keep files, whose pages outlive it.
//!
//! In two cases the order is not certain. A peer over TCP that is silent is given up by TCP's own keep-alive;
//! if it was only cut off, it may still carry out what it had, later. And a process that is killed knows
//! nothing of its connections: a server that stood still then may go on with them beside the next process.
//!
//! After [`Options::give_up`] without an answer I/O fails, and further I/O fails at once until there is a
//! connection again. The size is looked at with each connection: growth is taken over, anything less than
//! what guests were told ([`Terms::can_replace`]) keeps the device without a connection.
//!
//! | file | noun |
//! | --- | --- |
//! | `address` | [`Address`]: where a server is, as an NBD URI |
//! | `wire` | the protocol's numbers, requests and replies |
//! | `handshake` | [`Handshake`], [`Terms`]: what is agreed on, without I/O |
//! | `conversation` | [`Conversation`]: requests and replies after that, without I/O |
//! | `connect` | a connection, made by a thread that may block |
//! | `channel` | a queue pair on a connection of its own |
//! | `carrier`, `lane` | the thread that carries the I/O of all, and their queue pairs; how I/O goes there and back |
//! | `keeper`, `channelstate` | the thread that makes connections; how channels ask for some |
//! | `shared`, `life` | what all of a device share, and how long its threads go on |
//! | `disk` | [`Nbd`]: the bdev |

mod address;
mod carrier;
mod channel;
mod channelstate;
mod connect;
mod conversation;
mod disk;
mod handshake;
mod keeper;
mod lane;
mod life;
mod shared;
mod wire;

pub use address::Address;
pub use connect::{ConnectError, reach};
pub use conversation::{Broken, Conversation, Ended, Note, Rules};
pub use disk::{CreateError, Nbd, Options, end_all};
pub use handshake::{Handshake, Refused, Terms};

#[cfg(test)]
mod tests;
