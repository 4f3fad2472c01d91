//! Devices of the ublk driver, for targets that serve them.
//!
//! The kernel keeps a device while nobody serves it, so nothing is held here: which one is whose is
//! told by the mark that each was made with, also to the holder that is started next. What waits for a
//! target, that it serves its tags or has answered what it has, is waited for by the kernel, and its
//! asker answered then.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use ublk::{Control, Device, New, Slow};
use uuid::Uuid;

use crate::wire::Which;

/// In a device's mark: it is a holder's.
const OURS: u64 = 1 << 63;

/// The part of a mark that tells the volume; that above it tells the folder of the holder.
const VOLUME: u64 = u64::MAX >> 16;

/// How often the file of a new device is looked for, which devtmpfs makes; and how long in between.
const OPEN_TRIES: u32 = 50;
const OPEN_PAUSE: Duration = Duration::from_millis(2);

/// Milliseconds after which the driver looks whether a server that has all tags still lives.
const TIMEOUT_MS: u32 = 1000;

/// A device's queue, for who serves it.
#[derive(Debug)]
pub struct Disk {
    /// Its number: it is `/dev/ublkbN`.
    pub id: u32,
    /// Whether another process has left it, so that it has users.
    pub left: bool,
    /// Requests at a time.
    pub depth: u16,
    /// Bytes of one at most.
    pub max_io_bytes: u32,
    /// `/dev/ublkcN`.
    pub queue: OwnedFd,
}

/// What came of asking for a device.
#[derive(Debug)]
pub enum Found {
    /// It is this one.
    Disk(Disk),
    /// Another server of it is about to end: ask again.
    Busy,
    /// The number that was asked for is that of another volume's device, or of somebody else's.
    Taken,
    /// The volume's device has this number, and not the one that was asked for.
    Other(u32),
    /// No device was left.
    None,
}

/// Who is to be told of a command's end.
struct Asker {
    peer: Option<OwnedFd>,
    id: u32,
    slow: Slow,
}

/// All devices of this holder.
pub(crate) struct Disks {
    control: Control,
    askers: BTreeMap<u64, Asker>,
    next: u64,
    /// The part of a mark above [`VOLUME`], of this holder's devices.
    own: u64,
    /// By mark: those of this holder, and of the one before it.
    known: BTreeMap<u64, u32>,
}

/// Two numbers in one, in which each of their bits counts.
fn folded(high: u64, low: u64) -> u64 {
    // Of the golden ratio, so that the halves do not cancel out.
    let folded = high.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ low;
    folded ^ folded >> 48
}

/// The mark of a volume's device, but for the holder's part.
fn mark(uuid: Uuid) -> u64 {
    let (high, low) = uuid.as_u64_pair();
    OURS | folded(high, low) & VOLUME
}

/// The holder's part of marks: another one, with a folder of its own, has another. Nobody else gives up
/// its devices.
fn part_of(dir: &Path) -> u64 {
    let (device, inode) = std::fs::metadata(dir).map_or((0, 0), |found| (found.dev(), found.ino()));
    folded(device, inode) << 48 & !OURS
}

/// Whether a mark is that of a volume's device, whichever holder made it.
fn is_of(mark_found: u64, uuid: Uuid) -> bool {
    mark_found & (OURS | VOLUME) == mark(uuid)
}

fn failed(what: &str) -> impl Fn(Errno) -> String {
    move |e| format!("the ublk driver does not {what}: {e}")
}

impl Disks {
    /// Of a kernel that can recover devices, with those that the holder before this one has made for
    /// the mounts' folder `dir`; `None`: it cannot, or this process may not.
    pub(crate) fn new(control: Control, dir: &Path) -> Option<Disks> {
        let control = Some(control).filter(Control::recovers)?;
        let own = part_of(dir);
        let there = control.devices().unwrap_or_else(|e| {
            tracing::warn!(
                "cannot list the devices of ublk, so none is given up that was left: {e}"
            );
            Vec::new()
        });
        let own_too = |device: &Device| device.mark & !VOLUME == OURS | own;
        let known = there.iter().filter(|device| own_too(device));
        let known = known.map(|device| (device.mark, device.id)).collect();
        Some(Disks { control, askers: BTreeMap::new(), next: 0, own, known })
    }

