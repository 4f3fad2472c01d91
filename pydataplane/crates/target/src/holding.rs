//! Finds or starts the process that holds exports while this one is away.

use crate::cli::Cli;
use crate::state::Config;
use bdev::Registry;
use export::Exports;
use holder::Client;
use std::env;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The program, beside this one.
const PROGRAM: &str = "virtlun-holder";

/// How long a holder that runs by itself is waited for when there are exports to restore: both may
/// start at the same time.
const WAIT: Duration = Duration::from_secs(30);

/// How often it is looked for.
const POLL: Duration = Duration::from_millis(20);

/// A connection to the holder of the command line, else to one that is started here; to be called
/// before anything confines this process. `None`: exports will end with it, as one sees by
/// `survives` of virtlun_export_list. `uid` is whom this process will become.
pub fn find(cli: &Cli, uid: u32) -> Option<Arc<Client>> {
    if let Some(socket) = &cli.holder_socket {
        return Some(Arc::new(Client::new(socket)));
    }
    // Nobody else can mount.
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let client = Client::new(&socket(cli));
    match start(&client, cli, uid) {
        Ok(()) => Some(Arc::new(client)),
        Err(e) => {
            tracing::warn!("exported files will end with this process: {e}");
            None
        }
    }
}

/// Where the holder listens, be it there or not.
pub fn socket(cli: &Cli) -> PathBuf {
    let given = cli.holder_socket.clone();
    given.unwrap_or_else(|| cli.export_dir.with_file_name("holder.sock"))
}

fn start(client: &Client, cli: &Cli, uid: u32) -> io::Result<()> {
    let program = env::current_exe()?.with_file_name(PROGRAM);
    client.start(&program, &cli.export_dir, Some(uid)).map_err(io::Error::other)
}

/// The exports of the process, held by the holder if there is one.
pub fn exports(
    cli: &Cli,
    config: &Config,
    registry: &Registry,
    holder: Option<Arc<Client>>,
) -> Exports {
    let (registry, dir) = (registry.clone(), &cli.export_dir);
    let Some(client) = holder else { return Exports::new(registry, dir) };
    let of_holder = ["virtlun_export_create", "ublk_create_target"];
    if config.items().any(|item| of_holder.contains(&item.call.method.as_str())) {
        wait_for(&client);
    }
    Exports::held(registry, dir, client)
}

fn wait_for(client: &Client) {
    let end = Instant::now() + WAIT;
    while let Err(e) = client.connected() {
        if Instant::now() > end {
            tracing::error!("{e}");
            return;
        }
        thread::sleep(POLL);
    }
}
