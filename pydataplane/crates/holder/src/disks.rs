//! Devices of the ublk driver, for targets that serve them.
//!
//! The kernel keeps a device while nobody serves it, so nothing is held here: which one is whose is
//! told by the mark that each was made with. What waits for a target, that it serves its tags or has
//! answered what it has, is waited for by the kernel, and its asker answered then.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;
use ublk::{Control, Device, New, Slow};
use uuid::Uuid;

/// In a device's mark beside its UUID: it is one of ours.
const OURS: u64 = 0x5654 << 48;

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
    /// Those that were asked for here.
    known: BTreeMap<Uuid, u32>,
}

/// The mark of a volume's device.
fn mark(uuid: Uuid) -> u64 {
    let (high, low) = uuid.as_u64_pair();
    // Of the golden ratio, so that the halves do not cancel out.
    let folded = high.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ low;
    OURS | (folded ^ folded >> 48) & (u64::MAX >> 16)
}

fn failed(what: &str) -> impl Fn(Errno) -> String {
    move |e| format!("the ublk driver does not {what}: {e}")
}

impl Disks {
    /// Of a kernel that can recover devices; `None`: it cannot, or this process may not.
    pub(crate) fn new(control: Control) -> Option<Disks> {
        let control = Some(control).filter(Control::recovers)?;
        let (askers, known) = Default::default();
        Some(Disks { control, askers, next: 0, known })
    }

    /// Readable when [`Disks::ended`] has something.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// The device of a volume that was started and not stopped.
    fn find(&self, uuid: Uuid) -> Result<Option<Device>, String> {
        let listed = self.control.devices();
        let mut listed = listed.map_err(|e| format!("cannot list the devices of ublk: {e}"))?;
        listed.retain(|device| device.mark == mark(uuid) && (device.live || device.quiesced));
        Ok(listed.pop())
    }

    /// The device of a volume for a new server; `None`: what another server had is still about to
    /// end. Made anew where there is none.
    pub(crate) fn get(&mut self, uuid: Uuid, new: &New) -> Result<Option<Disk>, String> {
        let found = self.find(uuid)?;
        let left = match found {
            Some(device) if device.live => return Ok(None),
            Some(device) => match self.control.start_recovery(device.id) {
                Ok(()) => Some(device),
                Err(Errno::BUSY) => return Ok(None),
                Err(e) => return Err(failed("recover a device")(e)),
            },
            None => None,
        };
        let id = match left {
            Some(device) => device.id,
            None => {
                // Of a server that ended before it was started.
                if let Some(id) = self.known.remove(&uuid) {
                    _ = self.begin(id, Slow::Delete, None);
                }
                let new = New { mark: mark(uuid), ..*new };
                self.control.add(&new).map_err(failed("make a device"))?
            }
        };
        let device = self.control.device(id).map_err(failed("tell of a device"))?;
        let queue = match self.open(id) {
            Err(Errno::BUSY) if left.is_some() => return Ok(None),
            opened => opened.map_err(failed("open a queue"))?,
        };
        self.known.insert(uuid, id);
        let Device { depth, max_io_bytes, .. } = device;
        Ok(Some(Disk { id, left: left.is_some(), depth, max_io_bytes, queue }))
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

    /// Has a device be seen, or go on, as soon as the server `pid` serves it; `peer` is told then.
    pub(crate) fn serve(&mut self, uuid: Uuid, pid: u32, peer: OwnedFd) -> Result<(), String> {
        let device = match self.known.get(&uuid) {
            Some(id) => self.control.device(*id).map_err(failed("tell of a device"))?,
            None => return Err(format!("no device of {uuid} was asked for")),
        };
        let slow = match device.quiesced {
            true => Slow::EndRecovery(pid),
            false => Slow::Start(pid),
        };
        self.begin(device.id, slow, Some(peer))
    }

    /// Takes a device away; `peer` is told as soon as its server has answered what it has. Whether
    /// there is one.
    pub(crate) fn stop(&mut self, uuid: Uuid, peer: Option<OwnedFd>) -> Result<bool, String> {
        let known = self.known.remove(&uuid);
        match self.find(uuid)?.map(|device| device.id).or(known) {
            Some(id) => self.begin(id, Slow::Stop, peer).map(|()| true),
            None => Ok(false),
        }
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
                Slow::Start(_) if result.is_ok() => {
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
        for (uuid, id) in self.known.clone() {
            if self.control.device(id).is_ok_and(|device| device.quiesced) {
                tracing::error!(%uuid, "nobody serves its device: given up");
                if let Err(why) = self.stop(uuid, None) {
                    tracing::error!("{why}");
                }
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
        let marks = [1, 2, 1 << 64, 1 << 127, u128::MAX].map(|n| mark(Uuid::from_u128(n)));
        for (at, mark) in marks.iter().enumerate() {
            assert_eq!(mark >> 48, 0x5654);
            assert!(!marks[..at].contains(mark), "{mark:x}");
        }
    }
}
