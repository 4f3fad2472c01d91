use crate::{Delaying, Failing, Fault, Injection, Latency, follow, on};
use bdev::{
    AlignedBuf, Bdev, Finished, IoError, Malloc, MallocOptions, Op, OwnedChannel, Registry,
    SyncChannel,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 512;

fn registry() -> Registry {
    let registry = Registry::new();
    let options = MallocOptions {
        name: "m0".into(),
        block_size: BLOCK as u32,
        physical_block_size: 0,
        num_blocks: 1024,
        uuid: None,
    };
    registry.register(Malloc::create(options).unwrap()).unwrap();
    registry
}

fn failing() -> (Registry, Arc<Failing>) {
    let registry = registry();
    let failing = Failing::create(&registry, "m0", None).unwrap();
    registry.register(failing.clone()).unwrap();
    (registry, failing)
}

fn once(fault: Fault) -> Option<Injection> {
    Some(Injection { fault, times: 1, queue_depth: 0 })
}

#[test]
fn it_is_its_base_until_somebody_asks_for_more() {
    let (registry, failing) = failing();
    assert_eq!((failing.name(), on(&registry, "m0").as_deref()), ("EE_m0", Some("EE_m0")));
    assert_eq!(failing.geometry(), failing.layer().base().geometry());
    assert!(registry.claim("m0", "another").unwrap_err().to_string().contains("EE_m0"));
    let mut c = SyncChannel::open(&*failing).unwrap();
    c.write(3, &[7; BLOCK]).unwrap();
    let mut read = AlignedBuf::zeroed(BLOCK);
    c.read(3, &mut read).unwrap();
    assert_eq!(read[..], [7; BLOCK]);
    c.flush().unwrap();
    c.unmap(3, 1).unwrap();
}

#[test]
fn so_many_ios_fail_as_were_asked_for() {
    let (_registry, failing) = failing();
    let mut c = SyncChannel::open(&*failing).unwrap();
    let two = Injection { fault: Fault::Failure, times: 2, queue_depth: 0 };
    failing.inject(&[Op::Write, Op::Flush], Some(two));
    let mut read = AlignedBuf::zeroed(BLOCK);
    c.read(0, &mut read).unwrap();
    for _ in 0..2 {
        assert_eq!(c.write(0, &[1; BLOCK]).unwrap_err().cause, IoError::WriteMedium);
    }
    c.write(0, &[1; BLOCK]).unwrap();
    assert_eq!(c.flush().unwrap_err().cause, IoError::Flush);
    failing.inject(&Op::ALL, None);
    c.flush().unwrap();
    failing.inject(&[Op::Read], once(Fault::Failure));
    assert_eq!(c.read(0, &mut read).unwrap_err().cause, IoError::ReadMedium);
    // Beside others only, of which there are none.
    failing.inject(&[Op::Read], Some(Injection { queue_depth: 1, ..two }));
    c.read(0, &mut read).unwrap();
}

#[test]
fn a_byte_is_changed_on_its_way_and_on_the_medium() {
    let (_registry, failing) = failing();
    let mut c = SyncChannel::open(&*failing).unwrap();
    let mut below = SyncChannel::open(&**failing.layer().base()).unwrap();
    let mut read = AlignedBuf::zeroed(2 * BLOCK);
    c.write(4, &[0x10; 2 * BLOCK]).unwrap();
    let fault = Fault::Corrupt { offset: 600, value: 0x21 };
    failing.inject(&[Op::Read], once(fault));
    c.read(4, &mut read).unwrap();
    assert_eq!((read[599], read[600], read[601]), (0x10, 0x31, 0x10));
    c.read(4, &mut read).unwrap();
    assert_eq!(read[600], 0x10, "only on its way");
    failing.inject(&[Op::Write], once(fault));
    c.write(4, &[0x40; 2 * BLOCK]).unwrap();
    below.read(4, &mut read).unwrap();
    let changed: Vec<usize> = (0..2 * BLOCK).filter(|at| read[*at] != 0x40).collect();
    assert_eq!((changed, read[600]), (vec![600], 0x61));
    // One that has no such byte is as it was.
    failing.inject(&[Op::Write], once(fault));
    c.write(4, &[0x40; BLOCK]).unwrap();
    below.read(4, &mut read[..BLOCK]).unwrap();
    assert!(read[..BLOCK].iter().all(|byte| *byte == 0x40));
}

#[test]
fn what_is_pending_goes_on_when_it_may() {
    let (_registry, failing) = failing();
    failing.inject(&[Op::Write], once(Fault::Pending));
    let mut c = OwnedChannel::open(&*failing, 4).unwrap();
    let mut over = Vec::new();
    for lba in 0..2 {
        over.extend(c.submit(Op::Write, lba, 1, Some(AlignedBuf::zeroed(BLOCK)), lba));
    }
    until(&mut c, &mut over, Duration::from_millis(50), 2);
    assert_eq!(over.iter().map(|f| f.token).collect::<Vec<_>>(), [1], "the other one waits");
    failing.resume_pending();
    until(&mut c, &mut over, Duration::from_secs(20), 2);
    assert_eq!(
        over.iter().map(|f| (f.token, f.result)).collect::<Vec<_>>(),
        [(1, Ok(())), (0, Ok(()))]
    );
}

/// Polls until so many are over, or the time is.
fn until(c: &mut OwnedChannel<u64>, over: &mut Vec<Finished<u64>>, most: Duration, wanted: usize) {
    let end = Instant::now() + most;
    while over.len() < wanted && Instant::now() < end {
        c.poll(over);
    }
}

#[test]
fn one_that_finds_no_memory_is_tried_again() {
    let (_registry, failing) = failing();
    failing
        .inject(&[Op::Read], Some(Injection { fault: Fault::NoMemory, times: 5, queue_depth: 0 }));
    let mut c = SyncChannel::open(&*failing).unwrap();
    c.read(0, &mut AlignedBuf::zeroed(BLOCK)).unwrap();
}

#[test]
fn reads_and_writes_are_answered_later() {
    let registry = registry();
    let delaying = Delaying::create(&registry, "d0", "m0", None, [40_000, 40_000, 0, 0]).unwrap();
    let mut c = SyncChannel::open(&*delaying).unwrap();
    let took = |f: &mut dyn FnMut()| {
        let since = Instant::now();
        f();
        since.elapsed()
    };
    let mut read = AlignedBuf::zeroed(BLOCK);
    assert!(took(&mut || c.read(0, &mut read).unwrap()) >= Duration::from_millis(40));
    c.write(0, &[1; BLOCK]).unwrap();
    delaying.set(Latency::AverageRead, 0);
    delaying.set(Latency::P99Read, 0);
    for which in [Latency::AverageWrite, Latency::P99Write] {
        delaying.set(which, 30_000);
    }
    assert!(took(&mut || c.write(0, &[1; BLOCK]).unwrap()) >= Duration::from_millis(30));
    c.flush().unwrap();
    let shown = delaying.driver_specific();
    assert_eq!(shown["delay"]["avg_write_latency"], 30_000);
    assert_eq!(shown["delay"]["avg_read_latency"], 0);
}

#[test]
fn one_of_a_hundred_takes_longer() {
    let registry = registry();
    let delaying = Delaying::create(&registry, "d0", "m0", None, [0, 1_000_000, 0, 0]).unwrap();
    let mut c = OwnedChannel::open(&*delaying, 200).unwrap();
    let mut over = Vec::new();
    for lba in 0..200 {
        over.extend(c.submit(Op::Read, lba, 1, Some(AlignedBuf::zeroed(BLOCK)), lba));
    }
    until(&mut c, &mut over, Duration::from_millis(500), 200);
    // Of 200 two are slow on average, and twenty never.
    assert!(
        (180..=200).contains(&over.len()),
        "{} of 200 were not among the slow ones",
        over.len()
    );
    until(&mut c, &mut over, Duration::from_secs(20), 200);
    assert_eq!(over.len(), 200);
}

#[test]
fn they_go_with_their_bases() {
    let (registry, failing) = failing();
    let delaying = Delaying::create(&registry, "d0", "EE_m0", None, [0; 4]).unwrap();
    registry.register(delaying.clone()).unwrap();
    drop((failing, delaying));
    let _follows = follow(&registry);
    registry.unregister("m0").unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !registry.list().is_empty() && Instant::now() < end {
        std::thread::yield_now();
    }
    assert!(registry.list().is_empty());
}
