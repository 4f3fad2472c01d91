//! The virtio-blk front end: what a driver reads of its disk, requests in any framing, and what it may do
//! wrong. Everything that it shares with the other one is tried there; here is what a driver without a
//! status for "later" needs.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use bdev::testing::{Fault, FaultBdev};
use bdev::{IoError, Op};
use guestmem::{DirtyLog, LOG_PAGE};
use proptest::prelude::*;
use vhost_scsi::{ControllerError, ControllerOptions, Front, TargetOptions};

use crate::guest::*;
use crate::handover::taken_apart;
use crate::host::*;
use crate::inflight::{Region, go_on_of};
use crate::peer::*;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const F_RO: u64 = 1 << 5;
const F_FLUSH: u64 = 1 << 9;
const F_DISCARD: u64 = 1 << 13;
const SET_BACKEND_REQ_FD: u32 = 21;
const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
const PROTOCOL_CONFIG: u64 = 1 << 9;

/// What Linux negotiates through QEMU: SIZE_MAX, SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, MQ, DISCARD,
/// WRITE_ZEROES and those of the ring.
pub const BLK: u64 = 0b111_0110_0100_0110 | F_INDIRECT | F_EVENT_IDX | F_PROTOCOL | 1 << 32;

/// A disk of 4 MiB with a virtio-blk controller `vm0`.
pub fn host_with(disk: &Arc<FaultBdev>, options: TargetOptions) -> Host {
    let host = Host::new(2);
    host.controllers.delete("vm0", false).unwrap();
    host.registry.register(disk.clone()).unwrap();
    create(&host, options).unwrap();
    host
}

pub fn create(host: &Host, options: TargetOptions) -> Result<(), ControllerError> {
    host.controllers.create_blk("vm0", ControllerOptions::default(), "disk", options)
}

fn host() -> (Host, Arc<FaultBdev>) {
    let disk = FaultBdev::new("disk", 512, 8192);
    (host_with(&disk, TargetOptions::default()), disk)
}

fn host_shared() -> (Host, Arc<FaultBdev>) {
    let disk = FaultBdev::new("disk", 512, 8192);
    (host_with(&disk, TargetOptions { shareable: true, ..Default::default() }), disk)
}

/// A guest with so many request queues.
pub fn start(host: &Host, features: u64, queues: usize) -> Guest {
    let mut guest = Guest::connect(&host.socket(), features);
    (0..queues).for_each(|queue| guest.start_queue(queue));
    guest
}

pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    [words(&[kind, 0]), longs(&[sector])].concat()
}

pub fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [longs(&[sector]), words(&[sectors, flags])].concat()
}

/// A request in flight.
pub struct Pending {
    pub queue: usize,
    pub head: u16,
    descs: usize,
    pub space: u64,
    len: usize,
}

/// Puts a request into the ring, its parts cut after every `cut` bytes.
pub fn submit(guest: &mut Guest, queue: usize, out: &[u8], data_in: usize, cut: usize) -> Pending {
    let (at, space) = (guest.alloc(out.len()), guest.alloc(data_in + 1));
    guest.write(at, out);
    guest.write(space, &vec![0xee; data_in + 1]);
    let mut buffers = Vec::new();
    for (from, len, write) in [(at, out.len(), false), (space, data_in + 1, true)] {
        for part in (0..len).step_by(cut) {
            let len = cut.min(len - part) as u32;
            buffers.push(Buffer { addr: from + part as u64, len, write });
        }
    }
    let (head, descs) = match guest.features & F_INDIRECT {
        0 => (guest.chain(queue, &buffers), buffers.len()),
        _ => (guest.indirect(queue, &buffers), 1),
    };
    guest.offer(queue, head);
    Pending { queue, head, descs, space, len: data_in }
}

/// The status and the data of a request whose chain was given back.
pub fn reply(guest: &mut Guest, request: &Pending, written: u32) -> (u8, Vec<u8>) {
    assert_eq!(written as usize, request.len + 1);
    let mut bytes = guest.read(request.space, request.len + 1);
    guest.free(request.queue, request.head, request.descs);
    let status = bytes.pop().unwrap();
    (status, bytes)
}

