//! `virtlun-target`.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use target::cli::Cli;

fn main() -> ExitCode {
    target::daemon::run(&Cli::parse())
}
