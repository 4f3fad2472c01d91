//! The device against a small NBD server of these tests' own, which keeps its export in memory and does
//! what a test tells it; and what a server may say, byte by byte.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use bdev::{AlignedBuf, Bdev, Event, Io, IoError, Op, OwnedChannel, Registry, SyncChannel};
use guestmem::{IoVec, Sg};
use parking_lot::Mutex;
use uuid::Uuid;

use crate::conversation::{Conversation, Note, Rules};
use crate::wire::flag;
use crate::{Address, Broken, Handshake, Nbd, Options};

const KIB: usize = 1 << 10;
const ALL_FLAGS: u16 = 1
    | flag::SEND_FLUSH
    | flag::SEND_FUA
    | flag::SEND_TRIM
    | flag::SEND_WRITE_ZEROES
    | flag::CAN_MULTI_CONN;

/// What a server of the tests does and has seen.
struct Served {
    data: Mutex<Vec<u8>>,
    flags: AtomicU16,
    /// Least, preferred and largest bytes of a request.
    lengths: [u32; 3],
    /// The error of requests of this kind (kind << 32 | error); 0: none.
    error: AtomicU64,
    /// Requests are read and not answered.
    hangs: AtomicBool,
    /// Requests that are answered from now on before a connection is closed; u32::MAX: all.
    answers: AtomicU32,
    /// After them a connection stays, and nothing on it is answered.
    stays: AtomicBool,
    /// Kind, flags, offset and length of the requests.
    seen: Mutex<Vec<(u16, u16, u64, u32)>>,
    connections: Mutex<Vec<UnixStream>>,
    closed: AtomicBool,
    made: AtomicU32,
    /// Connections that are read from now.
    serving: AtomicU32,
}

/// A server of the tests, at a socket of its own.
struct Server {
    served: Arc<Served>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start(size: usize, flags: u16, lengths: [u32; 3]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n");
        let served = Arc::new(Served {
            data: Mutex::new(vec![0; size]),
            flags: AtomicU16::new(flags),
            lengths,
            error: AtomicU64::new(0),
            hangs: AtomicBool::new(false),
            answers: AtomicU32::new(u32::MAX),
            stays: AtomicBool::new(false),
            seen: Mutex::default(),
            connections: Mutex::default(),
            closed: AtomicBool::new(false),
            made: AtomicU32::new(0),
            serving: AtomicU32::new(0),
        });
        let server = Server { served, path, _folder: folder };
        server.listen();
        server
    }

