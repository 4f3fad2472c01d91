//! A session with a target: a context of libiscsi, which one thread uses. All calls of the library are here.

mod probe;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::{Duration, Instant};

use guestmem::IoVec;
use libc::{c_int, c_void};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::address::Address;
use crate::command::{self, Cdb};
use crate::ffi::{Context, Library, SESSION_NORMAL, STATUS_NO_ANSWER, Task, XFER};
use crate::isid::Isid;
use crate::sense::Answer;
use crate::unit::{LUNS_MAX, Unit};

/// Commands of I/O in flight at most.
pub(crate) const DEPTH: u16 = 256;
/// The place of commands with memory of the session's own.
const OWN: u16 = DEPTH;
/// Not that of a command: the connection with its login, and the logout.
const CONNECT: usize = DEPTH as usize + 1;
const LOGOUT: usize = DEPTH as usize + 2;

/// Bytes of memory for what a LUN says of itself, and the target of its LUNs.
const OWN_LEN: usize = 8 + 8 * LUNS_MAX;
/// How long a target may take to be connected to, to take the login and to say what the LUN is.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to answer the logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often somebody who waits for the target looks whether that is still wanted.
const LOOK: Duration = Duration::from_millis(250);
/// Of TCP: seconds of silence after which it asks whether the peer is there, seconds between two such
/// questions, how many are not answered before the connection is given up; and milliseconds that what was sent
/// may stay without acknowledgement.
const KEEPALIVE: [c_int; 3] = [5, 2, 5];
const UNACKNOWLEDGED_MS: c_int = 15_000;

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

/// Why there is no session.
#[derive(Debug)]
pub(crate) struct NoSession {
    /// As a clause.
    pub why: String,
    /// There was no answer for too long.
    pub silent: bool,
}

impl From<String> for NoSession {
    fn from(why: String) -> NoSession {
        NoSession { why, silent: false }
    }
}

/// As whom one logs in, and where.
#[derive(Clone, Copy)]
pub(crate) struct Identity<'a> {
    pub address: &'a Address,
    /// Name of the initiator.
    pub initiator: &'a str,
    /// Of the initiator's session (RFC 7143 10.1.1): a login with the same one ends the session before.
    pub isid: Isid,
}

