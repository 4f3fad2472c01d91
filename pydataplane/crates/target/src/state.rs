//! What was configured, recorded so that the next start brings it back.
//!
//! The record is `config.json` in the state directory, in the format of `spdk-rpc save_config`:
//! per subsystem a list of method calls. An item has a key, the thing that it makes; making it
//! again replaces the item in its place, deleting the thing removes it. The file is replaced as a
//! whole (temporary file, fsync, rename, fsync of the directory), so a crash leaves the old one or
//! the new one. Beside the calls it has the flushes that failed, which are no configuration. Which
//! process a controller came to belong to is written to `owners.json` first, which is not flushed.

mod call;
mod dir;
mod keys;
mod save;
mod unfinished;

use call::calls;
pub use call::{Call, ConfigFile, Subsystem};
use dir::Dir;
pub use dir::{OwnersFile, RecordFile, StateError, files_of_bdevs, is_state_dir};
use keys::OWNER_KEY;
pub use keys::{
    BDEV_KEY, NVME_OPTIONS_KEY, UBLK_KEY, bdev_key, cluster_key, coalescing_key, controller_key,
    export_key, identify, limits_key, owner_key, pool_key, target_key,
};
pub use save::save;

use crate::flusherror::FlushError;
use crate::methods::{iscsi, rbd};
use bdev::FlushFailure;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;

/// A configured thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Whose it is.
    pub subsystem: Subsystem,
    /// The thing, unique, such as `bdev m0`.
    pub key: String,
    /// What makes it.
    pub call: Call,
    /// Why it could not be restored, if so.
    pub problem: Option<String>,
    /// Of a bdev: the flush that failed, until that is cleared.
    pub flush_failure: Option<FlushFailure>,
}

impl Item {
    /// Whether it is recorded to be a bdev on that LUN.
    fn is_on_lun(&self, lun: Uuid) -> bool {
        let its = self.call.params.get("lun_uuid").and_then(Value::as_str);
        its.and_then(|its| Uuid::parse_str(its).ok()) == Some(lun)
    }
}

/// The configuration of this process.
#[derive(Debug, Default)]
pub struct Config {
    items: Vec<Item>,
    /// Whether the items differ from the file.
    dirty: bool,
    /// `None`: kept in memory only (the schemas are dumped, or a test).
    dir: Option<Arc<Dir>>,
}

impl Config {
    /// Takes the state directory for this process, creating it, and reads what is recorded there.
    pub fn open(path: &Path) -> Result<Config, StateError> {
        let dir = Dir::open(path)?;
        let mut config = Config { dir: None, ..Config::default() };
        let RecordFile { subsystems, flush_errors } = dir.read()?;
        config.put_all(calls(subsystems), &flush_errors);
        let mut owners = dir.read_owners();
        // One that was being made when the process ended is not recorded.
        owners.retain(|call| {
            let ctrlr = call.params.get("ctrlr").and_then(Value::as_str);
            ctrlr.is_some_and(|ctrlr| config.get(&controller_key(ctrlr)).is_some())
        });
        config.put_all(owners, &BTreeMap::new());
        config.dirty = false;
        config.dir = Some(Arc::new(dir));
        Ok(config)
    }

    /// Takes the state directory over from another process of this host, which holds it by `lock`
    /// and goes on doing so until it ends: the items are those of `calls`, of which some were not
    /// restored there, and of some bdevs a flush failed.
    ///
    /// # Errors
    /// The directory's lock is another file.
    pub fn inherit(
        path: &Path,
        lock: File,
        calls: Vec<Call>,
        unrestored: &BTreeMap<String, String>,
        flush_errors: &BTreeMap<String, FlushError>,
    ) -> Result<Config, StateError> {
        let dir = Dir::adopt(path, lock)?;
        let mut config = Config::default();
        config.put_all(calls, flush_errors);
        unrestored.iter().for_each(|(key, why)| config.set_problem(key, why.clone()));
        config.dirty = false;
        config.dir = Some(Arc::new(dir));
        Ok(config)
    }

    /// Of a directory that was taken over from a program that does not tell of failed flushes: adds
    /// those that are recorded, and `also`. They are recorded with the next change, or after
    /// [`Config::rewrite`].
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn add_flush_errors(
        &mut self,
        also: &BTreeMap<String, FlushError>,
    ) -> Result<(), StateError> {
        let recorded = self.dir.as_ref().map(|dir| dir.read()).transpose()?.unwrap_or_default();
        let before = self.dirty;
        for (bdev, error) in also.iter().chain(&recorded.flush_errors) {
            self.set_flush_failure(&bdev_key(bdev), Some(error.into()));
        }
        self.dirty = before;
        Ok(())
    }