    /// Serves at its socket from now on.
    fn listen(&self) {
        _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).unwrap();
        let served = self.served.clone();
        served.closed.store(false, SeqCst);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                if served.closed.load(SeqCst) {
                    return;
                }
                served.made.fetch_add(1, SeqCst);
                served.connections.lock().push(stream.try_clone().unwrap());
                let served = served.clone();
                served.serving.fetch_add(1, SeqCst);
                thread::spawn(move || {
                    _ = served.serve(&stream);
                    _ = stream.shutdown(std::net::Shutdown::Both);
                    served.serving.fetch_sub(1, SeqCst);
                });
            }
        });
    }

    /// As if it was killed.
    fn vanish(&self) {
        self.served.closed.store(true, SeqCst);
        _ = UnixStream::connect(&self.path);
        _ = std::fs::remove_file(&self.path);
        for stream in self.served.connections.lock().drain(..) {
            _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn options(&self) -> Options {
        let uri = format!("nbd+unix:///disk?socket={}", self.path.display());
        Options {
            name: "nbd0".into(),
            address: Address::parse(&uri).unwrap(),
            block_size: None,
            read_only: false,
            uuid: None,
            write_through: None,
            reconnect_delay: Duration::from_millis(20),
            give_up: Duration::from_secs(600),
        }
    }

    fn disk(&self) -> Arc<Nbd> {
        Nbd::create(&Registry::new(), self.options()).unwrap()
    }

    fn seen(&self, kind: u16) -> Vec<(u16, u64, u32)> {
        let seen = self.served.seen.lock();
        seen.iter().filter(|r| r.0 == kind).map(|r| (r.1, r.2, r.3)).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.vanish();
    }
}

impl Served {
    fn terms(&self) -> Vec<u8> {
        let mut reply = Vec::new();
        let mut option = |kind: u32, data: &[u8]| {
            reply.extend(0x0003_e889_0455_65a9_u64.to_be_bytes());
            reply.extend(7u32.to_be_bytes());
            reply.extend(kind.to_be_bytes());
            reply.extend((data.len() as u32).to_be_bytes());
            reply.extend(data);
        };
        let mut export = vec![0, 0];
        export.extend((self.data.lock().len() as u64).to_be_bytes());
        export.extend(self.flags.load(SeqCst).to_be_bytes());
        option(3, &export);
        let mut lengths = vec![0, 3];
        self.lengths.iter().for_each(|len| lengths.extend(len.to_be_bytes()));
        option(3, &lengths);
        option(1, &[]);
        reply
    }

    fn serve(&self, mut stream: &UnixStream) -> std::io::Result<()> {
        stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
        let mut head = [0; 20];
        stream.read_exact(&mut head)?;
        let mut option = vec![0; be(&head[16..]) as usize];
        stream.read_exact(&mut option)?;
        assert_eq!(&option[4..8], b"disk");
        stream.write_all(&self.terms())?;
        loop {
            let mut request = [0; 28];
            stream.read_exact(&mut request)?;
            let (kind, flags) = (be(&request[6..8]) as u16, be(&request[4..6]) as u16);
            let (offset, len) = (be(&request[16..24]), be(&request[24..]) as u32);
            self.seen.lock().push((kind, flags, offset, len));
            let mut data = vec![0; if kind == 1 { len as usize } else { 0 }];
            stream.read_exact(&mut data)?;
            if kind == 2 {
                return Ok(());
            }
            let left = self.answers.load(SeqCst);
            if left == 0 {
                while self.stays.load(SeqCst) && !self.closed.load(SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
                stream.shutdown(std::net::Shutdown::Both)?;
                return Err(ErrorKind::ConnectionReset.into());
            }
            if left != u32::MAX {
                self.answers.store(left - 1, SeqCst);
            }
            while self.hangs.load(SeqCst) && !self.closed.load(SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
            let wrong = self.error.load(SeqCst);
            let error = if wrong >> 32 == u64::from(kind) { wrong as u32 } else { 0 };
            let mut reply = vec![0x67, 0x44, 0x66, 0x98];
            reply.extend(error.to_be_bytes());
            reply.extend(&request[8..16]);
            let range = offset as usize..offset as usize + len as usize;
            if error == 0 {
                let mut medium = self.data.lock();
                match kind {
                    0 => reply.extend(&medium[range]),
                    1 => medium[range].copy_from_slice(&data),
                    6 => medium[range].fill(0),
                    _ => {}
                }
            }
            stream.write_all(&reply)?;
        }
    }
}

fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn pattern(len: usize, seed: usize) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    buf.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n * 31 + n / 511 + seed) as u8);
    buf
}

const ANY: [u32; 3] = [1, 4096, 32 << 20];

#[test]
fn all_kinds_of_io_reach_the_server_with_one_connection_and_with_one_each() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(1 << 20, flags, ANY);
        let disk = server.disk();
        assert_eq!((disk.geometry().block_size, disk.geometry().num_blocks), (512, 2048));
        assert_eq!(disk.geometry().physical_block_size, 4096);
        let (mut a, mut b) =
            (SyncChannel::open(&*disk).unwrap(), SyncChannel::open(&*disk).unwrap());
        let data = pattern(100 * KIB, 1);
        a.write(3, &data).unwrap();
        a.write_fua(1000, &data[..512]).unwrap();
        b.flush().unwrap();
        let mut back = AlignedBuf::zeroed(100 * KIB);
        b.read(3, &mut back).unwrap();
        assert!(back[..] == data[..]);
        b.write_zeroes(4, 2).unwrap();
        a.unmap(100, 50).unwrap();
        a.read(3, &mut back[..2048]).unwrap();
        assert!(
            back[512..1536].iter().all(|byte| *byte == 0) && back[1536..2048] == data[1536..2048]
        );
        assert_eq!(server.seen(1), [(0, 3 * 512, 100 * KIB as u32), (1, 512_000, 512)]);
        assert_eq!(server.seen(3), [(0, 0, 0)]);
        assert_eq!(server.seen(4), [(0, 51_200, 25_600)]);
        assert_eq!(server.seen(6), [(0, 2048, 1024)]);
        let beyond = a.read(2048, &mut back[..512]).unwrap_err();
        assert_eq!(beyond.cause, IoError::OutOfRange);
        let made = server.served.made.load(SeqCst);
        assert_eq!(made, if flags & flag::CAN_MULTI_CONN == 0 { 1 } else { 3 });
    }
}

