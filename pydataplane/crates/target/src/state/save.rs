//! Recording the configuration while others use it.
//!
//! The disk may take long, or not answer, so the configuration is locked for what memory and the kernel's
//! cache do alone: to take its text, and to put the file in place. Whoever wants to write stands behind whoever
//! does, so records follow one another in the order of what they contain, and a change is durable when
//! [`save`] has returned that was called after it, by whomever it was written.

use super::{Config, StateError};
use parking_lot::Mutex;

/// Writes the file if something changed. When it returns, all changes that were made before it was called
/// survive a crash.
///
/// # Errors
/// The file cannot be written; the next call tries again.
pub fn save(config: &Mutex<Config>) -> Result<(), StateError> {
    save_by(config, || (), || ())
}

/// As [`save`]; calls `flushing` when the disk would be waited for, and `renaming` before and after the
/// record is replaced.
fn save_by(
    config: &Mutex<Config>,
    flushing: impl Fn(),
    renaming: impl Fn(),
) -> Result<(), StateError> {
    let Some(dir) = config.lock().dir.clone() else { return Ok(()) };
    let _writing = dir.writing.lock();
    let text = {
        let mut config = config.lock();
        if !std::mem::take(&mut config.dirty) {
            return Ok(());
        }
        config.text()
    };
    let write = || {
        flushing();
        dir.write_next(&text)?;
        {
            let config = config.lock();
            // Owners that were recorded since the text was taken are recorded for the next record too, and
            // before it is in place: at no moment are they in neither.
            if config.dirty {
                config.save_owners()?;
            }
            renaming();
            dir.replace()?;
            renaming();
            if !config.dirty {
                dir.forget_owners();
            }
        }
        flushing();
        dir.sync()
    };
    let written = write();
    if written.is_err() {
        config.lock().dirty = true;
    }
    written
}

#[cfg(test)]
impl Config {
    /// As [`save`], for whom nobody else uses it.
    pub(super) fn save(&mut self) {
        let alone = Mutex::new(std::mem::take(self));
        let saved = save(&alone);
        *self = alone.into_inner();
        saved.unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::cell::Cell;
    use std::fs;
    use std::path::PathBuf;

    const OWNER: &str = "virtlun_controller_set_owner";

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("save-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    fn malloc(config: &Mutex<Config>, name: &str) {
        let params = json!({"name": name, "num_blocks": 1, "block_size": 512});
        config.lock().record("bdev_malloc_create", &params);
    }

    /// Keys of what a process finds that starts now: this one was killed.
    fn left(dir: &PathBuf) -> Vec<String> {
        let copy = dir.with_extension("left");
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir(&copy).unwrap();
        for entry in fs::read_dir(dir).unwrap() {
            let from = entry.unwrap().path();
            let to = copy.join(from.file_name().unwrap());
            // The same file: what is recorded of owners names it.
            fs::hard_link(&from, &to).unwrap();
        }
        fs::remove_file(copy.join("lock")).unwrap();
        let config = Config::open(&copy).unwrap();
        let keys = config.items().map(|item| item.key.clone()).collect();
        drop(config);
        fs::remove_dir_all(copy).unwrap();
        keys
    }

    #[test]
    fn while_the_disk_is_waited_for_others_change_and_nothing_of_either_is_lost() {
        let dir = scratch("others");
        let config = Mutex::new(Config::open(&dir).unwrap());
        malloc(&config, "a");
        config.lock().record("vhost_create_scsi_controller", &json!({"ctrlr": "v"}));
        save(&config).unwrap();
        malloc(&config, "b");
        let flushes = Cell::new(0);
        let during = || {
            flushes.set(flushes.get() + 1);
            // As another client's call, and a session that begins.
            assert!(config.try_lock().is_some(), "flush {}", flushes.get());
            malloc(&config, &format!("c{}", flushes.get()));
            let owner = json!({"ctrlr": "v", "uid": flushes.get()});
            config.lock().record(OWNER, &owner);
            config.lock().save_owners().unwrap();
            let left = left(&dir);
            assert!(left.contains(&"owner of controller v".to_owned()), "{left:?}");
            assert!(left.contains(&"bdev a".to_owned()), "{left:?}");
        };
        // Killed in between, the owner is there as well.
        let renames = Cell::new(0);
        let between = || {
            renames.set(renames.get() + 1);
            let left = left(&dir);
            assert!(left.contains(&"owner of controller v".to_owned()), "{left:?}");
        };
        save_by(&config, during, between).unwrap();
        assert_eq!((flushes.get(), renames.get()), (2, 2));
        // Of the others' what the process dies with is not promised yet, but for the owner.
        assert_eq!(left(&dir), ["bdev a", "bdev b", "controller v", "owner of controller v"]);
        save(&config).unwrap();
        let all =
            ["bdev a", "bdev b", "bdev c1", "bdev c2", "controller v", "owner of controller v"];
        assert_eq!(left(&dir), all);
        save_by(&config, || panic!("nothing has changed"), || ()).unwrap();
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_change_is_durable_when_its_save_has_returned_whoever_wrote_it() {
        let dir = scratch("many");
        let config = Mutex::new(Config::open(&dir).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (config, dir) = (&config, &dir);
                scope.spawn(move || {
                    for nth in 0..10 {
                        let name = format!("b{thread}-{nth}");
                        malloc(config, &name);
                        save(config).unwrap();
                        let text = fs::read_to_string(dir.join("config.json")).unwrap();
                        assert!(text.contains(&name), "{name} is not recorded");
                    }
                });
            }
        });
        assert_eq!(left(&dir).len(), 40);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_could_not_be_written_is_written_with_the_next() {
        let dir = scratch("fails");
        let config = Mutex::new(Config::open(&dir).unwrap());
        malloc(&config, "a");
        let next = dir.join("config.json.new");
        fs::create_dir(&next).unwrap();
        assert!(save(&config).is_err());
        fs::remove_dir(&next).unwrap();
        save(&config).unwrap();
        assert_eq!(left(&dir), ["bdev a"]);
        fs::remove_dir_all(dir).unwrap();
    }
}