pub fn finish(guest: &mut Guest, request: &Pending) -> (u8, Vec<u8>) {
    let (head, written) = guest.used(request.queue);
    assert_eq!(head, request.head);
    reply(guest, request, written)
}

pub fn ask(
    guest: &mut Guest,
    kind: u32,
    sector: u64,
    data: &[u8],
    data_in: usize,
) -> (u8, Vec<u8>) {
    let out = [&header(kind, sector)[..], data].concat();
    let request = submit(guest, 0, &out, data_in, usize::MAX);
    finish(guest, &request)
}

pub fn write(guest: &mut Guest, sector: u64, data: &[u8]) {
    assert_eq!(ask(guest, OUT, sector, data, 0).0, OK);
}

fn read(guest: &mut Guest, sector: u64, sectors: usize) -> Vec<u8> {
    let (status, data) = ask(guest, IN, sector, &[], sectors * 512);
    assert_eq!(status, OK);
    data
}

fn capacity(guest: &mut Guest) -> u64 {
    u64::from_le_bytes(guest.peer.config(0, 8).try_into().unwrap())
}

#[test]
fn a_driver_is_told_what_its_disk_is() {
    let (host, _) = host();
    let mut peer = Peer::connect(&host.socket());
    let offered = peer.get_u64(GET_FEATURES);
    assert_eq!(offered & BLK, BLK);
    // Neither VIRTIO_SCSI's bits, nor CONFIG_WCE, nor the packed ring.
    assert_eq!(offered & (1 | 1 << 11 | 1 << 34 | F_RO), 0);
    let protocol = peer.get_u64(GET_PROTOCOL_FEATURES);
    let needed = PROTOCOL_BACKEND_REQ | PROTOCOL_CONFIG;
    assert_eq!(protocol & needed, needed);
    peer.send(SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
    assert_eq!(peer.get_u64(GET_QUEUE_NUM), 64);
    let config = peer.config(0, 60);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(4)), (8192, 0));
    assert_eq!((word(12), word(20), config[34]), (126, 512, 64));
    assert!(word(36) > 0 && word(40) == 1 && word(52) == 1);
    assert_eq!(peer.config(60, 196), vec![0; 196]);
    // Nothing of it can be written, not even what it has.
    let writeback = [words(&[32, 1, 0]), vec![1]].concat();
    assert_eq!(peer.try_ask(SET_CONFIG, &writeback, &[]), Some(Ack::Refused));
    // A driver may not have what was not offered.
    let packed = (BLK | 1 << 34).to_le_bytes();
    assert_eq!(peer.try_ask(SET_FEATURES, &packed, &[]), Some(Ack::Refused));
}

#[test]
fn what_was_written_is_read_in_any_framing() {
    let (host, _) = host();
    for features in [BLK, BLK & !F_INDIRECT] {
        let mut guest = start(&host, features, 1);
        let data: Vec<u8> = (0..4096u32).map(|n| (n * 7 / 3) as u8).collect();
        for cut in [usize::MAX, 4096, 1000, 512, 100, 65] {
            let out = [&header(OUT, 100)[..], &data].concat();
            let request = submit(&mut guest, 0, &out, 0, cut);
            assert_eq!(finish(&mut guest, &request).0, OK, "cut after {cut}");
            let request = submit(&mut guest, 0, &header(IN, 100), 4096, cut);
            assert_eq!(finish(&mut guest, &request), (OK, data.clone()), "cut after {cut}");
        }
        // A header of single bytes.
        let request = submit(&mut guest, 0, &header(IN, 102), 64, 1);
        assert_eq!(finish(&mut guest, &request).0, IOERR, "no whole sector");
        let request = submit(&mut guest, 0, &header(GET_ID, 0), 20, 1);
        let uuid = host.registry.get("disk").unwrap().uuid().to_string();
        assert_eq!(finish(&mut guest, &request), (OK, uuid.as_bytes()[..20].to_vec()));
        drop(guest);
        host.wait_until_free();
    }
}

