//! A guest: memory that is shared with the target, and a driver of split rings in it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use guestmem::{GuestMemory, RegionSpec};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::peer::*;

pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_LOG_ALL: u64 = 1 << 26;
/// What Linux negotiates through QEMU.
pub const LINUX: u64 = 0b110 | F_INDIRECT | F_EVENT_IDX | F_PROTOCOL | 1 << 32;

/// Longest wait for the target before a test fails.
pub const DEADLINE: Duration = Duration::from_secs(20);
/// Guest memory below 4 GiB, in bytes: more than the buffers of all requests that a test has in flight.
const LOW: u64 = 128 << 20;
/// The peer's own address of guest address 0.
pub const USER: u64 = 0x7000_0000_0000;
/// Descriptors of every queue.
pub const SIZE: u16 = 256;
/// Queues that a guest may have.
const QUEUES: usize = 18;
/// Where the rings of queue 0 are; those of the others follow at [`RINGS`] bytes each.
const RINGS: u64 = 0x1_0000;
/// Where buffers are.
const BUFFERS: u64 = 0x20_0000;

/// The response and data of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    pub response: u8,
    pub status: u8,
    pub residual: u32,
    pub sense: Vec<u8>,
    pub data: Vec<u8>,
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub addr: u64,
    pub len: u32,
    pub write: bool,
}

struct Ring {
    /// Heads given to the device so far.
    avail: u16,
    /// Heads taken back so far.
    used: u16,
    free: Vec<u16>,
    kick: OwnedFd,
    call: OwnedFd,
}

pub struct Guest {
    pub peer: Peer,
    pub memory: GuestMemory,
    pub features: u64,
    /// Memory table and its files, as they were told.
    pub regions: Vec<(RegionSpec, OwnedFd)>,
    rings: Vec<Option<Ring>>,
    next_buffer: u64,
}

/// A memory region of its own file.
pub fn region(guest_addr: u64, size: u64) -> (RegionSpec, OwnedFd) {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    (RegionSpec { guest_addr, size, user_addr: USER + guest_addr, mmap_offset: 0 }, fd)
}

pub fn spec_bytes(spec: &RegionSpec) -> Vec<u8> {
    longs(&[spec.guest_addr, spec.size, spec.user_addr, spec.mmap_offset])
}

