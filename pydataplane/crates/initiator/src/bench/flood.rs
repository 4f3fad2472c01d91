//! Guests that nobody wants beside him: what they send is right or wrong, and always too much.
//!
//! The load that a neighbour is measured under (`python -m tests.bench.noisy`); what the target answers
//! is not looked at, only that it does.

use std::time::{Duration, Instant};

use serde::Serialize;
use virtqueue::Desc;

use crate::error::Error;
use crate::scsi;
use crate::session::{Options, Session, Transfer};

/// Requests of a round, each made after others had the CPU; the next round begins when all of them have ended.
const DEPTH: usize = 64;
/// Longest wait for one of them.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes between two writes that allocate: no cluster is larger.
const STRIDE: u64 = 1 << 20;
/// Bytes of one UNMAP or WRITE SAME.
const RANGE: u64 = 256 << 20;
/// Bytes of a READ that task management is about.
const READ: u64 = 256 << 10;
/// Largest guest address that a random descriptor names: beyond the guest's memory, too.
const RANDOM_ADDRESSES: u64 = 128 << 20;

/// Subtype of the function that only asks (virtio 1.2 5.6.6.2).
const QUERY_TASK_SET: u32 = 7;

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[clap(rename_all = "kebab-case")]
pub enum Flood {
    /// UNMAPs of 256 MiB each.
    Unmap,
    /// WRITE SAMEs of zeros, 256 MiB each.
    WriteSame,
    /// Writes of 4 KiB to one cluster after the other; UNMAP of all when the disk is through.
    Allocate,
    /// VERIFYs with data of 256 KiB each.
    Verify,
    /// READs, and task management functions about them.
    Tmf,
    /// Task management functions alone, as many at once as requests of other floods.
    Query,
    /// READs, and SET_MEM_TABLE while they are in flight.
    MemTable,
    /// Random descriptors, heads and headers, in new sessions.
    Garbage,
}

/// What came of a flood.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sent {
    /// What was sent.
    pub flood: Flood,
    /// Requests, functions, tables or chains.
    pub count: u64,
    /// Sessions that it took.
    pub sessions: u64,
    /// Seconds.
    pub seconds: f64,
}

/// A random number: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// A guest under way.
struct Guest {
    session: Session,
    lun: [u8; 8],
    /// Blocks of the disk, and bytes of one.
    blocks: u64,
    block_size: u64,
    /// Next byte to allocate.
    next: u64,
    random: Random,
}

/// Floods the target for `seconds`, from `seed` on.
///
/// # Errors
/// The target does not answer for a minute, or not at all.
pub fn run(options: &Options, flood: Flood, seconds: f64, seed: u64) -> Result<Sent, Error> {
    let begun = Instant::now();
    let mut sent = Sent { flood, count: 0, sessions: 1, seconds };
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let over = |begun: Instant| begun.elapsed().as_secs_f64() >= seconds;
    if flood == Flood::Garbage {
        while !over(begun) {
            sent.count += garbage(options, &mut random)?;
            sent.sessions += 1;
        }
    } else {
        let mut session = Session::open(options.clone())?;
        let (blocks, block_size) = session.capacity(0, 0)?;
        let lun = scsi::lun_field(0, 0, true);
        let block_size = u64::from(block_size);
        let mut guest = Guest { session, lun, blocks, block_size, next: 0, random };
        while !over(begun) {
            sent.count += guest.round(flood)?;
        }
    }
    sent.seconds = begun.elapsed().as_secs_f64();
    Ok(sent)
}

impl Guest {
    fn command(&self, cdb: &[u8], out: Vec<u8>, into: u64) -> Transfer {
        let mut readable = vec![scsi::request(self.lun, 7, cdb).to_vec(), out];
        readable.retain(|part| !part.is_empty());
        let mut writable = vec![scsi::RESPONSE_LEN as u32, into as u32];
        writable.retain(|len| *len > 0);
        Transfer { readable, writable }
    }

    fn read(&mut self) -> Transfer {
        let blocks = READ.min(self.blocks * self.block_size) / self.block_size;
        let lba = self.random.below(self.blocks - blocks);
        let cdb = scsi::read_write_16(false, false, lba, blocks as u32);
        self.command(&cdb, Vec::new(), blocks * self.block_size)
    }

    /// A task management function.
    fn function(&self, subtype: u32) -> Transfer {
        Transfer { readable: vec![scsi::task_management(self.lun, subtype, 7)], writable: vec![1] }
    }

