//! What libiscsi calls back when something has ended, and what comes of it.

use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr;

use libc::{c_int, c_void};
use rustix::event::PollFlags;

use super::{DEPTH, Data, OWN, Session};
use crate::command;
use crate::ffi::{Context, Library, STATUS_NO_ANSWER, Task, XFER};
use crate::sense::Answer;

/// Not that of a command: the connection with its login, and the logout.
pub(super) const CONNECT: usize = DEPTH as usize + 1;
pub(super) const LOGOUT: usize = DEPTH as usize + 2;

thread_local! {
    /// What has ended within a call of the library on this thread: which, and how.
    static ENDED: RefCell<Vec<(usize, c_int)>> = const { RefCell::new(Vec::new()) };
    /// Why a login failed: what the library says then it does not say for long.
    static REFUSED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Called by libiscsi on the thread that called it.
pub(super) extern "C" fn ended(
    context: Context,
    status: c_int,
    _: *mut c_void,
    which: *mut c_void,
) {
    if which as usize == CONNECT && status != 0 {
        REFUSED.set(error_of(context));
    }
    ENDED.with_borrow_mut(|ended| ended.push((which as usize, status)));
}

/// Forgets why a login before has failed.
pub(super) fn forget_refusal() {
    REFUSED.take();
}

/// Forgets what has ended of a context that is gone.
pub(super) fn forget_ended() {
    ENDED.with_borrow_mut(Vec::clear);
}

/// What libiscsi says of a context.
fn error_of(context: Context) -> String {
    let Ok(library) = Library::loaded() else { return String::new() };
    // SAFETY: a context of this thread; the text is its own and copied at once.
    let text = unsafe { CStr::from_ptr((library.iscsi_get_error)(context)) };
    let text = text.to_string_lossy();
    // Behind whoever says so in the library.
    if text.contains("Can not resolv") {
        return "its name has no address".to_owned();
    }
    let said = text.rsplit_once("socket error").map_or(&*text, |(_, said)| said);
    said.trim_matches(|c: char| c.is_whitespace() || c == '.').to_owned()
}

impl Session {
    /// Why there is no login.
    pub(super) fn error(&self) -> String {
        let refused = REFUSED.take();
        let said = if refused.is_empty() { error_of(self.context) } else { refused };
        if said.is_empty() { "the connection was closed".to_owned() } else { said }
    }

    /// Takes what has ended since the last call.
    pub(super) fn take_ended(&mut self) {
        let mut all = ENDED.with_borrow_mut(std::mem::take);
        for (which, status) in all.drain(..) {
            let no_answer = status >= STATUS_NO_ANSWER;
            match which {
                CONNECT if status == 0 => self.logged_in = true,
                LOGOUT => self.logged_out = true,
                CONNECT => self.lost = true,
                // What has no answer stays until the context is gone.
                _ if no_answer => self.lost = true,
                // The library still reads what it has not sent of it.
                place if self.sends() && self.has_data_out(place) => {
                    self.early.push((place, status))
                }
                place => self.answered(place, status),
            }
        }
        if !self.early.is_empty() && !self.lost && !self.sends() {
            for (place, status) in std::mem::take(&mut self.early) {
                self.answered(place, status);
            }
        }
        // Its memory is used again.
        ENDED.with_borrow_mut(|ended| {
            if ended.is_empty() {
                *ended = all;
            }
        });
    }

    /// Whether commands or data are to be sent that the target lets be sent. Data of a command goes before all
    /// commands after it.
    fn sends(&self) -> bool {
        // SAFETY: a context of this thread.
        let events = unsafe { (self.library.iscsi_which_events)(self.context) };
        events & c_int::from(PollFlags::OUT.bits() as i16) != 0
    }

    fn has_data_out(&self, place: usize) -> bool {
        let task = self.tasks.get(place).copied().filter(|task| !task.is_null());
        // SAFETY: a task of the library's layout, which nobody has freed.
        task.is_some_and(|task| unsafe { (*task).xfer_dir } == XFER[Data::Out as usize])
    }

    /// Whether nothing more is to be sent for now: an answer waits until all is sent that was given to the
    /// library, and is taken for none if the session is lost before.
    pub(crate) fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    fn answered(&mut self, place: usize, status: c_int) {
        let Some(task) = self.tasks.get_mut(place) else { return };
        let task = std::mem::replace(task, ptr::null_mut());
        if task.is_null() {
            return;
        }
        // SAFETY: a task that has ended, of the library's layout.
        let Task { expxferlen, cdb, residual_status, residual, datain_len, datain, .. } =
            unsafe { &*task };
        // Without data there is nothing that could be left; and tgtd says of each UNMAP that its list was.
        let kind = if *expxferlen == 0 || cdb[0] == command::UNMAP { 0 } else { *residual_status };
        let mut answer = Answer {
            status,
            missing: if kind == 1 { *residual } else { 0 },
            excess: kind == 2,
            ..Answer::default()
        };
        if answer.has_sense() && !datain.is_null() {
            let len = usize::try_from(*datain_len).unwrap_or(0);
            // SAFETY: so many bytes, which the task has until it is freed.
            let came = unsafe { std::slice::from_raw_parts(*datain, len) };
            answer.parse_sense(came.get(2..).unwrap_or_default());
        }
        self.late_failure |= answer.is_late_failure();
        // SAFETY: it has ended, and nobody else has it.
        unsafe { (self.library.scsi_free_scsi_task)(task) };
        match place as u16 {
            OWN => self.own_answer = Some(answer),
            place => self.answers.push_back((place, answer)),
        }
    }

    /// Whether the LUN has told, since the last call, that something which it had answered is lost.
    pub(crate) fn take_late_failure(&mut self) -> bool {
        std::mem::take(&mut self.late_failure)
    }

    /// The next command that was answered: its place, and how.
    pub(crate) fn next_answer(&mut self) -> Option<(u16, Answer)> {
        self.answers.pop_front()
    }
}