    /// Has the next [`save`] write the file even if nothing changes.
    pub fn rewrite(&mut self) {
        self.dirty = true;
    }

    fn put_all(&mut self, calls: Vec<Call>, flush_errors: &BTreeMap<String, FlushError>) {
        for call in calls {
            let (subsystem, key) = identify(&call);
            self.put(subsystem, key, call);
        }
        for (bdev, error) in flush_errors {
            self.set_flush_failure(&bdev_key(bdev), Some(error.into()));
        }
    }

    /// The lock of the state directory, for a process that takes it over.
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        Some(self.dir.as_ref()?.lock())
    }

    /// Writes down that the directory is this process's.
    ///
    /// # Errors
    /// The operating system says no.
    pub fn sign(&self) -> Result<(), StateError> {
        self.dir.as_ref().map_or(Ok(()), |dir| dir.sign())
    }

    /// What is not restored, by key, and why.
    pub fn problems(&self) -> BTreeMap<String, String> {
        let with = |item: &Item| Some((item.key.clone(), item.problem.clone()?));
        self.items.iter().filter_map(with).collect()
    }

    /// All items: bdevs, then controllers, each in the order in which they were made.
    pub fn items(&self) -> impl Iterator<Item = &Item> {
        Subsystem::ALL
            .into_iter()
            .flat_map(|s| self.items.iter().filter(move |item| item.subsystem == s))
    }

    /// The item of that key.
    pub fn get(&self, key: &str) -> Option<&Item> {
        self.items.iter().find(|item| item.key == key)
    }

    /// Records that `call` made the thing `key`; a problem it had is over. A failed flush stays where
    /// the call is the same.
    pub fn put(&mut self, subsystem: Subsystem, key: String, call: Call) {
        let mut item = Item { subsystem, key, call, problem: None, flush_failure: None };
        match self.items.iter_mut().find(|i| i.key == item.key) {
            Some(there) if there.call == item.call => {
                item.flush_failure = there.flush_failure;
                if *there == item {
                    return;
                }
                *there = item;
            }
            Some(there) => *there = item,
            None => self.items.push(item),
        }
        self.dirty = true;
    }

    /// Records a successful call; the thing is named by the call.
    pub fn record(&mut self, method: &str, params: &impl Serialize) {
        let params = match serde_json::to_value(params) {
            Ok(Value::Object(params)) => params,
            _ => Map::new(),
        };
        let params = params.into_iter().filter(|(_, v)| !v.is_null()).collect();
        let call = Call { method: method.to_owned(), params };
        let (subsystem, key) = identify(&call);
        self.put(subsystem, key, call);
    }

    /// The flush that failed of the bdev of that name on `medium`, a file, a server's URI, a LUN's URL without
    /// passwords or a subsystem's name, as far as is recorded.
    pub fn flush_failure(&self, bdev: &str, medium: &Path) -> Option<FlushFailure> {
        let item = self.get(&bdev_key(bdev))?;
        let params = &item.call.params;
        let text = |name: &str| params.get(name).and_then(Value::as_str).map(str::to_owned);
        let lun = || iscsi::shown(&text("url")?);
        let recorded =
            text("filename").or_else(|| text("uri")).or_else(|| text("subnqn")).or_else(lun)?;
        item.flush_failure.filter(|_| Path::new(&recorded) == medium)
    }

    /// As [`Config::flush_failure`], of any bdev that is recorded to be on the LUN `lun`.
    pub fn flush_failure_of_lun(&self, lun: Uuid) -> Option<FlushFailure> {
        self.items.iter().filter(|item| item.is_on_lun(lun)).find_map(|item| item.flush_failure)
    }

    /// Forgets the flushes that failed of bdevs on the LUN `lun` that are recorded and not there: `is_there` is asked
    /// with the name of each.
    pub fn clear_flush_failures_of_lun(&mut self, lun: Uuid, is_there: impl Fn(&str) -> bool) {
        for item in self.items.iter_mut().filter(|item| item.is_on_lun(lun)) {
            if item.key.strip_prefix(BDEV_KEY).is_some_and(|name| !is_there(name)) {
                self.dirty |= item.flush_failure.take().is_some();
            }
        }
    }

    /// Records whether a flush of the bdev `key` failed; whether that is new.
    pub fn set_flush_failure(&mut self, key: &str, failure: Option<FlushFailure>) -> bool {
        let Some(item) = self.items.iter_mut().find(|i| i.key == key) else { return false };
        let is_new = item.flush_failure != failure;
        item.flush_failure = failure;
        self.dirty |= is_new;
        is_new
    }

    /// By bdev: the flush that failed.
    pub fn flush_errors(&self) -> BTreeMap<String, FlushError> {
        let failed = |item: &Item| {
            let name = item.key.strip_prefix(BDEV_KEY)?;
            Some((name.to_owned(), item.flush_failure?.into()))
        };
        self.items.iter().filter_map(failed).collect()
    }

    /// Changes one parameter of a recorded call; null takes it out.
    pub fn set_param(&mut self, key: &str, name: &str, value: Value) {
        let Some(item) = self.items.iter_mut().find(|i| i.key == key) else { return };
        let params = &mut item.call.params;
        let before = match value.is_null() {
            true => params.remove(name),
            false => params.insert(name.to_owned(), value.clone()),
        };
        self.dirty |= before.unwrap_or_default() != value;
    }

    /// Forgets the items that `which` picks; whether there were any.
    pub fn forget(&mut self, mut which: impl FnMut(&Item) -> bool) -> bool {
        let before = self.items.len();
        self.items.retain(|item| !which(item));
        let any = self.items.len() != before;
        self.dirty |= any;
        any
    }

    /// Notes why an item could not be restored.
    pub fn set_problem(&mut self, key: &str, problem: String) {
        self.note(key, Some(problem));
    }

    /// Notes what is wrong with an item, or that nothing is; whether that is new.
    pub fn note(&mut self, key: &str, problem: Option<String>) -> bool {
        let Some(item) = self.items.iter_mut().find(|i| i.key == key) else { return false };
        let is_new = item.problem != problem;
        item.problem = problem;
        is_new
    }

    /// Notes how restoring `of` went, unless another thing has its key by now, or none.
    pub fn set_restored(&mut self, of: &Item, problem: Option<String>) {
        if let Some(item) = self.items.iter_mut().find(|i| i.key == of.key && i.call == of.call) {
            item.problem = problem;
        }
    }

    /// Whether `item` is configured as it is here, whatever became of it.
    pub fn holds(&self, item: &Item) -> bool {
        self.get(&item.key).is_some_and(|there| there.call == item.call)
    }

    /// Writes down whom controllers belong to. When it returns, that survives the end of this process,
    /// however it ends; with [`save`], which is still to come, that of the host.
    pub fn save_owners(&self) -> Result<(), StateError> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let owners = self.items.iter().filter(|item| item.key.starts_with(OWNER_KEY));
        dir.write_owners(&owners.map(|item| item.call.clone()).collect::<Vec<_>>())
    }

    /// The calls of one subsystem, for `framework_get_config`: without what is a secret.
    pub fn shown(&self, subsystem: Subsystem) -> Vec<Call> {
        let mut calls = self.calls(subsystem);
        for call in &mut calls {
            rbd::hide_secrets(&mut call.params);
            iscsi::hide_secrets(call);
        }
        calls
    }

    /// The calls of one subsystem.
    fn calls(&self, subsystem: Subsystem) -> Vec<Call> {
        let items = self.items.iter().filter(|item| item.subsystem == subsystem);
        items.map(|item| item.call.clone()).collect()
    }

    /// The record, as text.
    fn text(&self) -> String {
        let mut text = serde_json::to_string_pretty(&self.file()).unwrap_or_default();
        text.push('\n');
        text
    }

    fn file(&self) -> Value {
        let subsystems: Vec<_> = Subsystem::ALL
            .into_iter()
            .map(|s| json!({"subsystem": s.name(), "config": self.calls(s)}))
            .collect();
        let mut file = json!({"subsystems": subsystems});
        let flush_errors = self.flush_errors();
        if !flush_errors.is_empty() {
            file["flush_errors"] = json!(flush_errors);
        }
        file
    }
}

