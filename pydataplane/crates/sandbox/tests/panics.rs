//! A panic ends the process in every profile.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, exit};
use std::{env, thread};

const CHILD: &str = "VIRTLUN_PANICS";

#[test]
fn the_panic_of_a_thread_ends_the_process() {
    if env::var_os(CHILD).is_some() {
        sandbox::panics::end_the_process();
        let _ = thread::spawn(|| panic!("a bug")).join();
        exit(0); // it goes on
    }
    let ended = Command::new(env::current_exe().unwrap())
        .args(["the_panic_of_a_thread_ends_the_process", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{said}");
    assert!(said.contains("panicked at") && said.contains("a bug"), "{said}");
}
