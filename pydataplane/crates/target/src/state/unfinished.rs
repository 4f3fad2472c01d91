//! What targets that were killed were writing of the records of volumes: `UUID.json.new`, or `UUID.json.PID.new`.

use crate::reservations;
use scsi::Record;
use std::fs::{self, DirEntry};
use std::io;
use std::path::Path;
use uuid::Uuid;

/// Removes it, as nothing else does where the volume has no record later, or only those of another process.
/// The caller has the directory's lock, so that no target writes there. What cannot be removed is logged: it is
/// in nobody's way.
pub(super) fn remove(state_dir: &Path) {
    for folder in [reservations::FOLDER, Record::Sanitize.name(), Record::Mode.name()] {
        let folder = state_dir.join(folder);
        match remove_in(&folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(
                    "what is left of earlier targets stays in {}: {e}",
                    folder.display()
                );
            }
            _ => {}
        }
    }
}

/// Removes what it can, and returns the last error of what it could not.
fn remove_in(folder: &Path) -> io::Result<()> {
    let entries: Vec<DirEntry> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    let mut all = Ok(());
    for entry in entries {
        if entry.file_name().to_str().is_some_and(is_unfinished) {
            all = fs::remove_file(entry.path()).and(all);
        }
    }
    all
}

fn is_unfinished(name: &str) -> bool {
    let Some(name) = name.strip_suffix(".new") else { return false };
    let without_pid = match name.rsplit_once('.') {
        Some((rest, pid)) if pid.parse::<u32>().is_ok() => rest,
        _ => name,
    };
    let volume = without_pid.strip_suffix(".json");
    volume.is_some_and(|volume| Uuid::try_parse(volume).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::dir::Dir;
    use super::*;
    use std::collections::BTreeSet;
    use std::fs::File;

    const VOLUME: &str = "00000000-0000-0000-0000-000000000007";

    fn names(folder: &Path) -> BTreeSet<String> {
        let name = |entry: io::Result<DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        fs::read_dir(folder).unwrap().map(name).collect()
    }

    fn put(folder: &Path, names: &[String]) {
        fs::create_dir_all(folder).unwrap();
        names.iter().for_each(|name| drop(File::create(folder.join(name)).unwrap()));
    }

    #[test]
    fn what_was_cut_off_goes_with_the_next_start_and_records_stay() {
        let state_dir = tempfile::tempdir().unwrap();
        let cut_off = ["json.new", "json.1.new", "json.4194304.new"];
        let records = ["json", "lock", "new", "json.x.new", "json.1.new.before", "before.1.new"];
        let named = |ends: &[&str]| ends.iter().map(|end| format!("{VOLUME}.{end}")).collect();
        let (cut_off, records): (Vec<_>, Vec<_>) = (named(&cut_off), named(&records));
        let others = ["config.json.new", "x.json.1.new", ".json.new", ".new"].map(str::to_owned);
        let folders = ["reservations", "sanitize", "mode"].map(|name| state_dir.path().join(name));
        let expected: BTreeSet<_> = records.iter().chain(&others).cloned().collect();
        for folder in &folders {
            for names in [&cut_off, &records, &others.to_vec()] {
                put(folder, names);
            }
        }
        drop(Dir::open(state_dir.path()).unwrap());
        for folder in &folders {
            assert_eq!(names(folder), expected);
        }
    }

    #[test]
    fn what_another_process_writes_stays_when_it_is_taken_over_from() {
        let state_dir = tempfile::tempdir().unwrap();
        let old = Dir::open(state_dir.path()).unwrap();
        let folder = state_dir.path().join(reservations::FOLDER);
        let written = format!("{VOLUME}.json.1.new");
        put(&folder, std::slice::from_ref(&written));
        let lock = File::from(old.lock().try_clone_to_owned().unwrap());
        let new = Dir::adopt(state_dir.path(), lock).unwrap();
        drop(new);
        Dir::open(state_dir.path()).unwrap_err();
        assert_eq!(names(&folder), [written].into());
        drop(old);
        Dir::open(state_dir.path()).unwrap();
        assert!(names(&folder).is_empty());
    }

    #[test]
    fn what_cannot_be_removed_is_in_nobodys_way() {
        let state_dir = tempfile::tempdir().unwrap();
        let folder = state_dir.path().join(reservations::FOLDER);
        fs::create_dir_all(folder.join(format!("{VOLUME}.json.1.new"))).unwrap();
        put(&folder, &["json.new", "json.2.new"].map(|end| format!("{VOLUME}.{end}")));
        let later = state_dir.path().join(Record::Mode.name());
        put(&later, &[format!("{VOLUME}.json.new")]);
        Dir::open(state_dir.path()).unwrap();
        assert_eq!((names(&folder).len(), names(&later).len()), (1, 0));
    }
}
