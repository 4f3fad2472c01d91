//! Requests with protection information (virtio 1.2 5.6.6.1, VIRTIO_SCSI_F_T10_PI).

use bdev::{Malloc, MallocOptions, Protection, ProtectionType};
use protection::{ProtectedDisk, Tuple};

use crate::guest::*;
use crate::handover::{put_together, taken_apart};
use crate::host::*;
use vhost_scsi::TargetOptions;

pub const F_T10_PI: u64 = 1 << 3;
const PI: u64 = LINUX | F_T10_PI;

/// A host whose target 0 has protection information, and target 1 has none.
fn host(reactors: usize) -> Host {
    let host = Host::new(reactors);
    let options = MallocOptions {
        name: "protected".into(),
        block_size: 512,
        physical_block_size: 0,
        num_blocks: 8192,
        uuid: None,
    };
    let below = Malloc::with_metadata(options, 8).unwrap();
    let shown = Protection { kind: ProtectionType::Type1, interleaved: true, at_head: false };
    host.registry.register(ProtectedDisk::new(below, shown)).unwrap();
    host.malloc("plain");
    host.add(0, "protected");
    host.add(1, "plain");
    host
}

fn pattern(seed: usize, blocks: usize) -> Vec<u8> {
    (0..blocks * 512).map(|i| ((i / 512 + seed) * 11 + i) as u8).collect()
}

fn tuples(lba: u32, data: &[u8]) -> Vec<u8> {
    let of = |(n, data): (usize, &[u8])| {
        let tuple = Tuple::of(ProtectionType::Type1, u64::from(lba) + n as u64, data);
        Tuple { app_tag: 0x7777, ..tuple }.to_bytes()
    };
    data.chunks(512).enumerate().flat_map(of).collect()
}

/// A request as a driver with the feature makes it: bytes of protection information in the header, which
/// comes before the data each way, in runs of `cut` bytes at most.
struct Carried<'a> {
    cdb: &'a [u8],
    said: (u32, u32),
    readable: Vec<u8>,
    writable: usize,
    cut: usize,
}

fn carry(guest: &mut Guest, target: u8, what: &Carried) -> (Reply, Vec<u8>, u32) {
    let mut header = vec![1, target, 0x40, 0, 0, 0, 0, 0];
    header.extend([7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    header.extend(what.said.0.to_le_bytes());
    header.extend(what.said.1.to_le_bytes());
    header.extend(what.cdb);
    header.resize(59, 0);
    header.extend(&what.readable);
    let (out, into) = (guest.alloc(header.len()), guest.alloc(108 + what.writable));
    guest.write(out, &header);
    guest.write(into, &vec![0xee; 108 + what.writable]);
    let mut buffers = Vec::new();
    for (at, len, write) in [(out, header.len(), false), (into, 108 + what.writable, true)] {
        let mut done = 0;
        while done < len {
            let part = what.cut.min(len - done);
            buffers.push(Buffer { addr: at + done as u64, len: part as u32, write });
            done += part;
        }
    }
    let head = guest.indirect(2, &buffers);
    guest.offer(2, head);
    let (used, written) = guest.used(2);
    assert_eq!(used, head);
    guest.free(2, head, 1);
    let bytes = guest.read(into, 108 + what.writable);
    let sense_len = u32::from_le_bytes(bytes[0..4].try_into().unwrap()) as usize;
    let reply = Reply {
        response: bytes[11],
        status: bytes[10],
        residual: u32::from_le_bytes(bytes[4..8].try_into().unwrap()),
        sense: bytes[12..12 + sense_len].to_vec(),
        data: Vec::new(),
    };
    (reply, bytes[108..].to_vec(), written)
}

fn rw(code: u8, lba: u32, blocks: u16) -> Vec<u8> {
    let mut cdb = rw10(code, lba, blocks);
    cdb[1] = 0x20;
    cdb
}

fn write(guest: &mut Guest, lba: u32, data: &[u8], of: &[u8], cut: usize) -> Reply {
    let cdb = rw(0x2a, lba, (data.len() / 512) as u16);
    let readable = [of, data].concat();
    let said = (of.len() as u32, 0);
    carry(guest, 0, &Carried { cdb: &cdb, said, readable, writable: 0, cut }).0
}

fn read(guest: &mut Guest, lba: u32, blocks: usize, cut: usize) -> (Reply, Vec<u8>, u32) {
    let cdb = rw(0x28, lba, blocks as u16);
    let said = (0, blocks as u32 * 8);
    let readable = Vec::new();
    carry(guest, 0, &Carried { cdb: &cdb, said, readable, writable: blocks * 520, cut })
}

/// Takes the unit attentions of both targets.
fn ready(guest: &mut Guest) {
    for target in [0, 1, 0, 1] {
        let cdb = [0; 6];
        let test = Carried { cdb: &cdb, said: (0, 0), readable: vec![], writable: 0, cut: 4096 };
        carry(guest, target, &test);
    }
}

fn connect(host: &Host) -> Guest {
    let mut guest = Guest::start(&host.socket(), PI, 1);
    ready(&mut guest);
    guest
}

#[test]
fn virtio_5_6_6_1_protection_information_comes_before_the_data() {
    let host = host(1);
    let mut guest = connect(&host);
    // In few long runs, and in as many short ones as a chain may have.
    for (lba, blocks, cut) in [(0, 64, 1 << 20), (100, 3, 77), (200, 200, 1111)] {
        let data = pattern(lba as usize, blocks);
        let of = tuples(lba, &data);
        let reply = write(&mut guest, lba, &data, &of, cut);
        assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 0), "{reply:?}");
        let (reply, bytes, written) = read(&mut guest, lba, blocks, cut);
        assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 0), "{reply:?}");
        assert_eq!(written as usize, 108 + blocks * 520);
        assert!(bytes == [of, data.clone()].concat());
        // Without the field, the header's lengths leave the data alone.
        let plain = Carried {
            cdb: &rw10(0x28, lba, blocks as u16),
            said: (0, 24),
            readable: vec![],
            writable: 24 + blocks * 512,
            cut,
        };
        let (reply, bytes, _) = carry(&mut guest, 0, &plain);
        assert_eq!((reply.response, reply.status, reply.residual), (0, 0, 0), "{reply:?}");
        assert!(bytes[..24] == [0xee; 24] && bytes[24..] == data);
    }
}

