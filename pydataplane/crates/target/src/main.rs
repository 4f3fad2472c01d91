//! `virtlun-target`.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use target::cli::Cli;

fn main() -> ExitCode {
    target::daemon::run(&Cli::from_command_line())
}
