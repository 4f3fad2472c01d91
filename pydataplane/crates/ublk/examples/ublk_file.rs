//! A file as a block device, for tests of the driver alone.
//!
//! ```text
//! ublk_file serve FILE     makes a device of it, says `ready ID`, and serves until it is killed
//! ublk_file recover ID FILE   goes on with one whose server was killed, and says `ready ID`
//! ublk_file keep ID FILE      as recover, and answers nothing more once it has all requests
//! ublk_file delete ID
//! ```
//!
//! It does what it is asked before it takes more, and answers all of it a moment later, so that a kill
//! finds requests that are done and not answered.

use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::{Errno, pread, pwrite};
use std::env;
use std::error::Error;
use std::fs::File;
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};
use ublk::{Control, Limits, New, Op, Polled, Queue, Request};

const LIMITS: Limits = Limits { depth: 64, max_io_bytes: 512 << 10, block_size: 512 };

/// How long requests wait for their answer.
const MOMENT: Duration = Duration::from_millis(2);

fn perform(file: &File, request: &mut Request) -> Result<(), Errno> {
    let Request { op, offset, bytes, buf, .. } = request;
    let len = *bytes as usize;
    let whole = |done: usize| if done == len { Ok(()) } else { Err(Errno::IO) };
    let end = file.metadata().map_err(|_| Errno::IO)?.len();
    if offset.checked_add(*bytes).is_none_or(|to| to > end) {
        return Err(Errno::NOSPC);
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match op {
        Op::Read => pread(file, &mut buf[..len], *offset).and_then(whole),
        Op::Write { durably } => {
            pwrite(file, &buf[..len], *offset).and_then(whole)?;
            if *durably { fdatasync(file) } else { Ok(()) }
        }
        Op::Flush => fdatasync(file),
        Op::Discard | Op::WriteZeroes => fallocate(file, hole, *offset, *bytes),
    }
}

/// Serves on a thread of its own; `keep`: until all requests are here, which then stay.
fn serve(control: &Control, id: u32, file: File, keep: bool) -> Result<JoinHandle<()>, Errno> {
    let device = (0..1000).find_map(|_| match control.open_queue(id) {
        // devtmpfs makes the file a moment later, and a killed process goes a moment later.
        Err(Errno::NOENT | Errno::NXIO | Errno::BUSY) => {
            sleep(Duration::from_millis(10));
            None
        }
        opened => Some(opened),
    });
    let device = device.unwrap_or(Err(Errno::TIMEDOUT))?;
    Ok(thread::spawn(move || {
        let mut queue = Queue::new(device, LIMITS).expect("a queue");
        let mut requests = Vec::new();
        while queue.wait(&mut requests).expect("the ring works") == Polled::Served {
            if keep {
                if requests.len() == usize::from(LIMITS.depth) {
                    println!("all");
                    sleep(Duration::from_secs(3600));
                }
                continue;
            }
            let done = requests.drain(..).map(|mut request| {
                let result = perform(&file, &mut request);
                (request, result)
            });
            let done: Vec<_> = done.collect();
            sleep(MOMENT);
            for (request, result) in done {
                queue.commit(request.ticket, request.buf, result);
            }
        }
    }))
}

fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    let control = Control::open()?;
    let open = |path| File::options().read(true).write(true).open(path);
    match words {
        ["serve", path] => {
            let file = open(*path)?;
            assert!(control.recovers(), "the driver cannot recover devices");
            let id = control.add(&New {
                limits: LIMITS,
                physical_block_size: 4096,
                bytes: file.metadata()?.len(),
                read_only: false,
                max_discard_bytes: 1 << 30,
                max_zeroes_bytes: 1 << 30,
                discard_granularity: 4096,
                mark: 77,
                number: None,
            })?;
            assert_eq!(control.device(id)?.mark, 77);
            let thread = serve(&control, id, file, false)?;
            control.start(id)?;
            control.set_timeout(id, 1000)?;
            println!("ready {id}");
            thread.join().map_err(|_| "the queue's thread panicked")?;
        }
        [how @ ("recover" | "keep"), id, path] => {
            let (id, file) = (id.parse()?, open(*path)?);
            let began = Instant::now();
            while let Err(e) = control.start_recovery(id) {
                if e != Errno::BUSY || began.elapsed() > Duration::from_secs(60) {
                    return Err(e.into());
                }
                sleep(Duration::from_millis(10));
            }
            let thread = serve(&control, id, file, *how == "keep")?;
            control.end_recovery(id)?;
            println!("ready {id} after {} ms", began.elapsed().as_millis());
            thread.join().map_err(|_| "the queue's thread panicked")?;
        }
        ["delete", id] => control.delete(id.parse()?)?,
        _ => return Err("see the beginning of ublk_file.rs".into()),
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<_> = env::args().skip(1).collect();
    run(&words.iter().map(String::as_str).collect::<Vec<_>>())
}
