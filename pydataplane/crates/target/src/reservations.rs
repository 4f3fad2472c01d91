//! Persistent reservations of volumes, kept in files of the state directory: `reservations/UUID.json`, each
//! replaced as a whole.

use scsi::{KeptReservations, ReservationKeeper};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use uuid::Uuid;

const FOLDER: &str = "reservations";
/// Largest file that is read, in bytes: some times what the most registrants take.
const MAX_BYTES: u64 = 1 << 20;

/// The files.
pub struct ReservationFiles {
    folder: PathBuf,
}

impl ReservationFiles {
    /// Those in a state directory.
    pub fn of(state_dir: &Path) -> Self {
        ReservationFiles { folder: state_dir.join(FOLDER) }
    }

    fn path(&self, volume: Uuid) -> PathBuf {
        self.folder.join(format!("{volume}.json"))
    }

    fn read(&self, volume: Uuid) -> io::Result<Option<KeptReservations>> {
        let file = match File::open(self.path(volume)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text)?;
        Ok(Some(serde_json::from_str(&text)?))
    }
}

impl ReservationKeeper for ReservationFiles {
    fn keep(&self, volume: Uuid, kept: &KeptReservations) -> io::Result<()> {
        let path = self.path(volume);
        let kept = self.keep_at(&path, kept);
        kept.inspect_err(|e| {
            tracing::error!(
                "reservations of volume {volume} cannot be kept in {}: {e}",
                path.display()
            );
        })
    }

    fn kept(&self, volume: Uuid) -> Option<KeptReservations> {
        self.read(volume).unwrap_or_else(|e| {
            tracing::error!(
                "{} cannot be read, so nobody has reserved volume {volume}: {e}; stop its users, mend or \
                 remove the file, and restart the target",
                self.path(volume).display()
            );
            None
        })
    }
}

impl ReservationFiles {
    fn keep_at(&self, path: &Path, kept: &KeptReservations) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        if kept.is_empty() {
            match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        } else {
            let next = path.with_extension("json.new");
            let mut file = File::create(&next)?;
            file.write_all(&serde_json::to_vec(kept)?)?;
            file.sync_all()?;
            fs::rename(&next, path)?;
        }
        File::open(&self.folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: Uuid = Uuid::from_u128(7);

    fn kept(registrants: &str) -> KeptReservations {
        let text = format!(
            r#"{{"reservations": {{"generation": 3, "registrants": [{registrants}], "held": null,
                "persist": true}}, "boot": null}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn what_is_kept_is_read_again_until_nobody_is_registered() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        assert!(files.kept(VOLUME).is_none());
        let one = kept(r#"{"nexus": "vm-1:0", "key": 18446744073709551615}"#);
        files.keep(VOLUME, &one).unwrap();
        let again = ReservationFiles::of(folder.path()).kept(VOLUME).unwrap();
        assert_eq!(format!("{again:?}"), format!("{one:?}"));
        assert!(files.kept(Uuid::from_u128(8)).is_none());
        files.keep(VOLUME, &kept("")).unwrap();
        files.keep(VOLUME, &kept("")).unwrap();
        assert!(files.kept(VOLUME).is_none());
        assert_eq!(fs::read_dir(folder.path().join(FOLDER)).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_understood_is_nothing_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        fs::create_dir(&files.folder).unwrap();
        fs::write(files.path(VOLUME), "{").unwrap();
        assert!(files.kept(VOLUME).is_none());
        assert_eq!(fs::read_to_string(files.path(VOLUME)).unwrap(), "{");
    }
}
