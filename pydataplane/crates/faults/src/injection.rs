//! What is to go wrong, and how often.

use bdev::{IoError, Op};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// What becomes of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails.
    Failure,
    /// It is not answered until somebody says so.
    Pending,
    /// A byte of its data, that many bytes from its start, is changed: what a read returns, or what a
    /// write writes.
    Corrupt {
        /// Of an I/O that is shorter nothing is changed.
        offset: u64,
        /// What the byte is combined with by XOR.
        value: u8,
    },
    /// It finds no room, and is tried again.
    NoMemory,
}

/// A fault that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Injection {
    /// What it is.
    pub fault: Fault,
    /// How many I/Os more it meets.
    pub times: u32,
    /// It meets I/Os beside so many others in flight alone.
    pub queue_depth: u32,
}

/// Those of each kind of I/O.
#[derive(Default)]
pub(crate) struct Injections {
    /// Whether there is any: nobody takes the lock for none.
    any: AtomicBool,
    of: Mutex<[Option<Injection>; Op::COUNT]>,
}

impl Injections {
    pub fn set(&self, ops: &[Op], injection: Option<Injection>) {
        let mut of = self.of.lock();
        for op in ops {
            of[*op as usize] = injection.filter(|injection| injection.times > 0);
        }
        self.any.store(of.iter().any(Option::is_some), Ordering::Release);
    }

    /// By kind of I/O, in the words of bdev_error_inject_error.
    pub fn shown(&self) -> Value {
        let of = self.of.lock();
        let there = Op::ALL.iter().filter_map(|op| Some((op, of[*op as usize]?)));
        let shown = there.map(|(op, injection)| {
            let what = match injection.fault {
                Fault::Failure => "failure",
                Fault::Pending => "pending",
                Fault::Corrupt { .. } => "corrupt_data",
                Fault::NoMemory => "nomem",
            };
            let (num, depth) = (injection.times, injection.queue_depth);
            let each = json!({"error_type": what, "num": num, "queue_depth": depth});
            (format!("{op:?}").to_lowercase(), each)
        });
        Value::Object(shown.collect())
    }

    /// What becomes of an I/O that is begun beside `in_flight` others.
    pub fn next(&self, op: Op, in_flight: usize) -> Option<Fault> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut of = self.of.lock();
        let found = of[op as usize].as_mut().filter(|i| in_flight >= i.queue_depth as usize)?;
        let fault = found.fault;
        found.times -= 1;
        if found.times == 0 {
            of[op as usize] = None;
            self.any.store(of.iter().any(Option::is_some), Ordering::Release);
        }
        Some(fault)
    }
}

/// How an I/O fails.
pub(crate) fn failure(op: Op) -> IoError {
    match op {
        Op::Read => IoError::ReadMedium,
        Op::Flush => IoError::Flush,
        Op::Write | Op::Unmap | Op::WriteZeroes => IoError::WriteMedium,
    }
}
