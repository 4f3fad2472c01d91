//! Persistent reservations of volumes, kept in files of the state directory: `reservations/UUID.json`, each
//! replaced as a whole. One that cannot be read stays until it is replaced, or somebody mends or removes it.

use parking_lot::Mutex;
use rustix::io::Errno;
use scsi::{KeptReservations, NotKnown, ReservationKeeper};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Where in the state directory they are.
pub const FOLDER: &str = "reservations";
/// Largest file that is read, in bytes: some times what the most registrants take.
const MAX_BYTES: u64 = 1 << 20;
/// How often what cannot be read for now is read before it is told so, and the pauses between.
const TIMES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);
/// After so long there are as many pauses again.
const RENEWED: Duration = Duration::from_secs(1);

/// The files.
pub struct ReservationFiles {
    folder: PathBuf,
    patience: Mutex<Patience>,
    /// Volumes of which it was told that their file cannot be read.
    told: Mutex<HashMap<Uuid, NotKnown>>,
}

impl ReservationFiles {
    /// Those in a state directory.
    pub fn of(state_dir: &Path) -> Self {
        ReservationFiles {
            folder: state_dir.join(FOLDER),
            patience: Mutex::new(Patience::new()),
            told: Mutex::default(),
        }
    }

    /// Reads a volume's again a few times where they cannot be read for now: a virtio-blk disk has no other error
    /// for it than one of I/O, which its guest takes for good. Not where that was told: who has told it comes again.
    fn patiently<T>(
        &self,
        volume: Uuid,
        mut read: impl FnMut() -> Result<T, (NotKnown, io::Error)>,
    ) -> Result<T, (NotKnown, io::Error)> {
        for _ in 1..TIMES {
            match read() {
                Err((NotKnown::Unread, _)) if self.has_patience(volume) => thread::sleep(PAUSE),
                known => return known,
            }
        }
        read()
    }

    fn has_patience(&self, volume: Uuid) -> bool {
        let is_told = self.told.lock().get(&volume) == Some(&NotKnown::Unread);
        !is_told && self.patience.lock().take()
    }

    fn path(&self, volume: Uuid) -> PathBuf {
        self.folder.join(format!("{volume}.json"))
    }

    fn read(&self, volume: Uuid) -> Result<Option<KeptReservations>, (NotKnown, io::Error)> {
        let text = self.read_text(volume).map_err(|e| (why(&e), e))?;
        let kept = text.map(|text| serde_json::from_slice(&text)).transpose();
        kept.map_err(|e| (NotKnown::Lost, e.into()))
    }

    fn read_text(&self, volume: Uuid) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path(volume)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(Some(text))
    }

    /// Logs once that a volume's reservations are not known, and what to do, and that they are again.
    fn tell(&self, volume: Uuid, not_known: Option<&(NotKnown, io::Error)>) {
        let mut told = self.told.lock();
        let path = self.path(volume);
        let path = path.display();
        let Some((why, error)) = not_known else {
            if told.remove(&volume).is_some() {
                tracing::info!("the reservations of volume {volume} are known again");
            }
            return;
        };
        if told.insert(volume, *why) == Some(*why) {
            return;
        }
        match why {
            NotKnown::Unread => tracing::error!(
                "{path} cannot be read, so that nobody knows who has reserved volume {volume}: {error}; its \
                 commands end as NOT READY until what holds the file is mended, or the file is removed, \
                 which ends all reservations, once nobody who was kept from the volume can write to it"
            ),
            NotKnown::Lost => tracing::error!(
                "{path} is damaged, so that nobody knows who has reserved volume {volume}: {error}; its \
                 commands end as DATA PROTECT until the one of its VMs that is to hold the reservation replaces \
                 it (sg_persist --out --replace-lost --param-sark=KEY --prout-type=TYPE), or the file is removed, \
                 which ends all reservations, once nobody who was kept from the volume can write to it; only \
                 removing or mending it helps a VM that boots from the volume, or has it as a virtio-blk disk"
            ),
        }
    }
}

