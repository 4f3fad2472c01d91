//! The daemon `virtlun-target`: wires reactors, bdevs, lvstores and vhost controllers, and gives
//! them a JSON-RPC face.
//!
//! | file | noun |
//! | --- | --- |
//! | `cli`, `cpumask` | the command line |
//! | `daemon` | life of the process: start, restore, ready, signals, stop |
//! | `privilege` | who the process is, and what it may still do |
//! | `started` | the command line that root gave, where the target itself cannot change it |
//! | `rpcsocket` | where the JSON-RPC socket is made, so that nobody else can take its name |
//! | `app` | everything of the process, as the methods see it |
//! | `methods` | SPDK's methods and ours, a file per subsystem |
//! | `errors` | errors of the layers below as JSON-RPC errors |
//! | `state`, `restore` | the recorded configuration |
//! | `reservations`, `records` | what of volumes outlives the process beside it: who has them reserved; mode pages and sanitize operations |
//! | `stores`, `imagestore`, `lunstore` | what has volumes: the lvstores, pools of Ceph, and of arrays |
//! | `volume` | a volume of a pool |
//! | `array` | the disks of an array as volumes: LUNs, namespaces |
//! | `guestdisks` | bdevs that go when no guest has them |
//! | `pools`, `asked`, `openvolumes` | those pools, what they answer, and which of their volumes are open |
//! | `balance` | queues that move to reactors with more time |
//! | `copies` | targets whose bdevs are being copied to others |
//! | `awaited` | keys that came, and what waits for them |
//! | `above` | what lies on a bdev, and goes before it |
//! | `flusherror`, `flushrecord` | failed flushes, and how they come into it |
//! | `holding`, `heldsessions` | who holds exports and sessions of VMs while the process is away |
//! | `upgrade` | a new program takes everything over |
//! | `waits` | which operations wait for a disk, and for how long |
//! | `notices`, `logging`, `systemd`, `schemas` | what their names say |
//!
//! Only control threads run here: the main one, which waits for the end and hands over in an upgrade;
//! one for signals; one that waits for a program that takes over; one that records failed flushes; one
//! that gives sessions of VMs to the holder; one that has queues move, where there are several reactors;
//! one that accepts JSON-RPC clients, and one for each of them; and for a while one for each bdev that
//! is restored, asked before an upgrade, or copied. Crates below have threads of their own, as their
//! headers say. No I/O of a guest passes through.

#![forbid(unsafe_code)]

mod above;
pub mod app;
mod array;
mod asked;
mod awaited;
mod balance;
pub mod cli;
mod copies;
pub mod cpumask;
pub mod daemon;
pub mod errors;
pub mod flusherror;
pub mod flushrecord;
pub mod guestdisks;
pub mod heldsessions;
pub mod holding;
mod imagestore;
pub mod logging;
mod lunstore;
pub mod methods;
mod moves;
pub mod notices;
mod openvolumes;
pub mod pools;
mod privilege;
pub mod records;
pub mod reservations;
pub mod restore;
mod rpcsocket;
pub mod schemas;
mod started;
pub mod state;
pub mod stores;
pub mod systemd;
pub mod upgrade;
mod volume;
mod waits;