#[test]
fn what_is_wrong_of_it_is_told_with_the_block() {
    let host = host(1);
    let mut guest = connect(&host);
    let data = pattern(5, 8);
    let of = tuples(40, &data);
    for (at, ascq) in [(3 * 8, 1), (3 * 8 + 5, 3)] {
        let mut bad = of.clone();
        bad[at] ^= 1;
        let reply = write(&mut guest, 40, &data, &bad, 4096);
        assert_eq!((reply.response, reply.status, reply.residual), (0, 2, 8 * 512));
        assert_eq!(
            (reply.sense[0], reply.sense[2], &reply.sense[12..14]),
            (0xF0, 0xB, &[0x10, ascq][..])
        );
        assert_eq!(reply.sense[3..7], [0, 0, 0, 43]);
    }
    // A unit without it refuses the field, whatever the header says.
    let cdb = rw(0x28, 0, 1);
    let asked = Carried { cdb: &cdb, said: (0, 8), readable: vec![], writable: 520, cut: 4096 };
    let (reply, _, _) = carry(&mut guest, 1, &asked);
    assert_eq!((reply.status, &reply.sense[12..14]), (2, &[0x24, 0][..]));
    let plain = Carried {
        cdb: &rw10(0x28, 0, 1),
        said: (0, 0),
        readable: vec![],
        writable: 512,
        cut: 4096,
    };
    assert_eq!(carry(&mut guest, 1, &plain).0.status, 0);
}

#[test]
fn lengths_that_a_guest_makes_up_are_no_request() {
    let host = host(1);
    let mut guest = connect(&host);
    let cdb = rw(0x2a, 0, 1);
    for (said, readable, writable) in [
        ((521, 0), 520, 0),
        ((0, 1), 520, 0),
        ((u32::MAX, 0), 520, 0),
        ((8, u32::MAX), 520, 64),
        ((u32::MAX, u32::MAX), 0, 0),
    ] {
        let odd = Carried { cdb: &cdb, said, readable: vec![0; readable], writable, cut: 4096 };
        let (reply, _, written) = carry(&mut guest, 0, &odd);
        assert_eq!((reply.response, written), (9, 12), "VIRTIO_SCSI_S_FAILURE for {said:?}");
    }
    // Tuples or data that are too short for the command.
    for (said, readable) in [((7, 0), 519), ((8, 0), 519), ((0, 0), 512)] {
        let short =
            Carried { cdb: &cdb, said, readable: vec![0; readable], writable: 0, cut: 4096 };
        assert_eq!(
            carry(&mut guest, 0, &short).0.response,
            1,
            "VIRTIO_SCSI_S_OVERRUN for {said:?}"
        );
    }
    // A header of the other layout is too short.
    let at = guest.alloc(51 + 108);
    guest.write(at, &[0xee; 159]);
    let buffers = [
        Buffer { addr: at, len: 51, write: false },
        Buffer { addr: at + 51, len: 108, write: true },
    ];
    let head = guest.indirect(2, &buffers);
    guest.offer(2, head);
    assert_eq!(guest.used(2), (head, 12));
    guest.free(2, head, 1);
    let data = pattern(1, 1);
    let of = tuples(9, &data);
    assert_eq!(write(&mut guest, 9, &data, &of, 4096).status, 0);
}

#[test]
fn a_driver_that_starts_afresh_chooses_anew_and_a_handover_keeps_its_choice() {
    let host = host(2);
    let data = pattern(3, 4);
    let of = tuples(70, &data);
    // Without the feature, as SeaBIOS, and with it after a reset; and again without.
    let mut guest = Guest::start(&host.socket(), LINUX, 2);
    guest.ready(0);
    assert_eq!(guest.write_blocks(0, 70, &data).status, 0);
    guest.peer.ask(crate::peer::SET_FEATURES, &PI.to_le_bytes(), &[]);
    guest.features = PI;
    ready(&mut guest);
    assert_eq!(write(&mut guest, 70, &data, &of, 4096).status, 0);
    let (reply, bytes, _) = read(&mut guest, 70, 4, 4096);
    assert_eq!((reply.status, &bytes[..32]), (0, &of[..]));
    // In another process.
    let controllers = taken_apart(&host);
    let plain = TargetOptions::default;
    put_together(&host, controllers, &[(0, "protected", plain()), (1, "plain", plain())]);
    let (reply, bytes, _) = read(&mut guest, 70, 4, 333);
    assert_eq!((reply.status, &bytes[..32]), (0, &of[..]));
    assert!(bytes[32..] == data);
    guest.peer.ask(crate::peer::SET_FEATURES, &LINUX.to_le_bytes(), &[]);
    guest.features = LINUX;
    assert_eq!(guest.read_blocks(0, 70, 4).data, data);
    // Tuples of requests before are none of these.
    let mut cdb = rw10(0x28, 70, 4);
    cdb[1] = 0x20;
    let both = guest.scsi(0, &cdb, &[], 4 * 520);
    assert_eq!((both.status, &both.data[512..520]), (0, &of[..8]));
}