#[test]
fn a_large_io_is_cut_into_what_the_server_takes() {
    let server = Server::start(1 << 20, ALL_FLAGS, [4096, 4096, 8192]);
    let disk = server.disk();
    assert_eq!(disk.geometry().block_size, 4096);
    let mut channel = SyncChannel::open(&*disk).unwrap();
    let data = pattern(1 << 20, 7);
    channel.write(0, &data).unwrap();
    let mut back = AlignedBuf::zeroed(1 << 20);
    channel.read(0, &mut back).unwrap();
    assert!(back[..] == data[..] && server.served.data.lock()[..] == data[..]);
    let writes = server.seen(1);
    assert_eq!(writes.len(), 128);
    assert!(writes.iter().enumerate().all(|(n, w)| *w == (0, n as u64 * 8192, 8192)));
    let refused =
        Nbd::create(&Registry::new(), Options { block_size: Some(512), ..server.options() });
    let why = refused.err().unwrap().to_string();
    assert!(why.contains("no requests of less than 4096 bytes"), "{why}");
}

#[test]
fn many_ios_at_a_time_are_answered_in_any_number_of_threads() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(8 << 20, flags, ANY);
        let disk = server.disk();
        thread::scope(|scope| {
            for thread in 0..3u64 {
                let disk = disk.clone();
                scope.spawn(move || {
                    let mut channel = OwnedChannel::open(&*disk, 100).unwrap();
                    let (mut over, mut at) = (Vec::new(), VecDeque::new());
                    for n in 0..600u64 {
                        let lba = thread * 5000 + n % 300 * 16;
                        let (op, buf) = match n < 300 {
                            true => (Op::Write, pattern(8192, lba as usize)),
                            false => (Op::Read, AlignedBuf::zeroed(8192)),
                        };
                        while channel.is_full() || n == 300 && channel.in_flight() > 0 {
                            channel.poll(&mut over);
                            channel.wait(&mut over, 1000);
                        }
                        over.extend(channel.submit(op, lba, 16, Some(buf), lba));
                        at.push_back(lba);
                    }
                    while channel.in_flight() > 0 {
                        channel.poll(&mut over);
                        channel.wait(&mut over, 1000);
                    }
                    assert_eq!(over.len(), 600);
                    for finished in over {
                        finished.result.unwrap();
                        let buf = finished.buf.unwrap();
                        assert!(buf[..] == pattern(8192, finished.token as usize)[..]);
                    }
                });
            }
        });
    }
}

#[test]
fn errors_of_the_server_are_those_of_the_io_and_a_failed_flush_is_remembered() {
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    let disk = server.disk();
    let mut channel = SyncChannel::open(&*disk).unwrap();
    let fails = |kind: u64, error: u64| server.served.error.store(kind << 32 | error, SeqCst);
    let mut buf = AlignedBuf::zeroed(4096);
    for (kind, error, expected) in [
        (0, 5, IoError::ReadMedium),
        (1, 5, IoError::WriteMedium),
        (1, 28, IoError::NoSpace),
        (1, 1, IoError::ReadOnly),
        (6, 95, IoError::Unsupported),
    ] {
        fails(kind, error);
        let failed = match kind {
            0 => channel.read(0, &mut buf),
            1 => channel.write(0, &buf),
            _ => channel.write_zeroes(0, 8),
        };
        assert_eq!(failed.unwrap_err().cause, expected);
    }
    fails(3, 5);
    assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
    assert!(disk.clear_flush_failure().is_err());
    fails(0, 0);
    // Nobody asks the server: what was written before may be lost.
    assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
    assert_eq!(channel.write_fua(0, &buf).unwrap_err().cause, IoError::Flush);
    channel.write(0, &buf).unwrap();
    assert_eq!(disk.clear_flush_failure().unwrap().unwrap().errno, Some(5));
    channel.flush().unwrap();
}

