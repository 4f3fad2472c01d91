//! A session with a target: a context of libiscsi, which one thread uses. All calls of the library are here.

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
use crate::command::{self, CAPACITY_LEN, Cdb};
use crate::ffi::{Context, Library, SESSION_NORMAL, STATUS_NO_ANSWER, Task, XFER};
use crate::sense::{Answer, Verdict};
use crate::unit::{self, Capacity, LUNS_MAX, Limits, Mode, Provisioning, Unit};

/// Commands of I/O in flight at most.
pub(crate) const DEPTH: u16 = 256;
/// The place of commands with memory of the session's own.
const OWN: u16 = DEPTH;
/// Not that of a command: the connection with its login, and the logout.
const CONNECT: usize = DEPTH as usize + 1;
const LOGOUT: usize = DEPTH as usize + 2;

/// Bytes of memory for what a LUN says of itself, and the target of its LUNs.
const OWN_LEN: usize = 8 + 8 * LUNS_MAX;
/// Bytes of a page of vital product data that are looked at.
const PAGE_LEN: usize = 1024;
/// How long a target may take to be connected to, to take the login and to say what the LUN is.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long one LUN of many may take to say what it is, and how long all of them are asked.
const LUN_TIMEOUT: Duration = Duration::from_secs(3);
const LIST_WITHIN: Duration = Duration::from_secs(60);
/// How long it may take to answer the logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often somebody who waits for the target looks whether that is still wanted.
const LOOK: Duration = Duration::from_millis(250);
/// Pause before a target that is busy is asked the same again.
const BUSY: Duration = Duration::from_millis(50);
/// Unit attentions that a LUN has to tell at most.
const ATTENTIONS: usize = 32;

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

/// Number of a LUN, and what it is; a clause: it does not say.
pub(crate) type Listed = (u16, Result<Unit, String>);

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

