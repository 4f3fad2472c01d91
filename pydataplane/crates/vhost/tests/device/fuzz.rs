//! Random messages, random rings: nothing that a peer says or writes ends the process, and the
//! guest of another controller goes on.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::guest::*;
use crate::host::*;
use crate::hostile::{all_is_well, bystander};
use crate::peer::*;

/// A descriptor that comes with a message.
#[derive(Clone, Copy, Debug)]
enum Fd {
    Event,
    /// Memory of so many bytes.
    Memory(u64),
    Pipe,
    Socket,
    File,
}

#[derive(Clone, Debug)]
enum Step {
    Message {
        code: u32,
        flags: u32,
        body: Vec<u8>,
        fds: Vec<Fd>,
    },
    /// Bytes somewhere in the rings of a queue, and a kick.
    Scribble {
        queue: usize,
        at: u64,
        bytes: Vec<u8>,
    },
    /// Bytes where buffers and indirect tables are.
    Litter {
        at: u64,
        bytes: Vec<u8>,
    },
    /// Another available index.
    Index {
        queue: usize,
        by: u16,
    },
    /// A whole request, so that there is something in flight.
    Read {
        queue: usize,
        lun: [u8; 8],
        cdb: Vec<u8>,
        len: usize,
    },
}

impl Fd {
    fn make(self) -> OwnedFd {
        match self {
            Fd::Event => eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            Fd::Memory(size) => region(0, size).1,
            Fd::Pipe => rustix::pipe::pipe().unwrap().1,
            Fd::Socket => std::os::unix::net::UnixStream::pair().unwrap().0.into(),
            Fd::File => std::fs::File::open("/proc/self/stat").unwrap().into(),
        }
    }
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..4,
        2 => prop::sample::select(vec![
            63, 64, 66, 255, 256, 1024, 4096, 1 << 15, 1 << 16, 1 << 20, 16 << 20, 1 << 32,
            1 << 45, 1 << 63, u64::MAX - 4095, u64::MAX, LINUX, LINUX | F_LOG_ALL, F_PROTOCOL,
        ]),
        2 => (0u64..8).prop_map(|queue| USER + Guest::rings_at(queue as usize)),
        1 => any::<u64>(),
    ]
}

fn fd() -> impl Strategy<Value = Fd> {
    prop_oneof![
        4 => Just(Fd::Event),
        3 => prop::sample::select(vec![0, 1, 4096, 1 << 20, 1 << 40]).prop_map(Fd::Memory),
        1 => Just(Fd::Pipe),
        1 => Just(Fd::Socket),
        1 => Just(Fd::File),
    ]
}

/// The body that a message has, with numbers that it may not have.
fn body(code: u32) -> BoxedStrategy<Vec<u8>> {
    let n = || number();
    let word = || number().prop_map(|n| n as u32);
    match code {
        SET_VRING_NUM | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
            (word(), word()).prop_map(|(a, b)| words(&[a, b])).boxed()
        }
        SET_VRING_ADDR => (0u32..10, 0u32..2, prop::array::uniform4(n()))
            .prop_map(|(index, flags, at)| {
                let mut body = words(&[index, flags]);
                body.extend(longs(&at.map(|n| n & !15)));
                body
            })
            .boxed(),
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
            (0u64..0x10a).prop_map(|n| n.to_le_bytes().to_vec()).boxed()
        }
        SET_MEM_TABLE => prop::collection::vec(prop::array::uniform4(n()), 0..4)
            .prop_map(|regions| {
                let mut body = words(&[regions.len() as u32, 0]);
                regions.iter().for_each(|r| body.extend(longs(r)));
                body
            })
            .boxed(),
        ADD_MEM_REG | REM_MEM_REG => {
            prop::array::uniform4(n()).prop_map(|r| [vec![0; 8], longs(&r)].concat()).boxed()
        }
        SET_LOG_BASE => (n(), n()).prop_map(|(a, b)| longs(&[a, b])).boxed(),
        GET_CONFIG | SET_CONFIG => (word(), 0u32..300, word())
            .prop_map(|(offset, size, flags)| {
                let mut body = words(&[offset, size, flags & 3]);
                body.resize(12 + size as usize, 0);
                body
            })
            .boxed(),
        SET_FEATURES | SET_PROTOCOL_FEATURES => n().prop_map(|n| n.to_le_bytes().to_vec()).boxed(),
        _ => prop::collection::vec(any::<u8>(), 0..64).boxed(),
    }
}

