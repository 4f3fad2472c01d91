//! Least privilege: who the process is, and what it may still do. Called once, by the daemon, while
//! the process has one thread and nothing is open but a connection to the holder of exports.
//!
//! Started by root the target becomes a user of its own ([`Cli::user`]), to which it gives the folders
//! that it works in; so what an earlier release left as root's goes on working. Then it confines
//! itself to the system calls that it makes. The crate `sandbox` does both.

use crate::cli::Cli;
use crate::cli::SandboxMode;
use crate::holding;
use crate::rpcsocket;
use crate::started::Record;
use crate::state;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Access, AtFlags, CWD, Gid, Mode, Uid};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::CapabilitySet;
use sandbox::calls::{TARGET, TARGET_THAT_MOUNTS};
use sandbox::{Account, user};
use std::error::Error;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The user that the target becomes where nobody names another and this one exists.
const USER: &str = "virtlun";

/// Folders that are the target's alone with all below them, so that it may give those away.
const OWN: [&str; 2] = ["/run/virtlun", "/var/lib/virtlun"];

/// Mode of the folder in which the gateway, the holder and targets have their sockets: root's alone.
const SHARED_MODE: u32 = 0o755;

/// What root keeps where it does not become another user: it gives sockets to groups (CHOWN, FOWNER),
/// opens what belongs to others (DAC_OVERRIDE), pins memory (IPC_LOCK), mounts exports (SYS_ADMIN),
/// whose threads write back for the kernel (SYS_RESOURCE).
const OF_ROOT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_RESOURCE);

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Gives up what is not needed; there is no way back. Must come before the first thread. Returns where
/// the options are to be recorded, if this is not root any more.
///
/// # Errors
/// A sentence; the process must end, for it may have given up half.
pub fn reduce(cli: &Cli) -> Outcome<Option<Record>> {
    raise_limits();
    make_room_for_descriptors();
    let is_root = rustix::process::geteuid().is_root();
    let mut record = None;
    match account(cli, is_root)? {
        Some(account) => {
            let mut groups = cli.groups.clone();
            groups.extend(cli.rpc_group.into_iter().chain(cli.socket_group));
            hand_over(cli, &account)?;
            record = Record::open(&cli.rpc_socket, cli.take_over).unwrap_or_else(|e| {
                tracing::warn!("cannot record the options for an upgrade: {e}");
                None
            });
            user::become_user(&account, &groups)?;
            check_folders(cli)?;
        }
        None if is_root => user::keep_capabilities(OF_ROOT)?,
        None => user::keep_capabilities(CapabilitySet::empty())?,
    }
    confine(cli)?;
    Ok(record)
}

/// User id that the process is going to have; for what is set up before [`reduce`].
///
/// # Errors
/// There is no such account, or this user may not become it.
pub fn uid_to_be(cli: &Cli) -> Outcome<u32> {
    let present = rustix::process::geteuid();
    Ok(account(cli, present.is_root())?.map_or(present.as_raw(), |account| account.uid))
}

fn confine(cli: &Cli) -> Outcome<()> {
    let mode = match cli.sandbox() {
        SandboxMode::Enforce => sandbox::Mode::Enforce,
        SandboxMode::Log => sandbox::Mode::Log,
        SandboxMode::Off => sandbox::Mode::Off,
    };
    match mode {
        sandbox::Mode::Enforce => {}
        sandbox::Mode::Log => tracing::warn!(
            "--sandbox log: system calls that are not expected are allowed and only logged, by the \
             kernel"
        ),
        sandbox::Mode::Off => tracing::warn!(
            "--no-sandbox: a guest that finds a way to run code in this process can make any system \
             call; use it to find a fault, not to serve guests"
        ),
    }
    let mounts = rustix::thread::capabilities(None)
        .is_ok_and(|have| have.effective.contains(CapabilitySet::SYS_ADMIN));
    let calls = if mounts { TARGET_THAT_MOUNTS } else { TARGET };
    let calls = if has_network(cli) { calls.with_network() } else { calls };
    Ok(sandbox::confine(mode, &calls)?)
}

/// Whether the process may make network connections.
pub fn has_network(cli: &Cli) -> bool {
    cli.network
        || (cli.rbd && rbd::Library::loaded().is_ok())
        || (cli.iscsi && iscsi::Library::loaded().is_ok())
}

/// Whom to become; `None`: nobody else.
fn account(cli: &Cli, is_root: bool) -> Outcome<Option<Account>> {
    let Some(name) = &cli.user else {
        if !is_root {
            return Ok(None);
        }
        let own = cli.name.as_ref().and_then(|name| Account::find(&format!("{USER}-{name}")));
        let account = own.or_else(|| Account::find(USER));
        if account.is_none() {
            tracing::warn!(
                "there is no user {USER}: the target runs as root with few capabilities; create it \
                 (useradd --system {USER}), or give --user"
            );
        }
        return Ok(account);
    };
    let account = Account::find(name).ok_or_else(|| user::UserError::NoUser(name.clone()))?;
    let present = rustix::process::geteuid().as_raw();
    match account.uid {
        uid if uid == present => Ok(None),
        _ if is_root => Ok(Some(account)),
        _ => Err(format!(
            "only root can start the target as user {name}, and this is user {}: leave --user out, \
             or start it as root",
            user::name_of(present)
        )
        .into()),
    }
}