thread_local! {
    /// What has ended within a call of the library on this thread: which, and how.
    static ENDED: RefCell<Vec<(usize, c_int)>> = const { RefCell::new(Vec::new()) };
    /// Why a login failed: what the library says then it does not say for long.
    static REFUSED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Called by libiscsi on the thread that called it.
extern "C" fn ended(context: Context, status: c_int, _: *mut c_void, which: *mut c_void) {
    if which as usize == CONNECT && status != 0 {
        REFUSED.set(error_of(context));
    }
    ENDED.with_borrow_mut(|ended| ended.push((which as usize, status)));
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
    /// Connects, logs in and finds out what the LUN is; takes some seconds at most. `wake` becomes readable when
    /// `wanted` is to be called, which says whether all that is still wanted.
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub(crate) fn establish(
        identity: Identity<'_>,
        wake: Option<BorrowedFd<'_>>,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<(Session, Unit), NoSession> {
        let mut waiting = Waiting { until: Instant::now() + LOGIN_TIMEOUT, wake, wanted };
        let mut session = Session::log_in(identity, &mut waiting)?;
        let unit = session.probe(identity.address, &mut waiting)?;
        Ok((session, unit))
    }

    fn log_in(identity: Identity<'_>, waiting: &mut Waiting<'_>) -> Result<Session, NoSession> {
        let mut session = Session::begin(identity)?;
        let portal = identity.address.portal();
        while !session.logged_in {
            session.wait_while(waiting).map_err(|why| match why {
                Why::Lost => {
                    NoSession::from(format!("{portal} cannot be logged in to: {}", session.error()))
                }
                Why::Silent => NoSession {
                    why: format!(
                        "{portal} has not answered the login: look at the target and the network"
                    ),
                    silent: true,
                },
            })?;
        }
        Ok(session)
    }

    fn begin(identity: Identity<'_>) -> Result<Session, String> {
        let Identity { address, initiator, isid } = identity;
        let library = Library::loaded().map_err(|e| e.to_string())?;
        let text = |text: &str| CString::new(text).map_err(|_| "a name has a zero byte".to_owned());
        let (initiator, target) = (text(initiator)?, text(&address.target)?);
        let portal = text(&address.portal())?;
        // SAFETY: a zero-terminated text.
        let context = unsafe { (library.iscsi_create_context)(initiator.as_ptr()) };
        if context.is_null() {
            return Err("there is no memory for a session, or the initiator has no name".to_owned());
        }
        REFUSED.take();
        let mut session = Session {
            library,
            context,
            lun: address.lun_field(),
            tasks: vec![ptr::null_mut(); usize::from(DEPTH) + 1].into(),
            answers: VecDeque::with_capacity(usize::from(DEPTH)),
            lost: false,
            logged_in: false,
            logged_out: false,
            own: Box::new([0; OWN_LEN]),
            own_run: Box::new([IoVec::EMPTY]),
            own_answer: None,
            late_failure: false,
            early: Vec::with_capacity(usize::from(DEPTH)),
        };
        let Isid([a, b, c, d, e]) = isid;
        let (random, qualifier) =
            (u32::from_be_bytes([0, a, b, c]), u32::from_be_bytes([0, 0, d, e]));
        let [idle, interval, count] = KEEPALIVE;
        // SAFETY: a context of this thread, and zero-terminated texts, which are copied.
        unsafe {
            (library.iscsi_set_targetname)(context, target.as_ptr());
            (library.iscsi_set_session_type)(context, SESSION_NORMAL);
            (library.iscsi_set_isid_random)(context, random, qualifier);
            // It would take another identifier, so that the old session went on beside the new one.
            (library.iscsi_set_noautoreconnect)(context, 1);
            (library.iscsi_set_tcp_keepidle)(context, idle);
            (library.iscsi_set_tcp_keepintvl)(context, interval);
            (library.iscsi_set_tcp_keepcnt)(context, count);
            (library.iscsi_set_tcp_user_timeout)(context, UNACKNOWLEDGED_MS);
        }
        if let Some(login) = &address.login {
            let (user, password) = (text(&login.user)?, text(&login.password)?);
            // SAFETY: as above.
            unsafe {
                (library.iscsi_set_initiator_username_pwd)(
                    context,
                    user.as_ptr(),
                    password.as_ptr(),
                );
            }
        }
        if let Some(login) = &address.target_login {
            let (user, password) = (text(&login.user)?, text(&login.password)?);
            // SAFETY: as above.
            unsafe {
                (library.iscsi_set_target_username_pwd)(context, user.as_ptr(), password.as_ptr());
            }
        }
        let which = CONNECT as *mut c_void;
        // SAFETY: as above; without a LUN it is only logged in.
        let begun = unsafe {
            (library.iscsi_full_connect_async)(context, portal.as_ptr(), -1, ended, which)
        };
        session.take_ended();
        if begun != 0 {
            return Err(format!(
                "{} cannot be connected to: {}",
                address.portal(),
                session.error()
            ));
        }
        Ok(session)
    }

    /// Why there is no login.
    fn error(&self) -> String {
        let refused = REFUSED.take();
        let said = if refused.is_empty() { error_of(self.context) } else { refused };
        if said.is_empty() { "the connection was closed".to_owned() } else { said }
    }

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

    /// Takes what has ended since the last call.
    fn take_ended(&mut self) {
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

    fn wait_while(&mut self, waiting: &mut Waiting<'_>) -> Result<(), Why> {
        self.wait(waiting.wake, LOOK);
        if !(waiting.wanted)() || Instant::now() >= waiting.until {
            return Err(Why::Silent);
        }
        if self.lost { Err(Why::Lost) } else { Ok(()) }
    }

    /// Logs out, if nothing is in flight, as far as the target answers in a moment.
    pub(crate) fn log_out(mut self) {
        if self.lost || !self.logged_in || self.tasks.iter().any(|task| !task.is_null()) {
            return;
        }
        let until = Instant::now() + LOGOUT_TIMEOUT;
        // SAFETY: a context of this thread.
        let asked = unsafe {
            (self.library.iscsi_logout_async)(self.context, ended, LOGOUT as *mut c_void)
        };
        while asked == 0 && !self.logged_out && !self.lost && Instant::now() < until {
            self.wait(None, LOOK);
        }
    }
}

impl Drop for Session {
    /// Nothing of anybody's memory is used from then on.
    fn drop(&mut self) {
        // SAFETY: a context of this thread, used by nobody any more.
        unsafe { (self.library.iscsi_destroy_context)(self.context) };
        // What was in flight.
        ENDED.with_borrow_mut(Vec::clear);
        for task in self.tasks.iter().filter(|task| !task.is_null()) {
            // SAFETY: the context is gone, so nobody else has it.
            unsafe { (self.library.scsi_free_scsi_task)(*task) };
        }
    }
}

/// Whoever waits for the target.
struct Waiting<'a> {
    until: Instant,
    wake: Option<BorrowedFd<'a>>,
    wanted: &'a mut dyn FnMut() -> bool,
}

/// Why there was no answer.
enum Why {
    Lost,
    Silent,
}