#[test]
fn each_kind_of_request_does_what_it_says() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let options = TargetOptions { serial: Some("short".into()), ..Default::default() };
    let host = host_with(&disk, options);
    let mut guest = start(&host, BLK, 1);
    write(&mut guest, 0, &[5; 8192]);
    assert!(disk.unflushed_sectors() > 0);
    assert_eq!(ask(&mut guest, FLUSH, 0, &[], 0).0, OK);
    assert_eq!(disk.unflushed_sectors(), 0);
    assert_eq!(ask(&mut guest, DISCARD, 0, &segment(4, 4, 0), 0).0, OK);
    assert_eq!(ask(&mut guest, WRITE_ZEROES, 0, &segment(8, 2, 0), 0).0, OK);
    assert_eq!(ask(&mut guest, WRITE_ZEROES, 0, &segment(10, 2, 1), 0).0, OK);
    let seen = read(&mut guest, 0, 16);
    for (sector, bytes) in seen.chunks(512).enumerate() {
        let expected = if (4..12).contains(&sector) { 0 } else { 5 };
        assert_eq!(bytes, [expected; 512], "sector {sector}");
    }
    let mut id = b"short".to_vec();
    id.resize(20, 0);
    assert_eq!(ask(&mut guest, GET_ID, 0, &[], 20), (OK, id.clone()));
    assert_eq!(ask(&mut guest, GET_ID, 0, &[], 7), (OK, id[..7].to_vec()));
    let stats = host.stats();
    assert_eq!((stats.targets[0].2.reads, stats.targets[0].2.writes), (1, 3));
    assert_eq!((stats.targets[0].2.flushes, stats.controller.errors), (1, 0));
}

#[test]
fn what_is_not_on_the_disk_or_not_there_is_refused_and_nothing_is_done() {
    let (host, disk) = host();
    let mut guest = start(&host, BLK, 1);
    let before = disk.changes();
    for sector in [8192, 8191, u64::MAX, u64::MAX - 1, 1 << 55] {
        assert_eq!(ask(&mut guest, IN, sector, &[], 1024).0, IOERR, "{sector}");
        assert_eq!(ask(&mut guest, OUT, sector, &[1; 1024], 0).0, IOERR, "{sector}");
        let two = segment(sector, 2, 0);
        assert_eq!(ask(&mut guest, DISCARD, 0, &two, 0).0, IOERR, "{sector}");
        assert_eq!(ask(&mut guest, WRITE_ZEROES, 0, &two, 0).0, IOERR, "{sector}");
    }
    assert_eq!(ask(&mut guest, OUT, 0, &[1; 511], 0).0, IOERR);
    assert_eq!(ask(&mut guest, OUT, 0, &[1; 512], 512).0, IOERR);
    assert_eq!(ask(&mut guest, IN, 0, &[1; 512], 512).0, IOERR);
    assert_eq!(ask(&mut guest, DISCARD, 0, &segment(0, 8, 1), 0).0, UNSUPP);
    assert_eq!(ask(&mut guest, 2, 0, &[], 0).0, UNSUPP);
    assert_eq!(ask(&mut guest, 99, 0, &[], 4096).0, UNSUPP);
    assert_eq!(disk.changes(), before);
    // Longer than the limits that it was told.
    let (status, _) = ask(&mut guest, IN, 0, &[], 5 << 20);
    assert_eq!(status, IOERR);
    // A chain without room for a status, one with half a header: given back, with what there is room for.
    for (out, space) in [(16, 0), (15, 1), (0, 1)] {
        let (at, back) = (guest.alloc(16), guest.alloc(1));
        guest.write(back, &[0xee]);
        let mut buffers = vec![Buffer { addr: at, len: out, write: false }];
        buffers.push(Buffer { addr: back, len: space, write: true });
        buffers.retain(|buffer| buffer.len > 0);
        let head = guest.indirect(0, &buffers);
        guest.offer(0, head);
        assert_eq!(guest.used(0), (head, space));
        guest.free(0, head, 1);
        assert_eq!(guest.read(back, 1), [if space == 0 { 0xee } else { IOERR }]);
    }
    assert_eq!(host.stats().controller.malformed, 3);
    write(&mut guest, 8191, &[3; 512]);
}

