//! Each target runs every input of its corpora once, without libFuzzer: what is checked in, what runs
//! of `python -m tests.fuzz` on this machine kept as new, and their findings.
//!
//! ```text
//! cargo test -p virtlun-fuzz --test corpora                    # all targets
//! cargo test -p virtlun-fuzz --test corpora -- ring            # one, with the name of each input
//! cargo test -p virtlun-fuzz --test corpora -- ring FILE...    # those inputs of it
//! ```
//!
//! Each target has a process of its own, as in libFuzzer: targets share controllers, and a panic in any
//! thread is a finding.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs, panic, process, thread};

use virtlun_fuzz::{TARGETS, Target};

/// One that takes this for an input to fail on, to see that a failure is seen.
const ITSELF: &str = "itself";
const FAILS: &[u8] = b"fail";
/// An input that takes longer hangs, also on a machine that is busy; it is ended within twice that.
const INPUT_TIMEOUT: Duration = Duration::from_secs(60);
/// Lines of what a target that failed said.
const LAST_LINES: usize = 40;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let done = match words.split_first() {
        None => all(),
        Some((name, files)) => one(name, files.iter().map(PathBuf::from).collect()),
    };
    done.unwrap_or_else(|why| {
        eprintln!("{why}");
        ExitCode::FAILURE
    })
}

/// Runs all targets, as many at a time as tests of other programs, and tells what came of each.
fn all() -> Result<ExitCode, Box<dyn Error>> {
    sees_a_failure()?;
    let names: BTreeSet<_> = TARGETS.iter().map(|(name, _)| *name).collect();
    for folder in fs::read_dir(checked_in())? {
        let name = folder?.file_name();
        if !name.to_str().is_some_and(|name| names.contains(name)) {
            return Err(format!("the corpus {name:?} has no target in TARGETS").into());
        }
    }
    let at_a_time = match env::var("RUST_TEST_THREADS") {
        Ok(number) => number.parse()?,
        Err(_) => thread::available_parallelism()?.get(),
    };
    let left = Mutex::new(names.into_iter());
    let next = || left.lock().unwrap().next();
    let failed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                while let Some(name) = next() {
                    match in_its_process(name, &[]) {
                        Ok(inputs) => println!("{name}: {inputs} inputs"),
                        Err(why) => {
                            println!("{name}: {why}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    println!("{} of {} targets ran their corpora", TARGETS.len() - failed, TARGETS.len());
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs these inputs of a target, or all where there are none, and returns how many there were.
///
/// Fails, with what the target said and how to repeat it, where one of them does.
fn in_its_process(name: &str, files: &[&Path]) -> Result<usize, Box<dyn Error>> {
    let program = env::current_exe()?;
    let done = Command::new(&program).arg(name).args(files).output()?;
    let begun = String::from_utf8(done.stdout)?;
    if done.status.success() {
        return Ok(begun.lines().count());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let lines: Vec<_> = said.lines().collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
    let input = begun.lines().last().unwrap_or("");
    let status = done.status;
    Err(format!("{status}\n{last}\nrepeat it with: {} {name} {input}", program.display()).into())
}

/// Runs inputs of a target in this process, which ends with the first one that fails.
fn one(name: &str, files: Vec<PathBuf>) -> Result<ExitCode, Box<dyn Error>> {
    let known = TARGETS.iter().copied().chain([(ITSELF, itself as Target)]);
    let Some((_, target)) = known.into_iter().find(|(known, _)| *known == name) else {
        return Err(format!("there is no target {name}").into());
    };
    let files = if files.is_empty() { corpora(name)? } else { files };
    if files.is_empty() {
        return Err(format!("{name} has no input: tests/fuzz/corpus/{name} is for some").into());
    }
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        tell(panic);
        process::abort();
    }));
    static BEGUN: AtomicUsize = AtomicUsize::new(0);
    thread::spawn(|| {
        let mut before = 0;
        loop {
            thread::sleep(INPUT_TIMEOUT);
            let now = BEGUN.load(Ordering::Relaxed);
            assert_ne!(before, now, "an input has not ended after {INPUT_TIMEOUT:?}");
            before = now;
        }
    });
    for file in files {
        BEGUN.fetch_add(1, Ordering::Relaxed);
        println!("{}", file.display());
        match fs::read(&file) {
            Ok(input) => target(&input),
            // Who fuzzes at the same time has found a smaller one that does the same.
            Err(error) if error.kind() == ErrorKind::NotFound && file.starts_with(kept()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // Not by a return: what a target keeps until its process ends has threads.
    process::exit(0)
}

/// Fails where an input that makes a thread of its target panic is not told.
fn sees_a_failure() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let (good, bad) = (folder.path().join("good"), folder.path().join("bad"));
    fs::write(&good, b"")?;
    fs::write(&bad, FAILS)?;
    assert_eq!(in_its_process(ITSELF, &[&good, &good])?, 2);
    let told = in_its_process(ITSELF, &[&good, &bad, &good]).expect_err("it fails").to_string();
    let repeat = format!("{ITSELF} {}", bad.display());
    assert!(told.contains("it was told to") && told.ends_with(&repeat), "{told}");
    Ok(())
}

fn itself(data: &[u8]) {
    let fails = data == FAILS;
    let _ = thread::spawn(move || assert!(!fails, "it was told to")).join();
}

/// The inputs of a target: findings first.
fn corpora(name: &str) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let kept = kept();
    let folders =
        [kept.join("findings").join(name), checked_in().join(name), kept.join("corpus").join(name)];
    let mut found = Vec::new();
    for folder in folders.iter().filter(|folder| folder.is_dir()) {
        let mut files = fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>, std::io::Error>>()?;
        files.sort();
        found.append(&mut files);
    }
    Ok(found)
}

fn checked_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// What `tests/support/cache.py` has for all checkouts, for this.
fn kept() -> PathBuf {
    let given = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    given("VIRTLUN_CACHE")
        .unwrap_or_else(|| {
            let home = || given("HOME").unwrap_or_default().join(".cache");
            given("XDG_CACHE_HOME").unwrap_or_else(home).join("virtlun")
        })
        .join("fuzz")
}
