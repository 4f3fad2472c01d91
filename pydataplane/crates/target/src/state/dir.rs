//! The state directory: the lock that makes it one target's, and the files that are replaced as a whole.

use super::Call;
use super::call::{ConfigFile, SubsystemFile};
use super::keys::{OWNER_KEY, identify};
use super::unfinished;
use crate::flusherror::FlushError;
use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub(super) const CONFIG: &str = "config.json";
const CONFIG_NEW: &str = "config.json.new";
const LOCK: &str = "lock";
pub(super) const OWNERS: &str = "owners.json";
const OWNERS_NEW: &str = "owners.json.new";

/// Largest file that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 64 * 1024 * 1024;

/// Mode of the record: its owner's alone.
const OWN_MODE: u32 = 0o600;

/// Longest number of a process, in bytes.
const MAX_PID_BYTES: u64 = 16;

/// How long a target that was killed and whose files the kernel has not closed yet is waited for, and how
/// often they are looked at.
const ENDING_WAIT: Duration = Duration::from_secs(10);
const ENDING_POLL: Duration = Duration::from_millis(2);

/// The record: a [`ConfigFile`], and what became of what it makes.
#[derive(Default, Deserialize, JsonSchema)]
pub struct RecordFile {
    /// In the order of initialisation.
    pub(super) subsystems: Vec<SubsystemFile>,
    /// By bdev on a file or block device: the flush that failed, until that is cleared.
    #[serde(default)]
    pub(super) flush_errors: BTreeMap<String, FlushError>,
}

/// Whom controllers belong to, as that was recorded since the configuration was. It is void as soon as
/// that is another file.
#[derive(Serialize, Deserialize, JsonSchema)]
pub struct OwnersFile {
    /// The config.json that it adds to; null where there was none.
    of: Option<Edition>,
    /// The one that takes its place, if it was written when this was.
    #[serde(default)]
    next: Option<Edition>,
    /// Calls of virtlun_controller_set_owner, which take the place of those there.
    owners: Vec<Call>,
}

/// A file, told from those that were in its place before and came after.
#[derive(PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
struct Edition {
    /// Its number.
    inode: u64,
    /// Its size.
    bytes: u64,
    /// When it was written, in seconds since 1970.
    seconds: i64,
    /// And nanoseconds.
    nanoseconds: i64,
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another process has it.
    #[error(
        "the state directory {dir} is in use by another target{}; stop that one or give \
         --state-dir another", pid.map(|p| format!(" (pid {p})")).unwrap_or_default()
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// The other process, as it noted itself.
        pid: Option<u32>,
    },
    /// Another directory than that of the process that it is taken over from.
    #[error(
        "the target that serves keeps its state elsewhere than in {dir}; give --state-dir as it has"
    )]
    OtherDirectory {
        /// The directory.
        dir: PathBuf,
    },
    /// The record cannot be understood.
    #[error(
        "{path} cannot be read as a configuration: {why}; mend it, or move it away to start empty"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The operating system says no.
    #[error("cannot {operation} {path}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// The answer.
        source: io::Error,
    },
}