#[test]
fn a_disk_that_is_read_only_says_so_and_is_not_written() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions { read_only: true, ..Default::default() });
    let mut guest = start(&host, (BLK | F_RO) & !(F_DISCARD | 1 << 14), 1);
    for (kind, data) in [(OUT, vec![1; 512]), (DISCARD, segment(0, 8, 0))] {
        assert_eq!(ask(&mut guest, kind, 0, &data, 0).0, IOERR);
    }
    assert_eq!(ask(&mut guest, WRITE_ZEROES, 0, &segment(0, 8, 1), 0).0, IOERR);
    assert_eq!(ask(&mut guest, FLUSH, 0, &[], 0).0, OK);
    assert_eq!(read(&mut guest, 0, 8), vec![0; 4096]);
    assert_eq!(disk.image(), vec![0; 8192 * 512]);
}

#[test]
fn addresses_are_in_sectors_whatever_the_block_size() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let host = host_with(&disk, TargetOptions { block_size: Some(4096), ..Default::default() });
    let mut guest = start(&host, BLK, 1);
    assert_eq!((capacity(&mut guest), guest.peer.config(20, 4)), (8192, words(&[4096])));
    write(&mut guest, 16, &[9; 4096]);
    assert_eq!(disk.image()[16 * 512..24 * 512], [9; 4096]);
    assert_eq!(read(&mut guest, 16, 8), [9; 4096]);
    for (sector, len) in [(17, 4096), (16, 512), (15, 4096)] {
        assert_eq!(ask(&mut guest, IN, sector, &[], len).0, IOERR, "{sector} {len}");
    }
    assert_eq!(ask(&mut guest, DISCARD, 0, &segment(4, 8, 0), 0).0, IOERR);
    assert_eq!(ask(&mut guest, DISCARD, 0, &segment(16, 8, 0), 0).0, OK);
    assert_eq!(read(&mut guest, 16, 8), [0; 4096]);
}

#[test]
fn virtio_5_2_5_the_physical_block_of_its_topology_is_the_owners_choice() {
    let disk = FaultBdev::new("disk", 512, 8192);
    let mut options = TargetOptions::default();
    options.characteristics.physical_block_size = Some(16384);
    let host = host_with(&disk, options);
    let mut guest = start(&host, BLK, 1);
    // physical_block_exp, alignment_offset, min_io_size.
    assert_eq!(guest.peer.config(24, 4), [5, 0, 32, 0]);
    drop(guest);
    host.controllers.delete("vm0", true).unwrap();
    let mut odd = TargetOptions::default();
    odd.characteristics.physical_block_size = Some(3000);
    let why = create(&host, odd).unwrap_err().to_string();
    assert!(
        why.contains("physical blocks of 3000 bytes: ask for a power of two from 512"),
        "{why}"
    );
}

#[test]
fn a_driver_that_cannot_flush_has_every_write_durable() {
    let (host, disk) = host();
    let mut guest = start(&host, BLK & !F_FLUSH, 1);
    write(&mut guest, 0, &[5; 512]);
    assert_eq!(disk.unflushed_sectors(), 0);
    assert_eq!(ask(&mut guest, WRITE_ZEROES, 0, &segment(0, 1, 0), 0).0, OK);
    assert_eq!(disk.unflushed_sectors(), 0);
}

#[test]
fn errors_of_the_disk_are_told() {
    let (host, disk) = host();
    let mut guest = start(&host, BLK, 1);
    disk.inject(Fault::always(Op::Write, IoError::NoSpace));
    disk.inject(Fault::always(Op::Flush, IoError::Flush));
    assert_eq!(ask(&mut guest, OUT, 0, &[1; 512], 0).0, IOERR);
    assert_eq!(ask(&mut guest, FLUSH, 0, &[], 0).0, IOERR);
    assert_eq!(ask(&mut guest, IN, 0, &[], 512).0, OK);
    assert_eq!(host.stats().controller.errors, 2);
}

