//! A line-driven script: one JSON command a line in, one JSON answer a line out.
//!
//! Each command is an object with `cmd`; each answer has `ok` (bool) and, where that is false,
//! `error` (a sentence). Bytes are hexadecimal strings. Nothing a target does ends the script:
//! a hung-up socket is an answer with `ok` false. See [`command::Command`] for the commands.

mod command;
mod hex;
mod run;

use std::io::{BufRead, Write};
use std::path::Path;

use serde_json::{Value, json};

pub use command::Command;
pub use run::Script;

/// Runs the script on `input` until its end or `quit`, against the target at `socket`.
pub fn run(socket: &Path, input: impl BufRead, mut output: impl Write) -> std::io::Result<()> {
    let mut script = Script::new(socket);
    for line in input.lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let (answer, quit) = match serde_json::from_str::<Command>(&line) {
            Ok(Command::Quit) => (json!({"ok": true}), true),
            Ok(command) => match script.execute(command) {
                Ok(mut answer) => {
                    answer["ok"] = Value::Bool(true);
                    (answer, false)
                }
                Err(e) => (json!({"ok": false, "error": e.to_string()}), false),
            },
            Err(e) => (json!({"ok": false, "error": format!("bad command: {e}")}), false),
        };
        writeln!(output, "{answer}")?;
        output.flush()?;
        if quit {
            break;
        }
    }
    Ok(())
}
