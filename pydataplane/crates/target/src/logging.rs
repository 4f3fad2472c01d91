//! Log lines on standard error, with SPDK's level names.

use clap::ValueEnum;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Severity, as `log_set_level` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "UPPERCASE")]
#[value(rename_all = "UPPER")]
pub enum Level {
    #[allow(missing_docs)]
    Error,
    #[allow(missing_docs)]
    Warning,
    #[allow(missing_docs)]
    Notice,
    #[allow(missing_docs)]
    Info,
    #[allow(missing_docs)]
    Debug,
}

impl Level {
    /// The filter: what is a notice to SPDK is information here, and its information is detail.
    fn filter(self) -> LevelFilter {
        match self {
            Level::Error => LevelFilter::ERROR,
            Level::Warning => LevelFilter::WARN,
            Level::Notice | Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
        }
    }
}

/// Changes the level while the program runs.
pub struct LogControl {
    level: Mutex<Level>,
    /// `None` where nothing is logged (the schemas are dumped, or a test).
    handle: Option<reload::Handle<LevelFilter, Registry>>,
}

impl LogControl {
    /// Starts logging for the process; once.
    pub fn start(format: LogFormat, level: Level) -> LogControl {
        let (filter, handle) = reload::Layer::new(level.filter());
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let lines = match format {
            LogFormat::Text => lines.with_target(false).with_ansi(false).boxed(),
            LogFormat::Json => lines.json().flatten_event(true).boxed(),
        };
        tracing_subscriber::registry().with(filter).with(lines).init();
        LogControl { level: Mutex::new(level), handle: Some(handle) }
    }

    /// A control of nothing.
    pub fn silent() -> LogControl {
        LogControl { level: Mutex::new(Level::Notice), handle: None }
    }

    /// The level now.
    pub fn level(&self) -> Level {
        *self.level.lock()
    }

    /// Logs what is at least as severe as `level` from now on.
    pub fn set(&self, level: Level) -> Result<(), String> {
        if let Some(handle) = &self.handle {
            handle.reload(level.filter()).map_err(|e| e.to_string())?;
        }
        *self.level.lock() = level;
        Ok(())
    }
}
