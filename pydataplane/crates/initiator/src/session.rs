//! A device as its driver sees it: connection, memory, queues. What is in flight in these is in
//! `requests`.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guestmem::DirtyLog;
use serde::{Deserialize, Serialize};
use virtqueue::Desc;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::arena::{Arena, USER_BASE};
use crate::connection::{Connection, Vring, feature};
use crate::error::Error;
use crate::inflight::{Inflight, QueueState};
use crate::ring::{Ring, Used};
use crate::scsi::{self, Event};

mod requests;

/// What is at the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// virtio-scsi.
    #[default]
    Scsi,
    /// virtio-blk.
    Blk,
}

/// How to be a driver.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Where the target listens.
    pub socket: PathBuf,
    /// The device.
    pub kind: Kind,
    /// Request queues.
    pub queues: usize,
    /// Descriptors of each queue, a power of two.
    pub queue_size: u16,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Guest memory in huge pages of 2 MiB.
    pub hugepages: bool,
    /// Acknowledge EVENT_IDX if offered.
    pub event_idx: bool,
    /// Acknowledge INDIRECT_DESC if offered, and use it.
    pub indirect: bool,
    /// Buffers in the event queue (virtio-scsi).
    pub event_buffers: u16,
    /// Send memory with ADD_MEM_REG instead of SET_MEM_TABLE.
    pub mem_slots: bool,
    /// More feature bits to acknowledge, offered or not.
    pub force_features: u64,
    /// Keep what is in flight in a region of the target's, if it has one (INFLIGHT_SHMFD).
    pub inflight: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            socket: PathBuf::new(),
            kind: Kind::Scsi,
            queues: 1,
            queue_size: 128,
            memory: 64 << 20,
            hugepages: false,
            event_idx: true,
            indirect: true,
            event_buffers: 8,
            mem_slots: false,
            force_features: 0,
            inflight: true,
        }
    }
}

/// The buffers of one chain: each entry is one descriptor.
#[derive(Clone, Debug, Default)]
pub struct Transfer {
    /// Device-readable buffers with their bytes.
    pub readable: Vec<Vec<u8>>,
    /// Lengths of the device-writable buffers.
    pub writable: Vec<u32>,
}

/// A chain that came back.
#[derive(Clone, Debug)]
pub struct Done {
    /// Bytes that the device says it wrote.
    pub len: u32,
    /// All writable buffers, one after the other.
    pub bytes: Vec<u8>,
    /// Time from publishing to seeing it used.
    pub elapsed: Duration,
    /// Whether the device called for it (or for another since the last look).
    pub called: bool,
}

#[derive(Debug)]
struct Pending {
    heads: Vec<u16>,
    writable: Vec<(u64, u32)>,
    started: Instant,
    done: Option<(u32, Duration)>,
}

/// One queue with its descriptors and notification descriptors.
pub(crate) struct Queue {
    pub(crate) ring: Ring,
    pub(crate) kick: EventFd,
    call: EventFd,
    free: Vec<u16>,
    pending: HashMap<u16, Pending>,
    strays: Vec<Used>,
    calls: u64,
}

/// A driver's session with a target.
pub struct Session {
    /// How it was opened.
    pub options: Options,
    /// Guest memory.
    pub arena: Arena,
    connection: Option<Connection>,
    inflight: Option<Inflight>,
    pub(crate) queues: Vec<Queue>,
    /// Guest address of the first event buffer.
    events_at: u64,
    events: Vec<Event>,
    log: Option<(OwnedFd, DirtyLog)>,
    /// Where buffers of requests start.
    mark: u64,
}

fn eventfd() -> Result<EventFd, Error> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(Error::os("make an eventfd"))
}

