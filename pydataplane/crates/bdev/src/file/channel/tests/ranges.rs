//! Ranges that are unmapped or zeroed.

use std::os::unix::fs::FileExt;

use super::*;

const GIB: u64 = 1 << 30;

fn channel_on(size: u64) -> (FileChannel, IoContext, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(size).unwrap();
    let shared = Arc::new(open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap());
    let io = IoContext::new().unwrap();
    let channel = FileChannel::new(shared, Stats::new().channel(), &io).unwrap();
    (channel, io, file)
}

fn range(op: Op, bytes: u64) -> Io {
    Io { op, fua: false, lba: 0, blocks: bytes / BLOCK as u64, sg: Sg::EMPTY, tag: 1 }
}

#[test]
fn a_long_range_goes_part_by_part_and_others_go_in_between() {
    for op in [Op::Unmap, Op::WriteZeroes] {
        let (mut channel, io, file) = channel_on(GIB);
        file.as_file().write_all_at(&[7; 4096], GIB - 4096).unwrap();
        assert_eq!(channel.submit(&range(op, GIB)), Submit::Pending);
        let mut done = Vec::with_capacity(4);
        let mut flushes = 0;
        while !done.iter().any(|c: &Completion| c.tag == 1) {
            assert!(channel.working.count <= 1, "one part at a time");
            if channel.poll(&mut done) == 0 {
                io.wait(600_000_000).unwrap();
            }
            if flushes < 2 && channel.pushed.len() > 1 {
                flushes += 1;
                assert_eq!(channel.submit(&Io::flush(2)), Submit::Pending);
            }
            done.retain(|c| c.tag == 1);
        }
        assert_eq!(done[0].result, Ok(()));
        let (parts, others): (Vec<Pushed>, Vec<Pushed>) =
            channel.pushed.iter().copied().partition(|p| p.opcode == opcode::Fallocate::CODE);
        assert!(parts.len() >= 128, "{}", parts.len());
        // Of a fallocate this is its length.
        assert_eq!(parts.iter().map(|p| p.addr).sum::<u64>(), GIB);
        assert!(!others.is_empty());
        // The fdatasync of the second flush begins when the first one's has ended, and may be the last.
        let is_part = |p: &Pushed| p.opcode == opcode::Fallocate::CODE;
        let first_other = channel.pushed.iter().position(|p| !is_part(p));
        assert!(first_other < channel.pushed.iter().rposition(is_part));
        let mut back = [1; 4096];
        file.as_file().read_exact_at(&mut back, GIB - 4096).unwrap();
        assert_eq!(back, [0; 4096]);
    }
}

#[test]
fn the_first_part_that_fails_fails_the_range() {
    let (mut channel, io, _file) = channel_on(64 << 20);
    assert_eq!(channel.submit(&range(Op::Unmap, 64 << 20)), Submit::Pending);
    for nth in 1..4 {
        let (n, result) = from_the_kernel(&mut channel, &io);
        assert_eq!((result, channel.pushed.len()), (0, nth));
        assert_eq!(channel.stepped(n, 0), None);
        channel.go_on();
    }
    let (n, _) = from_the_kernel(&mut channel, &io);
    assert_eq!(channel.stepped(n, -libc::EIO), Some(Err(IoError::WriteMedium)));
    assert_eq!(channel.pushed.len(), 4);
    assert!(channel.again.is_empty());
}

#[test]
fn a_channel_that_goes_in_the_middle_of_a_range_does_no_more_of_it() {
    let (mut channel, _io, file) = channel_on(64 << 20);
    file.as_file().write_all_at(&[7; 4096], 63 << 20).unwrap();
    assert_eq!(channel.submit(&range(Op::Unmap, 64 << 20)), Submit::Pending);
    drop(channel);
    let mut back = [1; 4096];
    file.as_file().read_exact_at(&mut back, 63 << 20).unwrap();
    assert_eq!(back, [7; 4096]);
}

/// The length of the part that the kernel was given last.
fn last_len(channel: &FileChannel) -> u64 {
    channel.pushed.last().unwrap().addr
}

#[test]
fn how_long_a_part_took_says_how_long_the_next_one_is() {
    let (mut channel, io, _file) = channel_on(64 << 20);
    assert_eq!(channel.submit(&range(Op::Unmap, 64 << 20)), Submit::Pending);
    let first = last_len(&channel);
    // Sent when the clock began, and then just now.
    for (sent, len) in [(0, first / 4), (u64::MAX, first * 3 / 4)] {
        let (n, result) = from_the_kernel(&mut channel, &io);
        assert_eq!(result, 0);
        channel.slots[n].sent = sent;
        assert_eq!(channel.stepped(n, 0), None);
        channel.go_on();
        assert_eq!(last_len(&channel), len);
    }
}

#[test]
fn a_range_of_a_block_device_goes_whole() {
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    file.as_file().set_len(64 << 20).unwrap();
    let mut shared = open(file.path(), Some(BLOCK as u32), 0, false, None).unwrap();
    assert!(!shared.ranges_whole);
    // As of one.
    shared.ranges_whole = true;
    let io = IoContext::new().unwrap();
    let mut channel = FileChannel::new(Arc::new(shared), Stats::new().channel(), &io).unwrap();
    assert_eq!(channel.submit(&range(Op::Unmap, 64 << 20)), Submit::Pending);
    assert_eq!(polled(&mut channel, &io), (1, Ok(())));
    assert_eq!((channel.pushed.len(), last_len(&channel)), (1, 64 << 20));
}