impl ReservationKeeper for ReservationFiles {
    fn keep(&self, volume: Uuid, kept: &KeptReservations) -> io::Result<()> {
        let path = self.path(volume);
        let kept = self.keep_at(&path, kept);
        if kept.is_ok() {
            self.told.lock().remove(&volume);
        }
        kept.inspect_err(|e| {
            tracing::error!(
                "reservations of volume {volume} cannot be kept in {}: {e}",
                path.display()
            );
        })
    }

    fn kept(&self, volume: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        let read = self.patiently(volume, || self.read(volume));
        self.tell(volume, read.as_ref().err());
        read.map_err(|(why, _)| why)
    }

    fn look(&self, volume: Uuid) -> Result<Option<KeptReservations>, NotKnown> {
        self.read(volume).map_err(|(why, _)| why)
    }

    fn tell_spoiled(&self, volume: Uuid) {
        tracing::error!(
            "{} was damaged, changed or removed while the target serves volume {volume}: the reservations that \
             the target knows count, and are kept anew there",
            self.path(volume).display()
        );
    }
}

/// Why a file that cannot be read is not known: whether it is the file's own fault, which lasts.
fn why(error: &io::Error) -> NotKnown {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::IO | Errno::UCLEAN | Errno::BADMSG) => NotKnown::Lost,
        _ => NotKnown::Unread,
    }
}

/// Pauses that may be made: all volumes share them, so that a thousand wait no longer than one.
struct Patience {
    left: u32,
    renewed: Instant,
}

impl Patience {
    fn new() -> Self {
        Patience { left: TIMES - 1, renewed: Instant::now() }
    }

    /// Takes one, if there is one.
    fn take(&mut self) -> bool {
        if self.renewed.elapsed() >= RENEWED {
            *self = Patience::new();
        }
        let is_left = self.left > 0;
        self.left -= u32::from(is_left);
        is_left
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
            // A program that another has taken over from may still be about to write its own.
            let next = path.with_extension(format!("json.{}.new", process::id()));
            write_whole(&next, path, &serde_json::to_vec(kept)?)
                .inspect_err(|_| drop(fs::remove_file(&next)))?;
        }
        File::open(&self.folder)?.sync_all()
    }
}

