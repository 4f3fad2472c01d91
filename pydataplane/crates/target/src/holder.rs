//! `virtlun-holder`.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    holder::cli::run(&holder::cli::Cli::parse())
}
