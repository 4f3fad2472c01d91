//! The command line of a target that root has started, where the target itself cannot change it: root
//! starts another program with the same options at an upgrade, and what a guest may have broken into
//! must not choose them.

use rustix::fs::{FileType, Mode, OFlags, RawMode, Stat, fstat, open, openat, unlinkat};
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Others may write: to a folder, make and remove what is in it.
const OF_OTHERS: RawMode = 0o022;
/// In a folder: only what is their own.
const STICKY: RawMode = 0o1000;

/// The record of one target, open.
pub struct Record(File);

impl Record {
    /// The record of the target with this JSON-RPC socket; for root to call. With `take_over` it keeps
    /// what it says until [`Record::write`]. `None`: every folder above is somebody else's.
    ///
    /// # Errors
    /// The system's.
    pub fn open(rpc_socket: &Path, take_over: bool) -> io::Result<Option<Record>> {
        let Some((folder, name)) = place(rpc_socket) else { return Ok(None) };
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        if take_over {
            match openat(&folder, &name, flags, mode) {
                Ok(found) if is_roots(&fstat(&found)?) => {
                    return Ok(Some(Record(found.into())));
                }
                _ => {}
            }
        }
        match unlinkat(&folder, &name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        let made = openat(&folder, &name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
        Ok(Some(Record(made.into())))
    }

    /// Records the command line of this process: a JSON list of its options.
    ///
    /// # Errors
    /// The system's.
    pub fn write(mut self) -> io::Result<()> {
        let options: Vec<OsString> = env::args_os().skip(1).collect();
        let texts: Vec<_> = options.iter().map(|option| option.to_string_lossy()).collect();
        self.0.rewind()?;
        self.0.set_len(0)?;
        self.0.write_all(serde_json::to_string(&texts)?.as_bytes())
    }
}

fn is_roots(found: &Stat) -> bool {
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    is_file && found.st_uid == 0 && found.st_mode & OF_OTHERS == 0
}

/// The nearest folder above in which nobody but root can replace a file of root's, and the record's
/// name there: of all that comes after the folder.
fn place(rpc_socket: &Path) -> Option<(OwnedFd, String)> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let whole = std::path::absolute(rpc_socket).ok()?;
    whole.ancestors().skip(1).find_map(|folder| {
        let opened = open(folder, flags, Mode::empty()).ok()?;
        let found = fstat(&opened).ok()?;
        let safe = found.st_mode & OF_OTHERS == 0 || found.st_mode & STICKY != 0;
        (found.st_uid == 0 && safe).then(|| (opened, name(folder, &whole)))
    })
}

fn name(folder: &Path, whole: &Path) -> String {
    let rest: PathBuf = whole.strip_prefix(folder).unwrap_or(whole).to_owned();
    format!(".{}.options", rest.to_string_lossy().replace('/', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_tells_which_target() {
        let name = |folder: &str, socket: &str| name(Path::new(folder), Path::new(socket));
        assert_eq!(name("/run/virtlun", "/run/virtlun/target.sock"), ".target.sock.options");
        assert_eq!(name("/run/virtlun", "/run/virtlun/a/target.sock"), ".a-target.sock.options");
    }
}
