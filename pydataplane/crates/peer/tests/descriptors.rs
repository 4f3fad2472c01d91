//! Without descriptors nothing is learnt of a process, which does not mean that it is gone. Alone in
//! its program: the limit is the whole program's.

#![forbid(unsafe_code)]

use peer::Process;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;

#[test]
fn a_process_that_runs_is_found_and_one_that_ended_is_not() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let [runs, ends] =
        [&child, &other].map(|c| Process::of_pid(c.id()).unwrap().identity().clone());
    other.kill().unwrap();
    other.wait().unwrap();

    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    let (found, gone) = (Process::find(&runs), Process::find(&ends));
    let is_gone = found.as_ref().map(Process::is_gone);
    setrlimit(Resource::Nofile, limit).unwrap();

    assert_eq!(is_gone, Some(false));
    assert!(gone.is_none());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(found.is_some_and(|process| process.is_gone()), "seen again");
}
