//! How a session begins and ends: the login and the logout.

use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::{Duration, Instant};

use guestmem::IoVec;
use libc::{c_int, c_void};

use super::answers::{self, CONNECT, LOGOUT, ended};
use super::{DEPTH, OWN_LEN, Session};
use crate::address::Address;
use crate::ffi::{Library, SESSION_NORMAL};
use crate::isid::Isid;
use crate::unit::Unit;

/// How long a target may take to be connected to, to take the login and to say what the LUN is.
pub(super) const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to answer the logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often somebody who waits for the target looks whether that is still wanted.
const LOOK: Duration = Duration::from_millis(250);
/// Of TCP: seconds of silence after which it asks whether the peer is there, seconds between two such
/// questions, how many are not answered before the connection is given up; and milliseconds that what was sent
/// may stay without acknowledgement.
const KEEPALIVE: [c_int; 3] = [5, 2, 5];
const UNACKNOWLEDGED_MS: c_int = 15_000;

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

    pub(super) fn log_in(
        identity: Identity<'_>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Session, NoSession> {
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
        answers::forget_refusal();
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

    pub(super) fn wait_while(&mut self, waiting: &mut Waiting<'_>) -> Result<(), Why> {
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

/// Whoever waits for the target.
pub(super) struct Waiting<'a> {
    pub(super) until: Instant,
    pub(super) wake: Option<BorrowedFd<'a>>,
    pub(super) wanted: &'a mut dyn FnMut() -> bool,
}

/// Why there was no answer.
pub(super) enum Why {
    Lost,
    Silent,
}