/// Has `path` what `bytes` are, durably and as a whole, by way of `next`.
fn write_whole(next: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(next)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(next, path)
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
        assert!(files.kept(VOLUME).unwrap().is_none());
        let one = kept(r#"{"nexus": "vm-1:0", "key": 18446744073709551615}"#);
        files.keep(VOLUME, &one).unwrap();
        let again = ReservationFiles::of(folder.path()).kept(VOLUME).unwrap().unwrap();
        assert_eq!(format!("{again:?}"), format!("{one:?}"));
        assert!(files.kept(Uuid::from_u128(8)).unwrap().is_none());
        files.keep(VOLUME, &kept("")).unwrap();
        files.keep(VOLUME, &kept("")).unwrap();
        assert!(files.kept(VOLUME).unwrap().is_none());
        assert_eq!(fs::read_dir(folder.path().join(FOLDER)).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_understood_is_lost_and_stays_until_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        fs::create_dir(&files.folder).unwrap();
        let of_another_version = r#"{"reservations": {}, "boot": null}"#.as_bytes();
        let endless = [b' '].repeat(MAX_BYTES as usize + 1);
        for damaged in [b"".as_slice(), b"{", &[0xFF], of_another_version, &endless] {
            fs::write(files.path(VOLUME), damaged).unwrap();
            assert_eq!(files.kept(VOLUME).unwrap_err(), NotKnown::Lost);
            assert_eq!(fs::read(files.path(VOLUME)).unwrap(), damaged);
        }
        let one = kept(r#"{"nexus": "vm-1:0", "key": 1}"#);
        // Killed before the new one has its name: the old one counts.
        fs::write(
            files.path(VOLUME).with_extension("json.1.new"),
            serde_json::to_vec(&one).unwrap(),
        )
        .unwrap();
        assert_eq!(files.kept(VOLUME).unwrap_err(), NotKnown::Lost);
        files.keep(VOLUME, &one).unwrap();
        let again = files.kept(VOLUME).unwrap().unwrap();
        assert_eq!(format!("{again:?}"), format!("{one:?}"));
    }

    #[test]
    fn what_cannot_be_kept_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        fs::create_dir_all(files.path(VOLUME)).unwrap();
        files.keep(VOLUME, &kept(r#"{"nexus": "vm-1:0", "key": 1}"#)).unwrap_err();
        assert_eq!(fs::read_dir(&files.folder).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_read_is_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        fs::create_dir_all(files.path(VOLUME)).unwrap();
        assert_eq!(files.kept(VOLUME).unwrap_err(), NotKnown::Unread);
        fs::remove_dir(files.path(VOLUME)).unwrap();
        assert!(files.kept(VOLUME).unwrap().is_none());
    }

    #[test]
    fn a_file_whose_own_blocks_cannot_be_read_is_lost_and_can_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        fs::create_dir(&files.folder).unwrap();
        // Nothing is mapped at its begin, which it says by EIO.
        std::os::unix::fs::symlink("/proc/self/mem", files.path(VOLUME)).unwrap();
        assert_eq!(files.kept(VOLUME).unwrap_err(), NotKnown::Lost);
        files.keep(VOLUME, &kept(r#"{"nexus": "vm-1:0", "key": 1}"#)).unwrap();
        assert!(files.kept(VOLUME).unwrap().is_some());
        for own in [Errno::UCLEAN, Errno::BADMSG] {
            assert_eq!(why(&own.into()), NotKnown::Lost);
        }
        for passing in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::INTR] {
            assert_eq!(why(&passing.into()), NotKnown::Unread);
        }
    }

    #[test]
    fn what_cannot_be_read_for_a_moment_only_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        let mut left = TIMES - 1;
        let read = || match left {
            0 => Ok(7),
            _ => {
                left -= 1;
                Err((NotKnown::Unread, Errno::MFILE.into()))
            }
        };
        assert_eq!(files.patiently(VOLUME, read).unwrap(), 7);
        let mut reads = 0;
        let lost = files.patiently(VOLUME, || -> Result<(), _> {
            reads += 1;
            Err((NotKnown::Lost, Errno::IO.into()))
        });
        assert_eq!((lost.unwrap_err().0, reads), (NotKnown::Lost, 1));
    }

    /// How often `files` reads what cannot be read, of so many volumes, and the pauses that there may be meanwhile.
    fn reads_of(files: &ReservationFiles, volumes: u128) -> (u32, u32) {
        let (begun, mut reads) = (Instant::now(), 0);
        for volume in (0..volumes).map(Uuid::from_u128) {
            let read = files.patiently(volume, || -> Result<(), _> {
                reads += 1;
                Err((NotKnown::Unread, Errno::MFILE.into()))
            });
            files.tell(volume, read.as_ref().err());
        }
        (reads, (TIMES - 1) * (2 + begun.elapsed().as_secs() as u32))
    }

    #[test]
    fn a_thousand_that_cannot_be_read_for_now_take_no_longer_than_one() {
        let folder = tempfile::tempdir().unwrap();
        let files = ReservationFiles::of(folder.path());
        let (reads, pauses) = reads_of(&files, 1000);
        assert!((1000..=1000 + pauses).contains(&reads), "{reads} reads, {pauses} pauses");
        assert!(reads >= 1000 + TIMES - 1, "the first is waited for");
        // What was told once is not waited for again.
        files.patience.lock().left = u32::MAX;
        assert_eq!(reads_of(&files, 1000).0, 1000);
        assert_eq!(reads_of(&files, 1001).0, 1000 + TIMES);
    }
}
