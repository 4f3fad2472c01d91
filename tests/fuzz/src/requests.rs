//! What a driver can put into the queues of a controller: chains of any layout with any headers, and
//! after a reconnect an in-flight region of any content. The controller is a virtio-scsi one, also with
//! protection information, or a virtio-blk one: all but the headers is the same.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use initiator::{Arena, Connection, Inflight, Kick, Ring, Vring, feature, scsi};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtqueue::{Desc, InflightRegion};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::host::{BLK_NAME, NAME, PROTECTED_NAME, host};
use crate::input::Input;

/// What the controller is told as our own address of a guest address.
const USER_BASE: u64 = 0x7e00_0000_0000;
/// Descriptors of a queue.
const SIZE: u16 = 64;

/// What the driver drives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scsi,
    /// With VIRTIO_SCSI_F_T10_PI.
    Protected,
    Blk,
}

impl Kind {
    /// Name of the controller.
    fn name(self) -> &'static str {
        match self {
            Kind::Scsi => NAME,
            Kind::Protected => PROTECTED_NAME,
            Kind::Blk => BLK_NAME,
        }
    }

    fn queues(self) -> usize {
        match self {
            Kind::Scsi | Kind::Protected => 3,
            Kind::Blk => 2,
        }
    }

    /// Queues that chains are put into: now and then, and most.
    fn used(self) -> [usize; 2] {
        match self {
            Kind::Scsi | Kind::Protected => [scsi::CONTROL, scsi::REQUESTS],
            Kind::Blk => [0, 1],
        }
    }

    fn session(self) -> Option<vhost_scsi::SessionInfo> {
        host().controllers.list(Some(self.name())).expect("it is there").swap_remove(0).session
    }

    fn refused(self) -> bool {
        self.session().is_none_or(|session| !session.stopped_queues.is_empty())
    }

    fn malformed(self) -> u64 {
        let stats = host().controllers.stats(Some(self.name()), None);
        stats.expect("it is there")[0].controller.malformed
    }
}
/// Bytes of guest memory, and of its part where all buffers are.
const MEMORY: u64 = 1 << 20;
const AREA: u64 = 64 << 10;
/// Bytes of the part where indirect tables are: no buffer is there, so no request changes another's.
const TABLES: u64 = 64 * 16 * 16;
const CANARY: u8 = 0xC5;
/// How long all requests may take to end.
const DEADLINE: Duration = Duration::from_secs(8);
/// How long it takes until a queue counts as stopped once a chain was found to be malformed.
const STOPPED: Duration = Duration::from_millis(5);

struct Queue {
    ring: Ring,
    kick: EventFd,
    call: EventFd,
    /// Chains in flight: head, and bytes that the device may write.
    in_flight: HashMap<u16, u32>,
    /// How many of the chains made available have not been used.
    owed: u16,
    /// Descriptors that no chain in flight has, from here on.
    free: u16,
}

struct Guest {
    kind: Kind,
    arena: Arena,
    area: u64,
    tables: u64,
    connection: Option<Connection>,
    region: Option<Inflight>,
    queues: Vec<Queue>,
    /// Buffers in use end here, and tables.
    next: u64,
    next_table: u64,
    /// What the area holds where the device may not write.
    image: Vec<u8>,
    writable: Vec<bool>,
    malformed: u64,
    /// A chain may break the rules of virtio.
    odd: bool,
    /// The in-flight region was written by us.
    tampered: bool,
}

/// The queue was stopped, or the session ended, as the rules of virtio were broken.
struct Stopped;

fn eventfd() -> EventFd {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).expect("an eventfd")
}

impl Guest {
    fn new(kind: Kind) -> Guest {
        let mut arena = Arena::new(MEMORY, false).expect("memory");
        let mut queue = || {
            let at = arena.alloc(Ring::bytes(SIZE), 4096).expect("room");
            let layout = Ring::layout(at, SIZE);
            let ring = Ring::new(arena.memory().clone(), layout, true).expect("a ring");
            let (kick, call) = (eventfd(), eventfd());
            Queue { ring, kick, call, in_flight: HashMap::new(), owed: 0, free: 0 }
        };
        let queues = (0..kind.queues()).map(|_| queue()).collect();
        let area = arena.alloc(AREA, 4096).expect("room");
        let tables = arena.alloc(TABLES, 4096).expect("room");
        Guest {
            kind,
            arena,
            area,
            tables,
            connection: None,
            region: None,
            queues,
            next: 0,
            next_table: 0,
            image: vec![CANARY; AREA as usize],
            writable: vec![false; AREA as usize],
            malformed: 0,
            odd: false,
            tampered: false,
        }
    }