/// Has the kernel make its table of this process's descriptors as large as it will be. It grows by
/// itself, too, but in a process with threads each time after some ten milliseconds in which the thread
/// that needs the descriptor stands still, and a new program that takes over needs hundreds while all
/// guests wait.
fn make_room_for_descriptors() {
    /// Descriptors; the table has 8 bytes for each.
    const ROOM: u64 = 16384;
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(ROOM);
    let last = limit.min(ROOM).saturating_sub(1);
    // Without it all works, later.
    if let Ok(any) = eventfd(0, EventfdFlags::CLOEXEC) {
        drop(fcntl_dupfd_cloexec(any, last as i32));
    }
}

/// Takes what is allowed of descriptors and, as root, of memory that is pinned: another user could
/// not raise those. A VM has some hundred descriptors (three and more for each of its queues), and
/// one that cannot get its own must not be the fault of another's.
fn raise_limits() {
    /// Fewer are worth a word: about a dozen VMs.
    const FEW: u64 = 4096;
    let unlimited = Rlimit { current: None, maximum: None };
    // Not allowed but to root, and io_uring goes with less.
    let _ = setrlimit(Resource::Memlock, unlimited);
    let limit = getrlimit(Resource::Nofile);
    if let Err(why) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("the limit of file descriptors stays {:?}: {why}", limit.current);
    }
    if limit.maximum.is_some_and(|most| most < FEW) {
        tracing::warn!(
            "only {:?} file descriptors are allowed, which is enough for few VMs; raise LimitNOFILE",
            limit.maximum
        );
    }
}

/// Makes the folders and gives them to the account, with what an earlier release left as root's.
fn hand_over(cli: &Cli, to: &Account) -> Outcome<()> {
    for dir in folders(cli) {
        make(dir, to)?;
    }
    share(cli, to)?;
    let state = &cli.state_dir;
    if state::is_state_dir(state) && owner(state)? == 0 {
        // Root's alone until now, so what it says can be trusted; afterwards it is the account's.
        let files = state::files_of_bdevs(state);
        for file in files.iter().filter(|file| is_plain_file_of_root(file)) {
            give(file, to)?;
            tracing::info!(file = %file.display(), user = to.name, "given to the target's user");
        }
        give_below(state, to)?;
    }
    if is_own(&cli.vhost_dir) && owner(&cli.vhost_dir)? == 0 {
        give(&cli.vhost_dir, to)?;
    }
    Ok(())
}

/// Folders that the target works in.
fn folders(cli: &Cli) -> impl Iterator<Item = &Path> {
    [cli.rpc_socket.parent(), Some(&cli.vhost_dir), Some(&cli.state_dir)].into_iter().flatten()
}

/// Makes a folder with those above it; the account's, if it is new. The folders of all targets stay
/// root's, and everybody may pass through them.
fn make(dir: &Path, to: &Account) -> Outcome<()> {
    let missing = |at: &Path| !at.as_os_str().is_empty() && !at.exists();
    let new: Vec<_> = dir.ancestors().take_while(|at| missing(at)).collect();
    for at in new.into_iter().rev() {
        fs::create_dir(at).map_err(|e| sentence("create", at, &e))?;
        if !is_of_all(at) {
            give(at, to)?;
        }
    }
    for at in dir.ancestors().filter(|at| is_of_all(at) && owner(at).is_ok_and(|uid| uid == 0)) {
        let meta = fs::symlink_metadata(at).map_err(|e| sentence("examine", at, &e))?;
        set_mode(at, meta.mode() | 0o011)?;
    }
    check_owner(dir, to)
}

/// Whoever owns a folder decides what is in it, so nobody else may own one of the target's.
fn check_owner(dir: &Path, to: &Account) -> Outcome<()> {
    let owner = owner(dir)?;
    if [0, to.uid].contains(&owner) {
        return Ok(());
    }
    let (dir, who) = (dir.display(), user::name_of(owner));
    Err(format!("{dir} belongs to user {who}, not to {0}: chown {0} {dir}", to.name).into())
}

/// Lets clients find the account's socket in a folder of all targets, which stays root's. Not in the midst
/// of an upgrade: there the socket is where the target that serves has made it.
fn share(cli: &Cli, to: &Account) -> Outcome<()> {
    let socket = &cli.rpc_socket;
    let Some(dir) = socket.parent().filter(|dir| is_of_all(dir)) else { return Ok(()) };
    if owner(dir)? != 0 || (cli.take_over && !rpcsocket::linked(socket)) {
        return Ok(());
    }
    chown(dir, None, Some(0))?;
    set_mode(dir, SHARED_MODE)?;
    rpcsocket::part(socket, &holding::socket(cli), to)
}

