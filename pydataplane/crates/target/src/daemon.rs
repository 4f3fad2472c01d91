//! Life of the process.

use crate::app::App;
use crate::cli::{Cli, LogFormat};
use crate::holding;
use crate::logging::LogControl;
use crate::methods;
use crate::privilege;
use crate::schemas;
use crate::state::Config;
use crate::systemd;
use rpc::{Methods, Server, SocketOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::error::Error;
use std::fs;
use std::process::{self, ExitCode};
use std::sync::{Arc, mpsc};
use std::thread;

/// Exit status of a failure.
const FAILED: u8 = 1;

/// Runs the program; its exit status is documented in the help.
pub fn run(cli: &Cli) -> ExitCode {
    let outcome = if let Some(dir) = &cli.dump_schemas {
        schemas::write(dir).map_err(Into::into)
    } else if cli.print_schemas {
        print_schemas()
    } else {
        serve(cli)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("virtlun-target: {e}");
            ExitCode::from(FAILED)
        }
    }
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
    let holder = holding::find(cli, privilege::uid_to_be(cli)?);
    privilege::reduce(cli)?;
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
    let outcome = serve_app(cli, &app, methods, signals);
    match Arc::try_unwrap(app) {
        Ok(app) => app.stop(),
        Err(app) if !app.waits.long().is_empty() => {
            for wait in app.waits.long() {
                tracing::warn!(
                    "{} still waits for {}: that is left undone",
                    wait.name,
                    wait.waits_for
                );
            }
            app.stop_serving();
        }
        Err(_) => {
            tracing::error!("a JSON-RPC client is still being served: not stopped in order");
        }
    }
    if outcome.is_ok() {
        tracing::info!("stopped");
    }
    outcome
}

fn serve_app(
    cli: &Cli,
    app: &Arc<App>,
    methods: Arc<Methods>,
    signals: Signals,
) -> Result<(), Box<dyn Error>> {
    if !cli.wait_for_rpc {
        app.initialise()?;
    }
    let options = SocketOptions { mode: cli.rpc_mode, group: cli.rpc_group };
    let server = Server::start(&cli.rpc_socket, options, methods)?;
    systemd::notify("READY=1");
    tracing::info!(socket = %cli.rpc_socket.display(), pid = process::id(), "ready");
    wait_for_the_end(signals)?;
    systemd::notify("STOPPING=1");
    server.stop();
    Ok(())
}

/// Waits for a signal that ends the process; a second one ends it at once.
fn wait_for_the_end(mut signals: Signals) -> std::io::Result<()> {
    let (ended, end) = mpsc::channel();
    thread::Builder::new().name("signals".into()).spawn(move || {
        let mut stopping = false;
        for signal in signals.forever() {
            match signal {
                SIGHUP | SIGUSR1 => tracing::info!(signal, "signal ignored"),
                _ if stopping => {
                    tracing::warn!(signal, "second signal: ending at once");
                    process::exit(i32::from(FAILED));
                }
                _ => {
                    tracing::info!(signal, "stopping");
                    stopping = true;
                    let _ = ended.send(());
                }
            }
        }
    })?;
    // An error means that the thread is gone, which ends the process too.
    let _ = end.recv();
    Ok(())
}
