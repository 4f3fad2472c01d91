use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use guestmem::{IoVec, Sg};
use tempfile::TempDir;

use super::*;
use crate::testing::model;
use crate::{AlignedBuf, Completion, Event, Io, IoError, Op, Submit, SyncChannel};

/// Directories of different file systems: the temporary one, and memory.
fn dirs() -> Vec<TempDir> {
    ["/var/tmp", "/dev/shm"].iter().filter_map(|d| tempfile::tempdir_in(d).ok()).collect()
}

fn options(path: &Path, block_size: u32) -> FileOptions {
    FileOptions {
        name: "f0".into(),
        path: path.into(),
        block_size: Some(block_size),
        read_only: false,
        uuid: None,
        kind: FileKind::Aio,
    }
}

fn file(dir: &TempDir, bytes: u64) -> PathBuf {
    static N: AtomicU32 = AtomicU32::new(0);
    let path = dir.path().join(format!("disk{}", N.fetch_add(1, Relaxed)));
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn disk(dir: &TempDir, block_size: u32, blocks: u64) -> Arc<FileBdev> {
    let path = file(dir, u64::from(block_size) * blocks);
    FileBdev::create(options(&path, block_size)).unwrap()
}

fn why(o: FileOptions) -> String {
    FileBdev::create(o).err().expect("refused").to_string()
}

#[test]
fn behaves_as_a_byte_array() {
    for dir in dirs() {
        for block in [512, 4096] {
            // Few, because each flush waits for a real disk.
            model::check_cases(8, |blocks| disk(&dir, block, blocks));
        }
    }
}

#[test]
fn data_is_in_the_file_and_a_second_device_sees_it() {
    for dir in dirs() {
        let d = disk(&dir, 512, 64);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = AlignedBuf::zeroed(2048);
        buf.fill(0x5a);
        c.write(3, &buf).unwrap();
        c.flush().unwrap();
        c.write_zeroes(4, 1).unwrap();
        let raw = std::fs::read(d.path()).unwrap();
        assert_eq!((raw[1535], raw[1536], raw[2048], raw[2560]), (0, 0x5a, 0, 0x5a));
        let path = d.path().to_owned();
        drop((c, d));
        let d = FileBdev::create(options(&path, 512)).unwrap();
        let mut c = SyncChannel::open(&*d).unwrap();
        c.read(5, &mut buf[..512]).unwrap();
        assert!(buf[..512].iter().all(|b| *b == 0x5a));
    }
}

#[test]
fn unmap_gives_the_space_back_and_fua_zeroing_is_accepted() {
    for dir in dirs() {
        let d = disk(&dir, 4096, 256);
        assert!(d.features().unmap && d.features().unmap_zeroes && d.features().volatile_cache);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = AlignedBuf::zeroed(1 << 20);
        buf.fill(1);
        c.write_fua(0, &buf).unwrap();
        let full = std::fs::metadata(d.path()).unwrap();
        c.unmap(16, 224).unwrap();
        let less = std::fs::metadata(d.path()).unwrap();
        assert!(less.blocks() < full.blocks());
        assert_eq!(less.len(), full.len());
        let io = IoContext::new().unwrap();
        let mut ch = d.open(&io).unwrap();
        for op in [Op::WriteZeroes, Op::Unmap] {
            let zero = Io { op, fua: true, lba: 0, blocks: 8, sg: Sg::EMPTY, tag: 9 };
            assert_eq!(ch.submit(&zero), Submit::Pending);
            let ended = wait(&io, &mut *ch);
            assert_eq!((ended.tag, ended.result), (9, Ok(())));
        }
        c.read(0, &mut buf).unwrap();
        assert!(buf[..8 * 4096].iter().all(|b| *b == 0));
        assert!(buf[8 * 4096..16 * 4096].iter().all(|b| *b == 1));
        assert!(buf[16 * 4096..240 * 4096].iter().all(|b| *b == 0));
    }
}

fn wait(io: &IoContext, c: &mut dyn Channel) -> Completion {
    let mut done = Vec::with_capacity(1);
    loop {
        io.flush();
        if c.poll(&mut done) > 0 {
            return done[0];
        }
        // A step that nobody pushes would show as a hang here.
        io.wait(600_000_000).unwrap();
    }
}

/// Runs `op` on a list of runs cut out of one buffer at the given places.
fn run_on(d: &FileBdev, op: Op, buf: &mut [u8], cuts: &[usize]) -> Result<(), IoError> {
    let io = IoContext::new().unwrap();
    let mut c = d.open(&io).unwrap();
    let mut iov = Vec::new();
    let mut at = 0;
    for &end in cuts.iter().chain([&buf.len()]) {
        // SAFETY: parts of `buf`, which outlives the I/O.
        iov.push(unsafe { IoVec::new(buf.as_mut_ptr().add(at), end - at) });
        at = end;
    }
    // SAFETY: `iov` outlives the I/O.
    let sg = unsafe { Sg::new(&iov) };
    let blocks = buf.len() as u64 / u64::from(d.geometry().block_size);
    match c.submit(&Io { op, fua: false, lba: 1, blocks, sg, tag: 1 }) {
        Submit::Pending => wait(&io, &mut *c).result,
        Submit::Done(r) => r,
        Submit::Full => panic!("an empty channel is not full"),
    }
}

#[test]
fn unaligned_and_overlong_lists_arrive_whole() {
    const LEN: usize = 300 * 512;
    for dir in dirs() {
        let d = disk(&dir, 512, 400);
        let pattern: Vec<u8> = (0..LEN).map(|i| (i * 7 % 251) as u8).collect();
        let ways: [Vec<usize>; 4] = [
            vec![512, 1024, 65536],
            vec![1, 77, 513, 100_000],
            // More runs than the kernel takes.
            (1..1200).map(|i| i * 128).collect(),
            vec![],
        ];
        for (i, cuts) in ways.iter().enumerate() {
            let mut buf = AlignedBuf::zeroed(LEN + 16);
            let shift = i * 3;
            buf[shift..shift + LEN].copy_from_slice(&pattern);
            run_on(&d, Op::Write, &mut buf[shift..shift + LEN], cuts).unwrap();
            let mut raw = vec![0; LEN];
            File::open(d.path()).unwrap().read_exact_at(&mut raw, 512).unwrap();
            assert!(raw == pattern, "way {i}");
            buf.fill(0);
            run_on(&d, Op::Read, &mut buf[shift..shift + LEN], cuts).unwrap();
            assert!(buf[shift..shift + LEN] == pattern[..], "way {i}");
        }
    }
}

#[test]
fn a_full_channel_says_so_and_every_io_completes_once() {
    let dir = &dirs()[0];
    let d = disk(dir, 512, 1024);
    let io = IoContext::new().unwrap();
    let mut c = d.open(&io).unwrap();
    let mut bufs: Vec<_> = (0..400).map(|_| AlignedBuf::zeroed(1024)).collect();
    // Odd addresses for one in three: bounce buffers run out before slots do.
    let iovs: Vec<_> = bufs
        .iter_mut()
        .enumerate()
        .map(|(i, b)| {
            b.fill(i as u8);
            let at = if i % 3 == 0 { 1 } else { 0 };
            // SAFETY: 512 bytes of a buffer that outlives the channel.
            [unsafe { IoVec::new(b.as_mut_ptr().add(at), 512) }]
        })
        .collect();
    let (mut next, mut full) = (0, 0);
    let mut seen = vec![false; 400];
    let mut done = Vec::with_capacity(7);
    while seen.iter().any(|s| !s) {
        while let Some(iov) = iovs.get(next) {
            // SAFETY: `iovs` outlives the channel's I/O.
            let sg = unsafe { Sg::new(iov) };
            let tag = next as u64;
            match c.submit(&Io { op: Op::Write, fua: false, lba: tag, blocks: 1, sg, tag }) {
                Submit::Pending => next += 1,
                Submit::Full => {
                    full += 1;
                    break;
                }
                Submit::Done(r) => panic!("{r:?}: a file on disk"),
            }
        }
        io.wait(1000).unwrap();
        done.clear();
        c.poll(&mut done);
        for c in &done {
            assert_eq!(c.result, Ok(()));
            assert!(!std::mem::replace(&mut seen[c.tag as usize], true), "once only");
        }
    }
    assert!(full > 0);
    let raw = std::fs::read(d.path()).unwrap();
    assert!((0..400).all(|i| raw[i * 512..(i + 1) * 512].iter().all(|b| *b == i as u8)));
    assert_eq!(d.stats().unwrap().snapshot().op(Op::Write).ops, 400);
}

#[test]
fn a_channel_dropped_with_io_in_flight_waits_for_it() {
    let dir = &dirs()[0];
    let d = disk(dir, 4096, 64);
    let io = IoContext::new().unwrap();
    let mut c = d.open(&io).unwrap();
    let mut buf = AlignedBuf::zeroed(64 * 4096);
    buf.fill(0xab);
    // SAFETY: `buf` outlives the channel.
    let iov = unsafe { [IoVec::new(buf.as_mut_ptr(), buf.len())] };
    // SAFETY: so does the list.
    let sg = unsafe { Sg::new(&iov) };
    for (tag, op) in [Op::Write, Op::Flush].into_iter().enumerate() {
        let io = Io { op, fua: false, lba: 0, blocks: 64, sg, tag: tag as u64 };
        assert_eq!(c.submit(&io), Submit::Pending);
    }
    drop(c);
    assert!(std::fs::read(d.path()).unwrap().iter().all(|b| *b == 0xab));
}

#[test]
fn what_is_not_a_usable_file_is_said_in_one_sentence() {
    let dir = &dirs()[0];
    let p = dir.path();
    let d = p.display();
    assert_eq!(
        why(options(&p.join("none"), 512)),
        format!(
            "cannot open f0: {d}/none does not exist: create it, for example with truncate -s 1G"
        )
    );
    assert_eq!(
        why(options(p, 512)),
        format!("cannot open f0: {d} is a directory: give a file or a block device in it")
    );
    assert_eq!(
        why(options(Path::new("/dev/null"), 512)),
        "cannot open f0: /dev/null is neither a regular file nor a block device"
    );
    let small = file(dir, 511);
    assert_eq!(
        why(options(&small, 512)),
        format!(
            "cannot open f0: {} has 511 bytes, less than one block of 512: make it larger, for \
             example with truncate -s 1G",
            small.display()
        )
    );
    assert_eq!(
        why(options(&small, 1024)),
        "cannot open f0: a block is 512 or 4096 bytes, not 1024"
    );
    let under = small.join("x");
    assert!(why(options(&under, 512)).contains("a part of the path is not a directory"));
}

#[test]
fn a_file_in_use_names_who_uses_it_and_readers_share() {
    let dir = &dirs()[0];
    let path = file(dir, 4096);
    let first = FileBdev::create(options(&path, 512)).unwrap();
    let p = path.display();
    let text =
        format!("cannot open f0: {p} is in use by another device of this target: stop that first");
    assert_eq!(why(options(&path, 512)), text);
    drop(first);
    let mut holder = Command::new("flock")
        .args(["-x", path.to_str().unwrap(), "-c", "echo held; read x"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut held = [0; 4];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut held).unwrap();
    let text = why(options(&path, 512));
    let prefix = format!("cannot open f0: {p} is in use by process ");
    assert!(text.starts_with(&prefix) && text.ends_with(": stop that first"), "{text}");
    drop(holder.stdin.take());
    holder.wait().unwrap();
    let ro = || FileOptions { read_only: true, ..options(&path, 512) };
    let (_a, _b) = (FileBdev::create(ro()).unwrap(), FileBdev::create(ro()).unwrap());
    assert!(why(options(&path, 512)).contains("in use"));
}

/// As a worker of the kernel may that ended the last I/O, or a child that has not executed its program.
#[test]
fn a_file_that_is_closed_is_free_whoever_still_refers_to_it() {
    for dir in dirs() {
        let path = file(&dir, 4096);
        let first = FileBdev::create(options(&path, 512)).unwrap();
        let _refers = first.shared.fd.try_clone().unwrap();
        drop(first);
        FileBdev::create(options(&path, 512)).unwrap();
    }
}

/// The kernel grants a write lease on a file that nobody else has open, be it by a descriptor, or because
/// an io_uring knows it.
#[test]
fn a_file_that_is_closed_is_open_nowhere_while_its_threads_ring_goes_on() {
    let dir = &dirs()[0];
    let path = file(dir, 64 << 10);
    let is_free = || {
        let mine = OpenOptions::new().write(true).open(&path).unwrap();
        // SAFETY: an open descriptor and no memory.
        let set =
            |lease: libc::c_int| unsafe { libc::fcntl(mine.as_raw_fd(), libc::F_SETLEASE, lease) };
        set(libc::F_WRLCK) == 0 && set(libc::F_UNLCK) == 0
    };
    let io = IoContext::new().unwrap();
    assert!(is_free());
    for _ in 0..2 {
        let disk = FileBdev::create(options(&path, 512)).unwrap();
        let mut buf = AlignedBuf::zeroed(4096);
        let mut channels: Vec<_> = (0..3).map(|_| disk.open(&io).unwrap()).collect();
        for channel in &mut channels {
            // SAFETY: `buf` outlives the I/O.
            let iov = unsafe { [IoVec::new(buf.as_mut_ptr(), 4096)] };
            // SAFETY: so does the list.
            let sg = unsafe { Sg::new(&iov) };
            let read = Io { op: Op::Read, fua: false, lba: 8, blocks: 8, sg, tag: 1 };
            assert_eq!(channel.submit(&read), Submit::Pending);
            assert_eq!(wait(&io, &mut **channel).result, Ok(()));
        }
        drop(disk);
        while let Some(channel) = channels.pop() {
            assert!(!is_free(), "a channel has it");
            drop(channel);
        }
        // A child of another test may have it until it executes its program.
        let end = Instant::now() + Duration::from_secs(60);
        while !is_free() {
            assert!(Instant::now() < end, "it is open still");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn the_last_user_of_a_file_is_waited_for() {
    let dir = &dirs()[0];
    let path = file(dir, 4096);
    let first = FileBdev::create(options(&path, 512)).unwrap();
    let closing = first.closing();
    assert!(!closing.wait(Duration::from_millis(1)));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| closing.wait(Duration::from_secs(60)));
        assert!(!waits.is_finished(), "somebody has it");
        drop(first);
        assert!(waits.join().unwrap());
    });
    FileBdev::create(options(&path, 512)).unwrap();
}

/// A block device of a file, gone at the end of the test. Needs root.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Self {
        let losetup = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let out = losetup.unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Loop(String::from_utf8(out.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

impl Loop {
    /// Flushes that the device has had (Documentation/block/stat.rst, field 16).
    fn flushes(&self) -> u64 {
        let name = self.0.file_name().unwrap().to_str().unwrap();
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        stat.split_whitespace().nth(15).unwrap().parse().unwrap()
    }
}

#[test]
fn flush_and_fua_reach_the_device_and_a_plain_write_does_not_wait_for_it() {
    let dir = &dirs()[0];
    let device = Loop::over(&file(dir, 1 << 20));
    let d = FileBdev::create(options(&device.0, 512)).unwrap();
    assert!(d.features().fua && d.features().volatile_cache);
    let io = IoContext::new().unwrap();
    let mut c = d.open(&io).unwrap();
    let buf = guestmem::Bounce::new();
    let mut run = |op, fua| {
        let sg = if op == Op::Write { buf.sg(4096).unwrap() } else { guestmem::Sg::EMPTY };
        let before = device.flushes();
        assert_eq!(c.submit(&Io { op, fua, lba: 8, blocks: 8, sg, tag: 1 }), Submit::Pending);
        assert_eq!(wait(&io, &mut *c).result, Ok(()));
        device.flushes() - before
    };
    assert_eq!(run(Op::Write, false), 0);
    assert_eq!(run(Op::Flush, false), 1);
    assert_eq!(run(Op::Write, true), 1);
    assert_eq!(run(Op::WriteZeroes, false), 0);
    assert_eq!(run(Op::WriteZeroes, true), 1);
}

#[test]
fn a_short_lock_on_a_block_device_is_waited_for_and_a_long_one_named() {
    let dir = &dirs()[0];
    let device = Loop::over(&file(dir, 1 << 20));
    let lock = |seconds: &str| {
        let mut holder = Command::new("flock")
            .args(["-s", device.0.to_str().unwrap(), "-c", &format!("echo held; sleep {seconds}")])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut held = [0; 4];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut held).unwrap();
        holder
    };
    // As udev does when somebody closed the device.
    let mut udev = lock("0.1");
    let d = FileBdev::create(options(&device.0, 512)).unwrap();
    assert_eq!(d.geometry().num_blocks, 2048);
    udev.wait().unwrap();
    drop(d);
    let mut other = lock("60");
    let text = why(options(&device.0, 512));
    assert!(text.contains("is in use by process "), "{text}");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn a_read_only_device_refuses_writes_and_works_on_a_read_only_file() {
    let dir = &dirs()[0];
    let path = file(dir, 8192);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let o = FileOptions { read_only: true, kind: FileKind::Uring, ..options(&path, 512) };
    let d = FileBdev::create(o).unwrap();
    assert_eq!(d.product_name(), "URING bdev");
    assert!(d.features().read_only && !d.features().unmap);
    let mut c = SyncChannel::open(&*d).unwrap();
    let mut buf = AlignedBuf::zeroed(512);
    c.read(0, &mut buf).unwrap();
    c.flush().unwrap();
    assert_eq!(c.write(0, &buf).unwrap_err().cause, IoError::ReadOnly);
    assert_eq!(c.write_zeroes(0, 1).unwrap_err().cause, IoError::ReadOnly);
}

#[test]
fn a_rescan_takes_the_new_size_and_tells_the_registry_only_then() {
    let dir = &dirs()[0];
    let d = disk(dir, 512, 8);
    let r = Registry::new();
    r.register(d.clone()).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let s = seen.clone();
    let _sub = r.subscribe(move |e| {
        if let Event::Resized(b) = e {
            s.lock().unwrap().push(b.geometry().num_blocks);
        }
    });
    let mut c = SyncChannel::open(&*d).unwrap();
    let mut buf = AlignedBuf::zeroed(512);
    assert!(!d.rescan(&r).unwrap());
    let f = OpenOptions::new().write(true).open(d.path()).unwrap();
    f.set_len(512 * 20 + 100).unwrap();
    assert_eq!(c.read(19, &mut buf).unwrap_err().cause, IoError::OutOfRange);
    assert!(d.rescan(&r).unwrap());
    c.read(19, &mut buf).unwrap();
    f.set_len(512 * 4).unwrap();
    // Truncated behind our back: an error, never zeros.
    assert_eq!(c.read(10, &mut buf).unwrap_err().cause, IoError::ReadMedium);
    assert!(d.rescan(&r).unwrap());
    assert_eq!(c.read(10, &mut buf).unwrap_err().cause, IoError::OutOfRange);
    f.set_len(10).unwrap();
    assert!(d.rescan(&r).unwrap_err().to_string().contains("less than one block"));
    assert_eq!(d.geometry().num_blocks, 4);
    assert_eq!(*seen.lock().unwrap(), [20, 4]);
}

#[test]
fn zeroing_without_the_file_systems_help_writes_zeros() {
    for dir in dirs() {
        let d = disk(&dir, 512, 8192);
        d.shared.zero_range.store(false, Relaxed);
        let mut c = SyncChannel::open(&*d).unwrap();
        let mut buf = AlignedBuf::zeroed(4 << 20);
        buf.fill(7);
        c.write(0, &buf).unwrap();
        c.write_zeroes(1, 8190).unwrap();
        c.read(0, &mut buf).unwrap();
        let (end, last) = (buf.len() - 512, buf.len() - 1);
        assert!(buf[512..end].iter().all(|b| *b == 0));
        assert_eq!((buf[0], buf[511], buf[end], buf[last]), (7, 7, 7, 7));
    }
}

/// A small file system in memory, unmounted at the end of the test. Needs root.
struct Mount(TempDir);

impl Mount {
    fn tmpfs(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "none"]);
        assert!(mount.arg(dir.path()).status().unwrap().success(), "mount needs root");
        Mount(dir)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_is_no_space_and_what_was_there_stays() {
    let mount = Mount::tmpfs("1m");
    let d = disk(&mount.0, 4096, 1024);
    let mut c = SyncChannel::open(&*d).unwrap();
    let mut buf = AlignedBuf::zeroed(512 << 10);
    buf.fill(1);
    c.write(0, &buf).unwrap();
    let mut failed = 0;
    for i in 1..4 {
        if let Err(e) = c.write(i * 128, &buf) {
            assert_eq!(e.cause, IoError::NoSpace);
            failed += 1;
        }
    }
    assert!(failed >= 2);
    c.read(0, &mut buf).unwrap();
    assert!(buf.iter().all(|b| *b == 1));
    assert!(d.stats().unwrap().snapshot().errors_of(IoError::NoSpace) >= 2);
}