#[test]
fn what_was_in_flight_is_sent_again_after_a_reconnect_and_nothing_that_was_answered() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(1 << 20, flags, ANY);
        let disk = server.disk();
        let mut channel = OwnedChannel::open(&*disk, 32).unwrap();
        let mut over = Vec::new();
        server.served.answers.store(7, SeqCst);
        server.served.stays.store(true, SeqCst);
        for n in 0..20u64 {
            over.extend(channel.submit(Op::Write, n * 8, 8, Some(pattern(4096, n as usize)), n));
        }
        until("seven answers", || {
            channel.poll(&mut over);
            over.len() == 7
        });
        server.vanish();
        // What the kernel has of a connection is read after its end too.
        until("nobody reads", || server.served.serving.load(SeqCst) == 0);
        server.served.answers.store(u32::MAX, SeqCst);
        let before = server.seen(1).len();
        for _ in 0..50 {
            channel.poll(&mut over);
            thread::sleep(Duration::from_millis(1));
        }
        assert!(over.iter().all(|finished| finished.result.is_ok()) && over.len() == 7);
        server.listen();
        until("all are answered", || {
            channel.poll(&mut over);
            over.len() == 20
        });
        let again: Vec<_> = server.seen(1)[before..].iter().map(|write| write.1 / 4096).collect();
        assert_eq!(again, (7..20).collect::<Vec<_>>());
        assert!(over.iter().all(|finished| finished.result.is_ok()));
        let data = server.served.data.lock();
        (0..20).for_each(|n| assert!(data[n * 4096..][..4096] == pattern(4096, n)[..], "{n}"));
    }
}

#[test]
fn a_server_that_hangs_is_given_up_and_comes_back_only_after_its_old_connection_has_ended() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(1 << 20, flags, ANY);
        let give_up = Duration::from_millis(300);
        let disk = Nbd::create(&Registry::new(), Options { give_up, ..server.options() }).unwrap();
        let mut channel = SyncChannel::open(&*disk).unwrap();
        channel.write(0, &pattern(4096, 1)).unwrap();
        server.served.hangs.store(true, SeqCst);
        let failed = channel.write(0, &pattern(4096, 2)).unwrap_err();
        assert_eq!(failed.cause, IoError::WriteMedium);
        let made = server.served.made.load(SeqCst);
        // At once, as nobody answers.
        assert_eq!(channel.flush().unwrap_err().cause, IoError::Flush);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(server.served.made.load(SeqCst), made, "it was connected to anew");
        server.served.hangs.store(false, SeqCst);
        until("it is used again", || channel.write(0, &pattern(4096, 3)).is_ok());
        assert!(server.served.data.lock()[..4096] == pattern(4096, 3)[..]);
        // It was no error of the server's.
        channel.flush().unwrap();
    }
}

#[test]
fn memory_that_the_kernel_has_for_a_server_that_reads_nothing_is_let_go_of() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(16 << 20, flags, ANY);
        let give_up = Duration::from_millis(300);
        let disk = Nbd::create(&Registry::new(), Options { give_up, ..server.options() }).unwrap();
        let mut channel = OwnedChannel::open(&*disk, 16).unwrap();
        let mut over = Vec::new();
        server.served.hangs.store(true, SeqCst);
        for n in 0..12u64 {
            let (op, lba) = (if n % 3 == 0 { Op::Read } else { Op::Write }, n * 2048);
            over.extend(channel.submit(op, lba, 2048, Some(pattern(1 << 20, 1)), n));
        }
        until("all have failed", || {
            channel.poll(&mut over);
            over.len() == 12
        });
        assert!(over.iter().all(|finished| finished.result.is_err()));
        server.served.hangs.store(false, SeqCst);
        until("it is used again", || {
            over.extend(channel.submit(Op::Write, 0, 2048, Some(pattern(1 << 20, 2)), 99));
            while channel.in_flight() > 0 {
                channel.poll(&mut over);
            }
            over.last().is_some_and(|finished| finished.result.is_ok())
        });
        assert!(server.served.data.lock()[..1 << 20] == pattern(1 << 20, 2)[..]);
    }
}