impl Session {
    /// Makes guest memory and queues, connects, and starts all queues.
    pub fn open(options: Options) -> Result<Session, Error> {
        let fixed = if options.kind == Kind::Scsi { scsi::REQUESTS } else { 0 };
        let mut arena = Arena::new(options.memory, options.hugepages)?;
        let mut at = Vec::new();
        for _ in 0..fixed + options.queues {
            at.push(arena.alloc(Ring::bytes(options.queue_size), 4096)?);
        }
        let events_at = arena.alloc(u64::from(options.event_buffers) * 16, 4096)?;
        let mark = arena.mark();
        let mut session = Session {
            options,
            arena,
            connection: None,
            inflight: None,
            queues: Vec::new(),
            events_at,
            events: Vec::new(),
            log: None,
            mark,
        };
        let connection = session.negotiate()?;
        let event_idx = connection.features & feature::EVENT_IDX != 0;
        session.connection = Some(connection);
        for gpa in at {
            let layout = Ring::layout(gpa, session.options.queue_size);
            session.queues.push(Queue {
                ring: Ring::new(session.arena.memory().clone(), layout, event_idx)?,
                kick: eventfd()?,
                call: eventfd()?,
                free: (0..session.options.queue_size).rev().collect(),
                pending: HashMap::new(),
                strays: Vec::new(),
                calls: 0,
            });
        }
        session.share_inflight(false)?;
        session.share_memory()?;
        for index in 0..session.queues.len() {
            session.start(index, 0)?;
        }
        session.post_events()?;
        Ok(session)
    }

    fn negotiate(&self) -> Result<Connection, Error> {
        let mut wanted = feature::VERSION_1 | feature::SCSI_HOTPLUG | feature::SCSI_CHANGE;
        if self.options.kind == Kind::Blk {
            wanted = feature::VERSION_1
                | feature::BLK_FLUSH
                | feature::BLK_MQ
                | feature::BLK_DISCARD
                | feature::BLK_WRITE_ZEROES;
        }
        if self.options.event_idx {
            wanted |= feature::EVENT_IDX;
        }
        if self.options.indirect {
            wanted |= feature::INDIRECT;
        }
        let mut connection = Connection::open(&self.options.socket, wanted)?;
        if self.options.force_features != 0 {
            let features = connection.features | self.options.force_features;
            connection.set_features(features)?;
        }
        Ok(connection)
    }

    /// The connection, if there is one.
    pub fn connection(&mut self) -> Result<&mut Connection, Error> {
        self.connection.as_mut().ok_or_else(|| Error::Usage("not connected".into()))
    }

    /// Hangs up. Memory, rings and what is in flight stay as they are.
    pub fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Connects again with the same memory. With `keep`, rings go on at the used index, and the
    /// in-flight region is given again, as QEMU does after a back end came back; without, they start
    /// anew and in-flight requests are forgotten.
    pub fn reconnect(&mut self, keep: bool) -> Result<(), Error> {
        self.connection = None;
        let connection = self.negotiate()?;
        let event_idx = connection.features & feature::EVENT_IDX != 0;
        self.connection = Some(connection);
        self.share_inflight(keep)?;
        self.share_memory()?;
        for index in 0..self.queues.len() {
            let base = if keep {
                let used = self.queues[index].ring.at().used;
                self.arena.range(used, 4)?.load_acquire_u16(2)?
            } else {
                let queue = &mut self.queues[index];
                queue.ring = Ring::new(self.arena.memory().clone(), queue.ring.at(), event_idx)?;
                queue.free = (0..self.options.queue_size).rev().collect();
                queue.pending.clear();
                queue.strays.clear();
                0
            };
            self.start(index, base)?;
        }
        if !keep {
            self.post_events()?;
        }
        Ok(())
    }

    /// Gives the in-flight region to the target: the one that is there with `keep`, else a new one.
    fn share_inflight(&mut self, keep: bool) -> Result<(), Error> {
        let Session { connection, inflight, options, queues, .. } = self;
        let connection = connection.as_mut().ok_or_else(|| Error::Usage("not connected".into()))?;
        if !options.inflight {
            return Ok(());
        }
        if !keep || inflight.is_none() {
            *inflight = connection.get_inflight(queues.len() as u16, options.queue_size)?;
        }
        inflight.as_ref().map_or(Ok(()), |region| connection.set_inflight(region))
    }