/// Messages of the back end that came.
struct Channel(UnixStream);

impl Channel {
    fn give(guest: &mut Guest) -> Channel {
        let (ours, theirs) = UnixStream::pair().unwrap();
        guest.peer.ask(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        ours.set_read_timeout(Some(DEADLINE)).unwrap();
        Channel(ours)
    }

    /// Waits for CONFIG_CHANGE_MSG, which wants no reply.
    fn config_changed(&mut self) {
        let mut message = [0u8; 12];
        std::io::Read::read_exact(&mut self.0, &mut message).expect("a message");
        assert_eq!(message.to_vec(), words(&[2, 1, 0]));
    }

    fn is_silent(&mut self, time: Duration) -> bool {
        self.0.set_read_timeout(Some(time)).unwrap();
        let silent = std::io::Read::read(&mut self.0, &mut [0]).is_err();
        self.0.set_read_timeout(Some(DEADLINE)).unwrap();
        silent
    }
}

#[test]
fn a_front_end_is_told_when_the_size_changes_and_once_at_first() {
    let (host, disk) = host();
    let mut guest = Guest::connect(&host.socket(), BLK);
    let mut channel = Channel::give(&mut guest);
    assert!(channel.is_silent(Duration::from_millis(300)), "the device does not run");
    guest.start_queue(0);
    channel.config_changed();
    assert!(channel.is_silent(Duration::from_millis(300)));
    disk.resize(16384);
    host.registry.notify_resized("disk");
    channel.config_changed();
    assert_eq!(capacity(&mut guest), 16384);
    write(&mut guest, 16383, &[1; 512]);
    // Not while it talks: QEMU would take one answer for another.
    disk.resize(20000);
    guest.peer.get_u64(GET_QUEUE_NUM);
    host.registry.notify_resized("disk");
    channel.config_changed();
    assert_eq!(capacity(&mut guest), 20000);
    let shown = host.controllers.list(None).unwrap().remove(0);
    assert!(shown.front == Front::Blk && shown.targets[0].resize_event_at.is_some());
}

#[test]
fn a_front_end_that_does_not_listen_holds_nobody_up() {
    let (host, disk) = host();
    let mut guest = start(&host, BLK, 1);
    let channel = Channel::give(&mut guest);
    drop(channel);
    for blocks in [9000, 10000] {
        disk.resize(blocks);
        host.registry.notify_resized("disk");
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(capacity(&mut guest), blocks);
    }
    // What is no socket is refused.
    let file = tempfile::tempfile().unwrap();
    guest.peer.try_ask(SET_BACKEND_REQ_FD, &[], &[file.as_fd()]);
    drop(guest);
    host.wait_until_free();
    let mut guest = start(&host, BLK, 1);
    write(&mut guest, 0, &[1; 512]);
}

#[test]
fn a_ring_that_stops_has_done_all_that_it_took() {
    const SECTORS: u32 = 80 << 10;
    const REQUESTS: usize = 12;
    let disk = FaultBdev::new("disk", 512, SECTORS.into());
    disk.defer(Some(3));
    let host = host_with(&disk, TargetOptions::default());
    let mut guest = start(&host, BLK, 1);
    disk.hold();
    // Of 40 MiB, so that each is several I/Os.
    let all: Vec<_> = (0..REQUESTS)
        .map(|_| {
            let out = [header(DISCARD, 0), segment(0, SECTORS, 0)].concat();
            submit(&mut guest, 0, &out, 0, usize::MAX)
        })
        .collect();
    wait_until("some began", || disk.held() > 0);
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        disk.release();
    });
    let base = guest.peer.base(0);
    assert_eq!(base, u32::from(guest.used_index(0)), "what was taken is done");
    assert!(base > 0);
    for _ in 0..base {
        let (head, written) = guest.try_used(0).expect("all that was taken is back");
        let request = all.iter().find(|r| r.head == head).unwrap();
        assert_eq!(reply(&mut guest, request, written).0, OK);
    }
    opener.join().unwrap();
}

