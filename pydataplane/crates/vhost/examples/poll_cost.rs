//! What a request costs in the poller, from ring to ring, with all below it: nanoseconds of thread CPU time of a
//! READ(10) and a WRITE(10) of 4 KiB, 32 at a time: `cargo run --release -p vhost-scsi --example poll_cost`.
//!
//! `poll_cost [below] null|later|malloc|file read|write COUNT` does so many and says nothing, for what counts
//! instructions (`python -m tests.bench.instructions`). `null` ends each at once and moves no data, `later` is asked
//! once more for each batch, `malloc` is in memory, and `file` a file on tmpfs. `below` is the same without the
//! poller: ring, SCSI and bdev alone.
//!
//! The thread is driver and device: ring of 256, chains in tables of their own, an in-flight region, everything in the
//! cache; the driver looks for what ended by itself, and wants no calls.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

use bdev::{
    Bdev, Channel, Completion, Features, FileBdev, FileKind, FileOptions, Geometry, Io, Malloc,
    MallocOptions, Null, OpenError, Submit,
};
use guestmem::{GuestMemory, GuestRange};
use reactor::IoContext;
use rustix::time::{ClockId, clock_gettime};
use scsi::{CDB_LEN, Lun, LunOptions, LunShared, Outcome, Status, Task};
use uuid::Uuid;
use vhost_scsi::PollerAlone;
use virtqueue::{
    AddressSpace, Desc, Head, InflightRegion, MAX_SEGMENTS, QueueConfig, Segments, SplitQueue,
};

const KINDS: [&str; 4] = ["null", "later", "malloc", "file"];
const OPERATIONS: [&str; 2] = ["read", "write"];
/// Requests of each line where nobody says how many.
const REQUESTS: usize = 2_000_000;
/// Requests that come at a time.
const BATCH: u16 = 32;

const SIZE: u16 = 256;
const DESC: u64 = 0x1_0000;
const AVAIL: u64 = 0x2_0000;
const USED: u64 = 0x3_0000;
const TABLES: u64 = 0x4_0000;
/// Header and response of each request.
const HEADERS: u64 = 0x10_0000;
const DATA: u64 = 1 << 32;
/// `struct virtio_scsi_req_cmd` and `virtio_scsi_resp_cmd`, with `cdb_size` 32 and `sense_size` 96 (virtio 1.2
/// 5.6.6.1).
const HEADER_LEN: usize = 51;
const RESPONSE_LEN: usize = 108;
/// What of a response is in front of its sense data; all of it 0: OK, GOOD, and no data left.
const STATUS_LEN: usize = 12;
/// Where the response is behind its header.
const RESPONSE_AT: u64 = 64;

const BLOCK: u32 = 512;
const IO_BLOCKS: u32 = 8;
const IO_BYTES: u32 = BLOCK * IO_BLOCKS;
/// A place for each request of the ring.
const BLOCKS: u64 = SIZE as u64 * IO_BLOCKS as u64;

/// A disk that has ended what it was given when it is asked the next time.
struct Later;

impl Bdev for Later {
    fn name(&self) -> &str {
        "later"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn product_name(&self) -> &'static str {
        "Later"
    }
    fn geometry(&self) -> Geometry {
        Geometry { block_size: BLOCK, physical_block_size: BLOCK, num_blocks: BLOCKS }
    }
    fn features(&self) -> Features {
        Features { fua: true, ..Features::default() }
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(LaterChannel { tags: Vec::with_capacity(BATCH.into()) }))
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

struct LaterChannel {
    tags: Vec<u64>,
}

impl Channel for LaterChannel {
    #[inline(never)]
    fn submit(&mut self, io: &Io) -> Submit {
        self.tags.push(io.tag);
        Submit::Pending
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let ended = |tag| Completion { tag, result: Ok(()), ticks: 0, ended: 0 };
        let count = self.tags.len() as u32;
        done.extend(self.tags.drain(..).map(ended));
        count
    }
}

/// A disk, and the file that it is in.
type Disk = (Arc<dyn Bdev>, Option<tempfile::NamedTempFile>);

fn disk(kind: &str) -> Result<Disk, Box<dyn Error>> {
    let name = kind.to_owned();
    Ok(match kind {
        "null" => (Null::create(kind, BLOCK, BLOCKS, None)?, None),
        "later" => (Arc::new(Later), None),
        "malloc" => {
            let options = MallocOptions {
                name,
                block_size: BLOCK,
                physical_block_size: 0,
                num_blocks: BLOCKS,
                uuid: None,
            };
            (Malloc::create(options)?, None)
        }
        "file" => {
            let file = tempfile::NamedTempFile::new_in("/dev/shm")?;
            file.as_file().set_len(BLOCKS * u64::from(BLOCK))?;
            let options = FileOptions {
                name,
                path: file.path().into(),
                block_size: Some(BLOCK),
                read_only: false,
                uuid: None,
                kind: FileKind::Uring,
            };
            (FileBdev::create(options)?, Some(file))
        }
        other => return Err(format!("{other}: not one of {KINDS:?}").into()),
    })
}

/// Bytes of a guest's memory.
fn range(memory: &GuestMemory, at: u64, len: usize) -> Result<GuestRange<'_>, String> {
    memory.range(at, len as u64).ok_or_else(|| format!("the guest has no memory at {at:#x}"))
}