    /// What the in-flight region says of each queue; `None`: there is none.
    pub fn in_flight(&self) -> Result<Option<Vec<QueueState>>, Error> {
        let Some(region) = &self.inflight else { return Ok(None) };
        (0..self.queues.len() as u16)
            .map(|index| region.state(index))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Tells the target the whole memory table (again).
    pub fn share_memory(&mut self) -> Result<(), Error> {
        let slots = self.options.mem_slots;
        let Session { connection, arena, .. } = self;
        let connection = connection.as_mut().ok_or_else(|| Error::Usage("not connected".into()))?;
        if slots {
            arena.table().try_for_each(|(spec, fd)| connection.add_mem_region(&spec, fd))
        } else {
            connection.set_mem_table(arena.table())
        }
    }

    /// One more region at run time (ADD_MEM_REG, or a whole new table).
    pub fn add_region(&mut self, guest_addr: u64, bytes: u64) -> Result<(), Error> {
        let spec = self.arena.add_region(guest_addr, bytes)?;
        if !self.options.mem_slots {
            return self.share_memory();
        }
        let Session { connection, arena, .. } = self;
        let connection = connection.as_mut().ok_or_else(|| Error::Usage("not connected".into()))?;
        let (_, fd) = arena.table().find(|(s, _)| *s == spec).ok_or(Error::NoRoom { wanted: 0 })?;
        connection.add_mem_region(&spec, fd)
    }

    /// Takes a region away at run time (REM_MEM_REG, or a whole new table).
    pub fn remove_region(&mut self, guest_addr: u64) -> Result<(), Error> {
        let spec = self.arena.remove_region(guest_addr)?;
        if self.options.mem_slots {
            return self.connection()?.remove_mem_region(&spec);
        }
        self.share_memory()
    }

    fn vring(&self, index: usize) -> Result<Vring, Error> {
        let at = self.queue(index)?.ring.at();
        Ok(Vring {
            size: at.size,
            desc: USER_BASE + at.desc,
            avail: USER_BASE + at.avail,
            used: USER_BASE + at.used,
            log: self.log.as_ref().map(|_| at.used),
        })
    }

    /// Starts queue `index` at `base`.
    pub fn start(&mut self, index: usize, base: u16) -> Result<(), Error> {
        let vring = self.vring(index)?;
        let Session { connection, queues, .. } = self;
        let connection = connection.as_mut().ok_or_else(|| Error::Usage("not connected".into()))?;
        let queue = &queues[index];
        connection.set_vring(index, &vring, base)?;
        connection.set_vring_fds(index, &queue.kick, &queue.call)?;
        connection.enable(index, true)
    }

    /// Stops queue `index`; the target has drained it when this returns. Where it got to.
    pub fn stop(&mut self, index: usize) -> Result<u16, Error> {
        self.queue(index)?;
        self.connection()?.get_vring_base(index)
    }

    /// Starts or stops logging of writes to guest memory, as QEMU does for migration.
    pub fn set_logging(&mut self, on: bool) -> Result<(), Error> {
        let features = self.connection()?.features;
        if on {
            let top = self.arena.table().map(|(s, _)| s.guest_addr + s.size).max().unwrap_or(0);
            let bytes = (top / guestmem::LOG_PAGE).div_ceil(8).next_multiple_of(4096);
            let fd = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC)
                .and_then(|fd| rustix::fs::ftruncate(&fd, bytes).map(|()| fd))
                .map_err(|e| Error::os("make a dirty log")(e.into()))?;
            let log =
                DirtyLog::new(fd.as_fd(), 0, bytes).map_err(|e| Error::Usage(e.to_string()))?;
            self.connection()?.set_log(fd.as_fd(), bytes)?;
            self.connection()?.set_features(features | feature::LOG_ALL)?;
            self.log = Some((fd, log));
        } else {
            self.connection()?.set_features(features & !feature::LOG_ALL)?;
            self.log = None;
        }
        for index in 0..self.queues.len() {
            let vring = self.vring(index)?;
            self.connection()?.set_vring_addr(index, &vring)?;
        }
        Ok(())
    }

    /// Guest addresses of the pages that the target marked as written.
    pub fn dirty_pages(&self) -> Vec<u64> {
        let Some((_, log)) = &self.log else { return Vec::new() };
        let pages = self.arena.table().flat_map(|(s, _)| {
            (s.guest_addr..s.guest_addr + s.size).step_by(guestmem::LOG_PAGE as usize)
        });
        pages.filter(|gpa| log.is_marked(*gpa)).collect()
    }

