//! The thread of a controller: it alone uses the connections, and carries the I/O of all channels over them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::Registry;
use reactor::IoContext;

use crate::context::Context;
use crate::options::PATHS_MAX;
use crate::path::{LATE_POLL, Path};
use crate::requests::{DEPTH, Paths, Requests};
use crate::shared::{Order, Shared};

/// Longest sleep.
const SLEEP: Duration = Duration::from_secs(1);
/// How long all paths may take to be closed in order.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

pub(crate) struct Worker {
    with: Context,
    paths: Vec<Path>,
    /// What is to be done when one of them is gone that is used no more: until then it has its number.
    kept: Option<Order>,
    late: Instant,
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, registry: Registry) -> std::io::Result<Worker> {
        let io = IoContext::new()?;
        shared.set_waker(io.waker());
        let requests = Requests::new(Arc::clone(&shared.units), shared.cache, shared.write_through);
        let now = Instant::now();
        let with = Context { shared, registry, io, requests, now, changed: true, others_up: false };
        Ok(Worker { with, paths: Vec::with_capacity(PATHS_MAX), kept: None, late: now })
    }

    /// Until it is told to stop, when nobody has I/O any more; `begun` is called when it has its paths.
    pub(crate) fn run(mut self, begun: impl FnOnce()) {
        self.take_orders();
        self.show();
        begun();
        while !self.with.shared.is_stopped() {
            self.with.now = Instant::now();
            self.take_orders();
            let any = self.turn();
            let due = self.step();
            self.show();
            if !any {
                self.sleep(due);
            }
        }
        self.close();
        self.with.shared.closed();
    }

    /// One turn of the I/O path; whether anything was there.
    fn turn(&mut self) -> bool {
        let (with, paths) = (&mut self.with, &mut self.paths);
        let (shared, now) = (Arc::clone(&with.shared), with.now);
        with.requests.take(now, || shared.next_request());
        // What was given up must not come after what is sent from now on.
        let holds = paths.iter().any(Path::is_doubtful);
        let changed = &mut with.changed;
        with.requests.send(now, |requests, at, unit, changes, commands| {
            if holds && changes {
                return None;
            }
            let unit = usize::from(unit);
            let path = best_of(paths, unit)?;
            if !paths[path].current[unit] {
                paths.iter_mut().for_each(|path| path.current[unit] = false);
                (paths[path].current[unit], *changed) = (true, true);
            }
            send(requests, &mut paths[path], at, commands)
        });
        paths.iter_mut().for_each(Path::pump);
        with.io.flush();
        let mut any = false;
        for path in paths.iter_mut() {
            any |= path.poll(with);
        }
        any
    }

    /// What is due beside I/O; when there is more.
    fn step(&mut self) -> Instant {
        let mut due = self.with.now + SLEEP;
        for at in 0..self.paths.len() {
            let is_up = |(n, path): (usize, &Path)| n != at && path.is_up();
            self.with.others_up = self.paths.iter().enumerate().any(is_up);
            due = self.paths[at].step(&mut self.with).map_or(due, |at| at.min(due));
        }
        self.paths.retain(|path| !(path.leaving && path.is_down()));
        if self.with.now - self.late >= LATE_POLL {
            self.late = self.with.now;
            self.give_up();
        }
        if !self.with.requests.is_empty() {
            due = due.min(self.late + LATE_POLL);
        }
        self.with.requests.next_due().map_or(due, |at| at.min(due))
    }

    /// Ends what has waited for too long.
    fn give_up(&mut self) {
        let Some(most) = self.with.shared.give_up() else { return };
        let now = self.with.now;
        if self.with.requests.oldest().is_none_or(|since| now - since < most) {
            return;
        }
        let Some(before) = now.checked_sub(most) else { return };
        let (busy, doubtful) = self.with.requests.fail_since(before);
        let name = self.with.shared.name().to_owned();
        let seconds = most.as_secs_f32();
        for path in &mut self.paths {
            if doubtful & 1 << path.number != 0 {
                path.doubt();
            }
            if busy & 1 << path.number != 0 {
                path.leave("it has not answered a command for too long", &mut self.with);
            }
        }
        if !self.paths.iter().any(Path::is_up) && !self.with.shared.has_given_up() {
            tracing::error!(controller = name, "I/O fails: there was no answer for {seconds} s");
            self.with.shared.set_given_up(true);
            while let Some(request) = self.with.shared.next_request() {
                let failed = request.of.io.op.failed();
                request.of.end(Err(failed));
            }
        }
    }

    fn take_orders(&mut self) {
        while let Some(order) = self.kept.take().or_else(|| self.with.shared.next_order()) {
            match order {
                Order::Add(address, made) => {
                    let free = |n: &u8| self.paths.iter().all(|path| path.number != *n);
                    let Some(number) = (0..Paths::BITS as u8).find(free) else {
                        self.kept = Some(Order::Add(address, made));
                        return;
                    };
                    self.with.changed = true;
                    self.with.others_up = self.paths.iter().any(Path::is_up);
                    let mut path = Path::new(number, address, self.with.now);
                    if let Some(made) = made
                        && let Err(why) = path.join(*made, &mut self.with)
                    {
                        tracing::error!("{address}: {why}");
                    }
                    self.paths.push(path);
                }
                Order::Remove(address) => {
                    self.with.changed = true;
                    let found = self.paths.iter_mut().filter(|path| path.address == address);
                    found.for_each(|path| path.retire(&mut self.with));
                }
            }
        }
    }

    fn show(&mut self) {
        if std::mem::take(&mut self.with.changed) {
            let shown = self.paths.iter().filter(|path| !path.leaving).map(Path::info);
            self.with.shared.show(shown.collect());
        }
    }

    fn sleep(&mut self, due: Instant) {
        let has_room = self.with.shared.has_requests() && !self.with.requests.is_full();
        let left = due.saturating_duration_since(Instant::now());
        if has_room || left.is_zero() {
            self.with.io.flush();
            return;
        }
        if self.with.io.wait(left.as_micros().min(1_000_000) as u64).is_err() {
            std::thread::yield_now();
        }
    }

    /// Ends all associations in order, as far as controllers answer in time.
    fn close(&mut self) {
        let end = Instant::now() + CLOSE_WITHIN;
        self.paths.iter_mut().for_each(|path| path.retire(&mut self.with));
        while Instant::now() < end && !self.paths.iter().all(Path::is_down) {
            self.with.now = Instant::now();
            self.turn();
            self.step();
            _ = self.with.io.wait(10_000);
        }
    }
}

/// The path that I/O of a namespace goes by: the first one of those that are the best.
fn best_of(paths: &[Path], unit: usize) -> Option<usize> {
    let usable = paths.iter().enumerate().filter(|(_, path)| !path.leaving);
    let usable = usable.filter_map(|(n, path)| Some((path.access(unit)?, n)));
    let (_, best) = usable.filter(|(access, _)| access.is_usable()).min()?;
    Some(best)
}

/// Sends a part, which is so many commands, by a path, whose number is returned; `None`: its queues are full.
fn send(requests: &mut Requests, path: &mut Path, at: u16, commands: usize) -> Option<u8> {
    let number = path.number;
    let queue = path.queue_for(commands)?;
    // A comparison and its write are one after the other.
    for part in [Some(at), requests.second_of(at)].into_iter().flatten() {
        let sending = requests.command(part)?;
        debug_assert!(part < DEPTH);
        let taken = queue.talk.submit(sending.command, sending.data, u32::from(part));
        debug_assert!(taken, "there is room");
    }
    Some(number)
}
