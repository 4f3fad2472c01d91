//! What else of volumes outlives the process than their reservations, in files of the state directory:
//! `sanitize/UUID.json` and `mode/UUID.json`, each replaced as a whole.

use rustix::fs::{FlockOperation, flock};
use scsi::{Record, RecordKeeper};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Largest file that is read, in bytes: some times what a pattern of a block takes.
const MAX_BYTES: u64 = 1 << 20;

/// The files.
pub struct RecordFiles {
    state_dir: PathBuf,
}

impl RecordFiles {
    /// Those in a state directory.
    pub fn of(state_dir: &Path) -> Self {
        RecordFiles { state_dir: state_dir.to_owned() }
    }

    fn folder(&self, record: Record) -> PathBuf {
        self.state_dir.join(record.name())
    }

    fn path(&self, record: Record, volume: Uuid) -> PathBuf {
        self.folder(record).join(format!("{volume}.json"))
    }

    fn read(&self, record: Record, volume: Uuid) -> io::Result<Option<String>> {
        let file = match File::open(self.path(record, volume)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text)?;
        Ok(Some(text))
    }

    fn write(&self, record: Record, volume: Uuid, text: Option<&str>) -> io::Result<()> {
        let (folder, path) = (self.folder(record), self.path(record, volume));
        fs::create_dir_all(&folder)?;
        if let Some(text) = text {
            let next = path.with_extension("json.new");
            let mut file = File::create(&next)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&next, &path)?;
        } else {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        File::open(&folder)?.sync_all()
    }

    fn locked(&self, record: Record, volume: Uuid) -> io::Result<File> {
        let folder = self.folder(record);
        fs::create_dir_all(&folder)?;
        // It stays: whoever removes it may remove another's.
        let file = File::create(folder.join(format!("{volume}.lock")))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    /// Logs why something is not as it is to be.
    fn log(&self, record: Record, volume: Uuid, what: &str, error: &io::Error) {
        let (name, path) = (record.name(), self.path(record, volume));
        tracing::error!(
            "the {name} record of volume {volume} cannot be {what} in {}: {error}",
            path.display()
        );
    }
}

impl RecordKeeper for RecordFiles {
    fn keep(&self, record: Record, volume: Uuid, text: Option<&str>) -> io::Result<()> {
        let kept = self.write(record, volume, text);
        kept.inspect_err(|e| self.log(record, volume, "changed", e))
    }

    fn kept(&self, record: Record, volume: Uuid) -> io::Result<Option<String>> {
        self.read(record, volume).inspect_err(|e| self.log(record, volume, "read", e))
    }

    fn lock(&self, record: Record, volume: Uuid) -> io::Result<Box<dyn Send>> {
        let locked = self.locked(record, volume);
        let locked = locked.inspect_err(|e| self.log(record, volume, "locked", e))?;
        Ok(Box::new(locked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    const VOLUME: Uuid = Uuid::from_u128(7);

    #[test]
    fn what_is_kept_is_read_again_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let files = RecordFiles::of(folder.path());
        assert_eq!(files.kept(Record::Sanitize, VOLUME).unwrap(), None);
        files.keep(Record::Sanitize, VOLUME, Some("one")).unwrap();
        files.keep(Record::Mode, VOLUME, Some("two")).unwrap();
        let again = RecordFiles::of(folder.path());
        assert_eq!(again.kept(Record::Sanitize, VOLUME).unwrap().unwrap(), "one");
        assert_eq!(again.kept(Record::Mode, VOLUME).unwrap().unwrap(), "two");
        assert_eq!(again.kept(Record::Mode, Uuid::from_u128(8)).unwrap(), None);
        files.keep(Record::Sanitize, VOLUME, None).unwrap();
        files.keep(Record::Sanitize, VOLUME, None).unwrap();
        assert_eq!(again.kept(Record::Sanitize, VOLUME).unwrap(), None);
        fs::write(files.path(Record::Mode, VOLUME), [0xFF]).unwrap();
        assert!(again.kept(Record::Mode, VOLUME).is_err());
    }

    #[test]
    fn one_at_a_time_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let files = RecordFiles::of(folder.path());
        let first = files.lock(Record::Sanitize, VOLUME).unwrap();
        let other = files.lock(Record::Sanitize, Uuid::from_u128(8)).unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let second = files.lock(Record::Sanitize, VOLUME).unwrap();
                tell.send(()).unwrap();
                drop(second);
            });
            assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
            drop((first, other));
            told.recv_timeout(Duration::from_secs(60)).unwrap();
        });
    }
}
