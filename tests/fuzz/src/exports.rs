//! What comes from `/dev/fuse` to an export: any packets, and any record of the process before. The
//! kernel's place is taken by a socket that keeps packets apart, the holder's by a thread.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use bdev::testing::Holes;
use bdev::{Bdev, Malloc, MallocOptions, Registry};
use export::{Exports, MAX_IO_BYTES};
use holder::{Client, RECORD_BYTES};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Timeout, set_socket_recv_buffer_size, set_socket_send_buffer_size, set_socket_timeout,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept, bind, listen, recv, send, sendmsg, socket_with, socketpair,
};

use crate::input::Input;

/// Blocks of the disk, of 512 bytes: more than one request may be about.
const BLOCKS: u64 = 8192;
/// Bytes of `fuse_in_header` and `fuse_out_header`.
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(8);
/// Operations that have no answer: FORGET, BATCH_FORGET.
const SILENT: [u32; 2] = [2, 42];
/// The operation whose data follows.
const WRITE: u32 = 16;
/// The one that asks where data and holes are, and what it asks for.
const LSEEK: u32 = 46;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Descriptors that the next session has, and what it is asked for with: `take` where a process before
/// has left it, else `mount`.
type Next = Mutex<Option<(OwnedFd, OwnedFd, &'static [u8])>>;

struct Host {
    exports: Exports,
    disk: Arc<Malloc>,
    next: Arc<Next>,
    _directory: tempfile::TempDir,
}

fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("a socket")
}

/// A holder that has one session for whoever asks: the one in `next`.
fn hold(path: &PathBuf, next: Arc<Next>) {
    let listener = seqpacket();
    bind(&listener, &SocketAddrUnix::new(path).expect("a path")).expect("a free path");
    listen(&listener, 4).expect("it listens");
    thread::spawn(move || {
        loop {
            let Ok(peer) = accept(&listener) else {
                continue;
            };
            let next = Arc::clone(&next);
            thread::spawn(move || answer(&peer, &next));
        }
    });
}

/// Answers what one peer of the holder asks, until it has gone.
fn answer(peer: &OwnedFd, next: &Next) {
    let mut packet = [0; 256];
    while let Ok((1.., _)) = again(|| recv(peer, &mut packet, RecvFlags::empty())) {
        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
        let fds = next.take_if(|(_, _, request)| packet.starts_with(request));
        let text: &[u8] = match (&fds, packet[0]) {
            (None, b't') => b"none",
            (None, b'm') => b"failed there is none",
            _ => b"ok",
        };
        let beside: Vec<_> =
            fds.iter().flat_map(|(fuse, record, _)| [fuse.as_fd(), record.as_fd()]).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !beside.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&beside)));
        }
        let text = [IoSlice::new(text)];
        if sendmsg(peer, &text, &mut control, SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("holder");
        let next = Arc::new(Mutex::new(None));
        hold(&path, Arc::clone(&next));
        let registry = Registry::new();
        let options = MallocOptions {
            name: "disk".into(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: BLOCKS,
            uuid: None,
        };
        let disk = Malloc::create(options).expect("a disk");
        let holes = Holes::new(disk.clone(), &[8..16, 100..101, 4096..BLOCKS - 1]);
        registry.register(holes).expect("a free name");
        let exports = Exports::held(registry, directory.path(), Arc::new(Client::new(&path)));
        Host { exports, disk, next, _directory: directory }
    })
}

/// The kernel's end of a session, which begins with `record` as it was left; empty: a new one.
fn session(record: &[u8]) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let (kernel, ours) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
    rustix::io::ioctl_fionbio(&ours, true).expect("a socket");
    for end in [&kernel, &ours] {
        // An answer is as long as a read may be, and whoever cannot send it goes on without.
        set_socket_send_buffer_size(end, 4 * MAX_IO_BYTES as usize).expect("a buffer");
        set_socket_recv_buffer_size(end, 4 * MAX_IO_BYTES as usize).expect("a buffer");
    }
    set_socket_timeout(&kernel, Timeout::Recv, Some(ANSWER)).expect("a timeout");
    let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&memory, RECORD_BYTES).expect("its size");
    rustix::io::pwrite(&memory, record, 0).expect("it takes that");
    let request: &[u8] = if record.is_empty() { b"mount" } else { b"take" };
    *host().next.lock().unwrap_or_else(PoisonError::into_inner) = Some((ours, memory, request));
    kernel
}

/// A record as a process leaves it, with fields of the input.
fn record(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = b"VTEXPORT".to_vec();
    let (version, state) = if input.once_in(8) { (input.u32(), input.u32()) } else { (1, 2) };
    let abilities = if input.once_in(2) { u64::MAX } else { input.u64() };
    let max_write = if input.once_in(2) { 1 << 20 } else { input.u32() };
    bytes.extend([version.to_ne_bytes(), state.to_ne_bytes()].concat());
    bytes.extend(abilities.to_ne_bytes());
    bytes.extend([max_write.to_ne_bytes(), [0; 4]].concat());
    bytes.resize(4096, 0);
    for _ in 0..input.u8() % 8 {
        bytes.extend(u64::from(input.u16()).to_ne_bytes());
    }
    bytes
}

/// A session: packets of the input, each answered before the next. No input may make the export panic,
/// leave a request that has a name without its answer, answer with another length than the answer
/// says, or with more than was asked for.
pub fn exports(data: &[u8]) {
    // libFuzzer's alarm interrupts the first thread of the process.
    thread::scope(|scope| scope.spawn(|| serve(data)).join().expect("a session"));
}