    /// Readable when [`Disks::ended`] has something.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// The device of a volume that was started and not stopped.
    fn find(&self, uuid: Uuid) -> Result<Option<Device>, String> {
        let listed = self.control.devices();
        let mut listed = listed.map_err(|e| format!("cannot list the devices of ublk: {e}"))?;
        listed.retain(|device| is_of(device.mark, uuid) && (device.live || device.quiesced));
        Ok(listed.pop())
    }

    /// The device of a volume for a new server. Made anew where there is none, unless one that was left
    /// is asked for.
    pub(crate) fn get(&mut self, uuid: Uuid, new: &New, which: Which) -> Result<Found, String> {
        let number = which.number();
        if let Some(number) = number.filter(|number| *number >= ublk::abi::NUMBERS) {
            let most = ublk::abi::NUMBERS - 1;
            return Err(format!("{number} is no number of a device: 0 to {most} are"));
        }
        let left = match self.find(uuid)? {
            Some(device) if number.is_some_and(|number| number != device.id) => {
                return Ok(Found::Other(device.id));
            }
            Some(device) if device.live => return Ok(Found::Busy),
            Some(device) => match self.control.start_recovery(device.id) {
                Ok(()) => Some(device),
                Err(Errno::BUSY) => return Ok(Found::Busy),
                Err(e) => return Err(failed("recover a device")(e)),
            },
            None if matches!(which, Which::Left(_)) => return Ok(Found::None),
            None => None,
        };
        let mark = mark(uuid) | self.own;
        let id = match left {
            Some(device) => device.id,
            None => {
                // Of a server that ended before it was started.
                if let Some(id) = self.known.remove(&mark) {
                    _ = self.begin(id, Slow::Delete, None);
                }
                match self.control.add(&New { mark, number, ..*new }) {
                    Err(Errno::EXIST) if number.is_some_and(|id| self.is_ending(id)) => {
                        return Ok(Found::Busy);
                    }
                    Err(Errno::EXIST) if number.is_some() => return Ok(Found::Taken),
                    made => made.map_err(failed("make a device"))?,
                }
            }
        };
        let device = self.control.device(id).map_err(failed("tell of a device"))?;
        let queue = match self.open(id) {
            Err(Errno::BUSY) if left.is_some() => return Ok(Found::Busy),
            opened => opened.map_err(failed("open a queue"))?,
        };
        self.known.insert(device.mark, id);
        let Device { depth, max_io_bytes, .. } = device;
        Ok(Found::Disk(Disk { id, left: left.is_some(), depth, max_io_bytes, queue }))
    }

    /// Whether a device is being taken away.
    fn is_ending(&self, id: u32) -> bool {
        let ends =
            |asker: &Asker| asker.id == id && matches!(asker.slow, Slow::Stop | Slow::Delete);
        self.askers.values().any(ends)
    }

    /// The number of a volume's device that was asked for and not taken away.
    fn number(&self, uuid: Uuid) -> Option<(u64, u32)> {
        let known = self.known.iter().find(|(mark, _)| is_of(**mark, uuid));
        known.map(|(mark, id)| (*mark, *id))
    }

    fn open(&self, id: u32) -> Result<OwnedFd, Errno> {
        let mut last = Errno::NOENT;
        for _ in 0..OPEN_TRIES {
            match self.control.open_queue(id) {
                Err(e @ (Errno::NOENT | Errno::NXIO)) => last = e,
                opened => return opened,
            }
            sleep(OPEN_PAUSE);
        }
        Err(last)
    }

    /// Has a device be seen, or go on, as soon as who has its queue serves it; `peer` is told then.
    pub(crate) fn serve(&mut self, uuid: Uuid, peer: OwnedFd) -> Result<(), String> {
        let device = match self.number(uuid) {
            Some((_, id)) => self.control.device(id).map_err(failed("tell of a device"))?,
            None => return Err(format!("no device of {uuid} was asked for")),
        };
        let slow = if device.quiesced { Slow::EndRecovery } else { Slow::Start };
        self.begin(device.id, slow, Some(peer))
    }

    /// Takes a device away; `peer` is told as soon as its server has answered what it has. Whether
    /// there is one.
    pub(crate) fn stop(&mut self, uuid: Uuid, peer: Option<OwnedFd>) -> Result<bool, String> {
        let known = self.number(uuid);
        let found = self.find(uuid)?.map(|device| device.id);
        if let Some((mark, _)) = known {
            self.known.remove(&mark);
        }
        match found.or(known.map(|(_, id)| id)) {
            Some(id) => self.begin(id, Slow::Stop, peer).map(|()| true),
            None => Ok(false),
        }
    }