fn set_mode(path: &Path, mode: u32) -> Outcome<()> {
    rustix::fs::chmod(path, Mode::from_raw_mode(mode & 0o7777))
        .map_err(|e| sentence("change the mode of", path, &e.into()))
}

/// Whether a folder is one that all targets of the host have theirs in.
fn is_of_all(dir: &Path) -> bool {
    OWN.iter().any(|own| Path::new(own) == dir)
}

/// Whether a folder is, or lies in, one that is the target's alone.
fn is_own(dir: &Path) -> bool {
    OWN.iter().any(|own| dir.starts_with(own))
}

fn owner(path: &Path) -> Outcome<u32> {
    Ok(fs::symlink_metadata(path).map_err(|e| sentence("examine", path, &e))?.uid())
}

/// A regular file under one name: a link could be to anything.
fn is_plain_file_of_root(path: &Path) -> bool {
    let plain = |meta: Metadata| meta.is_file() && meta.nlink() == 1 && meta.uid() == 0;
    fs::symlink_metadata(path).is_ok_and(plain)
}

/// Gives away a folder with the files in it, itself last.
fn give_below(dir: &Path, to: &Account) -> Outcome<()> {
    for entry in fs::read_dir(dir).map_err(|e| sentence("read", dir, &e))? {
        let path = entry.map_err(|e| sentence("read", dir, &e))?.path();
        let meta = fs::symlink_metadata(&path).map_err(|e| sentence("examine", &path, &e))?;
        match meta.file_type() {
            kind if kind.is_dir() => give_below(&path, to)?,
            kind if kind.is_file() || kind.is_socket() => give(&path, to)?,
            _ => {}
        }
    }
    give(dir, to)
}

fn give(path: &Path, to: &Account) -> Outcome<()> {
    chown(path, Some(to.uid), Some(to.gid))
}

fn chown(path: &Path, uid: Option<u32>, gid: Option<u32>) -> Outcome<()> {
    let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
    rustix::fs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| sentence("give away", path, &e.into()))
}

fn sentence(operation: &str, path: &Path, e: &io::Error) -> Box<dyn Error> {
    format!("cannot {operation} {}: {e}", path.display()).into()
}

/// Says at start, rather than at the first socket, where the user may not make files.
fn check_folders(cli: &Cli) -> Outcome<()> {
    let socket = rpcsocket::of(&cli.rpc_socket);
    let dirs = [socket.parent(), Some(&cli.vhost_dir), Some(&cli.state_dir)];
    for dir in dirs.into_iter().flatten() {
        if let Err(why) = may(dir, Access::WRITE_OK | Access::EXEC_OK) {
            return Err(format!("{} cannot be used: {why}", dir.display()).into());
        }
    }
    Ok(())
}

/// From now on no core of this process is dumped, and only root reads its memory (prctl(2),
/// PR_SET_DUMPABLE): keys are in it, and copies of what they were made of.
pub fn keep_out_of_dumps() {
    if let Err(e) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::error!("a core dump of this process would show keys: {e}; have none made");
    }
}

/// Whether this process's user has `rights` on `path`.
///
/// # Errors
/// A part of a sentence: what keeps it out, and the command that lets it in.
pub fn may(path: &Path, rights: Access) -> Result<(), String> {
    let who = user::name_of(rustix::process::geteuid().as_raw());
    let denied = |at: &Path, rights| {
        rustix::fs::accessat(CWD, at, rights, AtFlags::EACCESS) == Err(rustix::io::Errno::ACCESS)
    };
    let above: Vec<PathBuf> = path.ancestors().skip(1).map(Path::to_owned).collect();
    for dir in above.iter().rev().filter(|dir| !dir.as_os_str().is_empty()) {
        if denied(dir, Access::EXEC_OK) {
            let dir = dir.display();
            return Err(format!(
                "user {who} may not enter the folder {dir}: setfacl -m u:{who}:x {dir}"
            ));
        }
    }
    if !denied(path, rights) {
        return Ok(());
    }
    let p = path.display();
    let device = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device());
    Err(match device {
        Some(meta) => format!(
            "user {who} may not open the block device {p}: add it to the device's group, number {} \
             (usermod -aG disk {who}), and start the target again",
            meta.gid()
        ),
        None if path.is_dir() => {
            format!("user {who} may not make files in {p}: chown {who} {p}, or name another folder")
        }
        None => {
            format!("user {who} may not open {p}: chown {who} {p}, or setfacl -m u:{who}:rw {p}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_targets_own_folders_are_its_own() {
        assert!(is_own(Path::new("/run/virtlun/vhost")));
        assert!(is_own(Path::new("/var/lib/virtlun")));
        for other in ["/run", "/run/virtlun2", "/", "/tmp", "/var/lib"] {
            assert!(!is_own(Path::new(other)), "{other}");
        }
    }
}
