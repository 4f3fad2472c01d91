//! Serves RAM disks to a VM without the rest of the target: for trying the session by hand.
//!
//! `serve DIR` listens on `DIR/vm0` with one malloc disk as target 0, and obeys lines on stdin:
//! `add N MIB`, `remove N`, `resize N BLOCKS` (null disks), `null N BLOCKS`, `info`, `quit`.

use std::io::BufRead;
use std::sync::Arc;

use bdev::{Malloc, MallocOptions, Null, Registry};
use reactor::{Idle, Reactors};
use vhost_scsi::{ControllerOptions, Controllers, Settings, TargetOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: serve DIR")?;
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let reactors = Reactors::start(&[None], Idle::Adaptive { spin_us: 50 })?;
    let registry = Registry::new();
    let settings = Settings {
        directory: directory.into(),
        mode: 0o660,
        uid: None,
        gid: None,
        timeouts: vhost_scsi::Timeouts::default(),
        marks: None,
    };
    let controllers = Controllers::new(registry.clone(), reactors.handles(), settings);
    controllers.create("vm0", ControllerOptions::default())?;
    let malloc = |n: u64, mib: u64| -> Result<(), Box<dyn std::error::Error>> {
        let name = format!("malloc{n}");
        registry.register(Malloc::create(MallocOptions {
            name: name.clone(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: mib * 2048,
            uuid: None,
        })?)?;
        controllers.add_target("vm0", n as i64, &name, TargetOptions::default())?;
        Ok(())
    };
    malloc(0, 64)?;
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|w| w.parse::<u64>().ok()).unwrap_or(0);
        let done: Result<(), Box<dyn std::error::Error>> = match words.first().copied() {
            Some("add") => malloc(number(1), number(2)),
            Some("null") => (|| {
                let name = format!("null{}", number(1));
                registry.register(Null::create(&name, 512, number(2), None)?)?;
                let options = TargetOptions::default();
                controllers.add_target("vm0", number(1) as i64, &name, options)?;
                Ok(())
            })(),
            Some("resize") => {
                let name = format!("null{}", number(1));
                let null: Option<Arc<Null>> = registry.get_as(&name);
                null.map(|n| n.resize(number(2)));
                registry.notify_resized(&name);
                Ok(())
            }
            Some("remove") => {
                controllers.remove_target("vm0", number(1) as i64).map_err(Into::into)
            }
            Some("info") => {
                println!("{:#?} {:#?}", controllers.list(None)?, controllers.stats(None, None)?);
                Ok(())
            }
            _ => break,
        };
        println!("{}", done.map_or_else(|e| format!("error: {e}"), |()| "ok".into()));
    }
    assert!(controllers.stop(), "I/O does not end");
    reactors.stop();
    Ok(())
}
