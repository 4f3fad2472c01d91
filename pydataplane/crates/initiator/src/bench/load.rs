//! The loop that keeps I/Os in flight.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::clock::{Clock, ticks};
use super::place::pin;
use super::process::cpu_ns;
use super::report::{Counted, Report};
use super::slots::Slots;
use super::verify::Ledger;
use super::{Config, Pattern, c2c};
use crate::connection::feature;
use crate::error::Error;
use crate::ring::Kick;
use crate::scsi;
use crate::session::{Kind, Session};

/// Longest latency that is told apart, in ns.
const MAX_LATENCY_NS: u64 = 60_000_000_000;
/// Seconds that I/Os in flight get to end in when the time is over.
const DRAIN_SECONDS: f64 = 20.0;
/// Longest sleep: where nothing ends, the time that is measured does.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Random blocks tried before an I/O is put off because others have them all.
const TRIES: u32 = 64;
/// Blocks that verification keeps books of, at most.
const MAX_LEDGER: u64 = 1 << 24;

/// Which block is next.
struct Addresses {
    pattern: Pattern,
    blocks: u64,
    state: u64,
    next: u64,
    /// From one block to the next, where they are not random.
    step: u64,
    /// They do not begin anew at the end of the disk.
    once: bool,
    /// All were given out that are done once.
    over: bool,
}

impl Addresses {
    /// xorshift64*: plenty for addresses, and one multiplication.
    #[inline(always)]
    fn random(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// (block, whether to write it), of the I/O in that place.
    #[inline(always)]
    fn next(&mut self, index: usize) -> (u64, bool) {
        let random = self.random();
        let write = match self.pattern {
            Pattern::Read | Pattern::RandRead => false,
            Pattern::Write | Pattern::RandWrite => true,
            Pattern::RandRw => random & 1 != 0,
            Pattern::RandApart => index & 1 != 0,
        };
        if self.pattern.is_random() {
            // The high part of a product: uniform without a division.
            return (((random as u128 * self.blocks as u128) >> 64) as u64, write);
        }
        let block = self.next;
        self.next += self.step;
        if self.next >= self.blocks {
            self.next = 0;
            self.over = self.once;
        }
        (block, write)
    }
}

struct Load<'s> {
    session: &'s mut Session,
    first_queue: usize,
    queues: Vec<Slots>,
    addresses: Addresses,
    ledger: Option<Ledger>,
    buffer: Vec<u8>,
    clock: Clock,
    latency: Histogram<u64>,
    in_flight: u64,
    ios: u64,
    errors: u64,
    miscompares: u64,
    kicks: u64,
    /// Ticks of the passes over the queues in which something had ended: what is left is waiting.
    busy: u64,
    /// Gives the CPU away where nothing has ended.
    yields: bool,
    /// Sleeps until the target calls where nothing has ended.
    sleeps: bool,
}

/// Runs one measurement on `session`, whose queues must be idle.
pub fn run(session: &mut Session, config: &Config) -> Result<Report, Error> {
    let (blocks, block_size) = session.capacity(config.target, config.lun)?;
    if config.bs == 0 || !config.bs.is_multiple_of(block_size) {
        let bs = config.bs;
        return Err(Error::Usage(format!("I/Os of {bs} bytes: not blocks of {block_size}")));
    }
    let bytes = blocks * u64::from(block_size);
    let usable = config.size.map_or(bytes, |size| size.min(bytes)) / u64::from(config.bs);
    if usable == 0 {
        return Err(Error::Usage("the disk is smaller than one I/O".into()));
    }
    let stride = config.stride.unwrap_or(config.bs.into());
    if stride == 0
        || !stride.is_multiple_of(config.bs.into())
        || config.stride.is_some() && config.rw.is_random()
    {
        return Err(Error::Usage(
            "--stride is a multiple of --bs, and not for random patterns".into(),
        ));
    }
    if config.verify && usable > MAX_LEDGER {
        return Err(Error::Usage("too many blocks to verify: give a smaller --size".into()));
    }
    let trip = |at: Option<(usize, usize)>| at.map(|(a, b)| c2c::measure(a, b)).transpose();
    let before = trip(config.cpus)?;
    if let Some((cpu, _)) = config.cpus {
        pin(cpu)?;
    }
    let mut load = Load::new(session, config, usable, block_size)?;
    if config.verify || config.fill {
        load.fill()?;
    }
    let counted = load.measure(config)?;
    let queues = load.queues.len();
    let latency = load.latency;
    let mut report = Report::new(config, session.options.kind, queues, &counted, &latency);
    report.c2c_before_ns = before;
    report.c2c_after_ns = trip(config.cpus)?;
    Ok(report)
}

