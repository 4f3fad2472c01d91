//! Chains of a session on their way: put into a queue, waited for, taken back.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use virtqueue::Desc;

use super::{Done, Kind, Pending, Queue, Session, Transfer};
use crate::error::Error;
use crate::ring::{Kick, Used};
use crate::scsi;

impl Session {
    /// Puts a chain into queue `index`, kicks if asked to; its head is its name.
    pub fn submit(&mut self, index: usize, transfer: &Transfer) -> Result<u16, Error> {
        if self.queue(index)?.pending.is_empty() && self.idle() {
            self.arena.rewind(self.mark);
        }
        let mut descs = Vec::new();
        let mut writable = Vec::new();
        for bytes in &transfer.readable {
            let gpa = self.arena.alloc(bytes.len() as u64, 64)?;
            self.arena.write(gpa, bytes)?;
            descs.push((gpa, bytes.len() as u32, 0));
        }
        for len in &transfer.writable {
            let gpa = self.arena.alloc(u64::from(*len), 64)?;
            self.arena.range(gpa, u64::from(*len))?.fill(0);
            descs.push((gpa, *len, Desc::WRITE));
            writable.push((gpa, *len));
        }
        let last = descs.len().saturating_sub(1);
        let indirect = self.indirect() && descs.len() > 1;
        let table = if indirect { self.arena.alloc(descs.len() as u64 * 16, 64)? } else { 0 };
        let needed = if indirect { 1 } else { descs.len() };
        let queue = self.queues.get_mut(index).ok_or(Error::NoQueue(index))?;
        if queue.free.len() < needed || needed == 0 {
            return Err(Error::QueueFull(index));
        }
        let heads: Vec<u16> = queue.free.split_off(queue.free.len() - needed);
        for (i, (gpa, len, flags)) in descs.iter().enumerate() {
            let flags = flags | if i < last { Desc::NEXT } else { 0 };
            if indirect {
                let range = self.arena.memory().range(table, descs.len() as u64 * 16);
                let range = range.ok_or(Error::NoRoom { wanted: 0 })?;
                range.put(i * 16, Desc::new(*gpa, *len, flags, i as u16 + 1))?;
            } else {
                let next = heads.get(i + 1).copied().unwrap_or(0);
                queue.ring.set_desc(heads[i], Desc::new(*gpa, *len, flags, next))?;
            }
        }
        if indirect {
            let len = descs.len() as u32 * 16;
            queue.ring.set_desc(heads[0], Desc::new(table, len, Desc::INDIRECT, 0))?;
        }
        let head = heads[0];
        queue.ring.add(head);
        let started = Instant::now();
        queue.pending.insert(head, Pending { heads, writable, started, done: None });
        self.publish(index)?;
        Ok(head)
    }

    /// Publishes what was added to queue `index`, and kicks if the target asks for it.
    pub fn publish(&mut self, index: usize) -> Result<(), Error> {
        let queue = self.queue_mut(index)?;
        if queue.ring.publish() == Kick::Needed {
            queue.kick.write(1).map_err(Error::os("kick"))?;
        }
        Ok(())
    }

    /// Kicks queue `index`, whether the target asked for it or not.
    pub fn kick(&mut self, index: usize) -> Result<(), Error> {
        self.queue_mut(index)?.kick.write(1).map_err(Error::os("kick"))
    }

    fn idle(&self) -> bool {
        self.queues.iter().enumerate().all(|(i, q)| {
            q.pending.is_empty() || self.options.kind == Kind::Scsi && i == scsi::EVENTS
        })
    }

    /// Takes what queue `index` has used; returns whether there was anything.
    pub(super) fn reap(&mut self, index: usize) -> Result<bool, Error> {
        let queue = self.queue_mut(index)?;
        let mut any = false;
        while let Some(used) = queue.ring.poll() {
            any = true;
            let pending = u16::try_from(used.head).ok().and_then(|h| queue.pending.get_mut(&h));
            match pending {
                Some(p) if p.done.is_none() => p.done = Some((used.len, p.started.elapsed())),
                _ => queue.strays.push(used),
            }
        }
        Ok(any)
    }

