//! What a panic does to the process.

use std::panic;
use std::process;

/// Ends the process with SIGABRT at the panic of any thread, after the panic was reported. A panic is a
/// bug, and a restart goes on from what is on disk. The release profile has `panic = "abort"`; with this
/// a program that was built with the tests does the same.
pub fn end_the_process() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        report(what);
        process::abort();
    }));
}
