//! JSON-RPC 2.0 over a UNIX stream socket, framed as SPDK frames it.
//!
//! Owns: the framing ([`frame`]), the code table of errors ([`code`]), the method table with its
//! JSON Schemas ([`methods`], [`check`]), the socket ([`socket`]), and the server with one thread per
//! client ([`server`]) and a limited number of them ([`clients`]).
//! Never knows a bdev or a controller: methods are closures that the daemon adds.
//!
//! On the wire there is a stream of bare JSON values without delimiters, pretty-printed or not; an
//! array is a batch. Replies come in the order of the requests, in ASCII (anything else as `\u`
//! escapes, because SPDK's client decodes each 4,096 bytes on their own), followed by a newline.
//! Text that is no JSON is answered with -32700 and the connection is closed, since a stream
//! without delimiters has no place to start again.
//!
//! Bounds: [`frame::MAX_REQUEST_BYTES`], [`frame::MAX_DEPTH`], [`clients::MAX_CONNECTIONS`],
//! [`methods::MAX_BATCH`], [`methods::MAX_BATCH_REPLY`].

#![forbid(unsafe_code)]

pub mod ascii;
pub mod check;
pub mod clients;
pub mod code;
pub mod frame;
pub mod methods;
pub mod server;
pub mod socket;

pub use clients::ParkedClient;
pub use code::{Code, Errno, Error};
pub use methods::{Flags, Held, Methods, NoParams, Phase};
pub use server::{Parked, Server};
pub use socket::{Listener, SocketOptions};
