//! Where the JSON-RPC socket is made that clients find in `/run/virtlun`.
//!
//! That folder is everybody's of this host: the gateway, the holder and further targets have their
//! sockets there. Whoever may make files in it may take a name of theirs before they do, and clients
//! would talk to it. So it is root's alone. What the target makes at run time (the socket anew at each
//! start, a second one for upgrades) is in a folder of its own within, and root leaves a link to it
//! where clients look.

use std::error::Error;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use sandbox::user::Account;

/// The socket there. Not the name under which the sockets of further targets are looked for.
const NAME: &str = "rpc.sock";

/// Where the socket is made that clients find at `rpc_socket`.
pub fn of(rpc_socket: &Path) -> PathBuf {
    match (linked(rpc_socket), rpc_socket.parent()) {
        (true, Some(dir)) => dir.join(within(rpc_socket)),
        _ => rpc_socket.to_owned(),
    }
}

/// Whether `rpc_socket` is the link that [`part`] makes.
pub fn linked(rpc_socket: &Path) -> bool {
    fs::read_link(rpc_socket).is_ok_and(|to| to == within(rpc_socket))
}

/// Makes the folder and the link; for root, in a folder that nobody else may change any more. What the
/// target's user left in that before is removed: the socket of an earlier release, and what it may have
/// put in the place of somebody else's.
/// `holder` is the holder's socket, which that gave to this user.
///
/// # Errors
/// A sentence.
pub fn part(rpc_socket: &Path, holder: &Path, to: &Account) -> Result<(), Box<dyn Error>> {
    let Some(dir) = rpc_socket.parent() else { return Ok(()) };
    let failed = |what: &str, at: &Path, why: &std::io::Error| -> Box<dyn Error> {
        format!("cannot {what} {}: {why}", at.display()).into()
    };
    for entry in fs::read_dir(dir).map_err(|e| failed("list", dir, &e))? {
        let path = entry.map_err(|e| failed("list", dir, &e))?.path();
        let meta = fs::symlink_metadata(&path).map_err(|e| failed("examine", &path, &e))?;
        if meta.uid() == to.uid && !meta.is_dir() && path != holder {
            fs::remove_file(&path).map_err(|e| failed("remove", &path, &e))?;
            tracing::info!(path = %path.display(), user = to.name, "removed: the folder is root's");
        }
    }
    let own = dir.join(folder(rpc_socket));
    match fs::symlink_metadata(&own) {
        Ok(meta) if meta.is_dir() => {}
        _ => fs::create_dir(&own).map_err(|e| failed("create", &own, &e))?,
    }
    std::os::unix::fs::chown(&own, Some(to.uid), Some(to.gid))
        .map_err(|e| failed("give away", &own, &e))?;
    if linked(rpc_socket) {
        return Ok(());
    }
    if fs::symlink_metadata(rpc_socket).is_ok() {
        fs::remove_file(rpc_socket).map_err(|e| failed("replace", rpc_socket, &e))?;
    }
    symlink(within(rpc_socket), rpc_socket).map_err(|e| failed("create", rpc_socket, &e))
}

/// Name of the target's folder in the one of all.
fn folder(rpc_socket: &Path) -> PathBuf {
    let name = rpc_socket.file_name().unwrap_or_default();
    format!(".{}.d", name.to_string_lossy()).into()
}

/// What the link says.
fn within(rpc_socket: &Path) -> PathBuf {
    folder(rpc_socket).join(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_link_that_root_made_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("target.sock");
        assert_eq!(of(&socket), socket);
        symlink("/elsewhere", &socket).unwrap();
        assert_eq!(of(&socket), socket);
        fs::remove_file(&socket).unwrap();
        symlink(".target.sock.d/rpc.sock", &socket).unwrap();
        assert_eq!(of(&socket), dir.path().join(".target.sock.d/rpc.sock"));
    }
}