#[test]
fn what_was_in_flight_when_a_back_end_died_is_done_by_the_next() {
    let (host, _) = host();
    let mut guest = Guest::connect(&host.socket(), BLK);
    let region = Region::of(&mut guest, 2);
    (0..2).for_each(|queue| guest.start_queue(queue));
    write(&mut guest, 0, &[1; 512]);
    // As a back end leaves it that was killed before it did these: taken, marked, not given back.
    guest.peer.shutdown();
    host.wait_until_free();
    let out = [&header(OUT, 5)[..], &[7; 512]].concat();
    let request = submit(&mut guest, 1, &out, 0, usize::MAX);
    region.mark(1, request.head);
    go_on_of(&mut guest, &region, &host, 2);
    assert_eq!(finish(&mut guest, &request).0, OK);
    assert!(region.marked(1).is_empty());
    assert_eq!(read(&mut guest, 5, 1), [7; 512]);
}

#[test]
fn a_session_with_its_channel_goes_on_in_another_process() {
    let (host, disk) = host();
    let mut guest = start(&host, BLK, 2);
    let mut channel = Channel::give(&mut guest);
    channel.config_changed();
    for turn in 0..3u8 {
        write(&mut guest, u64::from(turn), &[turn; 512]);
        let controllers = taken_apart(&host);
        disk.resize(9000 + u64::from(turn));
        host.controllers.inherit(controllers).unwrap();
        host.controllers.expect_blk("vm0", ControllerOptions::default()).unwrap();
        create(&host, TargetOptions::default()).unwrap();
        host.controllers.take_over().unwrap();
        host.controllers.release();
        assert_eq!(read(&mut guest, turn.into(), 1), [turn; 512]);
        channel.config_changed();
        assert_eq!(capacity(&mut guest), 9000 + u64::from(turn));
    }
}

#[test]
fn everything_that_is_written_into_guest_memory_is_logged() {
    let (host, _) = host();
    let mut guest = start(&host, BLK, 1);
    let (_, fd) = region(0, 4096 / 8);
    let log = DirtyLog::new(fd.as_fd(), 0, 4096 / 8).unwrap();
    guest.peer.send(SET_LOG_BASE, &longs(&[4096 / 8, 0]), &[fd.as_fd()]);
    guest.peer.reply(SET_LOG_BASE).expect("a reply");
    guest.peer.ask(SET_FEATURES, &(BLK | F_LOG_ALL).to_le_bytes(), &[]);
    guest.peer.ask(SET_VRING_ADDR, &address_body(0, true), &[]);
    let request = submit(&mut guest, 0, &header(IN, 0), 3 * 4096, 4096);
    let at = request.space;
    assert_eq!(finish(&mut guest, &request).0, OK);
    for page in at / LOG_PAGE..=(at + 3 * 4096) / LOG_PAGE {
        assert!(log.is_marked(page * LOG_PAGE), "page {page}");
    }
    assert!(log.is_marked(Guest::rings_at(0) + 0x8000), "used ring");
    // Data to the device is not written by it.
    let far = guest.alloc(32768) + 16384;
    let (head, status) = (guest.alloc(16), guest.alloc(1));
    guest.write(head, &header(OUT, 0));
    let buffers = [
        Buffer { addr: head, len: 16, write: false },
        Buffer { addr: far, len: 4096, write: false },
        Buffer { addr: status, len: 1, write: true },
    ];
    let head = guest.indirect(0, &buffers);
    guest.offer(0, head);
    guest.used(0);
    assert!(log.is_marked(status) && !log.is_marked(far));
}

