//! Which device of ublk is whose, for others to see: links in the folder of the mounts.
//!
//! `UUID.disk -> /dev/ublkbN`, made by root in root's folder. Who mounts for containers believes
//! nobody else, the target least: the driver itself tells a device's mark to CAP_SYS_ADMIN with an
//! io_uring only.

use rustix::fs::{CWD, symlinkat};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Behind the UUID.
const SUFFIX: &str = ".disk";

/// The links in one folder.
pub(crate) struct Links {
    dir: PathBuf,
}

fn volume(name: &OsString) -> Option<Uuid> {
    Uuid::try_parse(name.to_str()?.strip_suffix(SUFFIX)?).ok()
}

impl Links {
    /// Of a folder that nobody else may write to.
    pub(crate) fn new(dir: PathBuf) -> Links {
        Links { dir }
    }

    fn at(&self, uuid: Uuid) -> PathBuf {
        self.dir.join(format!("{uuid}{SUFFIX}"))
    }

    /// The volumes that have one, and what it names.
    pub(crate) fn all(&self) -> io::Result<Vec<(Uuid, PathBuf)>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let Some(uuid) = volume(&entry?.file_name()) else { continue };
            all.push((uuid, std::fs::read_link(self.at(uuid))?));
        }
        Ok(all)
    }

    /// Notes that a volume's device has this number, and that no other's has it.
    pub(crate) fn set(&self, uuid: Uuid, id: u32) -> io::Result<()> {
        let device = device(id);
        for (other, named) in self.all()? {
            if other == uuid || named == device {
                self.remove(other)?;
            }
        }
        Ok(symlinkat(&device, CWD, self.at(uuid))?)
    }

    /// Forgets a volume's; fine where there is none.
    pub(crate) fn remove(&self, uuid: Uuid) -> io::Result<()> {
        match std::fs::remove_file(self.at(uuid)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// What the kernel calls a device.
pub(crate) fn device(id: u32) -> PathBuf {
    Path::new("/dev").join(format!("ublkb{id}"))
}

/// The number of a device, from what the kernel calls it.
pub(crate) fn number(path: &Path) -> Option<u32> {
    path.to_str()?.strip_prefix("/dev/ublkb")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_volumes_alone() {
        let dir = tempfile::tempdir().unwrap();
        let links = Links::new(dir.path().into());
        let (one, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        std::fs::write(dir.path().join("else.disk"), "").unwrap();
        std::fs::create_dir(dir.path().join(one.to_string())).unwrap();
        links.set(one, 3).unwrap();
        links.set(one, 4).unwrap();
        assert_eq!(links.all().unwrap(), [(one, device(4))]);
        links.set(other, 4).unwrap();
        assert_eq!(links.all().unwrap(), [(other, device(4))]);
        links.remove(other).unwrap();
        links.remove(other).unwrap();
        assert_eq!(links.all().unwrap(), []);
        assert_eq!((number(&device(7)), number(Path::new("/dev/sda"))), (Some(7), None));
    }
}
