//! The thread that makes a device's connections, and looks whether its server answers.
//!
//! Of a server that serves several connections as one it keeps one without I/O for itself, so that it
//! notices when the server goes and comes, and what the size is then, also while nobody does I/O.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bdev::Registry;
use reactor::ticks;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use crate::channelstate::Wanted;
use crate::connect::{establish, say_goodbye};
use crate::shared::Shared;

/// How often it looks whether somebody waits for too long: in an eighth of that time, within these.
const LOOK_LEAST: Duration = Duration::from_millis(250);
const LOOK_MOST: Duration = Duration::from_secs(2);

/// How long a server may take to be connected to, as others wait to be looked after meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes of a connection that ends, read at once.
const DRAIN: usize = 64 << 10;

/// The thread's own.
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    registry: Registry,
    waiting: Vec<Wanted>,
    /// The connection without I/O.
    own: Option<OwnedFd>,
    /// Since when it has that, or had it.
    own_since: Instant,
    /// No attempt before that.
    next: Instant,
    /// The sentence that was logged last.
    said: Option<String>,
}

impl Keeper {
    pub(crate) fn new(shared: Arc<Shared>, registry: Registry, first: OwnedFd) -> Keeper {
        let now = Instant::now();
        let mut keeper = Keeper {
            shared,
            registry,
            waiting: Vec::new(),
            own: None,
            own_since: now,
            next: now,
            said: None,
        };
        if keeper.shared.multi_conn() {
            keeper.own = Some(first);
        } else {
            // Whoever comes first has it.
            keeper.spare(first);
        }
        keeper
    }

    fn spare(&self, fd: OwnedFd) {
        *self.shared.spare.lock() = Some(fd);
    }

    /// Until it is told to stop.
    pub(crate) fn run(mut self) {
        let orders = self.shared.clone();
        let orders = &orders.orders;
        while !orders.stop.load(Relaxed) {
            while let Some(mut wanted) = orders.wanted.pop() {
                wanted.from += self.pause_of(&wanted);
                self.waiting.push(wanted);
            }
            self.waiting.retain(|wanted| wanted.state.strong_count() > 0);
            self.look_at_own();
            self.drain();
            self.connect();
            self.shared.find_late();
            self.sleep();
        }
        if let Some(fd) = &self.own {
            say_goodbye(fd);
        }
    }

    /// How long one that had a connection a moment ago waits for the next: a server that ends each at once is
    /// not to be connected to all the time.
    fn pause_of(&self, wanted: &Wanted) -> Duration {
        let given = wanted.state.upgrade().map_or(0, |state| state.given.load(Relaxed));
        if given == 0 {
            return Duration::ZERO;
        }
        let had = Duration::from_nanos(ticks::to_ns(ticks::now().saturating_sub(given)));
        self.shared.reconnect_delay().saturating_sub(had)
    }

    /// Whether the connection without I/O has ended.
    fn look_at_own(&mut self) {
        let Some(fd) = &self.own else { return };
        let mut byte = [0];
        // Nothing was asked, so nothing is answered either.
        match recv(fd, &mut byte, RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            _ => {
                self.own = None;
                self.next = self.next.max(self.own_since + self.shared.reconnect_delay());
            }
        }
    }

    /// Reads what the server still says on connections that end, until their end.
    fn drain(&mut self) {
        for wanted in &mut self.waiting {
            let Some(fd) = &wanted.old else { continue };
            // So that the server knows that nothing more comes.
            _ = shutdown(fd, Shutdown::Write);
            let mut bytes = vec![0; DRAIN];
            loop {
                match recv(fd, &mut *bytes, RecvFlags::DONTWAIT) {
                    Ok((n, _)) if n > 0 => {}
                    Err(rustix::io::Errno::INTR) => {}
                    Err(rustix::io::Errno::AGAIN) => break,
                    Ok(_) | Err(_) => {
                        wanted.old = None;
                        break;
                    }
                }
            }
        }
    }

    fn wants(&self) -> bool {
        let own = self.shared.multi_conn() && self.own.is_none();
        own || self.waiting.iter().any(Wanted::is_due)
    }

    /// Connects for one that waits, if it is time; the others follow at once.
    fn connect(&mut self) {
        while self.wants() && Instant::now() >= self.next {
            let spare = self.shared.spare.lock().take();
            if let Some(fd) = spare {
                self.hand_over(fd);
                continue;
            }
            match self.attempt() {
                Ok(fd) => {
                    if self.said.take().is_some() {
                        tracing::info!(bdev = self.shared.name(), "its server answers again");
                    }
                    self.shared.set_problem(None);
                    self.hand_over(fd);
                }
                Err(why) => {
                    self.next = Instant::now() + self.shared.reconnect_delay();
                    if self.said.as_ref() != Some(&why) {
                        tracing::error!(bdev = self.shared.name(), "no connection: {why}");
                    }
                    self.shared.set_problem(Some(why.clone()));
                    self.said = Some(why);
                }
            }
        }
        let up = !self.wants() && self.waiting.is_empty();
        self.shared.connected.store(up, Relaxed);
    }

    fn hand_over(&mut self, fd: OwnedFd) {
        if self.shared.multi_conn() && self.own.is_none() {
            (self.own, self.own_since) = (Some(fd), Instant::now());
            return;
        }
        let Some(at) = self.waiting.iter().position(Wanted::is_due) else { return };
        let wanted = self.waiting.swap_remove(at);
        if let Some(state) = wanted.state.upgrade() {
            self.shared.connections.fetch_add(1, Relaxed);
            state.given.store(ticks::now(), Relaxed);
            _ = state.arrived.push(fd);
            state.waker.wake();
        }
    }

    /// A connection whose terms are still those of the device.
    fn attempt(&self) -> Result<OwnedFd, String> {
        let (fd, terms) =
            establish(self.shared.address(), CONNECT_TIMEOUT).map_err(|e| e.to_string())?;
        let geometry = self.shared.geometry();
        terms.can_replace(self.shared.terms(), geometry.block_size, geometry.num_blocks)?;
        let blocks = terms.size / u64::from(geometry.block_size);
        if blocks > geometry.num_blocks {
            self.shared.grow(blocks);
            self.registry.notify_resized(self.shared.name());
        }
        Ok(fd)
    }

    fn sleep(&self) {
        let orders = &self.shared.orders;
        let mut fds = vec![PollFd::new(&orders.event, PollFlags::IN)];
        fds.extend(self.own.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let olds = self.waiting.iter().filter_map(|wanted| wanted.old.as_ref());
        fds.extend(olds.map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)));
        let mut time = (self.shared.give_up() / 8).clamp(LOOK_LEAST, LOOK_MOST);
        if self.wants() {
            time = time.min(self.next.saturating_duration_since(Instant::now()));
        }
        // Those that had one a moment ago.
        let pauses = self.waiting.iter().map(|w| w.from.saturating_duration_since(Instant::now()));
        time = pauses.filter(|pause| !pause.is_zero()).fold(time, Duration::min);
        let time = Timespec::try_from(time).ok();
        _ = poll(&mut fds, time.as_ref());
        let mut count = [0; 8];
        _ = rustix::io::read(&orders.event, &mut count);
    }
}