fn message() -> impl Strategy<Value = Step> {
    let code = prop_oneof![
        6 => prop::sample::select(vec![
            SET_FEATURES, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE,
            SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_ENABLE, SET_MEM_TABLE,
            ADD_MEM_REG, REM_MEM_REG, SET_LOG_BASE, GET_CONFIG, SET_CONFIG, RESET_OWNER,
        ]),
        1 => 0u32..48,
    ];
    let flags = prop_oneof![4 => Just(0u32), 4 => Just(8), 1 => any::<u32>()];
    let fds = prop_oneof![
        2 => Just(vec![]),
        4 => prop::collection::vec(fd(), 1),
        1 => prop::collection::vec(fd(), 0..5),
    ];
    code.prop_flat_map(body_of).prop_flat_map(move |(code, body)| {
        (flags.clone(), fds.clone()).prop_map(move |(flags, fds)| Step::Message {
            code,
            flags,
            body: body.clone(),
            fds,
        })
    })
}

fn body_of(code: u32) -> impl Strategy<Value = (u32, Vec<u8>)> {
    body(code).prop_map(move |body| (code, body))
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = || prop::collection::vec(any::<u8>(), 1..64);
    let cdb = prop_oneof![
        2 => (0u32..9000, 0u16..16).prop_map(|(lba, blocks)| rw10(0x28, lba, blocks)),
        1 => prop::collection::vec(any::<u8>(), 6..32),
    ];
    let lun = prop_oneof![3 => Just(flat(0)), 1 => any::<[u8; 8]>()];
    prop_oneof![
        6 => message(),
        2 => (0usize..4, prop_oneof![0u64..1024, 0x4000u64..0x4100, 0x8000u64..0x8300], bytes())
            .prop_map(|(queue, at, bytes)| Step::Scribble { queue, at, bytes }),
        1 => (0u64..0x1000, bytes()).prop_map(|(at, bytes)| Step::Litter { at, bytes }),
        2 => (0usize..4, prop_oneof![0u16..66, any::<u16>()])
            .prop_map(|(queue, by)| Step::Index { queue, by }),
        4 => (2usize..4, lun, cdb, 0usize..9000)
            .prop_map(|(queue, lun, cdb, len)| Step::Read { queue, lun, cdb, len }),
    ]
}

fn take(guest: &mut Guest, step: &Step) {
    match step {
        Step::Message { code, flags, body, fds } => {
            let fds: Vec<OwnedFd> = fds.iter().map(|fd| fd.make()).collect();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            guest.peer.send_flags(*code, *flags, body, &fds);
        }
        Step::Scribble { queue, at, bytes } => {
            guest.write(Guest::rings_at(*queue) + at, bytes);
            guest.kick(*queue);
        }
        Step::Litter { at, bytes } => guest.write(0x20_0000 + at, bytes),
        Step::Index { queue, by } => {
            let avail = guest.memory.range(Guest::rings_at(*queue) + 0x4000, 4).unwrap();
            let idx = avail.load_acquire_u16(2).unwrap().wrapping_add(*by);
            avail.store_release_u16(2, idx).unwrap();
            guest.kick(*queue);
        }
        Step::Read { queue, lun, cdb, len } => {
            guest.submit(*queue, *lun, 1, cdb, &[], *len);
        }
    }
}

#[test]
fn random_messages_and_rings_harm_nobody_else() {
    let host = Host::with_disk(2);
    let other = RefCell::new(bystander(&host));
    let config = ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() };
    proptest!(config, |(
        started in prop::bool::weighted(0.8),
        steps in prop::collection::vec(step(), 1..30),
        cut in 0u32..64,
    )| {
        let socket = host.socket();
        host.wait_until_free();
        let mut guest = match started {
            true => Guest::start(&socket, LINUX, 2),
            false => Guest::unconnected(&socket),
        };
        for step in &steps {
            take(&mut guest, step);
            if !guest.peer.skim() {
                break;
            }
        }
        // It leaves in the middle of a message.
        guest.peer.try_send_bytes(&words(&[SET_FEATURES, 1, cut]));
        drop(guest);
        let other = &mut *other.borrow_mut();
        prop_assert_eq!(other.write_blocks(0, 3, &[5; 512]).status, 0);
        prop_assert_eq!(&other.read_blocks(0, 3, 1).data, &[5; 512]);
    });
    host.wait_until_free();
    all_is_well(&host, &mut other.borrow_mut());
    Guest::start(&host.socket(), LINUX, 1).ready(0);
}