#[test]
fn a_controller_has_its_one_disk_and_no_targets() {
    let host = Host::new(1);
    host.controllers.delete("vm0", false).unwrap();
    assert!(matches!(create(&host, TargetOptions::default()), Err(ControllerError::Registry(_))));
    assert!(host.controllers.list(None).unwrap().is_empty());
    assert!(!host.socket().exists());
    host.malloc("disk");
    create(&host, TargetOptions::default()).unwrap();
    assert!(matches!(create(&host, TargetOptions::default()), Err(ControllerError::Exists(_))));
    host.malloc("other");
    let added = host.controllers.add_target("vm0", -1, "other", TargetOptions::default());
    assert!(matches!(added, Err(ControllerError::NotScsi(_))));
    assert!(matches!(host.controllers.remove_target("vm0", 0), Err(ControllerError::NotScsi(_))));
    // Another may not have its bdev.
    let second = host.controllers.create_blk(
        "vm1",
        ControllerOptions::default(),
        "disk",
        TargetOptions::default(),
    );
    let why = second.unwrap_err().to_string();
    assert!(why.contains("controller vm0"), "{why}");
    // The bdev goes: requests fail, and the guest stays.
    let mut guest = start(&host, BLK, 1);
    write(&mut guest, 0, &[1; 512]);
    host.registry.unregister("disk").unwrap();
    wait_until("the disk is gone", || host.controllers.list(None).unwrap()[0].targets.is_empty());
    assert_eq!(ask(&mut guest, IN, 0, &[], 512).0, IOERR);
    assert_eq!(ask(&mut guest, GET_ID, 0, &[], 20).0, IOERR);
    assert_eq!(capacity(&mut guest), 0);
    drop(guest);
    host.wait_until_free();
    host.controllers.delete("vm0", false).unwrap();
}

#[test]
fn what_another_initiator_has_reserved_is_kept_from_the_disk() {
    let (host, disk) = host_shared();
    host.controllers.create("vm1", ControllerOptions::default()).unwrap();
    let shared = TargetOptions { shareable: true, ..Default::default() };
    host.controllers.add_target("vm1", 0, "disk", shared).unwrap();
    let mut guest = start(&host, BLK, 1);
    write(&mut guest, 0, &[1; 512]);
    let mut other = Guest::start(&host.socket().with_file_name("vm1"), LINUX, 1);
    other.ready(0);
    // PERSISTENT RESERVE OUT: REGISTER a key, RESERVE write exclusive with it.
    let key = 7u64.to_be_bytes();
    let register = [[0; 8], key, [0; 8]].concat();
    let reserve = [key, [0; 8], [0; 8]].concat();
    for (action, kind, list) in [(0, 0, register), (1, 1, reserve)] {
        let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
        assert_eq!(other.scsi(0, &cdb, &list, 0).status, 0);
    }
    let before = disk.changes();
    assert_eq!(ask(&mut guest, OUT, 0, &[2; 512], 0).0, IOERR);
    assert_eq!(ask(&mut guest, DISCARD, 0, &segment(0, 8, 0), 0).0, IOERR);
    assert_eq!((read(&mut guest, 0, 1), disk.changes()), (vec![1; 512], before));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Requests of any bytes, cut anywhere: each is given back with a status that there is, what is beyond the
    /// disk stays so, and the next one is served.
    #[test]
    fn whatever_a_driver_asks_for_it_has_an_answer(
        requests in prop::collection::vec(
            (
                prop_oneof![0..20u32, any::<u32>()],
                prop_oneof![0..9000u64, any::<u64>()],
                prop::collection::vec(any::<u8>(), 0..600),
                0..2000usize,
                1..700usize,
            ),
            1..20,
        )
    ) {
        let (host, _) = host();
        let mut guest = start(&host, BLK, 1);
        for (kind, sector, data, data_in, cut) in requests {
            let out = [&header(kind, sector)[..], &data].concat();
            // No more segments than it may have.
            let cut = cut.max((out.len() + data_in) / 100 + 1);
            let request = submit(&mut guest, 0, &out, data_in, cut);
            let (status, _) = finish(&mut guest, &request);
            prop_assert!(status <= UNSUPP, "status {}", status);
        }
        write(&mut guest, 7, &[7; 512]);
        prop_assert_eq!(read(&mut guest, 7, 1), vec![7; 512]);
    }
}