#[test]
fn a_server_that_ends_each_connection_is_left_alone_for_a_while_and_given_up() {
    for (flags, made) in [(ALL_FLAGS, 2), (ALL_FLAGS & !flag::CAN_MULTI_CONN, 1)] {
        let server = Server::start(1 << 20, flags, ANY);
        let (reconnect_delay, give_up) = (Duration::from_secs(600), Duration::from_millis(400));
        let options = Options { reconnect_delay, give_up, ..server.options() };
        let disk = Nbd::create(&Registry::new(), options).unwrap();
        server.served.answers.store(0, SeqCst);
        let mut channel = SyncChannel::open(&*disk).unwrap();
        let failed = channel.write(0, &pattern(512, 1)).unwrap_err();
        assert_eq!(failed.cause, IoError::WriteMedium);
        assert_eq!(server.served.made.load(SeqCst), made);
    }
    // Nor does a new connection give what waits more time.
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    let give_up = Duration::from_millis(400);
    let disk = Nbd::create(&Registry::new(), Options { give_up, ..server.options() }).unwrap();
    server.served.answers.store(0, SeqCst);
    let mut channel = SyncChannel::open(&*disk).unwrap();
    assert!(channel.flush().is_err());
    assert!(server.served.made.load(SeqCst) > 3);
}

#[test]
fn a_long_io_leaves_room_for_others() {
    let server = Server::start(1 << 20, ALL_FLAGS, [512, 512, 4096]);
    let disk = server.disk();
    let mut channel = OwnedChannel::open(&*disk, 4).unwrap();
    let mut over = Vec::new();
    over.extend(channel.submit(Op::Write, 0, 2048, Some(pattern(1 << 20, 1)), 0));
    over.extend(channel.submit(Op::Write, 0, 8, Some(pattern(4096, 2)), 1));
    until("both are answered", || {
        channel.poll(&mut over);
        over.len() == 2
    });
    assert_eq!(over[0].token, 1, "it waited for the long one");
    assert!(over.iter().all(|finished| finished.result.is_ok()));
    assert_eq!(server.seen(1).len(), 257);
}

#[test]
fn who_does_not_answer_is_no_server() {
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    server.vanish();
    let create = || Nbd::create(&Registry::new(), server.options()).err().unwrap();
    let gone = create();
    assert_eq!((gone.errno, gone.unreachable), (Some(libc::ENOENT), true));
    let _listener = UnixListener::bind(&server.path).unwrap();
    let silent = create();
    assert_eq!((silent.errno, silent.unreachable), (Some(libc::ETIMEDOUT), true));
    assert!(silent.to_string().contains("does not answer as an NBD server does"), "{silent}");
}

#[test]
fn growth_is_noticed_without_io_and_anything_less_keeps_the_disk_away() {
    let registry = Registry::new();
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    let give_up = Duration::from_millis(400);
    let disk = Nbd::create(&registry, Options { give_up, ..server.options() }).unwrap();
    registry.register(disk.clone()).unwrap();
    let resized = Arc::new(AtomicU32::new(0));
    let counted = resized.clone();
    let _subscription = registry.subscribe(move |event| {
        counted.fetch_add(u32::from(matches!(event, Event::Resized(_))), SeqCst);
    });
    let comes_back = |size: usize, flags: u16| {
        server.vanish();
        *server.served.data.lock() = vec![9; size];
        server.served.flags.store(flags, SeqCst);
        server.listen();
    };
    comes_back(2 << 20, ALL_FLAGS);
    until("it has grown", || resized.load(SeqCst) == 1);
    assert_eq!(disk.geometry().num_blocks, 4096);
    let problem = || disk.driver_specific()["nbd"]["problem"].as_str().map(str::to_owned);
    let mut channel = SyncChannel::open(&*disk).unwrap();
    for (size, flags, words) in [
        (1 << 20, ALL_FLAGS, "shrank from 2097152 to 1048576 bytes"),
        (2 << 20, ALL_FLAGS & !flag::SEND_FLUSH, "takes no flushes any more"),
        (2 << 20, ALL_FLAGS | flag::READ_ONLY, "is read-only now"),
        (2 << 20, ALL_FLAGS & !flag::CAN_MULTI_CONN, "several connections"),
    ] {
        comes_back(size, flags);
        until(words, || problem().is_some_and(|why| why.contains(words)));
        let mut buf = AlignedBuf::zeroed(512);
        assert_eq!(channel.read(0, &mut buf).unwrap_err().cause, IoError::ReadMedium);
    }
    comes_back(2 << 20, ALL_FLAGS);
    until("it is back", || problem().is_none());
    let mut buf = AlignedBuf::zeroed(512);
    until("it reads", || channel.read(4095, &mut buf).is_ok());
    assert!(buf.iter().all(|byte| *byte == 9));
}

