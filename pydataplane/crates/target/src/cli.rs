//! The command line.

use crate::cpumask::CpuMask;
use crate::logging::LogFormat;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};

const LONG_ABOUT: &str = "\
The virtlun data plane: one process per host that serves logical volumes to virtual machines over \
vhost-user-scsi and is controlled by SPDK's JSON-RPC methods on a UNIX socket.

What is configured through the socket is recorded in the state directory and comes back at the \
next start. The socket appears when everything was restored; what could not be restored is logged, \
kept and shown by the method virtlun_get_status.";

const AFTER_HELP: &str = "\
Signals: SIGTERM, SIGINT and SIGQUIT stop it in order: controllers, lvstores, then reactors; a \
second one ends it at once.
Exit status: 0 stopped in order, 1 failed at start or while running, 2 wrong command line.

Several targets on one host have names of their own, and with them folders and, if there is a user
virtlun-NAME, a user.

Examples:
  virtlun-target --cpumask '[2,3]' --socket-group kvm
  spdk-rpc -s /run/virtlun/target.sock bdev_get_bdevs";

/// What happens to a system call that the target is not known to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SandboxMode {
    /// It fails, and is logged with its name.
    Enforce,
    /// It succeeds, and the kernel's audit log names it by number.
    Log,
    /// It succeeds.
    Off,
}

impl SandboxMode {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            SandboxMode::Enforce => "enforce",
            SandboxMode::Log => "log",
            SandboxMode::Off => "off",
        }
    }
}

/// The options of `virtlun-target`.
#[derive(Debug, Parser)]
#[command(name = "virtlun-target", version, about = "The virtlun data plane",
          long_about = LONG_ABOUT, after_help = AFTER_HELP)]
pub struct Cli {
    /// Name of one of several targets of this host: its sockets are in /run/virtlun/NAME, its state
    /// in /var/lib/virtlun/NAME, where other options do not say otherwise
    #[arg(short = 'n', long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,

    /// JSON-RPC socket: complete control, so keep it to administrators
    #[arg(short = 'r', long, value_name = "PATH", default_value = "/run/virtlun/target.sock")]
    pub rpc_socket: PathBuf,

    /// Permissions of the JSON-RPC socket, octal
    #[arg(long, value_name = "MODE", default_value = "0660", value_parser = parse_mode)]
    pub rpc_mode: u32,

    /// Group of the JSON-RPC socket, a name or a number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub rpc_group: Option<u32>,

    /// Folder of the controllers' sockets; a socket is named as its controller
    #[arg(short = 'S', long, value_name = "DIR", default_value = "/run/virtlun/vhost")]
    pub vhost_dir: PathBuf,

    /// Permissions of the controllers' sockets, octal
    #[arg(long, value_name = "MODE", default_value = "0660", value_parser = parse_mode)]
    pub socket_mode: u32,

    /// Group of the controllers' sockets (the one QEMU runs as), a name or a number
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub socket_group: Option<u32>,

    /// Folder where the configuration is recorded; one target at a time may use it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/virtlun/target")]
    pub state_dir: PathBuf,

    /// Folder where exported bdevs appear as files, each in a FUSE mount of its own
    #[arg(long, value_name = "DIR", default_value = "/run/virtlun/export")]
    pub export_dir: PathBuf,

    /// Socket of the virtlun-holder that keeps exported files while this process is away; without
    /// it, the target starts one of its own, at holder.sock beside the folder of the exports
    #[arg(long, value_name = "PATH")]
    pub holder_socket: Option<PathBuf>,

    /// Have virtlun-holder keep the connections of VMs while this process is away, stopped or crashed:
    /// a pause for their guests, with any QEMU
    #[arg(long)]
    pub hold_sessions: bool,

    /// CPUs with a reactor each, as 0x3 or [0,1]; without it one reactor runs wherever the kernel
    /// puts it
    #[arg(short = 'm', long, value_name = "MASK")]
    pub cpumask: Option<CpuMask>,

    /// Never sleep: lowest latency, one whole CPU per reactor also when idle
    #[arg(long)]
    pub poll: bool,

    /// Microseconds without work before a reactor sleeps
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50, conflicts_with = "poll")]
    pub spin_us: u64,

    /// Seconds that an upgrade waits for guests' I/O in flight, 60 at most; then it is given up. Only
    /// guests whose I/O takes long wait with it
    #[arg(long, value_name = "SECONDS", default_value_t = 5,
        value_parser = clap::value_parser!(u64).range(1..=60))]
    pub drain_timeout: u64,

    /// Let the target make network connections, as to NVMe controllers, or an NBD server by TCP
    #[arg(long)]
    pub network: bool,

    /// Serve images of Ceph (RBD): load librbd at the start, of Debian's package librbd1. Implies --network
    #[arg(long)]
    pub rbd: bool,

    /// Serve LUNs of iSCSI targets: load libiscsi at the start, of Debian's package libiscsi7. Implies --network
    #[arg(long)]
    pub iscsi: bool,

    /// Configuration to apply after the recorded one, as `spdk-rpc save_config` writes it
    #[arg(short = 'c', long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Open the JSON-RPC socket first and restore at the method framework_start_init
    #[arg(long)]
    pub wait_for_rpc: bool,

    /// User to become when root starts it, a name or UID[:GID]; `root` stays root, with few
    /// capabilities  [default: virtlun-NAME or virtlun, if there is that user]
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// Groups, beside --socket-group, that it can give a controller's socket to when it has become
    /// another user (`socket_gid` of vhost_create_scsi_controller), separated by commas
    #[arg(long, value_name = "GROUP", value_parser = parse_group, value_delimiter = ',')]
    pub groups: Vec<u32>,

    /// What happens to a system call that the target is not known to make
    #[arg(long, value_name = "MODE", value_enum, default_value = "enforce")]
    pub sandbox: SandboxMode,

    /// The same as --sandbox off: to find a fault, not to serve guests
    #[arg(long, conflicts_with = "sandbox")]
    pub no_sandbox: bool,

    /// Take everything over from the target that serves with the same paths, which ends then; guests
    /// notice a pause. If anything goes wrong, that one serves on and this one ends
    #[arg(long, conflicts_with_all = ["config", "wait_for_rpc"])]
    pub take_over: bool,

    /// How log lines are written, to standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,

    /// Least severity that is logged; the method log_set_level changes it
    #[arg(long, value_name = "LEVEL", default_value = "NOTICE", ignore_case = true)]
    pub log_level: crate::logging::Level,

    /// Stay in the foreground; it always does
    #[arg(long)]
    pub foreground: bool,

    /// Print the schema of every method as JSON and exit
    #[arg(long)]
    pub print_schemas: bool,

    /// Write the schemas into the folder (rpc/ and config/ in it) and exit
    #[arg(long, value_name = "DIR")]
    pub dump_schemas: Option<PathBuf>,
}