/// The memory of a guest and what its driver has made there.
struct Driver {
    memory: Arc<GuestMemory>,
    /// The available index.
    index: u16,
    config: QueueConfig,
}

impl Driver {
    /// All requests of a ring, each in its place.
    fn new(write: bool) -> Result<Self, Box<dyn Error>> {
        let memory = Arc::new(GuestMemory::memfd(&[(0, 256 << 20), (DATA, 256 << 20)])?);
        let avail = range(&memory, AVAIL, 0x1000)?;
        let put = |table: u64, i: u64, desc: Desc| -> Result<(), Box<dyn Error>> {
            Ok(range(&memory, table + i * 16, 16)?.put(0, desc)?)
        };
        for i in 0..SIZE {
            let at = u64::from(i);
            let (table, header, data) = (TABLES + at * 64, HEADERS + at * 256, DATA + at * 4096);
            put(DESC, at, Desc::new(table, 48, Desc::INDIRECT, 0))?;
            let response = header + RESPONSE_AT;
            let (next, last) = (Desc::WRITE | Desc::NEXT, Desc::WRITE);
            put(table, 0, Desc::new(header, HEADER_LEN as u32, Desc::NEXT, 1))?;
            if write {
                put(table, 1, Desc::new(data, IO_BYTES, Desc::NEXT, 2))?;
                put(table, 2, Desc::new(response, RESPONSE_LEN as u32, last, 0))?;
            } else {
                put(table, 1, Desc::new(response, RESPONSE_LEN as u32, next, 2))?;
                put(table, 2, Desc::new(data, IO_BYTES, last, 0))?;
            }
            let mut bytes = [0u8; HEADER_LEN];
            // LUN 0 of target 0, as Linux writes it.
            (bytes[0], bytes[2]) = (1, 0x40);
            let cdb = &mut bytes[HEADER_LEN - CDB_LEN..];
            cdb[0] = if write { 0x2A } else { 0x28 };
            cdb[2..6].copy_from_slice(&(u32::from(i) * IO_BLOCKS).to_be_bytes());
            cdb[8] = IO_BLOCKS as u8;
            range(&memory, header, HEADER_LEN)?.write_slice(0, &bytes)?;
            range(&memory, response, STATUS_LEN)?.write_slice(0, &[0xFF; STATUS_LEN])?;
            avail.put(4 + usize::from(i) * 2, i)?;
        }
        let config = QueueConfig {
            size: SIZE,
            space: AddressSpace::Guest,
            desc: DESC,
            avail: AVAIL,
            used: USED,
            used_log: None,
            event_idx: true,
            indirect: true,
            next_avail: 0,
        };
        Ok(Driver { memory, index: 0, config })
    }

    /// The ring, as the device has it.
    fn queue(&self) -> Result<SplitQueue, Box<dyn Error>> {
        let mut queue = SplitQueue::new(Arc::clone(&self.memory), &self.config)?;
        let (file, bytes) = (InflightRegion::make(1, SIZE)?, InflightRegion::bytes(1, SIZE));
        let region = InflightRegion::map(&GuestMemory::empty(), file, 0, bytes, 1, SIZE)?;
        queue.track(region.queue(0).ok_or("the region is of one queue")?)?;
        Ok(queue)
    }

    /// Asks for so many requests, a batch at a time; `turn` is the device's.
    fn run(&mut self, count: usize, mut turn: impl FnMut()) -> Result<(), Box<dyn Error>> {
        let (avail, used) = (range(&self.memory, AVAIL, 4)?, range(&self.memory, USED, 4)?);
        for _ in 0..count / usize::from(BATCH) {
            self.index = self.index.wrapping_add(BATCH);
            avail.store_release_u16(2, self.index)?;
            while used.load_acquire_u16(2)? != self.index {
                turn();
            }
        }
        Ok(())
    }

