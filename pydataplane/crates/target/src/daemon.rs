//! Life of the process.

use crate::app::App;
use crate::cli::Cli;
use crate::holding;
use crate::logging::{LogControl, LogFormat};
use crate::methods;
use crate::openvolumes::CLOSE_TIMEOUT;
use crate::privilege;
use crate::rpcsocket;
use crate::schemas;
use crate::started::Record;
use crate::state::Config;
use crate::systemd;
use crate::upgrade::{self, Arrival, Successor, UpgradeListener};
use holder::Client;
use rpc::{Methods, Server, SocketOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::error::Error;
use std::fs;
use std::process::{self, ExitCode};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Exit status of a failure.
const FAILED: u8 = 1;
/// How often the end looks whether others have let go.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Runs the program; its exit status is documented in the help.
pub fn run(cli: &Cli) -> ExitCode {
    sandbox::panics::end_the_process();
    reactor::memory::large_blocks_from_system();
    let outcome = if let Some(dir) = &cli.dump_schemas {
        schemas::write(dir).map_err(Into::into)
    } else if cli.print_schemas {
        print_schemas()
    } else {
        serve(cli)
    };
    let status = match outcome {
        Ok(()) => 0,
        Err(e) => {
            eprintln!("virtlun-target: {e}");
            FAILED
        }
    };
    if !rbd::is_quiet() {
        rbd::exit(status);
    }
    ExitCode::from(status)
}

fn print_schemas() -> Result<(), Box<dyn Error>> {
    println!("{}", serde_json::to_string_pretty(&schemas::all()?)?);
    Ok(())
}

/// Start, restore, ready, wait for a signal, stop.
fn serve(cli: &Cli) -> Result<(), Box<dyn Error>> {
    // Signals that come while starting are taken when it is done.
    let signals = Signals::new([SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1])?;
    let log = LogControl::start(cli.log_format, cli.log_level);
    if cli.log_format == LogFormat::Json {
        sandbox::trap::log_as_json();
    }
    if cli.rbd
        && let Err(why) = rbd::Library::load()
    {
        tracing::error!("{why}");
    }
    if cli.iscsi
        && let Err(why) = iscsi::Library::load()
    {
        tracing::error!("{why}");
    }
    let holder = holding::find(cli, privilege::uid_to_be(cli)?);
    let record = privilege::reduce(cli)?;
    if cli.take_over {
        return take_over(cli, log, holder, record, signals);
    }
    write(record);
    let config = Config::open(&cli.state_dir)?;
    if let Some(dir) = cli.rpc_socket.parent() {
        fs::create_dir_all(dir).map_err(|e| format!("cannot create {}: {e}", dir.display()))?;
    }
    fs::create_dir_all(&cli.vhost_dir)
        .map_err(|e| format!("cannot create {}: {e}", cli.vhost_dir.display()))?;
    let app =
        App::new(cli, config, log, holder).map_err(|e| format!("cannot start a reactor: {e}"))?;
    let app = Arc::new(app);
    let methods = methods::table(&app);
    let ends = Ends::watch(cli, signals)?;
    let outcome = start(cli, &app, &methods).and_then(|server| {
        systemd::notify("READY=1");
        tracing::info!(socket = %cli.rpc_socket.display(), pid = process::id(), "ready");
        run_until_the_end(cli, &app, &methods, server, ends)
    });
    end(app, methods, outcome)
}

/// Stops everything in order.
fn end(
    app: Arc<App>,
    methods: Arc<Methods>,
    outcome: Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    drop(methods);
    // A thread that is late for its disk has it for who knows how long.
    let most = if app.waits.long().is_empty() { CLOSE_TIMEOUT } else { Duration::ZERO };
    match alone(app, most) {
        Ok(app) => app.stop(),
        Err(app) => {
            let waits = app.waits.long();
            for wait in &waits {
                tracing::warn!(
                    "{} still waits for {}: that is left undone",
                    wait.name,
                    wait.waits_for
                );
            }
            if waits.is_empty() {
                tracing::warn!(
                    "a call, or what closes a volume, still goes on: that is left undone"
                );
            }
            app.stop_serving();
        }
    }
    if outcome.is_ok() {
        tracing::info!("stopped");
    }
    outcome
}

/// What nobody else has any more; who has it may have to wait for a server himself, so that he gets `most` for it.
fn alone<T>(mut shared: Arc<T>, most: Duration) -> Result<T, Arc<T>> {
    let end = Instant::now() + most;
    loop {
        shared = match Arc::try_unwrap(shared) {
            Err(shared) if Instant::now() < end => shared,
            outcome => return outcome,
        };
        thread::sleep(LOOK_AGAIN);
    }
}

/// Takes everything over from the target that serves, then as any other.
fn take_over(
    cli: &Cli,
    log: LogControl,
    holder: Option<Arc<Client>>,
    record: Option<Record>,
    signals: Signals,
) -> Result<(), Box<dyn Error>> {
    let arrival = Arrival::new(&upgrade::socket_path(&rpcsocket::of(&cli.rpc_socket)))?;
    let app = App::new(cli, Config::default(), log, holder);
    let app = Arc::new(app.map_err(|e| format!("cannot start a reactor: {e}"))?);
    let methods = methods::table(&app);
    let arrived = arrival.take_over(&app).unwrap_or_else(|(arrival, why)| {
        eprintln!("virtlun-target: the target that serves goes on: {why}");
        arrival.fail(&why);
        // At once: what is here is the other one's again, sockets and all.
        rbd::exit(FAILED);
    });
    let taken = arrived.serve(&app);
    // Before the old process ends: the service manager must not take that for the service's end.
    systemd::notify(&format!("MAINPID={}\nREADY=1", process::id()));
    _ = app.upgrade.set(taken);
    write(record);
    let ends = Ends::watch(cli, signals)?;
    if let Err(e) = app.config().sign() {
        tracing::warn!("{e}");
    }
    if let Err(e) = app.commit() {
        tracing::warn!("{e}");
    }
    let finished = arrived.finish(taken, &rpcsocket::of(&cli.rpc_socket));
    // Before clients are answered, so that what they are told of a session is so: they wait for a second at
    // most, guests do not.
    app.end_other_sessions();
    let outcome = match finished {
        Ok(parked) => Server::resume(parked, methods.clone()).map_err(Into::into),
        Err(e) => {
            tracing::warn!("RPC clients lose their connections: {e}");
            listen(cli, &methods)
        }
    };
    let outcome = outcome.and_then(|server| {
        let (from_pid, pause_ms) = (taken.from_pid, taken.pause.as_secs_f64() * 1e3);
        let socket = cli.rpc_socket.display();
        tracing::info!(%socket, pid = process::id(), from_pid, pause_ms, "ready, taken over");
        run_until_the_end(cli, &app, &methods, server, ends)
    });
    end(app, methods, outcome)
}

/// Records with which options this process was started.
fn write(record: Option<Record>) {
    if let Some(Err(e)) = record.map(Record::write) {
        tracing::warn!("cannot record the options for an upgrade: {e}");
    }
}

/// Restores what was configured and opens the RPC socket.
fn start(cli: &Cli, app: &Arc<App>, methods: &Arc<Methods>) -> Result<Server, Box<dyn Error>> {
    if !cli.wait_for_rpc {
        app.initialise()?;
    }
    listen(cli, methods)
}

fn listen(cli: &Cli, methods: &Arc<Methods>) -> Result<Server, Box<dyn Error>> {
    let options = SocketOptions { mode: cli.rpc_mode, group: cli.rpc_group };
    Ok(Server::start(&rpcsocket::of(&cli.rpc_socket), options, methods.clone())?)
}

/// What ends the process.
enum End {
    /// A signal.
    Signal,
    /// A new program is ready to take over.
    Upgrade(Successor),
}

/// Waits for what ends the process.
struct Ends {
    ended: mpsc::Sender<End>,
    end: mpsc::Receiver<End>,
    /// Where a new program is waited for.
    upgrades: Option<UpgradeListener>,
}

impl Ends {
    /// From now on signals and new programs are heard.
    fn watch(cli: &Cli, signals: Signals) -> std::io::Result<Ends> {
        let (ended, end) = mpsc::channel();
        watch_signals(signals, ended.clone())?;
        let mut ends = Ends { ended, end, upgrades: None };
        ends.listen_for_upgrade(cli);
        Ok(ends)
    }

    fn listen_for_upgrade(&mut self, cli: &Cli) {
        let ended = self.ended.clone();
        let upgrades = UpgradeListener::open(
            &upgrade::socket_path(&rpcsocket::of(&cli.rpc_socket)),
            move |successor| {
                _ = ended.send(End::Upgrade(successor));
            },
        );
        self.upgrades =
            upgrades.inspect_err(|why| tracing::warn!("no new program can take over: {why}")).ok();
    }
}

/// Serves until a signal ends the process, or a new program has taken everything over.
fn run_until_the_end(
    cli: &Cli,
    app: &Arc<App>,
    methods: &Arc<Methods>,
    mut server: Server,
    mut ends: Ends,
) -> Result<(), Box<dyn Error>> {
    // An error means that all who could end it are gone, which ends the process too.
    while let Ok(End::Upgrade(successor)) = ends.end.recv() {
        ends.upgrades = None;
        match upgrade::leave(app, methods, server, &successor) {
            Ok(true) => rbd::exit(0),
            Ok(false) => rbd::exit(FAILED),
            Err((same, why)) => {
                tracing::error!("the upgrade is abandoned, this target goes on: {why}");
                server = same;
                ends.listen_for_upgrade(cli);
            }
        }
    }
    systemd::notify("STOPPING=1");
    server.stop();
    Ok(())
}

/// Reports a signal that ends the process; a second one ends it at once.
fn watch_signals(mut signals: Signals, ended: mpsc::Sender<End>) -> std::io::Result<()> {
    thread::Builder::new().name("signals".into()).spawn(move || {
        let mut stopping = false;
        for signal in signals.forever() {
            match signal {
                SIGHUP | SIGUSR1 => tracing::info!(signal, "signal ignored"),
                _ if stopping => {
                    tracing::warn!(signal, "second signal: ending at once");
                    rbd::exit(FAILED);
                }
                _ => {
                    tracing::info!(signal, "stopping");
                    stopping = true;
                    let _ = ended.send(End::Signal);
                }
            }
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_about_to_let_go_is_waited_for() {
        let shared = Arc::new(());
        let other = shared.clone();
        let shared = alone(shared, Duration::ZERO).unwrap_err();
        let thread = thread::spawn(move || {
            thread::sleep(2 * LOOK_AGAIN);
            drop(other);
        });
        assert!(alone(shared, Duration::from_secs(60)).is_ok());
        thread.join().unwrap();
    }
}