fn serve(data: &[u8]) {
    let host = host();
    let mut input = Input(data);
    let left = if input.once_in(2) { record(&mut input) } else { Vec::new() };
    let read_only = input.once_in(16);
    let kernel = session(&left);
    thread::scope(|scope| {
        // It waits until the kernel has agreed how it is served, or has gone.
        let created = scope.spawn(|| host.exports.create("disk", read_only));
        let served = converse(&kernel, input);
        drop(kernel);
        if created.join().expect("an export, or a reason").is_ok() {
            assert!(served, "an answer, not the end of the connection");
            host.exports.delete("disk", true).expect("it was created");
        }
    });
    assert_eq!(host.disk.geometry().num_blocks, BLOCKS);
}

/// Sends what the input has as the kernel, and reads the answers; `false`: the connection ended before
/// an answer, as it does where what was left is of no use.
fn converse(kernel: &OwnedFd, mut input: Input<'_>) -> bool {
    let mut answer = vec![0; 2 * MAX_IO_BYTES as usize];
    for unique in 2u64.. {
        if input.is_empty() {
            break;
        }
        let opcode = match input.u8() % 64 {
            63 => input.u32(),
            opcode => opcode.into(),
        };
        let node = if input.once_in(8) { input.u64() } else { u64::from(input.u8() % 3) };
        let len = usize::from(input.u8());
        let mut body = input.bytes(len).to_vec();
        if opcode == WRITE && body.len() >= 40 && !input.once_in(8) {
            // The data that it speaks of, mostly.
            let size = u32::from(input.u8() % 5) * 512;
            body[16..20].copy_from_slice(&size.to_ne_bytes());
            body.resize(40 + size as usize, 0x5a);
        }
        if opcode == LSEEK && body.len() >= 24 && !input.once_in(8) {
            // A place in the file and what there is to look for, mostly.
            let (offset, whence) = (u64::from(input.u32()) % (BLOCKS * 600), 3 + input.u8() % 2);
            body[8..16].copy_from_slice(&offset.to_ne_bytes());
            body[16..20].copy_from_slice(&u32::from(whence).to_ne_bytes());
        }
        let said = if input.once_in(16) { input.u32() } else { (IN_HEADER + body.len()) as u32 };
        let mut packet = [said.to_ne_bytes(), opcode.to_ne_bytes()].concat();
        packet.extend([unique.to_ne_bytes(), node.to_ne_bytes()].concat());
        packet.extend([0; 16]);
        packet.extend(&body);
        if input.once_in(32) {
            packet.truncate(usize::from(input.u8()).max(1));
        }
        let whole = packet.len() >= IN_HEADER;
        if again(|| send(kernel, &packet, SendFlags::NOSIGNAL)).is_err() {
            break;
        }
        if !whole || SILENT.contains(&opcode) && said as usize == packet.len() {
            continue;
        }
        loop {
            let got = again(|| recv(kernel, answer.as_mut_slice(), RecvFlags::empty()));
            let got = match got {
                Ok((0, _)) | Err(Errno::CONNRESET) => return false,
                got => got.expect("a request that has a name is answered").0,
            };
            assert!(got >= OUT_HEADER, "{got} bytes");
            let word = |at: usize| answer[at..at + 4].try_into().expect("4 bytes");
            let (len, error) = (u32::from_ne_bytes(word(0)), i32::from_ne_bytes(word(4)));
            let name = u64::from_ne_bytes(answer[8..16].try_into().expect("8 bytes"));
            assert_eq!(len as usize, got, "the length that it says");
            if name == 0 {
                // That requests be sent again.
                continue;
            }
            assert_eq!(name, unique);
            assert!((-511..=0).contains(&error), "{error}");
            assert!(error == 0 || got == OUT_HEADER, "a failure has no body");
            if opcode == WRITE && error == 0 {
                let said = body.get(16..20).expect("a WRITE that is shorter is refused");
                let said = u32::from_ne_bytes(said.try_into().expect("4 bytes")) as usize;
                assert_eq!(packet.len(), IN_HEADER + 40 + said, "data that did not come");
            }
            if opcode == LSEEK && error == 0 {
                check_lseek(&body, &answer[OUT_HEADER..got]);
            }
            if matches!(opcode, 15 | 28) && error == 0 {
                let asked = body.get(16..20).expect("a READ that is shorter is refused");
                let asked = u32::from_ne_bytes(asked.try_into().expect("4 bytes")) as usize;
                assert!(got - OUT_HEADER <= asked, "{got} bytes of {asked}");
            }
            break;
        }
    }
    true
}

/// What LSEEK found is not before what was asked, and within the file; its end is a hole.
fn check_lseek(body: &[u8], found: &[u8]) {
    let asked = u64::from_ne_bytes(body[8..16].try_into().expect("an LSEEK that is whole"));
    let whence = u32::from_ne_bytes(body[16..20].try_into().expect("an LSEEK that is whole"));
    let found = u64::from_ne_bytes(found.try_into().expect("an offset"));
    let end = BLOCKS * 512;
    assert!(asked <= found && found <= end, "{found} after {asked}");
    assert!(whence == SEEK_HOLE || (whence == SEEK_DATA && found < end), "{whence}: {found}");
}

fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}