#[cfg(test)]
mod tests {
    use super::dir::{CONFIG, OWNERS};
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("state-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    fn malloc(name: &str, blocks: u64) -> Value {
        json!({"name": name, "num_blocks": blocks, "block_size": 512, "uuid": null})
    }

    #[test]
    fn what_was_recorded_comes_back_in_order() {
        let dir = scratch("order");
        let mut config = Config::open(&dir).unwrap();
        config.record("vhost_create_scsi_controller", &json!({"ctrlr": "v"}));
        config.record("bdev_malloc_create", &malloc("b", 1));
        config.record("bdev_malloc_create", &malloc("a", 1));
        config.record("bdev_malloc_create", &malloc("b", 2));
        config.record(
            "vhost_scsi_controller_add_target",
            &json!({"ctrlr": "v", "scsi_target_num": 0, "bdev_name": "a"}),
        );
        config.save();
        drop(config);
        let config = Config::open(&dir).unwrap();
        let keys: Vec<_> = config.items().map(|i| i.key.as_str()).collect();
        assert_eq!(keys, ["bdev b", "bdev a", "controller v", "target 0 of controller v"]);
        assert_eq!(config.get("bdev b").unwrap().call.params["num_blocks"], 2);
        assert!(!config.get("bdev b").unwrap().call.params.contains_key("uuid"));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_failed_flush_is_recorded_until_it_is_cleared_or_its_bdev_is_another() {
        let dir = scratch("flush");
        let file = |name: &str| json!({"name": "d", "filename": name, "uuid": "u"});
        let at = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(7);
        let failure = FlushFailure { cause: bdev::FlushCause::Metadata, errno: Some(5), at };
        let known = |config: &Config| config.flush_failure("d", Path::new("/x"));
        let mut config = Config::open(&dir).unwrap();
        assert!(!config.set_flush_failure("bdev d", Some(failure)), "there is no such bdev");
        config.record("bdev_aio_create", &file("/x"));
        assert!(config.set_flush_failure("bdev d", Some(failure)));
        config.save();
        drop(config);
        let mut config = Config::open(&dir).unwrap();
        assert_eq!(known(&config), Some(failure));
        assert_eq!(config.flush_failure("d", Path::new("/y")), None, "another file");
        assert!(!json!(config.calls(Subsystem::Bdev)).to_string().contains("flush"));
        // Made again as it was, as at each start, it is the same; nothing is to be written.
        config.record("bdev_aio_create", &file("/x"));
        assert!(known(&config) == Some(failure) && !config.dirty);
        assert!(config.set_flush_failure("bdev d", None));
        config.save();
        drop(config);
        let mut config = Config::open(&dir).unwrap();
        assert_eq!(known(&config), None);
        config.set_flush_failure("bdev d", Some(failure));
        config.record("bdev_aio_create", &file("/y"));
        assert!(config.flush_errors().is_empty(), "another file");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_flush_of_a_lun_that_is_cleared_is_no_failure_of_bdevs_that_are_gone() {
        let lun = Uuid::from_u128(7);
        let of = |name: &str, lun: Uuid| json!({"name": name, "url": "u", "lun_uuid": lun});
        let mut config = Config::default();
        config.record("bdev_iscsi_create", &of("there", lun));
        config.record("bdev_iscsi_create", &of("gone", lun));
        config.record("bdev_iscsi_create", &of("other", Uuid::from_u128(8)));
        let failure = FlushFailure {
            cause: bdev::FlushCause::Flush,
            errno: None,
            at: std::time::SystemTime::UNIX_EPOCH,
        };
        for name in ["there", "gone", "other"] {
            assert!(config.set_flush_failure(&bdev_key(name), Some(failure)));
        }
        config.clear_flush_failures_of_lun(lun, |name| name == "there");
        assert_eq!(config.flush_errors().into_keys().collect::<Vec<_>>(), ["other", "there"]);
        config.set_flush_failure(&bdev_key("there"), None);
        assert_eq!(config.flush_failure_of_lun(lun), None);
    }

    #[test]
    fn of_an_older_program_what_is_recorded_and_what_it_answered_counts() {
        let dir = scratch("older");
        let at = |seconds| {
            FlushError::from(FlushFailure {
                cause: bdev::FlushCause::Metadata,
                errno: None,
                at: std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds),
            })
        };
        let mut old = Config::open(&dir).unwrap();
        for name in ["recorded", "told", "well"] {
            old.record("bdev_aio_create", &json!({"name": name, "filename": "/x"}));
        }
        old.set_flush_failure("bdev recorded", Some((&at(7)).into()));
        old.save();
        let lock = File::from(old.lock().unwrap().try_clone_to_owned().unwrap());
        let calls = old.calls(Subsystem::Bdev);
        let none = BTreeMap::new();
        let mut new = Config::inherit(&dir, lock, calls, &none, &BTreeMap::new()).unwrap();
        let told = ["recorded", "told", "lvs0/v0"].map(|name| (name.to_owned(), at(9)));
        new.add_flush_errors(&told.into()).unwrap();
        let expected = BTreeMap::from([("recorded".to_owned(), at(7)), ("told".to_owned(), at(9))]);
        assert_eq!(new.flush_errors(), expected, "the record knows more of it");
        // The old program may have to go on: nothing is written yet.
        new.save();
        assert_eq!(old.dir.as_ref().unwrap().read().unwrap().flush_errors.len(), 1);
        new.rewrite();
        new.save();
        assert_eq!(old.dir.as_ref().unwrap().read().unwrap().flush_errors, expected);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn owners_are_there_until_the_file_is_another() {
        const METHOD: &str = "virtlun_controller_set_owner";
        let dir = scratch("owners");
        let (file, owners) = (dir.join(CONFIG), dir.join(OWNERS));
        let owner = |pid: u64| json!({"ctrlr": "v", "uid": pid});
        let read = || {
            let config = Config::open(&dir).unwrap();
            config.get("owner of controller v").map(|item| item.call.params["uid"].clone())
        };
        let mut config = Config::open(&dir).unwrap();
        config.record("vhost_create_scsi_controller", &json!({"ctrlr": "v"}));
        config.record(METHOD, &owner(1));
        config.save();
        let written = fs::read(&file).unwrap();
        config.record(METHOD, &owner(2));
        config.save_owners().unwrap();
        assert_eq!(fs::read(&file).unwrap(), written);
        // The process is killed.
        drop(config);
        assert_eq!(read(), Some(json!(2)));
        let earlier = fs::read(&owners).unwrap();
        let mut config = Config::open(&dir).unwrap();
        config.record(METHOD, &owner(3));
        config.save_owners().unwrap();
        config.record(METHOD, &owner(4));
        config.save();
        drop(config);
        assert!(!owners.exists());
        assert_eq!(read(), Some(json!(4)));
        // As if the process had been killed before it removed it.
        fs::write(&owners, earlier).unwrap();
        assert_eq!(read(), Some(json!(4)));
        // Of a controller that is not there.
        let mut config = Config::open(&dir).unwrap();
        config.record(METHOD, &json!({"ctrlr": "w", "uid": 5}));
        config.save_owners().unwrap();
        drop(config);
        assert_eq!(Config::open(&dir).unwrap().items().count(), 2);
        // As the host may leave it.
        fs::write(&owners, [0u8; 100]).unwrap();
        assert_eq!(read(), Some(json!(4)));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_directory_has_one_user_at_a_time() {
        let dir = scratch("lock");
        let first = Config::open(&dir).unwrap();
        let e = Config::open(&dir).unwrap_err().to_string();
        assert!(e.contains("in use by another target (pid "), "{e}");
        drop(first);
        Config::open(&dir).unwrap();
        fs::remove_dir_all(dir).unwrap();
    }

    /// As the kernel has it for a moment.
    #[test]
    fn the_lock_of_a_killed_target_is_waited_for() {
        let dir = scratch("killed");
        let first = Config::open(&dir).unwrap();
        // No process has that number (pid_max, proc(5)). A child would have other tests' locks for a moment.
        fs::write(dir.join("lock"), "4194305\n").unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| Config::open(&dir).map(drop));
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!waits.is_finished());
            drop(first);
            waits.join().unwrap().unwrap();
        });
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let dir = scratch("damaged");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(CONFIG), "{\"subsystems\": [").unwrap();
        let e = Config::open(&dir).unwrap_err().to_string();
        assert!(e.contains("config.json cannot be read as a configuration"), "{e}");
        assert_eq!(fs::read_to_string(dir.join(CONFIG)).unwrap(), "{\"subsystems\": [");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn forgetting_and_problems() {
        let mut config = Config::default();
        config.record("bdev_malloc_create", &malloc("a", 1));
        config.set_problem("bdev a", "no".into());
        assert_eq!(config.get("bdev a").unwrap().problem.as_deref(), Some("no"));
        config.record("bdev_malloc_create", &malloc("a", 1));
        assert_eq!(config.get("bdev a").unwrap().problem, None);
        let old = config.get("bdev a").unwrap().clone();
        config.record("bdev_malloc_create", &malloc("a", 2));
        config.set_restored(&old, Some("of another thing".into()));
        assert!(config.get("bdev a").unwrap().problem.is_none() && !config.holds(&old));
        assert!(config.forget(|i| i.key == "bdev a"));
        assert!(!config.forget(|i| i.key == "bdev a"));
        assert_eq!(config.items().count(), 0);
    }

    #[test]
    fn batches_of_a_saved_configuration_are_taken_apart() {
        let calls = ConfigFile::parse(
            r#"{"subsystems": [
                {"subsystem": "scsi", "config": null},
                {"subsystem": "bdev", "config": [{"method": "a"}, [{"method": "b"}, {"method": "c"}]]}
            ]}"#,
        )
        .unwrap();
        let names: Vec<_> = calls.iter().map(|c| c.method.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
    }
}
