//! A file system, such as FUSE, where the submission of a read or write may wait for the disk.

use super::*;

/// Bytes of a large transfer, several pieces.
const LONG: usize = 4 << 20;

fn on_fuse() -> Rig {
    rig_on(|shared| {
        // Whatever the file system of this machine has.
        shared.direct = true;
        shared.submit_waits = true;
    })
}

/// Waits for the end of so many I/Os, which go well, and looks at the channel meanwhile.
fn end(rig: &mut Rig, count: usize, mut look: impl FnMut(&FileChannel)) {
    let mut done = Vec::with_capacity(count);
    while done.len() < count {
        if rig.channel.poll(&mut done) == 0 {
            rig.io.wait(600_000_000).unwrap();
        }
        look(&rig.channel);
    }
    assert!(done.iter().all(|c| c.result == Ok(())), "{done:?}");
    assert_eq!((rig.channel.working.count, rig.channel.shared.workers.load(Relaxed)), (0, 0));
}

#[test]
fn a_file_in_a_local_file_system_or_in_memory_is_not_on_fuse() {
    for dir in ["/var/tmp", "/dev/shm"] {
        let file = tempfile::NamedTempFile::new_in(dir).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert!(!open(file.path(), None, 0, false, None).unwrap().submit_waits, "{dir}");
    }
}

#[test]
fn reads_and_writes_go_to_the_kernels_workers() {
    let mut rig = on_fuse();
    // Plain, through a bounce buffer, and in pieces.
    let cases = [(0x1000, 0x4000), (0x5001, 0x1000), (0x10_0000, 0x20_0000)];
    for (at, len) in cases {
        let range = rig.range(at, len);
        let data = fill(&range, at);
        for op in [Op::Write, Op::Read] {
            let (pushed, _) = rig.run(op, &[range]);
            assert!(!pushed.is_empty() && pushed.iter().all(|p| p.by_worker), "{pushed:?}");
            if op == Op::Write {
                range.fill(0);
            }
        }
        assert_eq!(bytes(&range), data);
        assert_eq!(rig.channel.working.count, 0);
    }
}

#[test]
fn so_many_of_them_at_a_time() {
    let mut rig = on_fuse();
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, 4096).to_iovec() }];
    for tag in 0..u64::from(DEPTH) {
        // SAFETY: so does the list.
        let sg = unsafe { Sg::new(&runs) };
        let io = Io { op: Op::Read, fua: false, lba: 0, blocks: 8, sg, tag };
        assert_eq!(rig.channel.submit(&io), Submit::Pending);
    }
    assert_eq!(rig.channel.pushed.len(), WORKERS_MAX as usize);
    end(&mut rig, usize::from(DEPTH), |channel| assert!(channel.working.count <= WORKERS_MAX));
    assert_eq!(rig.channel.pushed.len(), usize::from(DEPTH));
}

#[test]
fn pieces_of_large_transfers_are_among_them() {
    let mut rig = on_fuse();
    // As if other channels had all but two of them.
    let others = WORKERS_MAX - 2;
    rig.channel.shared.workers.fetch_add(others, Relaxed);
    // SAFETY: the memory outlives the I/O, which ends below.
    let runs = [unsafe { rig.range(0, LONG).to_iovec() }];
    // SAFETY: so does the list.
    let (sg, blocks) = (unsafe { Sg::new(&runs) }, (LONG / BLOCK) as u64);
    let io = Io { op: Op::Read, fua: false, lba: 0, blocks, sg, tag: 1 };
    assert_eq!(rig.channel.submit(&io), Submit::Pending);
    for _ in 0..LONG / large::PIECE {
        // The next turn, in which no completion is looked at.
        rig.io.flush();
        rig.channel.push_pieces();
    }
    assert_eq!((rig.channel.pushed.len(), rig.channel.working.count), (2, 2));
    // And if they had all: one may always be there.
    rig.channel.shared.workers.fetch_add(2, Relaxed);
    let mut done = Vec::with_capacity(1);
    while done.is_empty() {
        if rig.channel.poll(&mut done) == 0 {
            rig.io.wait(600_000_000).unwrap();
        }
        assert!(rig.channel.working.count <= 2);
    }
    assert_eq!(done[0].result, Ok(()));
    rig.channel.shared.workers.fetch_sub(others + 2, Relaxed);
    end(&mut rig, 0, |_| ());
}
