//! A folder of FUSE mounts, one folder in it for each session, named by its UUID.

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, move_mount, open_tree, unmount,
};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

use crate::{RECORD_BYTES, Session};

/// Type of the mounts in /proc/mounts.
pub const FS_TYPE: &str = "fuse.virtlun";

/// The device.
const FUSE: &str = "/dev/fuse";

/// Mounts on top of each other at one place that are detached; each killed process may leave one.
const STALE_MAX: u32 = 64;

/// Why a mount cannot be made or taken away.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {path}: {source}")]
pub struct MountError {
    /// What was tried.
    pub operation: &'static str,
    /// On what.
    pub path: PathBuf,
    /// The system's answer.
    pub source: io::Error,
}

fn os<E: Into<io::Error>>(operation: &'static str, path: &Path) -> impl Fn(E) -> MountError {
    move |source| MountError { operation, path: path.to_owned(), source: source.into() }
}

/// A folder of mounts.
#[derive(Clone, Debug)]
pub struct Mounts {
    dir: PathBuf,
    /// The folder itself, whatever its path leads to by now.
    open: Option<Arc<OwnedFd>>,
}

impl Mounts {
    /// Of the folder `dir`, which is made with the first mount.
    pub fn new(dir: &Path) -> Mounts {
        Mounts { dir: dir.to_owned(), open: None }
    }

    /// Of the folder `dir`, for somebody whom a less privileged process asks to mount: the folder is
    /// made now if it is not there, and no link that is put in its place later, or in it, leads a
    /// mount elsewhere.
    ///
    /// # Errors
    /// [`MountError`]; PERM where the folder is a link, or others than this process's user and root
    /// may write to it.
    pub fn kept(dir: &Path) -> Result<Mounts, MountError> {
        fs::create_dir_all(dir).map_err(os("create", dir))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = rustix::fs::open(dir, flags, Mode::empty()).map_err(os("open", dir))?;
        let found = rustix::fs::fstat(&open).map_err(os("examine", dir))?;
        let own = [0, rustix::process::geteuid().as_raw()].contains(&found.st_uid);
        let others = Mode::from_raw_mode(found.st_mode) & (Mode::WGRP | Mode::WOTH);
        if !own || !others.is_empty() {
            let why = format!(
                "user {} owns it, mode {:o}, so somebody else could turn mounts elsewhere: remove \
                 the folder, or give it to root with mode 755",
                found.st_uid,
                found.st_mode & 0o7777
            );
            return Err(os("mount in", dir)(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        Ok(Mounts { dir: dir.to_owned(), open: Some(Arc::new(open)) })
    }

    /// Where a session's mount is.
    pub fn path(&self, uuid: Uuid) -> PathBuf {
        self.dir.join(uuid.to_string())
    }

    /// The folder itself, for a system call.
    pub(crate) fn folder(&self) -> PathBuf {
        match &self.open {
            Some(open) => PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd())),
            None => self.dir.clone(),
        }
    }

    /// The same place, for a system call.
    fn at(&self, uuid: Uuid) -> PathBuf {
        self.folder().join(uuid.to_string())
    }

    /// Mounts a new session. What a process that is gone has left at its place is detached first.
    ///
    /// # Errors
    /// [`MountError`]; EBUSY where a living process has the mount.
    pub fn mount(&self, uuid: Uuid) -> Result<Session, MountError> {
        let (path, at) = (self.path(uuid), self.at(uuid));
        self.clear_away(uuid)?;
        fs::create_dir_all(&at).map_err(os("create", &path))?;
        let record = record().map_err(os("make a record for", &path))?;
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fuse =
            rustix::fs::open(FUSE, flags, Mode::empty()).map_err(os("open", Path::new(FUSE)))?;
        let options = format!(
            "fd={},rootmode=40000,user_id={},group_id={},allow_other,default_permissions",
            fuse.as_raw_fd(),
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        let options = CString::new(options).unwrap_or_default();
        let flags =
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        mount("virtlun", &at, FS_TYPE, flags, &*options).map_err(os("mount", &path))?;
        Ok(Session { fuse, record })
    }

    /// A second reference to a session's mount, with which it can be put back; `None` where the
    /// kernel (before 5.2) has no such thing.
    pub fn tree(&self, uuid: Uuid) -> Option<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(rustix::fs::CWD, self.at(uuid), flags).ok()
    }

    /// Puts a session's mount back where it was unmounted behind our back.
    ///
    /// # Errors
    /// [`MountError`]: the kernel refuses.
    pub fn put_back(&self, uuid: Uuid, tree: OwnedFd) -> Result<(), MountError> {
        let (path, at) = (self.path(uuid), self.at(uuid));
        tracing::warn!(path = %path.display(), "was unmounted by somebody: mounted again");
        fs::create_dir_all(&at).map_err(os("create", &path))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(tree.as_fd(), "", rustix::fs::CWD, &at, flags).map_err(os("mount", &path))
    }

    /// Whether a mount of ours is what one finds at a session's place.
    ///
    /// # Errors
    /// [`MountError`]: the table of mounts cannot be read.
    pub fn is_there(&self, uuid: Uuid) -> Result<bool, MountError> {
        is_mounted(&self.at(uuid))
    }

    /// Detaches a session's mount and removes its folder. What has files of it open keeps them.
    ///
    /// # Errors
    /// [`MountError`]: the kernel refuses.
    pub fn unmount(&self, uuid: Uuid) -> Result<(), MountError> {
        let (path, at) = (self.path(uuid), self.at(uuid));
        if is_mounted(&at)? {
            unmount(&at, UnmountFlags::DETACH).map_err(os("unmount", &path))?;
        }
        match fs::remove_dir(&at) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(os("remove", &path)(e)),
            _ => Ok(()),
        }
    }