#[test]
fn writes_to_another_host_are_durable_at_once_unless_it_is_asked_otherwise() {
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    let options = Options { write_through: Some(true), ..server.options() };
    let disk = Nbd::create(&Registry::new(), options).unwrap();
    assert!(!disk.features().volatile_cache && server.disk().features().volatile_cache);
    SyncChannel::open(&*disk).unwrap().write(0, &pattern(512, 0)).unwrap();
    assert_eq!(server.seen(1), [(1, 0, 512)]);
    let none = Server::start(1 << 20, ALL_FLAGS & !flag::SEND_FUA, ANY);
    let options = Options { write_through: Some(true), ..none.options() };
    let why = Nbd::create(&Registry::new(), options).err().unwrap().to_string();
    assert!(why.contains("no write durable by itself"), "{why}");
}

#[test]
fn a_read_only_export_takes_no_writes_and_one_without_abilities_has_none() {
    let server = Server::start(1 << 20, ALL_FLAGS | flag::READ_ONLY, ANY);
    let disk = server.disk();
    let mut channel = SyncChannel::open(&*disk).unwrap();
    assert_eq!(channel.write(0, &pattern(512, 0)).unwrap_err().cause, IoError::ReadOnly);
    assert!(channel.unmap(0, 1).is_err() && channel.write_zeroes(0, 1).is_err());
    let plain = Server::start(1 << 20, 1, ANY);
    let disk = plain.disk();
    let features = disk.features();
    assert!(!features.volatile_cache && !features.fua && !features.unmap && !features.write_zeroes);
    let mut channel = SyncChannel::open(&*disk).unwrap();
    channel.flush().unwrap();
    assert_eq!(channel.unmap(0, 1).unwrap_err().cause, IoError::Unsupported);
    assert!(plain.seen(3).is_empty());
}

#[test]
fn a_device_that_nobody_has_ends_its_threads_and_closes_its_connections() {
    for flags in [ALL_FLAGS, ALL_FLAGS & !flag::CAN_MULTI_CONN] {
        let server = Server::start(1 << 20, flags, ANY);
        let disk = server.disk();
        let mut channel = SyncChannel::open(&*disk).unwrap();
        drop(disk);
        channel.write(0, &pattern(512, 0)).unwrap();
        drop(channel);
        let all_closed = || {
            let connections = server.served.connections.lock();
            connections.iter().all(|stream| {
                stream.set_nonblocking(true).unwrap();
                matches!((&*stream).read(&mut [0]), Ok(0))
            })
        };
        until("its connections are closed", all_closed);
    }
}

/// A handshake with these bytes of the server.
fn said(bytes: &[u8]) -> Result<crate::Terms, String> {
    let (mut handshake, mut answer, mut at) = (Handshake::new("disk"), Vec::new(), 0);
    loop {
        let next = bytes.get(at..at + handshake.wants()).ok_or("the server says no more")?;
        at += next.len();
        match handshake.take(next, &mut answer) {
            Ok(Some(terms)) => return Ok(terms),
            Ok(None) => assert!(handshake.wants() > 0 && handshake.wants() <= 8192),
            Err(e) => return Err(e.to_string()),
        }
    }
}