fn os(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> StateError {
    move |source| StateError::Os { operation, path: path.to_owned(), source }
}

/// The state directory, held for this process by a lock.
#[derive(Debug)]
pub(super) struct Dir {
    path: PathBuf,
    /// The lock lives as long as this file is open, here or in a process that it was given to.
    lock: File,
    /// Held by whoever writes the record.
    pub(super) writing: Mutex<()>,
}

impl Dir {
    pub(super) fn open(path: &Path) -> Result<Dir, StateError> {
        fs::create_dir_all(path).map_err(os("create the state directory", path))?;
        let lock_path = path.join(LOCK);
        let mut lock = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&lock_path)
            .map_err(os("open the lock", &lock_path))?;
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(e) => return Err(os("lock", &lock_path)(e.into())),
            }
            let pid = signed(&mut lock);
            if begun.elapsed() >= ENDING_WAIT || !pid.is_some_and(peer::is_ending) {
                return Err(StateError::InUse { dir: path.into(), pid });
            }
            thread::sleep(ENDING_POLL);
        }
        let dir = Dir { path: path.to_owned(), lock, writing: Mutex::new(()) };
        dir.sign()?;
        unfinished::remove(path);
        Ok(dir)
    }

    /// Takes the directory over from another process of this host, which holds it by `lock`.
    pub(super) fn adopt(path: &Path, lock: File) -> Result<Dir, StateError> {
        let lock_path = path.join(LOCK);
        let identity = |m: fs::Metadata| (m.dev(), m.ino());
        let theirs = lock.metadata().map(identity).map_err(os("examine", &lock_path))?;
        if fs::metadata(&lock_path).map(identity).map_err(os("examine", &lock_path))? != theirs {
            return Err(StateError::OtherDirectory { dir: path.into() });
        }
        Ok(Dir { path: path.to_owned(), lock, writing: Mutex::new(()) })
    }

    /// The lock, for a process that takes the directory over.
    pub(super) fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Writes down whose the directory is.
    pub(super) fn sign(&self) -> Result<(), StateError> {
        self.lock
            .set_len(0)
            .and_then(|()| {
                self.lock.write_all_at(format!("{}\n", std::process::id()).as_bytes(), 0)
            })
            .map_err(os("write the lock", &self.path.join(LOCK)))
    }

    pub(super) fn read(&self) -> Result<RecordFile, StateError> {
        let path = self.path.join(CONFIG);
        let mut text = String::new();
        match File::open(&path) {
            Ok(file) => {
                file.take(MAX_CONFIG_BYTES).read_to_string(&mut text).map_err(os("read", &path))?
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(RecordFile::default());
            }
            Err(e) => return Err(os("open", &path)(e)),
        };
        serde_json::from_str(&text).map_err(|e| StateError::Damaged { path, why: e.to_string() })
    }

    /// Writes the next record beside the present one, durably. It may have keys of clusters in it, so it is
    /// its owner's alone.
    pub(super) fn write_next(&self, text: &str) -> Result<(), StateError> {
        let new = self.path.join(CONFIG_NEW);
        let mut options = File::options();
        let created = options.write(true).create(true).truncate(true).mode(OWN_MODE).open(&new);
        let mut file = created.map_err(os("create", &new))?;
        // One that a process left that was killed may have another mode.
        file.set_permissions(Permissions::from_mode(OWN_MODE))
            .map_err(os("keep others from", &new))?;
        file.write_all(text.as_bytes()).map_err(os("write", &new))?;
        file.sync_all().map_err(os("flush", &new))
    }

    /// Replaces the record by the next one, which voids what [`Dir::write_owners`] recorded before that was
    /// written.
    pub(super) fn replace(&self) -> Result<(), StateError> {
        let (new, path) = (self.path.join(CONFIG_NEW), self.path.join(CONFIG));
        fs::rename(&new, &path).map_err(os("replace", &path))
    }

    /// Removes what [`Dir::write_owners`] recorded and the record has by now.
    pub(super) fn forget_owners(&self) {
        _ = fs::remove_file(self.path.join(OWNERS));
    }

    /// Makes the replacement durable.
    pub(super) fn sync(&self) -> Result<(), StateError> {
        File::open(&self.path).and_then(|dir| dir.sync_all()).map_err(os("flush", &self.path))
    }

    fn edition(&self, name: &str) -> Option<Edition> {
        let meta = fs::metadata(self.path.join(name)).ok()?;
        Some(Edition {
            inode: meta.ino(),
            bytes: meta.len(),
            seconds: meta.mtime(),
            nanoseconds: meta.mtime_nsec(),
        })
    }

    /// Records whom controllers belong to beside the present record; when it returns, that survives
    /// this process.
    ///
    /// It need not survive the host: the processes that it names do not either, and those of the next
    /// boot are told from them. So nothing waits for the disk here, on which a guest's session would
    /// wait, and behind all that others write there: the next process reads what the kernel has.
    pub(super) fn write_owners(&self, owners: &[Call]) -> Result<(), StateError> {
        let (new, path) = (self.path.join(OWNERS_NEW), self.path.join(OWNERS));
        let (of, next) = (self.edition(CONFIG), self.edition(CONFIG_NEW));
        let text = json!({"of": of, "next": next, "owners": owners}).to_string();
        fs::write(&new, text).map_err(os("write", &new))?;
        fs::rename(&new, &path).map_err(os("replace", &path))
    }

    /// What [`Dir::write_owners`] recorded, if the record is still the same; nothing where it cannot be
    /// read, as after a crash of the host.
    pub(super) fn read_owners(&self) -> Vec<Call> {
        let path = self.path.join(OWNERS);
        let mut text = Vec::new();
        let read = File::open(&path)
            .and_then(|file| file.take(MAX_CONFIG_BYTES).read_to_end(&mut text))
            .and_then(|_| Ok(serde_json::from_slice::<OwnersFile>(&text)?));
        let OwnersFile { of, next, mut owners } = match read {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(e) => {
                tracing::warn!("{} is ignored: {e}", path.display());
                return Vec::new();
            }
        };
        let present = self.edition(CONFIG);
        if of != present && (next.is_none() || next != present) {
            return Vec::new();
        }
        owners.retain(|call| identify(call).1.starts_with(OWNER_KEY));
        owners
    }
}

/// Whose the directory is, as that one wrote down.
fn signed(lock: &mut File) -> Option<u32> {
    let mut pid = String::new();
    lock.rewind().ok()?;
    lock.take(MAX_PID_BYTES).read_to_string(&mut pid).ok()?;
    pid.trim().parse().ok()
}

/// Whether a folder is one that a target recorded its configuration in.
pub fn is_state_dir(path: &Path) -> bool {
    path.join(LOCK).is_file()
}

/// Files and block devices that the configuration recorded in a state directory names; none where it
/// cannot be read, which is said when it is opened.
pub fn files_of_bdevs(path: &Path) -> Vec<PathBuf> {
    let calls = fs::read_to_string(path.join(CONFIG)).ok();
    let calls = calls.and_then(|text| ConfigFile::parse(&text).ok()).unwrap_or_default();
    let file = |call: Call| Some(PathBuf::from(call.params.get("filename")?.as_str()?));
    calls.into_iter().filter_map(file).collect()
}