    pub(crate) fn queue(&self, index: usize) -> Result<&Queue, Error> {
        self.queues.get(index).ok_or(Error::NoQueue(index))
    }

    pub(crate) fn queue_mut(&mut self, index: usize) -> Result<&mut Queue, Error> {
        self.queues.get_mut(index).ok_or(Error::NoQueue(index))
    }

    fn indirect(&self) -> bool {
        let features = self.connection.as_ref().map_or(0, |c| c.features);
        self.options.indirect && features & feature::INDIRECT != 0
    }

    /// Whether the target keeps its end of the connection open.
    pub fn is_alive(&mut self) -> bool {
        self.connection().and_then(|c| c.probe()).is_ok()
    }

    fn post_events(&mut self) -> Result<(), Error> {
        if self.options.kind != Kind::Scsi {
            return Ok(());
        }
        for i in 0..self.options.event_buffers.min(self.options.queue_size) {
            self.post_event(i)?;
        }
        self.publish(scsi::EVENTS)
    }

    fn post_event(&mut self, i: u16) -> Result<(), Error> {
        let gpa = self.events_at + u64::from(i) * scsi::EVENT_LEN as u64;
        self.arena.write(gpa, &[0; scsi::EVENT_LEN])?;
        let ring = &mut self.queue_mut(scsi::EVENTS)?.ring;
        ring.set_desc(i, Desc::new(gpa, scsi::EVENT_LEN as u32, Desc::WRITE, 0))?;
        ring.add(i);
        Ok(())
    }

    /// Events that came, waiting up to `timeout` for the first; their buffers are posted again
    /// if `repost`.
    pub fn events(&mut self, timeout: Duration, repost: bool) -> Result<Vec<Event>, Error> {
        if self.options.kind != Kind::Scsi {
            return Err(Error::Usage("a blk device has no events".into()));
        }
        self.reap(scsi::EVENTS)?;
        if self.queues[scsi::EVENTS].strays.is_empty() {
            self.wait_used(scsi::EVENTS, Instant::now() + timeout)?;
        }
        for used in std::mem::take(&mut self.queues[scsi::EVENTS].strays) {
            let gpa = self.events_at + u64::from(used.head) * scsi::EVENT_LEN as u64;
            let bytes = self.arena.read(gpa, scsi::EVENT_LEN)?;
            self.events.extend(Event::parse(&bytes));
            if repost {
                self.post_event(used.head as u16)?;
            }
        }
        self.publish(scsi::EVENTS)?;
        Ok(std::mem::take(&mut self.events))
    }

    /// The LUN's or device's size: (blocks, bytes of a block).
    pub fn capacity(&mut self, target: u8, lun: u16) -> Result<(u64, u32), Error> {
        let timeout = Duration::from_secs(10);
        if self.options.kind == Kind::Blk {
            let config = self.connection()?.get_config(0, crate::blk::CONFIG_LEN)?;
            return Ok((crate::blk::capacity(&config) / crate::blk::SECTOR, 512));
        }
        // The first command of a new session gets a unit attention; a few may be pending.
        for _ in 0..8 {
            let lun = scsi::lun_field(target, lun, true);
            let header = scsi::request(lun, 0, &scsi::read_capacity_16());
            let transfer = Transfer {
                readable: vec![header.to_vec()],
                writable: vec![scsi::RESPONSE_LEN as u32, 32],
            };
            let done = self.transact(scsi::REQUESTS, &transfer, timeout)?;
            let response = scsi::Response::parse(&done.bytes)
                .ok_or_else(|| Error::Usage("a short response".into()))?;
            if response.response != 0 {
                let code = response.response;
                return Err(Error::Usage(format!(
                    "target {target}: response {code}, no such LUN?"
                )));
            }
            if response.status == 0 {
                let data = &done.bytes[scsi::RESPONSE_LEN..];
                let last = u64::from_be_bytes(data[..8].try_into().unwrap_or_default());
                let block = u32::from_be_bytes(data[8..12].try_into().unwrap_or_default());
                return Ok((last.saturating_add(1), block));
            }
        }
        Err(Error::Usage(format!("target {target}: READ CAPACITY(16) keeps failing")))
    }
}