impl Cli {
    /// The process's own command line; ends the process with a message where it is wrong.
    pub fn from_command_line() -> Cli {
        let matches = Cli::command().get_matches();
        let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
        cli.named(&matches)
    }

    /// Its name decides where things are, unless an option says it.
    fn named(mut self, matches: &ArgMatches) -> Cli {
        let Some(name) = &self.name else { return self };
        let (run, lib) = (Path::new("/run/virtlun").join(name), Path::new("/var/lib/virtlun"));
        for (option, path, value) in [
            ("rpc_socket", &mut self.rpc_socket, run.join("target.sock")),
            ("vhost_dir", &mut self.vhost_dir, run.join("vhost")),
            ("export_dir", &mut self.export_dir, run.join("export")),
            ("state_dir", &mut self.state_dir, lib.join(name).join("target")),
        ] {
            if matches.value_source(option) == Some(ValueSource::DefaultValue) {
                *path = value;
            }
        }
        self
    }

    /// What happens to a system call that the target is not known to make.
    pub fn sandbox(&self) -> SandboxMode {
        if self.no_sandbox { SandboxMode::Off } else { self.sandbox }
    }
}

/// Names of folders that /run/virtlun and /var/lib/virtlun have for something else.
const TAKEN: [&str; 6] = ["export", "gateway", "hook", "holder", "target", "vhost"];

/// A target's name, which is that of folders and, after `virtlun-`, of a user.
fn parse_name(text: &str) -> Result<String, String> {
    let lower = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let valid = text.len() <= 23
        && text.bytes().all(|b| lower(b) || b == b'-')
        && text.bytes().next().is_some_and(lower);
    match valid && !TAKEN.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "a target's name has at most 23 small letters, digits and hyphens, begins with no \
             hyphen, and is none of {}",
            TAKEN.join(", ")
        )),
    }
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.trim_start_matches("0o"), 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "permissions are octal digits from 0 to 0777".into())
}

/// A group by number, or by its name in /etc/group (group(5)).
fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(gid) = text.parse() {
        return Ok(gid);
    }
    let groups = fs::read_to_string("/etc/group")
        .map_err(|e| format!("cannot look up the group: /etc/group: {e}"))?;
    group_in(&groups, text).ok_or_else(|| {
        "there is no such group in /etc/group; give an existing one or its number".into()
    })
}

fn group_in(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    fn parsed(words: &[&str]) -> Cli {
        let words = ["virtlun-target"].iter().chain(words);
        let matches = Cli::command().try_get_matches_from(words).unwrap();
        Cli::from_arg_matches(&matches).unwrap().named(&matches)
    }

    #[test]
    fn a_name_decides_where_things_are_and_options_decide_more() {
        let cli = parsed(&["--name", "gold", "--vhost-dir", "/run/virtlun/vhost"]);
        assert_eq!(cli.rpc_socket, Path::new("/run/virtlun/gold/target.sock"));
        assert_eq!(cli.export_dir, Path::new("/run/virtlun/gold/export"));
        assert_eq!(cli.state_dir, Path::new("/var/lib/virtlun/gold/target"));
        assert_eq!(cli.vhost_dir, Path::new("/run/virtlun/vhost"));
        assert_eq!(parsed(&[]).rpc_socket, Path::new("/run/virtlun/target.sock"));
    }

    #[test]
    fn names_of_targets() {
        assert!(parse_name("gold").is_ok() && parse_name("0-a").is_ok());
        for wrong in ["", "-a", "Gold", "a/b", "..", "vhost", "hook", &"a".repeat(24)] {
            assert!(parse_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(parse_mode("0660"), Ok(0o660));
        assert_eq!(parse_mode("0o600"), Ok(0o600));
        assert!(parse_mode("9").is_err() && parse_mode("7777").is_err());
    }

    #[test]
    fn groups_are_found_by_name_or_number() {
        let groups = "root:x:0:\nkvm:x:104:libvirt-qemu\n";
        assert_eq!(group_in(groups, "kvm"), Some(104));
        assert_eq!(group_in(groups, "kv"), None);
        assert_eq!(parse_group("64055"), Ok(64055));
        assert!(parse_group("no-such-group-here").is_err());
    }
}