    /// Used entries of queue `index` that belong to no request of [`Session::submit`]: what raw
    /// chains, or a faulty target, leave behind.
    pub fn strays(&mut self, index: usize) -> Result<Vec<Used>, Error> {
        self.reap(index)?;
        Ok(std::mem::take(&mut self.queue_mut(index)?.strays))
    }

    /// Waits, sleeping on the call descriptor, until queue `index` has used something new.
    /// `Ok(false)`: the time is over.
    pub fn wait_used(&mut self, index: usize, until: Instant) -> Result<bool, Error> {
        loop {
            if self.reap(index)? {
                return Ok(true);
            }
            let queue = self.queue_mut(index)?;
            if queue.ring.enable_call() {
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            let timeout =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // SAFETY: the descriptor is open as long as the queue.
            let fd = unsafe { BorrowedFd::borrow_raw(queue.call.as_raw_fd()) };
            let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            let ready = match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(n) => n,
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Error::os("wait for a call")(e.into())),
            };
            if ready == 0 {
                if self.reap(index)? {
                    return Err(Error::Timeout {
                        ms: left.as_millis() as u64,
                        detail: ", but the request is complete: the target did not call",
                    });
                }
                return Ok(false);
            }
            if queue.call.read().is_ok() {
                queue.calls += 1;
            }
        }
    }

    /// Sleeps until one of `queues` has used something that was not taken yet, or `most` is over; at
    /// once if one has. Calls are wanted meanwhile only.
    pub fn sleep(&mut self, queues: Range<usize>, most: Duration) -> Result<(), Error> {
        let mut used = false;
        for queue in &mut self.queues[queues.clone()] {
            used |= queue.ring.enable_call();
        }
        if !used {
            // SAFETY: the descriptors are open as long as the queues.
            let fd = |q: &Queue| unsafe { BorrowedFd::borrow_raw(q.call.as_raw_fd()) };
            let calls = self.queues[queues.clone()].iter().map(fd);
            let mut fds: Vec<_> =
                calls.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let most =
                Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
            match rustix::event::poll(&mut fds, Some(&most)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::os("wait for a call")(e.into())),
            }
        }
        for queue in &mut self.queues[queues] {
            queue.ring.disable_call();
            // Empty most of the time: it does not block.
            if queue.call.read().is_ok() {
                queue.calls += 1;
            }
        }
        Ok(())
    }

    /// Waits until the chain `head` of queue `index` comes back.
    pub fn wait(&mut self, index: usize, head: u16, timeout: Duration) -> Result<Done, Error> {
        let until = Instant::now() + timeout;
        let calls = self.queue(index)?.calls;
        loop {
            let queue = self.queue_mut(index)?;
            let Some(pending) = queue.pending.get(&head) else {
                return Err(Error::Usage(format!("no request {head} is in flight")));
            };
            if let Some((len, elapsed)) = pending.done {
                let called = queue.calls != calls;
                let pending = queue.pending.remove(&head).expect("looked up above");
                queue.free.extend(pending.heads);
                let mut bytes = Vec::new();
                for (gpa, len) in pending.writable {
                    bytes.extend(self.arena.read(gpa, len as usize)?);
                }
                return Ok(Done { len, bytes, elapsed, called });
            }
            if !self.wait_used(index, until)? {
                return Err(Error::Timeout { ms: timeout.as_millis() as u64, detail: "" });
            }
        }
    }

    /// Looks all the time whether the chain `head` of queue `index` has come back, until `most` is over.
    pub fn poll(&mut self, index: usize, head: u16, most: Duration) -> Result<(), Error> {
        let until = Instant::now() + most;
        let is_pending = |queue: &Queue| queue.pending.get(&head).is_some_and(|p| p.done.is_none());
        while is_pending(self.queue(index)?) && Instant::now() < until {
            self.reap(index)?;
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Submits and waits.
    pub fn transact(
        &mut self,
        index: usize,
        transfer: &Transfer,
        timeout: Duration,
    ) -> Result<Done, Error> {
        let head = self.submit(index, transfer)?;
        self.wait(index, head, timeout)
    }
}