    /// UNMAP of one range.
    fn unmap(&self, lba: u64, blocks: u64) -> Transfer {
        let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
        list.extend(lba.to_be_bytes());
        list.extend((blocks as u32).to_be_bytes());
        list.extend([0; 4]);
        self.command(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], list, 0)
    }

    /// A command with a 16-byte CDB: operation code, first byte of flags, range.
    fn cdb16(&self, code: u8, flags: u8, lba: u64, blocks: u64, out: Vec<u8>) -> Transfer {
        let mut cdb = vec![code, flags];
        cdb.extend(lba.to_be_bytes());
        cdb.extend((blocks as u32).to_be_bytes());
        cdb.extend([0; 2]);
        self.command(&cdb, out, 0)
    }

    /// What one request of a flood is.
    fn request(&mut self, flood: Flood) -> Transfer {
        let range = (RANGE / self.block_size).min(self.blocks);
        let lba = self.random.below(self.blocks - range + 1);
        match flood {
            Flood::Unmap => self.unmap(lba, range),
            Flood::WriteSame => self.cdb16(0x93, 0, lba, range, vec![0; self.block_size as usize]),
            Flood::Verify => {
                let blocks = (READ / self.block_size).min(self.blocks);
                self.cdb16(0x8f, 2, 0, blocks, vec![0; (blocks * self.block_size) as usize])
            }
            Flood::Allocate => {
                if self.next + STRIDE > self.blocks * self.block_size {
                    self.next = 0;
                    return self.unmap(0, self.blocks.min(u64::from(u32::MAX)));
                }
                let blocks = 4096 / self.block_size;
                let lba = self.next / self.block_size;
                self.next += STRIDE;
                let cdb = scsi::read_write_16(true, false, lba, blocks as u32);
                self.command(&cdb, vec![0x5a; 4096], 0)
            }
            Flood::Query => self.function(QUERY_TASK_SET),
            Flood::Tmf | Flood::MemTable | Flood::Garbage => self.read(),
        }
    }

    /// Sends a round of requests, and what goes with them; returns how many.
    fn round(&mut self, flood: Flood) -> Result<u64, Error> {
        let mut heads = Vec::with_capacity(DEPTH);
        let queue = if flood == Flood::Query { scsi::CONTROL } else { scsi::REQUESTS };
        for _ in 0..DEPTH {
            let transfer = self.request(flood);
            heads.push(self.session.submit(queue, &transfer)?);
            // Filling buffers is work; whoever shares this CPU is not to be measured by that.
            std::thread::yield_now();
        }
        let mut count = 0;
        match flood {
            Flood::Tmf => {
                // ABORT TASK, ABORT TASK SET, LOGICAL UNIT RESET, QUERY TASK, QUERY TASK SET.
                for subtype in [0, 6, 7, 1, 6, 7, 5] {
                    let transfer = self.function(subtype);
                    self.session.transact(scsi::CONTROL, &transfer, TIMEOUT)?;
                    count += 1;
                }
            }
            Flood::MemTable => {
                for _ in 0..8 {
                    self.session.share_memory()?;
                    count += 1;
                }
            }
            _ => count = DEPTH as u64,
        }
        for head in heads {
            self.session.wait(queue, head, TIMEOUT)?;
            std::thread::yield_now();
        }
        Ok(count)
    }
}

/// One session of random chains, which ends when the target has stopped its queue.
fn garbage(options: &Options, random: &mut Random) -> Result<u64, Error> {
    /// Chains of a session at most.
    const CHAINS: usize = 64;
    let mut session = Session::open(options.clone())?;
    let at = session.arena.alloc(64 << 10, 4096)?;
    for offset in (0..64 << 10).step_by(8) {
        session.arena.write(at + offset, &random.next().to_le_bytes())?;
    }
    let header = scsi::request(scsi::lun_field(0, 0, true), 1, &[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0]);
    session.arena.write(at, &header)?;
    let mut count = 0;
    for _ in 0..CHAINS {
        let queue = session.queue_mut(scsi::REQUESTS)?;
        let size = queue.ring.at().size;
        for index in 0..size {
            let near = random.below(2) == 0;
            let addr =
                if near { at + random.below(64 << 10) } else { random.below(RANDOM_ADDRESSES) };
            let length = 1u64 << random.below(24);
            let next = random.below(u64::from(size) + 2) as u16;
            let flags = (random.next() & 7) as u16;
            queue.ring.set_desc(index, Desc::new(addr, length as u32, flags, next))?;
        }
        for _ in 0..=random.below(8) {
            queue.ring.add(random.below(u64::from(size)) as u16);
            count += 1;
        }
        session.publish(scsi::REQUESTS)?;
        session.strays(scsi::REQUESTS)?;
        if !session.is_alive() {
            break;
        }
    }
    Ok(count)
}