    /// Connects; with `keep` as after a restart of the controller's process, else with rings that are
    /// new. All of it is well formed.
    fn connect(&mut self, keep: bool) -> Result<(), initiator::Error> {
        // Before it can find anything.
        self.malformed = self.kind.malformed();
        let mut wanted = feature::VERSION_1 | feature::EVENT_IDX | feature::INDIRECT;
        if self.kind == Kind::Protected {
            wanted |= feature::SCSI_T10_PI;
        }
        let mut connection = Connection::open(&host().socket(self.kind.name()), wanted)?;
        if !keep || self.region.is_none() {
            self.region = connection.get_inflight(self.kind.queues() as u16, SIZE)?;
            self.tampered = false;
        }
        connection.set_inflight(self.region.as_ref().expect("it has one"))?;
        connection.set_mem_table(self.arena.table())?;
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let at = queue.ring.at();
            if !keep {
                queue.ring = Ring::new(self.arena.memory().clone(), at, true)?;
                queue.in_flight.clear();
                queue.owed = 0;
            }
            let vring = Vring {
                size: SIZE,
                desc: USER_BASE + at.desc,
                avail: USER_BASE + at.avail,
                used: USER_BASE + at.used,
                log: None,
            };
            let base = self.arena.range(at.used, 4)?.load_acquire_u16(2)?;
            connection.set_vring(index, &vring, base)?;
            connection.set_vring_fds(index, &queue.kick, &queue.call)?;
            connection.enable(index, true)?;
        }
        self.connection = Some(connection);
        Ok(())
    }

    /// Hangs up, and waits until the controller has left.
    fn disconnect(&mut self) {
        self.connection = None;
        let began = Instant::now();
        while self.kind.session().is_some() {
            assert!(began.elapsed() < DEADLINE, "the controller does not leave");
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Begins anew with the area.
    fn clear(&mut self) {
        (self.next, self.next_table) = (0, 0);
        (self.odd, self.malformed) = (false, self.kind.malformed());
        self.image.fill(CANARY);
        self.writable.fill(false);
        self.arena.write(self.area, &self.image).expect("in range");
    }

    /// Nothing but what the device may write has changed.
    fn check(&self) {
        if self.tampered {
            // It was told to do again what had been in its queues at any time.
            return;
        }
        let bytes = self.arena.read(self.area, AREA as usize).expect("in range");
        if bytes != self.image {
            let differ = |at: &usize| bytes[*at] != self.image[*at] && !self.writable[*at];
            let wrong = (0..bytes.len()).find(differ);
            assert_eq!(wrong, None, "a byte that no device-writable buffer has was written");
        }
    }

    /// `bytes` in a buffer of their own.
    fn give(&mut self, bytes: &[u8]) -> u64 {
        let at = self.next as usize;
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
        self.next += bytes.len() as u64;
        self.arena.write(self.area + at as u64, bytes).expect("in range");
        self.area + at as u64
    }

    /// Marks what the device may write of `desc`.
    fn allow(&mut self, desc: &Desc) {
        if desc.flags() & Desc::WRITE != 0 {
            let end = desc.addr().saturating_add(desc.len().into()).min(self.area + AREA);
            for at in desc.addr().max(self.area)..end {
                self.writable[(at - self.area) as usize] = true;
            }
        }
    }

    /// Makes a chain of the input available, seen by the device or not yet.
    fn chain(&mut self, input: &mut Input<'_>) -> Result<(), Stopped> {
        let first = input.once_in(8);
        let index = self.kind.used()[usize::from(!first)];
        let control = first && self.kind != Kind::Blk;
        let (mut readable, mut odd) = match self.kind {
            Kind::Scsi | Kind::Protected if control => control_message(input),
            Kind::Scsi => (request(input), false),
            Kind::Protected => (protected_request(input), false),
            Kind::Blk => (blk_request(input), false),
        };
        if input.once_in(16) {
            odd = true;
            readable.resize(usize::from(input.u8()), 0);
        }
        let out = if input.once_in(3) { usize::from(input.below(6000)) } else { 0 };
        let data = input.bytes(out);
        readable.extend(data);
        readable.resize(readable.len() + out - data.len(), 1);
        let answer = match self.kind {
            Kind::Scsi | Kind::Protected if control => 5,
            Kind::Scsi | Kind::Protected => scsi::RESPONSE_LEN as u32,
            Kind::Blk => 1,
        };
        let short = input.once_in(16);
        let answer = if short { input.u8().into() } else { answer };
        let into = if input.once_in(2) { input.below(6000).into() } else { 0 };

        if self.kind == Kind::Protected && !control {
            // A header that says more than there is.
            let said = |at: usize| readable[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
            odd |= readable.len() < 59
                || said(19) as usize > readable.len() - 59
                || said(23) > (answer + into).saturating_sub(scsi::RESPONSE_LEN as u32);
        }
        if self.next + (readable.len() as u64) + u64::from(answer + into) + 512 > AREA
            || self.queues[index].free + 10 > SIZE
        {
            self.finish()?;
        }
        let at = self.give(&readable);
        let mut descs = Vec::new();
        cut(input, at, readable.len() as u32, 0, &mut descs);
        let at = self.area + self.next;
        self.next += u64::from(answer + into);
        cut(input, at, answer + into, Desc::WRITE, &mut descs);
        let wild = input.once_in(16);
        if wild {
            let nth = usize::from(input.u8()) % descs.len();
            descs[nth] = self.wild(input);
        }
        odd |= short || wild;
        self.odd |= odd;
        descs.iter().for_each(|desc| self.allow(desc));
        let most = descs.iter().filter(|d| d.flags() & Desc::WRITE != 0);
        let most = most.fold(0u32, |sum, desc| sum.saturating_add(desc.len()));

        let indirect = input.once_in(4);
        let first = self.queues[index].free;
        let last = descs.len() - 1;
        // A table's own indexes begin at 0.
        let base = if indirect { 0 } else { first };
        for (n, desc) in descs.iter_mut().enumerate().filter(|(n, _)| *n < last) {
            let flags = desc.flags() | Desc::NEXT;
            *desc = Desc::new(desc.addr(), desc.len(), flags, base + n as u16 + 1);
        }
        if indirect {
            let table: Vec<u8> = descs.iter().flat_map(bytes_of).collect();
            let at = self.tables + self.next_table;
            self.next_table += table.len() as u64;
            self.arena.write(at, &table).expect("as many chains as descriptors, each a few long");
            descs = vec![Desc::new(at, table.len() as u32, Desc::INDIRECT, 0)];
        }
        let queue = &mut self.queues[index];
        for (n, desc) in descs.iter().enumerate() {
            queue.ring.set_desc(first + n as u16, *desc).expect("in range");
        }
        queue.free += descs.len() as u16;
        queue.ring.add(first);
        queue.in_flight.insert(first, most);
        queue.owed += 1;
        if input.once_in(2) {
            self.publish();
        }
        Ok(())
    }

    /// A descriptor that leads anywhere but to what this driver needs itself.
    fn wild(&self, input: &mut Input<'_>) -> Desc {
        let addr = match input.u8() % 3 {
            0 => MEMORY + (u64::from(input.u32()) << (input.u8() % 32)),
            1 => u64::from(input.u16()).wrapping_neg(),
            _ => self.area + u64::from(input.u16()) % AREA,
        };
        let inside = (self.area + AREA).saturating_sub(addr);
        let len = match input.u8() % 4 {
            0 if inside == 0 => input.u32(),
            0 => (inside as u32).min(input.u16().into()),
            _ => (inside as u32).min(u32::from(input.u8())),
        };
        Desc::new(addr, len, u16::from(input.u8() % 8), input.u8().into())
    }

    fn publish(&mut self) {
        for index in self.kind.used() {
            let queue = &mut self.queues[index];
            if queue.ring.publish() == Kick::Needed {
                queue.kick.write(1).expect("a kick");
            }
        }
    }

    /// Waits until all that was made available has been used.
    fn finish(&mut self) -> Result<(), Stopped> {
        self.publish();
        let began = Instant::now();
        let mut suspect: Option<Instant> = None;
        loop {
            let mut done = true;
            for index in self.kind.used() {
                self.reap(index);
                done &= self.queues[index].owed == 0 || self.queues[index].ring.enable_call();
            }
            if self.kind.used().iter().all(|index| self.queues[*index].owed == 0) {
                break;
            }
            if done {
                continue;
            }
            if suspect.is_none() && (self.kind.malformed() != self.malformed || self.kind.refused())
            {
                assert!(self.odd || self.tampered, "a request that keeps the rules is refused");
                suspect = Some(Instant::now());
            }
            if suspect.is_some_and(|since| since.elapsed() > STOPPED) {
                return Err(Stopped);
            }
            assert!(began.elapsed() < DEADLINE, "requests neither end nor stop their queue");
            let fds = self.kind.used().map(|index| {
                let fd = self.queues[index].call.as_raw_fd();
                // SAFETY: the queue keeps it open.
                unsafe { BorrowedFd::borrow_raw(fd) }
            });
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
            for index in self.kind.used() {
                _ = self.queues[index].call.read();
            }
        }
        self.check();
        for queue in &mut self.queues {
            queue.free = 0;
        }
        self.clear();
        Ok(())
    }

    fn reap(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        while let Some(used) = queue.ring.poll() {
            assert!(queue.owed > 0, "head {} was used, and nothing was owed", used.head);
            queue.owed -= 1;
            let known = u16::try_from(used.head).ok().and_then(|h| queue.in_flight.remove(&h));
            match known {
                Some(most) => assert!(used.len <= most || self.tampered, "{used:?} of {most}"),
                None => assert!(self.tampered, "head {} was not in flight", used.head),
            }
        }
    }

    /// The controller's process dies with requests in flight, and its successor finds a region that
    /// says what the input says of them.
    fn die(&mut self, input: &mut Input<'_>) -> Result<(), Stopped> {
        self.finish()?;
        self.disconnect();
        let index = self.kind.used()[1];
        let region = self.region.as_ref().expect("it has one").fd();
        let part = InflightRegion::bytes(1, SIZE) * index as u64;
        let put = |at: u64, bytes: &[u8]| {
            rustix::io::pwrite(region.as_fd(), bytes, part + at).expect("a memfd takes it");
        };
        for _ in 0..input.u8() % 16 {
            match input.u8() % 4 {
                0 => put(8 + u64::from(input.u8() % 4) * 2, &input.u16().to_le_bytes()),
                1 => put(16 + 16 * u64::from(input.u8() % SIZE as u8), &input.u64().to_le_bytes()),
                _ => {
                    let state = 16 + 16 * u64::from(input.u8() % 8);
                    put(state, &[1]);
                    put(state + 8, &u64::from(input.u8()).to_le_bytes());
                }
            }
        }
        self.tampered = true;
        for _ in 0..input.u8() % 8 {
            self.chain(input)?;
        }
        for queue in &mut self.queues {
            // Seen by the next device.
            _ = queue.ring.publish();
        }
        self.connect(true).map_err(|_| Stopped)?;
        self.finish()?;
        // What it does beyond what was owed is of no interest to who comes next.
        Err(Stopped)
    }
}

fn bytes_of(desc: &Desc) -> Vec<u8> {
    let head = [desc.addr().to_le_bytes().as_slice(), &desc.len().to_le_bytes()].concat();
    [head, [desc.flags().to_le_bytes(), desc.next().to_le_bytes()].concat()].concat()
}

/// `len` bytes at `at` as one to three descriptors, none of them empty where there are bytes.
fn cut(input: &mut Input<'_>, at: u64, len: u32, flags: u16, descs: &mut Vec<Desc>) {
    let (mut at, mut left) = (at, len);
    for _ in 0..input.u8() % 3 {
        let part = u32::from(input.u16()) % left.max(1);
        if part > 0 {
            descs.push(Desc::new(at, part, flags, 0));
            at += u64::from(part);
            left -= part;
        }
    }
    descs.push(Desc::new(at, left, flags, 0));
}

fn lun(input: &mut Input<'_>) -> [u8; 8] {
    match input.u8() % 16 {
        15 => input.u64().to_le_bytes(),
        14 => [0xc1, 1, 0, 0, 0, 0, 0, 0],
        _ => scsi::lun_field(input.u8() % 3, (input.u8() % 64 / 63).into(), input.once_in(2)),
    }
}

fn request(input: &mut Input<'_>) -> Vec<u8> {
    let lun = lun(input);
    let id = u64::from(input.u8());
    let attributes = [input.u8() % 5, 0, 0];
    let mut header = scsi::request(lun, id, input.bytes(16)).to_vec();
    header[16..19].copy_from_slice(&attributes);
    header
}

/// A request with the lengths of its protection information before its CDB; a MODE SELECT(10) mostly with a list of
/// application tags, which need more that fits together than other commands.
fn protected_request(input: &mut Input<'_>) -> Vec<u8> {
    const MODE_SELECT: u8 = 0x55;
    const CDB: usize = 19;
    let mut plain = request(input);
    if plain[CDB] == MODE_SELECT && !input.once_in(4) {
        let list = application_tags(input);
        plain[CDB + 1] = 0x10; // PF
        plain[CDB + 2..CDB + 16].fill(0);
        plain[CDB + 8] = list.len() as u8;
        return [&plain[..CDB], &[0; 8], &plain[CDB..], &list].concat();
    }
    let mut length = || match input.u8() % 8 {
        7 => input.u32(),
        6 => input.u16().into(),
        5 => 0,
        _ => 8 * u32::from(input.u8() % 12),
    };
    let lengths = [length().to_le_bytes(), length().to_le_bytes()].concat();
    [&plain[..19], &lengths, &plain[19..]].concat()
}

/// A parameter list of the Application Tag mode page and the Control mode page, which says whether it counts.
fn application_tags(input: &mut Input<'_>) -> Vec<u8> {
    let mut list = [&[0; 8][..], &[0x4A, 2, 0, 108], &[0; 12]].concat();
    let mut next = 0u64;
    for _ in 0..4 {
        let flags = if input.once_in(3) { 0x80 } else { 0 };
        let tag = input.u16();
        let lba = if input.once_in(8) { input.u64() } else { next };
        let blocks = if input.once_in(8) { input.u64() } else { input.u8().into() };
        list.extend([flags, 0, 0, 0, 0, 0]);
        list.extend(tag.to_be_bytes());
        list.extend([lba.to_be_bytes(), blocks.to_be_bytes()].concat());
        next = lba.wrapping_add(blocks);
    }
    let enabled = if input.once_in(2) { 0x20 } else { 0 };
    list.extend([10, 10, 0x22, 0x10, 0, 0xC0 | enabled, 0, 0, 0, 0, 0, 0]);
    let at = usize::from(input.u8());
    if at < list.len() {
        list[at] ^= input.u8();
    }
    list
}

/// A message of the control queue, and whether it may be none.
fn control_message(input: &mut Input<'_>) -> (Vec<u8>, bool) {
    let lun = lun(input);
    let what = u32::from(input.u8() % 10);
    match input.u8() % 8 {
        7 => (scsi::notification(lun, 1 + what % 2, input.u32()), false),
        6 => (input.bytes(24).to_vec(), true),
        _ => (scsi::task_management(lun, what, input.u8().into()), false),
    }
}

/// A header of virtio-blk, and a segment where its type has one.
fn blk_request(input: &mut Input<'_>) -> Vec<u8> {
    const KINDS: [u32; 6] = [0, 1, 4, 8, 11, 13];
    let kind = match input.u8() % 8 {
        7 => input.u32(),
        nth => KINDS[usize::from(nth) % KINDS.len()],
    };
    let sector = |input: &mut Input<'_>| match input.once_in(4) {
        true => input.u64(),
        false => u64::from(input.u8()),
    };
    let mut header = [kind.to_le_bytes(), [0; 4]].concat();
    header.extend(sector(input).to_le_bytes());
    if kind == 11 || kind == 13 {
        header.extend(sector(input).to_le_bytes());
        let sectors = if input.once_in(4) { input.u32() } else { input.u8().into() };
        header.extend(sectors.to_le_bytes());
        header.extend(u32::from(input.u8() % 4).to_le_bytes());
    }
    header
}

/// Requests as a driver may make them. No input may make the controller write outside of the buffers
/// that it was given to write, use a head that is not in flight, say that it wrote more than there is
/// room for, or leave a request without an end unless the driver broke the rules.
pub fn requests(data: &[u8]) {
    static GUEST: Mutex<Option<Guest>> = Mutex::new(None);
    drive(&GUEST, Kind::Scsi, data);
}

/// The same of requests that carry protection information.
pub fn protected(data: &[u8]) {
    static GUEST: Mutex<Option<Guest>> = Mutex::new(None);
    drive(&GUEST, Kind::Protected, data);
}

/// The same of virtio-blk.
pub fn blks(data: &[u8]) {
    static GUEST: Mutex<Option<Guest>> = Mutex::new(None);
    drive(&GUEST, Kind::Blk, data);
}

fn drive(guest: &Mutex<Option<Guest>>, kind: Kind, data: &[u8]) {
    let mut guest = guest.lock().unwrap_or_else(PoisonError::into_inner);
    let guest = guest.get_or_insert_with(|| Guest::new(kind));
    if guest.connection.is_none() {
        guest.connect(false).expect("a well-formed session");
    }
    guest.clear();
    guest.queues.iter_mut().for_each(|queue| queue.free = 0);
    let mut input = Input(data);
    let mut all = || {
        while !input.is_empty() {
            match input.u8() {
                0..16 => guest.finish()?,
                255 => guest.die(&mut input)?,
                _ => guest.chain(&mut input)?,
            }
        }
        guest.finish()
    };
    if all().is_err() {
        guest.disconnect();
        guest.check();
    }
}
