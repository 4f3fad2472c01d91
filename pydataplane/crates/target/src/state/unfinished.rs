//! What targets that were killed were writing of the records of volumes: `UUID.json.new`, or `UUID.json.PID.new`; and of
//! that of the clients of Ceph.

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
    let of_volumes = [reservations::FOLDER, Record::Sanitize.name(), Record::Mode.name()];
    let of_volumes =
        of_volumes.map(|folder| (state_dir.join(folder), is_of_volume as fn(&str) -> bool));
    let of_clients = (state_dir.to_owned(), is_of_clients as fn(&str) -> bool);
    for (folder, is_of_record) in of_volumes.into_iter().chain([of_clients]) {
        match remove_in(&folder, is_of_record) {
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

/// Removes what it can of what was to be a record of a name, and returns the last error of what it could not.
fn remove_in(folder: &Path, is_of_record: fn(&str) -> bool) -> io::Result<()> {
    let entries: Vec<DirEntry> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    let mut all = Ok(());
    for entry in entries {
        if entry.file_name().to_str().and_then(to_be).is_some_and(is_of_record) {
            all = fs::remove_file(entry.path()).and(all);
        }
    }
    all
}

/// The name of which it was to be the file.
fn to_be(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".new")?;
    match name.rsplit_once('.') {
        Some((rest, pid)) if pid.parse::<u32>().is_ok() => Some(rest),
        _ => Some(name),
    }
}

fn is_of_volume(name: &str) -> bool {
    name.strip_suffix(".json").is_some_and(|volume| Uuid::try_parse(volume).is_ok())
}

fn is_of_clients(name: &str) -> bool {
    name == rbd::CLIENTS
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
    fn what_was_cut_off_of_the_clients_goes_and_the_rest_of_the_directory_stays() {
        let state_dir = tempfile::tempdir().unwrap();
        let cut_off = ["rbd-clients.new", "rbd-clients.1.new"].map(str::to_owned);
        let others = ["rbd-clients", "rbd-clients.x.new", "config.json.new", "rbd.new"];
        let others = others.map(str::to_owned);
        put(state_dir.path(), &cut_off);
        put(state_dir.path(), &others);
        drop(Dir::open(state_dir.path()).unwrap());
        let mut there = names(state_dir.path());
        assert!(there.remove("lock"));
        assert_eq!(there, others.into());
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