/// The initiator's part of a session's identifier: of the random kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isid(pub(crate) [u8; 5]);

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

    /// Logs in, asks the target for its LUNs, and each disk among them what it is; a clause stands for one that
    /// does not say. Takes some seconds at most, and as many for each LUN that does not answer or ends the session,
    /// after which there is a new one; a minute altogether.
    ///
    /// # Errors
    /// A clause that says what is wrong: nobody is let in, also anew, or the target does not tell its LUNs.
    pub(crate) fn list(identity: Identity<'_>) -> Result<Vec<Listed>, NoSession> {
        let (begun, wanted) = (Instant::now(), &mut || true);
        let mut waiting = Waiting { until: begun + LOGIN_TIMEOUT, wake: None, wanted };
        let mut session = Session::log_in(identity, &mut waiting)?;
        // LUN 0 answers for all, whether it is one or not (SPC-4 6.33).
        session.lun = identity.address.at(0).lun_field();
        session.ask(&command::test_unit_ready(), 0, &mut waiting)?;
        let asked = command::report_luns(OWN_LEN as u32);
        let luns = unit::luns(&session.data_in(&asked, OWN_LEN, &mut waiting)?)?;
        let mut found = Vec::with_capacity(luns.len());
        let mut session = Some(session);
        for lun in luns {
            if begun.elapsed() >= LIST_WITHIN {
                let why = "it was not asked, as the target took too long to tell of others";
                found.push((lun, Err(why.to_owned())));
                continue;
            }
            let mut with = match session.take() {
                Some(session) => session,
                None => {
                    waiting.until = Instant::now() + LOGIN_TIMEOUT;
                    Session::log_in(identity, &mut waiting)?
                }
            };
            waiting.until = Instant::now() + LUN_TIMEOUT;
            let told = with.probe_if_disk(&identity.address.at(lun), &mut waiting);
            // What it has not answered it may answer later.
            let is_of_use = !with.lost && (told.is_ok() || Instant::now() < waiting.until);
            session = is_of_use.then_some(with);
            match told {
                Ok(None) => {}
                Ok(Some(unit)) => found.push((lun, Ok(unit))),
                Err(why) => found.push((lun, Err(why))),
            }
        }
        session.into_iter().for_each(Session::log_out);
        Ok(found)
    }

    /// Logs in and asks the one LUN what it is; a clause stands for what it does not say. `None`: there is no such
    /// disk. Takes some seconds at most.
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub(crate) fn look(identity: Identity<'_>) -> Result<Option<Result<Unit, String>>, NoSession> {
        let wanted = &mut || true;
        let until = Instant::now() + LOGIN_TIMEOUT;
        let mut waiting = Waiting { until, wake: None, wanted };
        let mut session = Session::log_in(identity, &mut waiting)?;
        let told = session.probe_if_disk(identity.address, &mut waiting);
        let late = Instant::now() >= waiting.until;
        match told {
            Err(why) if session.lost || late => Err(NoSession { why, silent: late }),
            told => {
                session.log_out();
                Ok(told.transpose())
            }
        }
    }

    /// What a LUN is; `None`: no disk.
    fn probe_if_disk(
        &mut self,
        address: &Address,
        waiting: &mut Waiting<'_>,
    ) -> Result<Option<Unit>, String> {
        self.lun = address.lun_field();
        match self.is_disk(waiting)? {
            false => Ok(None),
            true => self.probe_lun(address, waiting).map(Some),
        }
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

    /// Whether the LUN says that it is a disk.
    fn is_disk(&mut self, waiting: &mut Waiting<'_>) -> Result<bool, String> {
        self.ask(&command::test_unit_ready(), 0, waiting)?;
        Ok(unit::is_disk(&self.data_in(&command::inquiry(None, 36), 36, waiting)?).is_ok())
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

    /// Asks the LUN and waits for its answer; unit attentions are taken note of.
    fn ask(&mut self, cdb: &Cdb, len: usize, waiting: &mut Waiting<'_>) -> Result<Answer, String> {
        for _ in 0..ATTENTIONS {
            let lost = |_| "the connection to the target is lost".to_owned();
            self.send_own(cdb, len).map_err(lost)?;
            while self.own_answer.is_none() {
                self.wait_while(waiting).map_err(|why| match why {
                    Why::Lost => lost(Lost),
                    Why::Silent => "the target has not answered".to_owned(),
                })?;
            }
            let answer = self.own_answer.take().unwrap_or_default();
            // What it has said before may not hold any more; the first command takes what a new session is told.
            if answer.is_doubtful() && cdb != &command::test_unit_ready() {
                return Err("it changed while it was looked at".to_owned());
            }
            match answer.verdict(bdev::Op::Flush) {
                Verdict::Again => {}
                Verdict::Later => {
                    self.wait(waiting.wake, BUSY);
                    // It has nothing to say, so that may have been no wait at all.
                    std::thread::sleep(BUSY);
                }
                Verdict::Done | Verdict::Failed(_) => return Ok(answer),
            }
        }
        Err("its LUN is busy, or goes on telling of changes".to_owned())
    }

    /// As [`Session::ask`]: what came, if the answer was good.
    fn data_in(
        &mut self,
        cdb: &Cdb,
        len: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Vec<u8>, String> {
        let answer = self.ask(cdb, len, waiting)?;
        let came = len.saturating_sub(answer.missing).min(OWN_LEN);
        Ok(if answer.is_good() { self.own[..came].to_vec() } else { Vec::new() })
    }

    fn probe(&mut self, address: &Address, waiting: &mut Waiting<'_>) -> Result<Unit, String> {
        let of_lun = |why: String| format!("LUN {} of {}: {why}", address.lun, address.target);
        let probed = self.probe_lun(address, waiting);
        probed.map_err(of_lun)
    }

    fn probe_lun(&mut self, address: &Address, waiting: &mut Waiting<'_>) -> Result<Unit, String> {
        const PAGE: u16 = 0xFF;
        let page_len = usize::from(PAGE);
        self.ask(&command::test_unit_ready(), 0, waiting)?;
        unit::is_disk(&self.data_in(&command::inquiry(None, 96), 96, waiting)?)?;
        let capacity =
            Capacity::parse(&self.data_in(&command::read_capacity(), CAPACITY_LEN, waiting)?)?;
        let mut mode = Vec::new();
        for page in [8, 0x3F] {
            if mode.is_empty() {
                mode = self.data_in(&command::mode_sense(page, 0xFF), page_len, waiting)?;
            }
        }
        let pages = self.data_in(&command::inquiry(Some(0), PAGE), page_len, waiting)?;
        let mut page = |number: u8| {
            if !pages.get(4..).unwrap_or_default().contains(&number) {
                return Ok(Vec::new());
            }
            let page = self.data_in(&command::inquiry(Some(number), PAGE), page_len, waiting)?;
            // Old LUNs know one byte of length only.
            if unit::page_len(&page) <= page_len {
                return Ok(page);
            }
            self.data_in(&command::inquiry(Some(number), PAGE_LEN as u16), PAGE_LEN, waiting)
        };
        let (identification, serial) = (page(0x83)?, page(0x80)?);
        let (limits, provisioning) = (page(0xB0)?, page(0xB2)?);
        let identity = unit::identity(&address.target, &identification, &serial);
        let identity = identity.ok_or("it has neither an identification (VPD page 83h) nor a serial number (80h), so it could not be told from another one")?;
        let provisioning = Provisioning::parse(&provisioning);
        let same = self.data_in(&command::report_opcode(0x93, 64), 64, waiting)?;
        Ok(Unit {
            capacity,
            mode: Mode::parse(&mode),
            limits: Limits::parse(&limits),
            same: unit::is_supported(&same) || provisioning.same,
            provisioning,
            identity,
        })
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

impl Isid {
    /// That of a device: the same whenever it is made, so that it ends a session that is left of it.
    pub fn of(initiator: &str, address: &Address, name: &str) -> Isid {
        let text = format!("{initiator}\0{address}\0{name}");
        let [a, b, c, d, e, ..] =
            *uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, text.as_bytes()).as_bytes();
        Isid([a, b, c, d, e])
    }

    /// One that nobody else has, as far as that can be said.
    pub fn random() -> Isid {
        let [a, b, c, d, e, ..] = *uuid::Uuid::new_v4().as_bytes();
        Isid([a, b, c, d, e])
    }

    /// Reads what [`Isid::to_string`] gives.
    pub fn parse(text: &str) -> Option<Isid> {
        let digits =
            text.strip_prefix("80").filter(|digits| digits.len() == 10 && digits.is_ascii())?;
        let mut isid = [0; 5];
        for (byte, at) in isid.iter_mut().zip((0..10).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
        }
        Some(Isid(isid))
    }
}

impl std::fmt::Display for Isid {
    /// Twelve hexadecimal digits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("80")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_is_twelve_digits_of_the_random_kind() {
        let isid = Isid([0, 1, 0xab, 0xff, 9]);
        assert_eq!(isid.to_string(), "800001abff09");
        assert_eq!(Isid::parse("800001abff09"), Some(isid));
        for wrong in ["", "800001abff", "400001abff09", "800001abfg09", "800001abff0900"] {
            assert_eq!(Isid::parse(wrong), None, "{wrong}");
        }
        assert_ne!(Isid::random(), Isid::random());
        let address = |url| Address::parse(url).unwrap();
        let of = Isid::of("i", &address("iscsi://me%one@h/t/1"), "a");
        assert_eq!(Isid::of("i", &address("iscsi://me%two@h/t/1"), "a"), of);
        assert_ne!(Isid::of("i", &address("iscsi://me%one@h/t/2"), "a"), of);
        assert_ne!(Isid::of("j", &address("iscsi://me%one@h/t/1"), "a"), of);
        assert_ne!(Isid::of("i", &address("iscsi://me%one@h/t/1"), "b"), of);
    }
}