/// A connection after the handshake.
fn shake_hands(path: &Path, features: u64) -> Peer {
    let mut peer = Peer::connect(path);
    peer.send(SET_OWNER, &[], &[]);
    let offered = peer.get_u64(GET_FEATURES);
    assert_eq!(features & !offered, 0, "not offered: {:#x}", features & !offered);
    let protocol = peer.get_u64(GET_PROTOCOL_FEATURES);
    peer.send(SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
    // What QEMU does: the ring features follow when the driver has chosen.
    peer.send(SET_FEATURES, &features.to_le_bytes(), &[]);
    peer
}

impl Guest {
    /// A guest after the handshake, with control, event and `request_queues` request queues.
    pub fn start(path: &Path, features: u64, request_queues: usize) -> Guest {
        let mut guest = Guest::connect(path, features);
        for queue in 0..request_queues + 2 {
            guest.start_queue(queue);
        }
        guest
    }

    /// A guest after the handshake, without queues.
    pub fn connect(path: &Path, features: u64) -> Guest {
        let peer = shake_hands(path, features);
        let regions = vec![region(0, LOW)];
        let copies = regions.iter().map(|(s, fd)| (*s, fd.try_clone().unwrap())).collect();
        let memory = GuestMemory::map(copies).unwrap();
        let rings = (0..QUEUES).map(|_| None).collect();
        let mut guest = Guest { peer, memory, features, regions, rings, next_buffer: BUFFERS };
        guest.tell_memory();
        guest
    }

    /// The same guest, whose QEMU connects anew: without queues until they are described.
    pub fn reconnect(&mut self, path: &Path) {
        self.peer = shake_hands(path, self.features);
        self.tell_memory();
    }

    /// A guest that has said nothing yet, but has rings.
    pub fn unconnected(path: &Path) -> Guest {
        let peer = Peer::connect(path);
        let regions = vec![region(0, LOW)];
        let copies = regions.iter().map(|(s, fd)| (*s, fd.try_clone().unwrap())).collect();
        let memory = GuestMemory::map(copies).unwrap();
        let kick = || eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let ring = |_| {
            let free = (0..SIZE).rev().collect();
            Some(Ring { avail: 0, used: 0, free, kick: kick(), call: kick() })
        };
        let rings = (0..8).map(ring).collect();
        Guest { peer, memory, features: LINUX, regions, rings, next_buffer: BUFFERS }
    }

    /// SET_MEM_TABLE with the regions as they are.
    pub fn tell_memory(&mut self) {
        let mut body = words(&[self.regions.len() as u32, 0]);
        self.regions.iter().for_each(|(spec, _)| body.extend(spec_bytes(spec)));
        let fds: Vec<_> = self.regions.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.peer.ask(SET_MEM_TABLE, &body, &fds);
    }

    pub fn rings_at(queue: usize) -> u64 {
        RINGS * (queue as u64 + 1)
    }

    /// Sets a queue up from scratch and starts it, as a driver does after a reset.
    pub fn start_queue(&mut self, queue: usize) {
        self.make_queue(queue);
        self.describe_queue(queue, 0, false);
    }

    /// Sets a queue up from scratch, which the target is not told.
    pub fn make_queue(&mut self, queue: usize) {
        let rings = self.memory.range(Self::rings_at(queue), RINGS).unwrap();
        rings.fill(0);
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let (kick, call) = (eventfd(0, flags).unwrap(), eventfd(0, flags).unwrap());
        self.rings[queue] =
            Some(Ring { avail: 0, used: 0, free: (0..SIZE).rev().collect(), kick, call });
    }

    /// Tells the target about a queue that goes on at `base`.
    pub fn describe_queue(&mut self, queue: usize, base: u16, logged: bool) {
        let ring = self.rings[queue].as_ref().unwrap();
        let index = queue as u32;
        self.peer.ask(SET_VRING_NUM, &words(&[index, u32::from(SIZE)]), &[]);
        self.peer.ask(SET_VRING_BASE, &words(&[index, u32::from(base)]), &[]);
        self.peer.ask(SET_VRING_ADDR, &address_body(queue, logged), &[]);
        self.peer.vring_fd(SET_VRING_KICK, index, Some(&ring.kick));
        self.peer.vring_fd(SET_VRING_CALL, index, Some(&ring.call));
        if self.features & F_PROTOCOL != 0 {
            self.peer.ask(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
        }
    }

    /// Space for `len` bytes, aligned to 16. Starts over when all was given out: what is in flight must
    /// be less than that, or later requests overwrite what the target has not looked at yet.
    pub fn alloc(&mut self, len: usize) -> u64 {
        if self.next_buffer + len as u64 > LOW {
            self.next_buffer = BUFFERS;
        }
        let at = self.next_buffer;
        self.next_buffer += (len as u64).next_multiple_of(16).max(16);
        at
    }

    pub fn write(&self, addr: u64, bytes: &[u8]) {
        self.memory.range(addr, bytes.len() as u64).unwrap().write_slice(0, bytes).unwrap();
    }

    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.range(addr, len as u64).unwrap().read_slice(0, &mut bytes).unwrap();
        bytes
    }

    fn put_desc(&self, table: u64, at: u16, buffer: &Buffer, flags: u16, next: u16) {
        let mut desc = longs(&[buffer.addr]);
        desc.extend(buffer.len.to_le_bytes());
        desc.extend((flags | if buffer.write { 2 } else { 0 }).to_le_bytes());
        desc.extend(next.to_le_bytes());
        self.write(table + 16 * u64::from(at), &desc);
    }

    /// Puts a chain of `buffers` into the descriptor table; returns its head.
    pub fn chain(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let ring = self.rings[queue].as_mut().unwrap();
        let indexes: Vec<u16> = buffers.iter().map(|_| ring.free.pop().unwrap()).collect();
        for (n, buffer) in buffers.iter().enumerate() {
            let (flags, next) = match indexes.get(n + 1) {
                Some(next) => (1, *next),
                None => (0, 0),
            };
            self.put_desc(Self::rings_at(queue), indexes[n], buffer, flags, next);
        }
        indexes[0]
    }

    /// As `chain`, with one indirect descriptor.
    pub fn indirect(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let table = self.alloc(16 * buffers.len());
        for (n, buffer) in buffers.iter().enumerate() {
            let last = n + 1 == buffers.len();
            self.put_desc(table, n as u16, buffer, u16::from(!last), n as u16 + 1);
        }
        let ring = self.rings[queue].as_mut().unwrap();
        let head = ring.free.pop().unwrap();
        let whole = Buffer { addr: table, len: 16 * buffers.len() as u32, write: false };
        self.put_desc(Self::rings_at(queue), head, &whole, 4, 0);
        head
    }

    /// Makes `head` available and kicks, as a driver without suppression does.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let rings = Self::rings_at(queue);
        let ring = self.rings[queue].as_mut().unwrap();
        let slot = ring.avail % SIZE;
        ring.avail = ring.avail.wrapping_add(1);
        let (avail, idx) = (rings + 0x4000, ring.avail);
        self.write(avail + 4 + 2 * u64::from(slot), &head.to_le_bytes());
        let range = self.memory.range(avail, 4).unwrap();
        range.store_release_u16(2, idx).unwrap();
        self.kick(queue);
    }

    pub fn kick(&self, queue: usize) {
        let ring = self.rings[queue].as_ref().unwrap();
        rustix::io::write(&ring.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Frees `count` descriptors from `head` on: those of a chain that was given back.
    pub fn free(&mut self, queue: usize, head: u16, count: usize) {
        let mut at = head;
        for _ in 0..count {
            self.rings[queue].as_mut().unwrap().free.push(at);
            let desc = self.read(Self::rings_at(queue) + 16 * u64::from(at), 16);
            at = u16::from_le_bytes([desc[14], desc[15]]);
        }
    }

    /// The next chain in the used ring, if there is one: head and bytes written.
    pub fn try_used(&mut self, queue: usize) -> Option<(u16, u32)> {
        let used = Self::rings_at(queue) + 0x8000;
        let range = self.memory.range(used, 0x1000).unwrap();
        let ring = self.rings[queue].as_mut().unwrap();
        if range.load_acquire_u16(2).unwrap() == ring.used {
            return None;
        }
        let entry: [u32; 2] = range.get(4 + 8 * usize::from(ring.used % SIZE)).unwrap();
        ring.used = ring.used.wrapping_add(1);
        Some((u32::from_le(entry[0]) as u16, u32::from_le(entry[1])))
    }

    /// The next chain in the used ring, waited for.
    pub fn used(&mut self, queue: usize) -> (u16, u32) {
        let since = Instant::now();
        loop {
            if let Some(used) = self.try_used(queue) {
                return used;
            }
            assert!(since.elapsed() < DEADLINE, "nothing came back in queue {queue}");
            std::thread::yield_now();
        }
    }

    /// The used index of a queue as the device wrote it.
    pub fn used_index(&self, queue: usize) -> u16 {
        self.memory.range(Self::rings_at(queue) + 0x8000, 4).unwrap().load_acquire_u16(2).unwrap()
    }

    /// Waits for a call; `false`: none came within `timeout`.
    pub fn called(&self, queue: usize, timeout: Duration) -> bool {
        let ring = self.rings[queue].as_ref().unwrap();
        let mut fds = [PollFd::new(&ring.call, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        poll(&mut fds, Some(&timeout)).unwrap();
        let called = !fds[0].revents().is_empty();
        if called {
            rustix::io::read(&ring.call, &mut [0u8; 8]).unwrap();
        }
        called
    }

    /// Makes a request available. Returns it for [`Guest::finish`].
    pub fn submit(
        &mut self,
        queue: usize,
        lun: [u8; 8],
        id: u64,
        cdb: &[u8],
        data_out: &[u8],
        data_in: usize,
    ) -> Request {
        self.submit_with(0, queue, lun, id, cdb, data_out, data_in)
    }

    /// As `submit`, with the task attribute `attribute`.
    #[allow(clippy::too_many_arguments)]
    pub fn submit_with(
        &mut self,
        attribute: u8,
        queue: usize,
        lun: [u8; 8],
        id: u64,
        cdb: &[u8],
        data_out: &[u8],
        data_in: usize,
    ) -> Request {
        let mut header = lun.to_vec();
        header.extend(id.to_le_bytes());
        header.extend([attribute, 0, 0]);
        header.extend(cdb);
        header.resize(51, 0);
        let head_at = self.alloc(header.len());
        self.write(head_at, &header);
        let mut buffers = vec![Buffer { addr: head_at, len: 51, write: false }];
        if !data_out.is_empty() {
            let at = self.alloc(data_out.len());
            self.write(at, data_out);
            buffers.push(Buffer { addr: at, len: data_out.len() as u32, write: false });
        }
        let response = self.alloc(108);
        self.write(response, &[0xee; 108]);
        buffers.push(Buffer { addr: response, len: 108, write: true });
        let data = self.alloc(data_in);
        if data_in > 0 {
            self.write(data, &vec![0xee; data_in]);
            buffers.push(Buffer { addr: data, len: data_in as u32, write: true });
        }
        let (head, descs) = match self.features & F_INDIRECT {
            0 => (self.chain(queue, &buffers), buffers.len()),
            _ => (self.indirect(queue, &buffers), 1),
        };
        self.offer(queue, head);
        Request { queue, head, descs, response, data, data_in }
    }

    /// The reply to a request whose chain was given back with `written` bytes.
    pub fn reply(&mut self, request: &Request, written: u32) -> Reply {
        assert!(written >= 108, "{written} bytes written");
        let bytes = self.read(request.response, 108);
        let sense_len = u32::from_le_bytes(bytes[0..4].try_into().unwrap()) as usize;
        let data = self.read(request.data, request.data_in.min(written as usize - 108));
        self.free(request.queue, request.head, request.descs);
        Reply {
            response: bytes[11],
            status: bytes[10],
            residual: u32::from_le_bytes(bytes[4..8].try_into().unwrap()),
            sense: bytes[12..12 + sense_len].to_vec(),
            data,
        }
    }

    /// Waits for a request, the only one in flight in its queue.
    pub fn finish(&mut self, request: &Request) -> Reply {
        let (head, written) = self.used(request.queue);
        assert_eq!(head, request.head);
        self.reply(request, written)
    }

    /// One request to LUN 0 of `target`, from start to end.
    pub fn scsi(&mut self, target: u8, cdb: &[u8], data_out: &[u8], data_in: usize) -> Reply {
        let lun = [1, target, 0x40, 0, 0, 0, 0, 0];
        let request = self.submit(2, lun, 7, cdb, data_out, data_in);
        self.finish(&request)
    }

    /// As `scsi`, with the unit attentions taken first.
    pub fn ready(&mut self, target: u8) {
        for _ in 0..8 {
            let reply = self.scsi(target, &[0; 6], &[], 0);
            assert_eq!(reply.response, 0, "target {target} is there");
            if reply.status == 0 {
                return;
            }
        }
        panic!("target {target} is not ready");
    }

    /// READ (10) of whole blocks of 512 bytes.
    pub fn read_blocks(&mut self, target: u8, lba: u32, blocks: u16) -> Reply {
        self.scsi(target, &rw10(0x28, lba, blocks), &[], usize::from(blocks) * 512)
    }

    /// WRITE (10) of whole blocks of 512 bytes.
    pub fn write_blocks(&mut self, target: u8, lba: u32, data: &[u8]) -> Reply {
        self.scsi(target, &rw10(0x2a, lba, (data.len() / 512) as u16), data, 0)
    }

    /// One message on the control queue, and the `len` bytes of its answer.
    pub fn control(&mut self, message: &[u8], len: u32) -> Vec<u8> {
        let (head, at) = self.submit_control(message, len);
        let (back, written) = self.used(0);
        assert_eq!((back, written), (head, len));
        self.free(0, head, 2);
        self.read(at, len as usize)
    }

    pub fn submit_control(&mut self, message: &[u8], len: u32) -> (u16, u64) {
        let at = self.alloc(message.len());
        self.write(at, message);
        let answer = self.alloc(len as usize);
        let buffers = [
            Buffer { addr: at, len: message.len() as u32, write: false },
            Buffer { addr: answer, len, write: true },
        ];
        let head = self.chain(0, &buffers);
        self.offer(0, head);
        (head, answer)
    }

    /// Gives one event buffer.
    pub fn give_event_buffer(&mut self) -> (u16, u64) {
        let at = self.alloc(16);
        self.write(at, &[0xee; 16]);
        let head = self.chain(1, &[Buffer { addr: at, len: 16, write: true }]);
        self.offer(1, head);
        (head, at)
    }

    /// Waits for the event in a buffer: event, LUN, reason.
    pub fn event(&mut self, (head, at): (u16, u64)) -> (u32, [u8; 8], u32) {
        assert_eq!(self.used(1), (head, 16));
        self.free(1, head, 1);
        let bytes = self.read(at, 16);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(0), bytes[4..12].try_into().unwrap(), word(12))
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub queue: usize,
    pub head: u16,
    pub descs: usize,
    pub response: u64,
    pub data: u64,
    pub data_in: usize,
}

/// READ (10) or WRITE (10).
pub fn rw10(code: u8, lba: u32, blocks: u16) -> Vec<u8> {
    let (l, n) = (lba.to_be_bytes(), blocks.to_be_bytes());
    vec![code, 0, l[0], l[1], l[2], l[3], 0, n[0], n[1], 0]
}

/// LUN 0 of a target, as Linux writes it.
pub fn flat(target: u8) -> [u8; 8] {
    [1, target, 0x40, 0, 0, 0, 0, 0]
}

pub const I_T_NEXUS_RESET: u32 = 4;
pub const LOGICAL_UNIT_RESET: u32 = 5;

/// `struct virtio_scsi_ctrl_tmf` for LUN 0 of a target.
pub fn tmf(subtype: u32, lun: [u8; 8], id: u64) -> Vec<u8> {
    let mut message = words(&[0, subtype]);
    message.extend(lun);
    message.extend(id.to_le_bytes());
    message
}

/// The body of SET_VRING_ADDR.
pub fn address_body(queue: usize, logged: bool) -> Vec<u8> {
    let at = USER + Guest::rings_at(queue);
    let mut body = words(&[queue as u32, u32::from(logged)]);
    let log = if logged { Guest::rings_at(queue) + 0x8000 } else { 0 };
    body.extend(longs(&[at, at + 0x8000, at + 0x4000, log]));
    body
}
