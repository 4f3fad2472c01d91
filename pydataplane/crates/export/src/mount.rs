//! The mount, and what a dead process left of one.

use fuser::{BackgroundSession, Config, Filesystem, Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::errors::ExportError;
use crate::worker::serve_write_back;

/// Type of the mount in /proc/mounts.
const FS_TYPE: &str = "fuse.virtlun";

/// Dead mounts on top of each other that are detached; each killed process may leave one.
const MAX_STALE: u32 = 64;

/// How long the end of a session is waited for.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A FUSE mount with its thread.
pub(crate) struct Mount {
    dir: PathBuf,
    session: BackgroundSession,
}

fn os(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> ExportError {
    move |source| ExportError::Os { operation, path: path.to_owned(), source }
}

impl Mount {
    /// Mounts `files` at `dir`, which is made if need be; a dead mount there is detached first.
    pub fn new(dir: &Path, files: impl Filesystem) -> Result<Mount, ExportError> {
        detach_dead(dir)?;
        fs::create_dir_all(dir).map_err(os("create", dir))?;
        let fuse = Path::new("/dev/fuse");
        let fd = rustix::fs::open(fuse, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| os("open", fuse)(e.into()))?;
        let options = format!(
            "fd={},rootmode=40000,user_id={},group_id={},allow_other,default_permissions",
            fd.as_raw_fd(),
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        let options = CString::new(options).unwrap_or_default();
        let flags =
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        mount("virtlun", dir, FS_TYPE, flags, &*options).map_err(|e| os("mount", dir)(e.into()))?;
        let start = move || {
            serve_write_back();
            Session::from_fd(files, fd, SessionACL::All, Config::default()).and_then(Session::spawn)
        };
        // On a thread of its own, from which the session's inherits what it is to the kernel.
        let started = thread::spawn(start)
            .join()
            .expect("a panic ends the process")
            .map_err(os("serve", dir));
        match started {
            Ok(session) => Ok(Mount { dir: dir.to_owned(), session }),
            Err(e) => {
                let _ = unmount(dir, UnmountFlags::DETACH);
                Err(e)
            }
        }
    }

    /// Whether it is what one finds at its folder, and somebody answers. Not when it was unmounted, or
    /// its connection aborted, behind our back.
    pub fn is_there(&self) -> bool {
        // Where the table cannot be read, it is taken to be as it was.
        !self.session.guard.is_finished() && is_mounted(&self.dir).unwrap_or(true)
    }

    /// Detaches it. A file that is still open keeps the session: it ends with the process.
    pub fn end(self) {
        if let Err(e) = unmount(&self.dir, UnmountFlags::DETACH) {
            tracing::warn!(dir = %self.dir.display(), "cannot detach the exports: {e}");
        }
        let end = Instant::now() + END_TIMEOUT;
        while !self.session.guard.is_finished() {
            if Instant::now() > end {
                tracing::warn!(dir = %self.dir.display(), "exports are still open");
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if let Err(e) = self.session.join() {
            tracing::warn!("the exports' session did not end well: {e}");
        }
    }
}

/// Detaches mounts at `dir` whose process is dead, as `umount -l` does.
///
/// # Errors
/// [`ExportError::DirInUse`] when the process lives; the kernel refuses.
pub(crate) fn detach_dead(dir: &Path) -> Result<(), ExportError> {
    for _ in 0..MAX_STALE {
        let Some(dir) = canonical(dir) else { return Ok(()) };
        if !is_mounted(&dir)? {
            return Ok(());
        }
        match fs::metadata(&dir) {
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()) => {
                unmount(&dir, UnmountFlags::DETACH).map_err(|e| os("detach", &dir)(e.into()))?;
                tracing::warn!(dir = %dir.display(), "detached the exports of a killed target");
            }
            _ => return Err(ExportError::DirInUse(dir)),
        }
    }
    Ok(())
}

/// As the kernel lists it. Below the mount itself nothing may be looked at.
fn canonical(dir: &Path) -> Option<PathBuf> {
    let (parent, name) = (dir.parent()?, dir.file_name()?);
    Some(parent.canonicalize().ok()?.join(name))
}

/// Whether one of our mounts is on top at `dir`.
fn is_mounted(dir: &Path) -> Result<bool, ExportError> {
    let path = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(path).map_err(os("read", path))?;
    Ok(canonical(dir).is_some_and(|dir| mounted(&table, &dir)))
}

/// Whether one of our mounts is on top at `dir`, by the text of mountinfo (proc_pid_mountinfo(5)).
fn mounted(table: &str, dir: &Path) -> bool {
    let of_dir = |line: &&str| {
        let at = line.split(' ').nth(4).map(unescaped);
        at.is_some_and(|at| Path::new(&at) == dir)
    };
    let top = table.lines().rfind(of_dir);
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
        detach_dead(&dir.path().join("never/made")).unwrap();
        detach_dead(dir.path()).unwrap();
    }
}