    /// Whether each request of the ring was answered OK and GOOD, all its data moved.
    fn is_content(&self) -> Result<bool, Box<dyn Error>> {
        for i in 0..u64::from(SIZE) {
            let mut response = [0xFF; STATUS_LEN];
            let place = HEADERS + i * 256 + RESPONSE_AT;
            range(&self.memory, place, STATUS_LEN)?.read_slice(0, &mut response)?;
            if response != [0; STATUS_LEN] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Ring, SCSI and bdev, without the poller.
struct Below {
    queue: SplitQueue,
    lun: Lun,
    heads: [Head; BATCH as usize],
    requests: Vec<(Segments, Task)>,
    done: Vec<Completion>,
}

impl Below {
    fn new(queue: SplitQueue, lun: Lun) -> Self {
        let segments = Segments::many(SIZE.into(), MAX_SEGMENTS);
        let requests = segments.enumerate().map(|(tag, room)| (room, Task::new(tag as u64)));
        let (heads, done) = Default::default();
        Below { queue, lun, heads, requests: requests.collect(), done }
    }

    fn turn(&mut self) {
        let taken = self.queue.pop(&mut self.heads).expect("the driver keeps the rules");
        for n in 0..taken {
            let head = self.heads[n];
            let (segments, task) = &mut self.requests[usize::from(head.index())];
            self.queue.walk(&head, segments).expect("the driver keeps the rules");
            let mut header = [0u8; HEADER_LEN];
            let halves = segments.split(HEADER_LEN, RESPONSE_LEN).expect("both are long enough");
            halves.readable.0.copy_to_slice(0, &mut header);
            let cdb = header.last_chunk::<CDB_LEN>().expect("it is longer");
            task.prepare(black_box(cdb), halves.readable.1, halves.writable.1);
            let outcome = self.lun.start(task);
            self.end(head.index(), outcome);
        }
        self.done.reserve(BATCH.into());
        self.lun.poll(&mut self.done);
        for n in 0..self.done.len() {
            let Completion { tag, result, .. } = self.done[n];
            let outcome = self.lun.resume(&mut self.requests[tag as usize].1, result);
            self.end(tag as u16, outcome);
        }
        self.done.clear();
        black_box(self.queue.publish());
    }

    fn end(&mut self, head: u16, outcome: Outcome) {
        let Outcome::Done(answer) = outcome else { return };
        let (segments, _) = &self.requests[usize::from(head)];
        let mut response = [0u8; STATUS_LEN];
        response[10] = answer.status as u8;
        segments.writable().copy_from_slice(0, &response);
        self.queue.push_used(head, segments.writable_len());
    }
}

fn cpu_ns() -> u64 {
    let spent = clock_gettime(ClockId::ThreadCPUTime);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}

/// Does so many requests; returns by how much `now` moved meanwhile.
fn run(
    kind: &str,
    below: bool,
    op: &str,
    count: usize,
    now: fn() -> u64,
) -> Result<u64, Box<dyn Error>> {
    let io = IoContext::new()?;
    let (bdev, _file) = disk(kind)?;
    let shared = LunShared::new(bdev, LunOptions::default())?;
    let channel = shared.bdev().open(&io)?;
    let mut lun = Lun::new(Arc::clone(&shared), shared.connect(), channel);
    let mut task = Task::new(0);
    task.prepare(&[0; CDB_LEN], guestmem::Sg::EMPTY, guestmem::Sg::EMPTY);
    let unit_attention = lun.start(&mut task);
    assert!(matches!(unit_attention, Outcome::Done(r) if r.status == Status::CheckCondition));

    let mut driver = Driver::new(op == "write")?;
    let queue = driver.queue()?;
    let before;
    if below {
        let mut below = Below::new(queue, lun);
        before = now();
        driver.run(count, || below.turn())?;
    } else {
        let mut poller = PollerAlone::new(queue, driver.config, lun)?;
        before = now();
        driver.run(count, || {
            poller.turn();
        })?;
    }
    let spent = now() - before;
    if count >= SIZE.into() && !driver.is_content()? {
        return Err("a request failed".into());
    }
    Ok(spent)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).peekable();
    let below = arguments.next_if_eq("below").is_some();
    if let (Some(kind), Some(op), Some(count)) =
        (arguments.next(), arguments.next(), arguments.next())
    {
        // valgrind has no clock that rustix could ask.
        run(&kind, below, &op, count.parse()?, || 0)?;
        return Ok(());
    }
    for kind in KINDS {
        for op in OPERATIONS {
            let [all, below] = [false, true].map(|below| run(kind, below, op, REQUESTS, cpu_ns));
            let [all, below] = [all?, below?].map(|ns| ns as f64 / REQUESTS as f64);
            println!("{op} of {kind}: {all:.1} ns, of which below the poller {below:.1}");
        }
    }
    Ok(())
}
