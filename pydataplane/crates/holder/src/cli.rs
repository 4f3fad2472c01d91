//! The program `virtlun-holder`.

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, set_no_new_privs};
use sandbox::Mode;
use sandbox::calls::HOLDER;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use ublk::Control;

use crate::server::{Options, serve};
use crate::store;

/// Keeps the FUSE mounts and the connections of VMs of a virtlun target, so that those who use them wait
/// while the target is restarted.
#[derive(Debug, Parser)]
#[command(name = "virtlun-holder", version)]
pub struct Cli {
    /// Where targets connect
    #[arg(long, value_name = "PATH", default_value = "/run/virtlun/holder.sock")]
    pub socket: PathBuf,

    /// Folder of the mounts: the target's --export-dir
    #[arg(long, value_name = "DIR", default_value = "/run/virtlun/export")]
    pub dir: PathBuf,

    /// User beside root that may connect, a name or a number: the target's
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// Seconds without a target after which pods and VMs get I/O errors instead of waiting
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub wait: u64,

    /// End when nothing is held and no target is connected
    #[arg(long)]
    pub exit_when_idle: bool,

    /// Allow every system call, to find a fault; without it only those that it makes are allowed
    #[arg(long)]
    pub no_sandbox: bool,
}

/// A user by number, or by its name in /etc/passwd (passwd(5)); else a sentence.
fn uid(text: &str) -> Result<u32, String> {
    if let Ok(uid) = text.parse() {
        return Ok(uid);
    }
    let users = std::fs::read_to_string("/etc/passwd")
        .map_err(|e| format!("cannot look up the user: /etc/passwd: {e}"))?;
    let uid = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(text)).then(|| fields.nth(1)?.parse().ok())?
    });
    uid.ok_or_else(|| {
        format!("there is no user {text} in /etc/passwd; create it or give its number")
    })
}

/// What it needs of root's rights: to mount, to give its socket to the target's user, and to replace
/// the socket of an earlier holder in a folder that is that user's.
const CAPABILITIES: CapabilitySet =
    CapabilitySet::SYS_ADMIN.union(CapabilitySet::CHOWN).union(CapabilitySet::DAC_OVERRIDE);

/// Gives up all other rights for good, and all system calls but those that it makes; else a sentence.
fn confine(mode: Mode) -> Result<(), String> {
    sandbox::user::keep_capabilities(CAPABILITIES).map_err(|e| e.to_string())?;
    // With seccomp or without it.
    set_no_new_privs(true).map_err(|e| format!("cannot set no_new_privs: {e}"))?;
    sandbox::confine(mode, &HOLDER).map_err(|e| e.to_string())
}

/// Has SIGTERM and SIGINT end the process at once, as by default. The first process of a container has
/// no default (pid_namespaces(7)): Kubernetes would wait for half a minute, and kill it then.
fn end_when_told() -> io::Result<()> {
    for signal in [SIGTERM, SIGINT] {
        let always = Arc::new(AtomicBool::new(true));
        signal_hook::flag::register_conditional_shutdown(signal, 0, always)?;
    }
    Ok(())
}

/// Has SIGHUP end nothing. The kernel sends it to a holder that SIGSTOP or a debugger has stopped when
/// the target that has started it ends: its process group is an orphaned one then (setpgid(2)).
fn outlive() -> io::Result<()> {
    let unread = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGHUP, unread).map(|_| ())
}

/// Runs the program; its exit status is 0 after the end by `--exit-when-idle` or a signal, 1 where it
/// cannot serve.
pub fn run(cli: &Cli) -> ExitCode {
    sandbox::panics::end_the_process();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let uid = match cli.user.as_deref().map(uid).transpose() {
        Ok(uid) => uid,
        Err(why) => {
            eprintln!("virtlun-holder: {why}");
            return ExitCode::FAILURE;
        }
    };
    if let Err(e) = outlive().and_then(|()| end_when_told()) {
        eprintln!("virtlun-holder: cannot be told to end: {e}");
        return ExitCode::FAILURE;
    }
    // Before that, as it makes an io_uring; its first command, which makes a thread of the kernel's,
    // after.
    let ublk = Control::open().ok();
    let mode = if cli.no_sandbox { Mode::Off } else { Mode::Enforce };
    if let Err(why) = confine(mode) {
        eprintln!("virtlun-holder: cannot give up rights: {why}");
        return ExitCode::FAILURE;
    }
    let options = Options {
        socket: cli.socket.clone(),
        dir: cli.dir.clone(),
        uid,
        wait: Duration::from_secs(cli.wait),
        exit_when_idle: cli.exit_when_idle,
    };
    match serve(&options, ublk, || store::notify("READY=1", &[])) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("virtlun-holder: cannot serve at {}: {e}", cli.socket.display());
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_users_have_numbers() {
        Cli::command().debug_assert();
        assert_eq!((uid("root"), uid("77")), (Ok(0), Ok(77)));
        assert!(uid("no-such-user-here").is_err());
    }
}