fn option(kind: u32, len: u32, data: &[u8]) -> Vec<u8> {
    let mut reply = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    reply.extend(7u32.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend(len.to_be_bytes());
    reply.extend(data);
    reply
}

#[test]
fn a_handshake_that_goes_wrong_ends_in_a_sentence() {
    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";
    let export = |size: u64| {
        let mut data = vec![0, 0];
        data.extend(size.to_be_bytes());
        data.extend([0, 1]);
        option(3, 12, &data)
    };
    let lengths = |all: [u32; 3]| {
        let mut data = vec![0, 3];
        all.iter().for_each(|len| data.extend(len.to_be_bytes()));
        option(3, 14, &data)
    };
    let ack = option(1, 0, &[]);
    let after = |replies: &[Vec<u8>]| [GREETING, &replies.concat()].concat();
    let terms = said(&after(&[export(1 << 20), lengths([512, 4096, 65536]), ack.clone()])).unwrap();
    assert_eq!((terms.size, terms.least, terms.payload_max), (1 << 20, 512, 65536));
    assert_eq!(said(&after(&[export(512), ack.clone()])).unwrap().payload_max, 32 << 20);
    for (bytes, words) in [
        (b"HTTP/1.1 400 Bad R".to_vec(), "no NBD server"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00".to_vec(), "too old"),
        (b"NBDMAGICIHAVEOPT\x00\x00".to_vec(), "too old"),
        (after(&[vec![0; 20]]), "answers something else"),
        (after(&[option(3, u32::MAX, &[])]), "says too much"),
        (after(&vec![option(3, 2, &[0, 9]); 33]), "says too much"),
        (after(&[option(3, 3, &[0, 0, 1])]), "information of a wrong length"),
        (after(&[option(3, 0, &[])]), "information of a wrong length"),
        (after(&[option(9, 0, &[])]), "not known"),
        (after(std::slice::from_ref(&ack)), "does not say how large"),
        (after(&[export(u64::MAX), ack.clone()]), "sizes of its export that cannot be"),
        (after(&[export(512), lengths([3, 4096, 65536]), ack.clone()]), "cannot be"),
        (after(&[export(512), lengths([512, 4096, 1024]), ack.clone()]), "cannot be"),
        (after(&[export(512), lengths([65536, 65536, 65536]), ack.clone()]), "less than 65536"),
        (after(&[export(512), lengths([1, 1, 100]), ack.clone()]), "more than 100 bytes"),
        (after(&[option(0x8000_0001, 0, &[])]), "does not know NBD_OPT_GO"),
        (
            after(&[option(0x8000_0006, 4, b"no\x1b!")]),
            "has no export \"disk\": the server says \"no!\"",
        ),
        (after(&[option(0x8000_0005, 0, &[])]), "TLS"),
    ] {
        let why = said(&bytes).unwrap_err();
        assert!(why.contains(words), "{words}: {why}");
    }
}

/// A conversation with a READ and a WRITE of 1024 bytes in flight, which were sent as far as `sent` says, and
/// their handles.
fn with_two(sent: usize, check: impl FnOnce(&mut Conversation, [Vec<u8>; 2])) {
    let rules = Rules { block_size: 512, payload_max: 4096, write_through: false };
    let mut talk = Conversation::new(rules);
    let mut data = vec![5u8; 2048];
    let (read, write) = data.split_at_mut(1024);
    // SAFETY: the data lives as long as the conversation.
    let runs =
        unsafe { [IoVec::new(read.as_mut_ptr(), 1024), IoVec::new(write.as_mut_ptr(), 1024)] };
    for (n, op) in [Op::Read, Op::Write].into_iter().enumerate() {
        // SAFETY: as above.
        let sg = unsafe { Sg::new(&runs[n..n + 1]) };
        let io = Io { op, fua: false, lba: 4, blocks: 2, sg, tag: n as u64 };
        assert!(talk.submit(&io, Note::default()));
    }
    let mut out = vec![IoVec::EMPTY; 16];
    let (count, bytes) = talk.to_send(&mut out);
    assert_eq!((count, bytes), (3, 28 + 28 + 1024));
    // SAFETY: a header, which is not changed while it is sent.
    let handle = |run: &IoVec| unsafe { std::slice::from_raw_parts(run.base().add(8), 8).to_vec() };
    let handles = [handle(&out[0]), handle(&out[1])];
    talk.was_sent(sent).unwrap();
    check(&mut talk, handles);
    drop(data);
}

/// Has a conversation receive bytes, in pieces of what it has room for and at most `most`.
fn hear(talk: &mut Conversation, mut bytes: &[u8], most: usize) -> Result<(), Broken> {
    while !bytes.is_empty() {
        let mut runs = vec![IoVec::EMPTY; 16];
        let count = talk.room(&mut runs);
        let mut came = 0;
        for run in &runs[..count] {
            let n = run.len().min(bytes.len()).min(most - came);
            // SAFETY: room that the conversation gives.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), run.base(), n) };
            bytes = &bytes[n..];
            came += n;
        }
        assert!(came > 0);
        talk.was_received(came)?;
    }
    Ok(())
}

fn reply(error: u32, handle: &[u8]) -> Vec<u8> {
    [&[0x67, 0x44, 0x66, 0x98], &error.to_be_bytes()[..], handle].concat()
}

#[test]
fn replies_in_any_order_and_in_any_pieces_end_their_ios() {
    for most in [1, 7, 16, 17, 100, 4096] {
        with_two(usize::MAX, |talk, [read, write]| {
            let bytes = [reply(0, &write), reply(0, &read), vec![8; 1024]].concat();
            hear(talk, &bytes, most).unwrap();
            let ended: Vec<_> = std::iter::from_fn(|| talk.next_ended()).collect();
            assert_eq!(ended.iter().map(|e| e.io.tag).collect::<Vec<_>>(), [1, 0]);
            assert!(ended.iter().all(|e| e.result.is_ok()) && talk.in_flight() == 0);
            let mut got = [0; 1024];
            ended[1].io.sg.copy_to_slice(0, &mut got);
            assert_eq!(got, [8; 1024]);
        });
    }
}

#[test]
fn what_no_server_may_say_ends_the_connection() {
    with_two(usize::MAX, |talk, _| {
        assert_eq!(hear(talk, &[0; 16], 16), Err(Broken::NotAReply));
    });
    with_two(usize::MAX, |talk, [_, write]| {
        // A second time, and another's that was never asked for.
        hear(talk, &reply(0, &write), 16).unwrap();
        assert_eq!(hear(talk, &reply(0, &write), 16), Err(Broken::Unknown));
    });
    with_two(usize::MAX, |talk, _| {
        assert_eq!(hear(talk, &reply(0, &[0xff; 8]), 16), Err(Broken::Unknown));
    });
    with_two(usize::MAX, |talk, [read, _]| {
        assert_eq!(hear(talk, &reply(108, &read), 16), Err(Broken::GoesAway));
    });
    // The WRITE is sent but for its last byte: its memory is the kernel's until then.
    with_two(28 + 28 + 1023, |talk, [_, write]| {
        hear(talk, &reply(0, &write), 16).unwrap();
        assert!(talk.next_ended().is_none());
        assert_eq!(talk.was_sent(0), Err(Broken::Early));
        talk.fail_all();
        assert_eq!(std::iter::from_fn(|| talk.next_ended()).count(), 2);
    });
    // It may be known before the kernel says that the rest is sent.
    with_two(28 + 28 + 1023, |talk, [_, write]| {
        hear(talk, &reply(0, &write), 16).unwrap();
        talk.was_sent(1).unwrap();
        assert_eq!(talk.next_ended().unwrap().io.tag, 1);
    });
}

#[test]
fn what_is_sent_again_has_another_handle_and_answers_of_before_are_strangers() {
    with_two(usize::MAX, |talk, [read, write]| {
        hear(talk, &[reply(0, &read), vec![1; 300]].concat(), 4096).unwrap();
        talk.begin_anew();
        let mut out = vec![IoVec::EMPTY; 16];
        assert_eq!(talk.to_send(&mut out), (3, 28 + 28 + 1024));
        talk.was_sent(usize::MAX).unwrap();
        assert_eq!(hear(talk, &reply(0, &write), 16), Err(Broken::Unknown));
        talk.fail_all();
        let errors: Vec<_> = std::iter::from_fn(|| talk.next_ended()).map(|e| e.result).collect();
        assert_eq!(errors, [Err(IoError::ReadMedium), Err(IoError::WriteMedium)]);
        assert_eq!(talk.in_flight(), 0);
    });
}

#[test]
fn a_uuid_that_is_given_stays() {
    let server = Server::start(1 << 20, ALL_FLAGS, ANY);
    let uuid = Some(Uuid::from_u128(7));
    let disk = Nbd::create(&Registry::new(), Options { uuid, ..server.options() }).unwrap();
    assert_eq!(disk.uuid(), Uuid::from_u128(7));
    assert_eq!(disk.driver_specific()["nbd"]["connected"], true);
}
