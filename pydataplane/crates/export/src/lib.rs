//! Bdevs as files for the kernel: the face of a volume for ordinary pods and for tools. Where it is asked
//! for and the kernel has it, a device of ublk takes the file's place.
//!
//! Owns: a FUSE mount per exported bdev, in it one file named by the bdev's UUID, and the thread that
//! serves it. A loop device on such a file (`losetup --direct-io=on`) is a block device of the
//! volume. Never knows lvols, vhost or RPC, and never runs on a reactor.
//!
//! ```text
//!  kernel --/dev/fuse--> a thread per export --OwnedChannel, DEPTH I/Os at a time--> bdev
//!                              ^ orders, claims
//!                          [`Exports`] <--descriptors--> holder, which outlives this process
//! ```
//!
//! An export has a mount, a thread and a channel of its own: one whose bdev stalls delays nobody
//! else's data, and a request is taken, given to the bdev and answered by one thread. The data of a
//! write is read from the kernel to where direct I/O takes it from; nothing is copied beside. The
//! kernel keeps nothing: the files are opened with direct I/O, and attributes are asked for each
//! time, so that a grown bdev is a grown file at once.
//!
//! | call | becomes |
//! | --- | --- |
//! | read, write | read, write; a read need not be whole blocks, a write must (EINVAL) |
//! | fsync | flush |
//! | fallocate, punch hole | unmap where it reads as zeros afterwards, else write of zeros |
//! | fallocate, zero range | write of zeros |
//! | lseek for data or a hole | what [`bdev::Sparse`] tells, where the bdev has it; stat(2) has its room |
//! | truncate, chmod, chown | EPERM: the bdev's methods do that |
//!
//! # What a request costs
//!
//! A 4 KiB read through a loop device wakes five threads, one after the other: the loop's worker, the
//! export's thread, that thread again when the disk is done, ksoftirqd (the loop completes a request
//! in the context of whoever answers it, which is no interrupt here), and the application. A plain
//! loop device wakes two. Beside such a one, on the same disk and in turn with it (Linux 6.18, two
//! CPUs, virtio-blk; the tenth of the I/Os that were least disturbed), an export does, as a ratio:
//!
//! | 4 KiB | export | bare server, read(2) | bare server, FUSE over io_uring |
//! | --- | --- | --- | --- |
//! | read, depth 1 | 0.78 | 0.77 | 0.81 |
//! | write, depth 1 | 0.81 | 0.77 | 0.84 |
//! | write and fdatasync, depth 1 | 0.77 | 0.76 | 0.81 |
//! | read, depth 16 | 0.79 | 0.83 | 0.83 |
//! | write, depth 16 | 0.83 | 0.77 | 0.93 |
//!
//! The bare servers do nothing but pass I/O on to a file, in one thread with one io_uring; so at 4 KiB
//! there is little more to be had from FUSE below a loop device, however it is served.
//!
//! FUSE over io_uring (Linux 6.14) is not used, although it is a little faster: what its ring has
//! fetched is lost with the process. FUSE_NOTIFY_RESEND sends again what was read from a descriptor,
//! not what a ring has, and nothing takes an entry back from a ring before it ends. Tried on Linux 6.18
//! with reads at depth 16, a second descriptor elsewhere, and a server that was killed and followed by
//! another: in 4 of 4 tries readers waited for ever or had ECANCELED, and in 0 of 2 where requests were
//! read from the descriptor. Nor are channels of several threads (FUSE_DEV_IOC_CLONE): a bare server
//! with two rings and threads was no faster on two CPUs than with one, and one with two threads, be it on
//! one descriptor or with a clone, sleeps as often for a request as with one thread: 2.0 to 2.2 times for a
//! read of 4 KiB at depth 1, 1.1 to 1.2 times at depth 16. So it does with splice, which would save the
//! copy between the descriptor and our buffers: that costs two or three system calls more. There is nothing
//! to register: requests are read by readv(2), and an io_uring that read the descriptor with registered
//! buffers would be spared the look-up of their pages, not FUSE's copy into them. Each clone is
//! one more descriptor whose end fails the requests that it has, which the holder would have to keep, and
//! what was spliced into a pipe is lost with it.
//!
//! # When the process ends
//!
//! The kernel ends a FUSE connection when its last descriptor is closed. The `holder` process, which
//! makes the mounts, has one of each, and beside it a memfd with what the next process must know
//! ([`record`](self): what INIT settled, which handles are open). Meanwhile whoever uses the file
//! waits. The next process takes both and goes on without a new INIT.
//!
//! - *Orderly stop*: what was taken from the kernel is answered first; what comes later stays with
//!   the kernel. That works on every kernel.
//! - *Killed*: the kernel is asked to send again what had been taken and not answered
//!   (FUSE_NOTIFY_RESEND, Linux 6.9). On older ones the connection is closed instead: I/O in flight
//!   and later gives errors (EIO through a loop device).
//! - *Without a holder*: the mounts end with the process, as on a killed one with an old kernel.
//!
//! - *A device of ublk* stays with the kernel, which gives the next process all that was not answered
//!   (user recovery with reissue); the holder has no descriptor of it.
//!
//! Doing a request twice is right. Whoever asked for it has no answer yet, so nothing that relies on
//! it was asked: the kernel, like a disk, promises no order among requests that are in flight
//! together, and what must come after another waits for its answer (a file system on a loop device
//! does, and so do the page cache's locks on a range that is written out). So a write that is done
//! again is followed by every newer write to its range, and so is a discard. What the dead process
//! had in flight cannot come late: its io_uring holds the file's lock until its last I/O has ended,
//! and the next process opens the file only with that lock. OPEN and RELEASE count by the handle's
//! name, not by how often they are asked.
//!
//! # Claims
//!
//! An export holds its bdev alone, so a volume has one face at a time. A parked export keeps its file
//! and whatever is on it, a loop device that a container has open for instance, and lets another face
//! have the volume: it refuses writes, serves reads, and claims no more than that the bdev stays.
//!
//! | file | noun |
//! | --- | --- |
//! | `exports` | [`Exports`]: create, delete, list, stop; devices by their numbers |
//! | `volume` | one exported bdev: its claim, its thread, its mount |
//! | `shape` | what it is to be: a file, a device, one of a number |
//! | `keeper` | who mounts, and keeps what a mount needs |
//! | `worker` | the thread: takes requests, does I/O, answers |
//! | `shared` | what that thread and the others tell each other |
//! | `device` | `/dev/fuse` |
//! | `disk` | the thread of an export that is a device of ublk |
//! | `call`, `abi` | what the kernel asks, checked; the layout of its packets |
//! | `file` | the folder and its file: what is answered at once |
//! | `request` | I/O in blocks of the bdev |
//! | `record` | what is written down for the next process |
//! | `errors` | [`ExportError`], and an errno for each [`bdev::IoError`] |

#![forbid(unsafe_code)]

mod abi;
mod call;
mod device;
mod disk;
mod errors;
mod exports;
mod file;
mod keeper;
mod record;
mod request;
mod shape;
mod shared;
mod volume;
mod worker;

pub use disk::of_disk;
pub use errors::ExportError;
pub use exports::{DiskInfo, Exports, Info, PARK_TIMEOUT, RELEASE_TIMEOUT, Survives};
pub use keeper::Abilities;
pub use request::{DEPTH, MAX_IO_BYTES};
pub use shape::Numbered;
pub use ublk::abi::NUMBERS as DISK_NUMBERS;