    /// Whether a volume has the device of this number, served or left.
    pub(crate) fn is_number(&self, uuid: Uuid, id: u32) -> bool {
        self.find(uuid).is_ok_and(|found| found.is_some_and(|device| device.id == id))
    }

    /// Whether devices can change their size.
    pub(crate) fn resizes(&self) -> bool {
        self.control.resizes()
    }

    /// Has the device of a volume be of so many bytes. Waits for nobody: the driver only notes it.
    pub(crate) fn resize(&self, uuid: Uuid, bytes: u64) -> Result<(), String> {
        let device = self.find(uuid)?.ok_or_else(|| format!("there is no device of {uuid}"))?;
        self.control.resize(device.id, bytes).map_err(failed("change the size of a device"))
    }

    /// Whether a file system, a loop device or the like has a device alone.
    pub(crate) fn is_open(&self, uuid: Uuid) -> Result<bool, String> {
        use rustix::fs::{Mode, OFlags};
        let Some(device) = self.find(uuid)? else { return Ok(false) };
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/dev/ublkb{}", device.id), flags, Mode::empty());
        Ok(matches!(opened, Err(Errno::BUSY)))
    }

    fn begin(&mut self, id: u32, slow: Slow, peer: Option<OwnedFd>) -> Result<(), String> {
        self.next += 1;
        let begun = self.control.begin(id, slow, self.next);
        begun.map_err(failed("take a command"))?;
        self.askers.insert(self.next, Asker { peer, id, slow });
        Ok(())
    }

    /// The next asker whose command has ended, and its answer.
    pub(crate) fn ended(&mut self) -> Option<(OwnedFd, Result<(), String>)> {
        loop {
            let (name, result) = self.control.ended()?;
            let Some(Asker { peer, id, slow }) = self.askers.remove(&name) else { continue };
            match slow {
                Slow::Start if result.is_ok() => {
                    if let Err(e) = self.control.set_timeout(id, TIMEOUT_MS) {
                        tracing::warn!("a killed target may be noticed late: {e}");
                    }
                }
                // That waits for whoever has it open, and nobody for that.
                Slow::Stop => {
                    if let Err(why) = self.begin(id, Slow::Delete, None) {
                        tracing::warn!("{why}");
                    }
                }
                _ => {}
            }
            if let Some(peer) = peer {
                return Some((peer, result.map_err(failed("do what it was asked"))));
            }
        }
    }

    /// Takes away what nobody serves: its users get errors.
    pub(crate) fn give_up(&mut self) {
        for (mark, id) in self.known.clone() {
            let slow = match self.control.device(id) {
                Ok(device) if device.mark == mark && device.live => continue,
                Ok(device) if device.mark == mark && device.quiesced => Slow::Stop,
                // Made, and never served.
                Ok(device) if device.mark == mark => Slow::Delete,
                // Taken away by somebody else, and perhaps its number is in use again.
                Ok(_) | Err(Errno::NODEV) => {
                    self.known.remove(&mark);
                    continue;
                }
                Err(e) => {
                    tracing::warn!("{}", failed("tell of a device")(e));
                    continue;
                }
            };
            tracing::error!(id, "nobody serves this device of ublk: given up");
            match self.begin(id, slow, None) {
                Ok(()) => drop(self.known.remove(&mark)),
                Err(why) => tracing::error!("{why}"),
            }
        }
    }

    /// Whether there is something to give up, or to wait for.
    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.askers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_differ_and_are_ours() {
        let uuids = [1, 2, 1 << 64, 1 << 127, u128::MAX].map(Uuid::from_u128);
        for (at, uuid) in uuids.iter().enumerate() {
            let own = mark(*uuid) | part_of(Path::new("/proc"));
            let elsewhere = mark(*uuid) | part_of(Path::new("/sys"));
            assert_ne!(own, elsewhere);
            assert_eq!((own >> 63, elsewhere >> 63), (1, 1));
            assert!(is_of(own, *uuid) && is_of(elsewhere, *uuid));
            assert!(!uuids[..at].iter().any(|other| is_of(own, *other)), "{own:x}");
            // What another program of the host may have made its devices with.
            assert!(!is_of(own & !OURS, *uuid));
        }
    }
}