    /// Detaches what processes that are gone have left at a session's place, as `umount -l` does.
    ///
    /// # Errors
    /// [`MountError`]; EBUSY where a living process has the mount.
    pub fn clear_away(&self, uuid: Uuid) -> Result<(), MountError> {
        let (path, at) = (self.path(uuid), self.at(uuid));
        for _ in 0..STALE_MAX {
            if !is_mounted(&at)? {
                return Ok(());
            }
            match fs::metadata(&at) {
                Err(e) if e.kind() == io::ErrorKind::NotConnected => {
                    unmount(&at, UnmountFlags::DETACH).map_err(os("detach", &path))?;
                    tracing::warn!(path = %path.display(), "detached the mount of a killed process");
                }
                _ => return Err(os("mount", &path)(rustix::io::Errno::BUSY)),
            }
        }
        Ok(())
    }
}

fn record() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let record = rustix::fs::memfd_create("virtlun-export", flags)?;
    rustix::fs::ftruncate(&record, RECORD_BYTES)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&record, seals)?;
    Ok(record)
}

/// As the kernel lists it. Below the mount itself nothing may be looked at.
fn canonical(path: &Path) -> Option<PathBuf> {
    let (parent, name) = (path.parent()?, path.file_name()?);
    Some(parent.canonicalize().ok()?.join(name))
}

/// Whether one of our mounts is on top at `path`.
///
/// # Errors
/// [`MountError`]: the table of mounts cannot be read.
pub fn is_mounted(path: &Path) -> Result<bool, MountError> {
    let table = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(table).map_err(os("read", table))?;
    Ok(canonical(path).is_some_and(|path| mounted(&table, &path)))
}

/// Whether one of our mounts is on top at `path`, by the text of mountinfo (proc_pid_mountinfo(5)).
fn mounted(table: &str, path: &Path) -> bool {
    let of_path = |line: &&str| {
        let at = line.split(' ').nth(4).map(unescaped);
        at.is_some_and(|at| Path::new(&at) == path)
    };
    let top = table.lines().rfind(of_path);
    top.and_then(|line| line.split(" - ").nth(1)).is_some_and(|rest| rest.starts_with(FS_TYPE))
}

/// Blanks and backslashes stand as three octal digits.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 0:21 / /run rw,nosuid shared:2 - tmpfs tmpfs rw
30 22 0:40 / /run/v/e rw,nosuid - fuse.virtlun virtlun rw,user_id=0
31 22 0:41 / /run/a\\040b rw - fuse.virtlun virtlun rw
32 22 0:42 / /run/other rw - fuse.virtlun virtlun rw
33 32 0:43 / /run/other rw - tmpfs tmpfs rw
";

    #[test]
    fn only_our_own_mount_on_top_is_ours() {
        for (path, ours) in [
            ("/run/v/e", true),
            ("/run/a b", true),
            ("/run/v", false),
            ("/run", false),
            ("/run/other", false),
        ] {
            assert_eq!(mounted(TABLE, Path::new(path)), ours, "{path}");
        }
    }

    #[test]
    fn nothing_is_detached_where_nothing_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = Mounts::new(&dir.path().join("never/made"));
        mounts.clear_away(Uuid::nil()).unwrap();
        mounts.unmount(Uuid::nil()).unwrap();
    }

    #[test]
    fn a_kept_folder_is_nobody_elses_and_no_link() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("new/folder");
        let mounts = Mounts::kept(&dir).unwrap();
        let moved = scratch.path().join("moved");
        fs::rename(&dir, &moved).unwrap();
        symlink("/", &dir).unwrap();
        fs::create_dir_all(mounts.at(Uuid::nil())).unwrap();
        assert!(moved.join(Uuid::nil().to_string()).is_dir());
        assert!(Mounts::kept(&dir).unwrap_err().to_string().contains("Not a directory"));
        fs::set_permissions(&moved, fs::Permissions::from_mode(0o1775)).unwrap();
        let why = Mounts::kept(&moved).unwrap_err().to_string();
        assert!(why.contains("mode 1775, so somebody else could turn mounts elsewhere"), "{why}");
    }

    #[test]
    fn a_record_keeps_its_size() {
        let record = fs::File::from(record().unwrap());
        assert_eq!(record.metadata().unwrap().len(), RECORD_BYTES);
        assert!(record.set_len(1).is_err() && record.set_len(RECORD_BYTES + 1).is_err());
    }
}
