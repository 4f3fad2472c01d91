//! A session with a target: a context of libiscsi, which one thread uses. All calls of the library are here and below.
//!
//! `login`: its beginning and end; `answers`: what has ended in it; `probe`: what its LUNs are.

mod answers;
mod login;
mod probe;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::Duration;

use guestmem::IoVec;
use libc::{c_int, c_void};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::command::{self, Cdb};
use crate::ffi::{Context, Library, Task, XFER};
use crate::sense::Answer;
use crate::unit::LUNS_MAX;

use answers::ended;
pub(crate) use login::{Identity, NoSession};

/// Commands of I/O in flight at most.
pub(crate) const DEPTH: u16 = 256;
/// The place of commands with memory of the session's own.
const OWN: u16 = DEPTH;
/// Bytes of memory for what a LUN says of itself, and the target of its LUNs.
const OWN_LEN: usize = 8 + 8 * LUNS_MAX;

/// Which way the data of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    None,
    In,
    Out,
}

/// The session is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lost;

pub(crate) struct Session {
    library: &'static Library,
    context: Context,
    lun: c_int,
    /// By place; null: none.
    tasks: Box<[*mut Task]>,
    answers: VecDeque<(u16, Answer)>,
    lost: bool,
    logged_in: bool,
    logged_out: bool,
    own: Box<[u8; OWN_LEN]>,
    own_run: Box<[IoVec; 1]>,
    own_answer: Option<Answer>,
    late_failure: bool,
    /// Commands with data that were answered while something was still to be sent, which may be that data.
    early: Vec<(usize, c_int)>,
}

// SAFETY: the library has no state of a thread, and a session is with one thread at a time.
unsafe impl Send for Session {}

impl Session {
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Nothing is sent any more, and what was not answered is not.
    pub(crate) fn end(&mut self) {
        self.lost = true;
    }

    /// Gives a command to the library; [`Session::next_answer`] has its answer.
    ///
    /// # Errors
    /// It was not taken: it will not be carried out.
    ///
    /// # Safety
    /// `runs` and the memory that they name stay valid, and nobody else uses the list, until the answer is
    /// there or the session was dropped. Nothing is in flight at that place.
    pub(crate) unsafe fn send(
        &mut self,
        place: u16,
        cdb: &Cdb,
        data: Data,
        runs: &mut [IoVec],
    ) -> Result<(), Lost> {
        if self.lost {
            return Err(Lost);
        }
        let bytes: usize = runs.iter().map(IoVec::len).sum();
        let (Ok(bytes), Ok(count)) = (c_int::try_from(bytes), c_int::try_from(runs.len())) else {
            self.lost = true;
            return Err(Lost);
        };
        let (library, mut cdb_) = (self.library, *cdb);
        // SAFETY: as many bytes as a command descriptor block has, which are copied.
        let task = unsafe {
            let len = command::len(cdb) as c_int;
            (library.scsi_create_task)(len, cdb_.as_mut_ptr(), XFER[data as usize], bytes)
        };
        if task.is_null() {
            self.lost = true;
            return Err(Lost);
        }
        let list = runs.as_mut_ptr().cast::<libc::iovec>();
        // SAFETY: a task that is not sent; the list is one of `struct iovec`, and stays (the caller).
        unsafe {
            match data {
                Data::None => {}
                Data::In => (library.scsi_task_set_iov_in)(task, list, count),
                Data::Out => (library.scsi_task_set_iov_out)(task, list, count),
            }
        }
        self.tasks[usize::from(place)] = task;
        let which = usize::from(place) as *mut c_void;
        // SAFETY: a context and a task of this thread.
        let taken = unsafe {
            (library.iscsi_scsi_command_async)(
                self.context,
                self.lun,
                task,
                ended,
                ptr::null_mut(),
                which,
            )
        };
        if taken != 0 {
            // The task goes with the session.
            self.lost = true;
        }
        self.take_ended();
        if taken == 0 { Ok(()) } else { Err(Lost) }
    }

    /// As [`Session::send`], into memory of the session's own: [`Session::own_answer`] has what came.
    pub(crate) fn send_own(&mut self, cdb: &Cdb, len: usize) -> Result<(), Lost> {
        self.own_answer = None;
        let len = len.min(OWN_LEN);
        self.own[..len].fill(0);
        // SAFETY: memory of this session, which outlives the context.
        self.own_run[0] = unsafe { IoVec::new(self.own.as_mut_ptr(), len) };
        let runs: *mut [IoVec] = if len == 0 { &mut [] } else { &mut *self.own_run };
        let data = if len == 0 { Data::None } else { Data::In };
        // SAFETY: the list and its memory are boxed and this session's; they outlive the context.
        unsafe { self.send(OWN, cdb, data, &mut *runs) }
    }

    /// The answer to what [`Session::send_own`] sent, with what came.
    pub(crate) fn own_answer(&mut self) -> Option<(Answer, &[u8])> {
        let answer = self.own_answer.take()?;
        let came = self.own_run[0].len().saturating_sub(answer.missing);
        Some((answer, &self.own[..came]))
    }

    /// Carries the session on: waits until there is something to do for it, for `time` at most or until
    /// `wake` is readable; whether that is.
    pub(crate) fn wait(&mut self, wake: Option<BorrowedFd<'_>>, time: Duration) -> bool {
        if self.lost {
            return false;
        }
        // SAFETY: a context of this thread.
        let (fd, events) = unsafe {
            (
                (self.library.iscsi_get_fd)(self.context),
                (self.library.iscsi_which_events)(self.context),
            )
        };
        if fd < 0 {
            self.lost = true;
            return false;
        }
        // SAFETY: the descriptor is open until the next call of the library.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = PollFlags::from_bits_truncate(events as u16);
        let mut fds = vec![PollFd::from_borrowed_fd(fd, flags)];
        fds.extend(wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN)));
        let time = Timespec::try_from(time).ok();
        let (mut happened, mut woken) = (PollFlags::empty(), false);
        if poll(&mut fds, time.as_ref()).is_ok() {
            happened = fds[0].revents();
            woken = fds.get(1).is_some_and(|wake| !wake.revents().is_empty());
        }
        if !happened.is_empty() {
            // SAFETY: a context of this thread.
            let served = unsafe {
                (self.library.iscsi_service)(self.context, c_int::from(happened.bits() as i16))
            };
            self.lost |= served < 0;
        }
        self.take_ended();
        woken
    }
}

impl Drop for Session {
    /// Nothing of anybody's memory is used from then on.
    fn drop(&mut self) {
        // SAFETY: a context of this thread, used by nobody any more.
        unsafe { (self.library.iscsi_destroy_context)(self.context) };
        // What was in flight.
        answers::forget_ended();
        for task in self.tasks.iter().filter(|task| !task.is_null()) {
            // SAFETY: the context is gone, so nobody else has it.
            unsafe { (self.library.scsi_free_scsi_task)(*task) };
        }
    }
}