impl<'s> Load<'s> {
    fn new(
        session: &'s mut Session,
        config: &Config,
        blocks: u64,
        block_size: u32,
    ) -> Result<Load<'s>, Error> {
        let first_queue = if session.options.kind == Kind::Scsi { scsi::REQUESTS } else { 0 };
        let indirect = session.connection()?.features & feature::INDIRECT != 0;
        let luns = (0..=u8::MAX).skip(config.target.into()).take(config.targets.into());
        let luns: Vec<_> = luns.map(|target| scsi::lun_field(target, config.lun, true)).collect();
        if luns.len() < usize::from(config.targets) {
            return Err(Error::Usage(format!(
                "{} targets from {} on: the last one has number 255",
                config.targets, config.target
            )));
        }
        let mut rings = session.queues.split_off(first_queue);
        let made: Result<Vec<_>, _> = rings
            .iter()
            .map(|q| {
                Slots::new(session, &q.ring, config.iodepth, config.bs, block_size, &luns, indirect)
            })
            .collect();
        rings.iter_mut().for_each(|q| q.ring.disable_call());
        session.queues.append(&mut rings);
        let pattern = config.rw;
        let step = config.stride.map_or(1, |stride| stride / u64::from(config.bs));
        let once = config.stride.is_some();
        let state = config.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Ok(Load {
            session,
            first_queue,
            queues: made?,
            addresses: Addresses { pattern, blocks, state, next: 0, step, once, over: false },
            ledger: config.verify.then(|| Ledger::new(blocks, config.seed)),
            buffer: vec![0; config.bs as usize],
            clock: Clock::calibrate(),
            latency: Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3)
                .map_err(|e| Error::Usage(e.to_string()))?,
            in_flight: 0,
            ios: 0,
            errors: 0,
            miscompares: 0,
            kicks: 0,
            busy: 0,
            yields: config.yields,
            sleeps: config.sleeps,
        })
    }

    /// Writes every block once, so that every read can be checked.
    fn fill(&mut self) -> Result<(), Error> {
        let pattern = std::mem::replace(&mut self.addresses.pattern, Pattern::Write);
        self.addresses.next = 0;
        let mut left = self.addresses.blocks;
        let mut idle: Vec<(usize, usize)> = self.all();
        let deadline = ticks() + self.clock.ticks_of(600.0);
        while left > 0 || self.in_flight > 0 {
            while left > 0
                && let Some((queue, index)) = idle.pop()
            {
                self.submit(queue, index)?;
                left -= 1;
            }
            self.publish()?;
            for queue in 0..self.queues.len() {
                while let Some(index) = self.reap(queue)? {
                    idle.push((queue, index));
                }
            }
            if ticks() > deadline {
                return Err(Error::Timeout { ms: 600_000, detail: " (filling the disk)" });
            }
        }
        self.addresses.pattern = pattern;
        Ok(())
    }

    fn all(&self) -> Vec<(usize, usize)> {
        let slots = |(queue, q): (usize, &Slots)| {
            (0..q.slots.len()).map(move |index| (queue, index)).collect::<Vec<_>>()
        };
        self.queues.iter().enumerate().flat_map(slots).collect()
    }

    fn measure(&mut self, config: &Config) -> Result<Counted, Error> {
        self.reset();
        for (queue, index) in self.all() {
            if !self.addresses.over {
                self.submit(queue, index)?;
            }
        }
        self.publish()?;
        self.spin(self.clock.ticks_of(config.warmup))?;
        self.reset();
        let cpu = || config.target_pid.and_then(cpu_ns);
        let (start, cpu_start) = (ticks(), cpu());
        self.spin(self.clock.ticks_of(config.seconds))?;
        let (end, cpu_end) = (ticks(), cpu());
        let counted = Counted {
            seconds: self.clock.ns_of(end - start) / 1e9,
            ios: self.ios,
            errors: self.errors,
            miscompares: self.miscompares,
            kicks: self.kicks,
            busy_ns: self.clock.ns_of(self.busy),
            cpu_ns: cpu_start.zip(cpu_end).map(|(a, b)| b.saturating_sub(a)),
        };
        self.drain()?;
        Ok(counted)
    }

    fn reset(&mut self) {
        self.latency.reset();
        (self.ios, self.errors, self.miscompares, self.kicks, self.busy) = (0, 0, 0, 0, 0);
    }

    /// Keeps all requests in flight for `length` ticks.
    fn spin(&mut self, length: u64) -> Result<(), Error> {
        let start = ticks();
        let mut now = start;
        while now - start < length {
            let (begun, before) = (now, self.ios);
            for queue in 0..self.queues.len() {
                while let Some(index) = self.reap(queue)? {
                    if !self.addresses.over {
                        self.submit(queue, index)?;
                    }
                }
            }
            self.publish()?;
            if self.addresses.over && self.in_flight == 0 {
                break;
            }
            if self.ios == before {
                if self.sleeps {
                    let queues = self.first_queue..self.session.queues.len();
                    self.session.sleep(queues, LONGEST_SLEEP)?;
                } else if self.yields {
                    std::thread::yield_now();
                }
                now = ticks();
            } else {
                now = ticks();
                self.busy += now - begun;
            }
        }
        Ok(())
    }

    /// Waits for what is in flight.
    fn drain(&mut self) -> Result<(), Error> {
        let (start, limit) = (ticks(), self.clock.ticks_of(DRAIN_SECONDS));
        while self.in_flight > 0 {
            for queue in 0..self.queues.len() {
                while self.reap(queue)?.is_some() {}
            }
            if ticks() - start > limit {
                return Err(Error::Timeout {
                    ms: DRAIN_SECONDS as u64 * 1000,
                    detail: " (I/Os are still in flight: did the target die?)",
                });
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn submit(&mut self, queue: usize, index: usize) -> Result<(), Error> {
        let (mut block, write) = self.addresses.next(index);
        if let Some(ledger) = &mut self.ledger {
            let mut tries = 0;
            while !ledger.take(block) {
                tries += 1;
                if tries > TRIES {
                    return Err(Error::Usage("too few blocks to verify at this depth".into()));
                }
                block = self.addresses.next(index).0;
            }
            if write {
                ledger.stamp(block, &mut self.buffer);
                self.queues[queue].write_data(index, &self.buffer)?;
            }
        }
        let slot = &mut self.queues[queue].slots[index];
        (slot.block, slot.write) = (block, write);
        let ring = &mut self.session.queues[self.first_queue + queue].ring;
        self.queues[queue].submit(ring, index, ticks())?;
        self.in_flight += 1;
        Ok(())
    }

    #[inline(always)]
    fn publish(&mut self) -> Result<(), Error> {
        for queue in &mut self.session.queues[self.first_queue..] {
            if queue.ring.publish() == Kick::Needed {
                self.kicks += 1;
                queue.kick.write(1).map_err(Error::os("kick"))?;
            }
        }
        Ok(())
    }

    /// Takes one finished request of `queue`.
    #[inline(always)]
    fn reap(&mut self, queue: usize) -> Result<Option<usize>, Error> {
        let Some(used) = self.session.queues[self.first_queue + queue].ring.poll() else {
            return Ok(None);
        };
        let slots = &self.queues[queue];
        let Some(index) = slots.index_of(used.head) else {
            let head = used.head;
            return Err(Error::Usage(format!(
                "the target used chain {head}, which is none of ours"
            )));
        };
        let slot = &slots.slots[index];
        let ns = self.clock.ns_of(ticks().saturating_sub(slot.started)) as u64;
        self.latency.saturating_record(ns);
        self.ios += 1;
        self.in_flight -= 1;
        let good = slots.is_good(index);
        self.errors += u64::from(!good);
        let (block, write) = (slot.block, slot.write);
        if let Some(ledger) = &mut self.ledger {
            ledger.release(block);
            if good && !write && ledger.is_written(block) {
                slots.read_data(index, &mut self.buffer)?;
                self.miscompares += u64::from(!ledger.matches(block, &self.buffer));
            }
        }
        Ok(Some(index))
    }
}
