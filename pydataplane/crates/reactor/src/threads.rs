//! Reactor threads, started, addressed and stopped from other threads.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::CpuSet;

use crate::call;
use crate::mailbox::Mailbox;
use crate::place::{beside, give_way, pin};
use crate::run::{Accounting, Idle, run};
use crate::{Cx, IoContext, Stats, Waker};

thread_local! {
    /// Whether this thread is a reactor's.
    static IS_REACTOR: Cell<bool> = const { Cell::new(false) };
}

/// The reactor has stopped, so the message did not run or its answer is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("reactor {0} has stopped")]
pub struct Stopped(pub usize);

/// A reactor as other threads see it.
#[derive(Clone)]
pub struct Handle {
    index: usize,
    cpu: Option<usize>,
    mailbox: Mailbox,
    accounting: Arc<Accounting>,
}

impl Handle {
    /// Index of the reactor.
    pub fn index(&self) -> usize {
        self.index
    }

    /// CPU that it is pinned to.
    pub fn cpu(&self) -> Option<usize> {
        self.cpu
    }

    /// Wakes it, for who has told its pollers something where they look.
    pub fn waker(&self) -> Waker {
        self.mailbox.waker()
    }

    /// Its accounting now.
    pub fn stats(&self) -> Stats {
        self.accounting.read(self.cpu)
    }

    /// Sends a message; waits while the mailbox is full (never call from a reactor thread). A
    /// reactor that has stopped drops it.
    pub fn send(&self, m: impl FnOnce(&mut Cx) + Send + 'static) {
        self.mailbox.send(Box::new(m));
    }

    /// Runs `f` on the reactor and returns its result (never call from a reactor thread).
    ///
    /// # Panics
    /// On a reactor thread, which would wait for itself, and when the reactor has stopped: see
    /// [`Handle::try_call`].
    pub fn call<R: Send + 'static>(&self, f: impl FnOnce(&mut Cx) -> R + Send + 'static) -> R {
        match self.try_call(f) {
            Ok(r) => r,
            Err(e) => panic!("{e}"),
        }
    }

    /// As [`Handle::call`], for callers that may outlive the reactor.
    ///
    /// # Errors
    /// [`Stopped`].
    ///
    /// # Panics
    /// On a reactor thread, which would wait for itself.
    pub fn try_call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Cx) -> R + Send + 'static,
    ) -> Result<R, Stopped> {
        assert!(!IS_REACTOR.get(), "a reactor thread must not wait for a reactor");
        let (call, caller) = call::call(f);
        self.send(move |cx| call.run(|f| f(cx)));
        // A message that is dropped unrun drops the call, which ends the wait.
        caller.wait(Duration::MAX).map_err(|_| Stopped(self.index))
    }
}

/// All reactors of the process.
pub struct Reactors {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
}

impl Reactors {
    /// Starts one thread per entry of `cpus` (`None`: not pinned).
    ///
    /// # Errors
    /// No entry, a CPU that the process may not use, or no thread or descriptors left; then
    /// nothing runs.
    pub fn start(cpus: &[Option<usize>], idle: Idle) -> io::Result<Self> {
        if cpus.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no reactor is asked for"));
        }
        // Calibrates the clock here, not in the first reactor's loop.
        crate::ticks::hz();
        let bound: Vec<usize> = cpus.iter().copied().flatten().collect();
        let beside = beside(&bound);
        let mut all = Reactors { handles: Vec::new(), threads: Vec::new() };
        for (index, &cpu) in cpus.iter().enumerate() {
            match start_one(index, cpu, beside, idle) {
                Ok((handle, thread)) => {
                    all.handles.push(handle);
                    all.threads.push(thread);
                }
                Err(e) => {
                    all.stop();
                    let on = cpu.map_or(String::new(), |c| format!(" on CPU {c}"));
                    let text = format!("cannot start reactor {index}{on}: {e}");
                    return Err(io::Error::new(e.kind(), text));
                }
            }
        }
        Ok(all)
    }

    /// All handles, in index order.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }

    /// Accounting of each reactor.
    pub fn stats(&self) -> Vec<Stats> {
        self.handles.iter().map(Handle::stats).collect()
    }

    /// Stops and joins all threads, dropping their pollers on their own threads.
    pub fn stop(mut self) {
        self.stop_all();
    }

    fn stop_all(&mut self) {
        for h in &self.handles {
            h.send(|cx| cx.stop = true);
        }
        for (t, h) in self.threads.drain(..).zip(&self.handles) {
            if t.join().is_err() {
                tracing::error!("reactor {} ended in a panic", h.index);
            }
        }
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.stop_all();
    }
}

/// Starts a reactor; `beside`: CPUs for what the kernel does for it in threads of its own.
fn start_one(
    index: usize,
    cpu: Option<usize>,
    beside: Option<CpuSet>,
    idle: Idle,
) -> io::Result<(Handle, JoinHandle<()>)> {
    let (ready, wait) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name(format!("reactor_{index}")).spawn(move || {
        IS_REACTOR.set(true);
        let io = match pin(cpu).and_then(|()| IoContext::with_workers_on(beside)) {
            Ok(io) => io,
            Err(e) => {
                let _ = ready.send(Err(e));
                return;
            }
        };
        if let Err(e) = give_way() {
            tracing::warn!("reactor {index}: what the kernel ends on its CPU may wait for it: {e}");
        }
        let mailbox = Mailbox::new(io.waker());
        let accounting = Arc::new(Accounting::new());
        let _closes = CloseOnDrop(mailbox.clone());
        let _ = ready.send(Ok((mailbox.clone(), accounting.clone())));
        let mut cx = Cx::new(index, io);
        run(&mut cx, &mailbox, &accounting, idle);
    })?;
    match wait.recv() {
        Ok(Ok((mailbox, accounting))) => Ok((Handle { index, cpu, mailbox, accounting }, thread)),
        Ok(Err(e)) => {
            let _ = thread.join();
            Err(e)
        }
        Err(_) => Err(io::Error::other("the thread ended at once")),
    }
}

/// Closes the mailbox when the thread ends, in a panic too, so that no caller waits for ever.
struct CloseOnDrop(Mailbox);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}
