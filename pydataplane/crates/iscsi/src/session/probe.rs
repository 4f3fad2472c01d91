//! What a target's LUNs say that they are, asked over a session.

use std::thread;
use std::time::{Duration, Instant};

use super::login::{LOGIN_TIMEOUT, Waiting, Why};
use super::{Identity, Lost, NoSession, OWN_LEN, Session};
use crate::address::Address;
use crate::command::{self, CAPACITY_LEN, Cdb};
use crate::sense::{Answer, Verdict};
use crate::unit::{self, Capacity, Limits, Mode, Provisioning, Unit};

/// Bytes of a page of vital product data that are looked at.
const PAGE_LEN: usize = 1024;
/// How long one LUN of many may take to say what it is, and how long all of them are asked.
const LUN_TIMEOUT: Duration = Duration::from_secs(3);
const LIST_WITHIN: Duration = Duration::from_secs(60);
/// Pause before a target that is busy is asked the same again.
const BUSY: Duration = Duration::from_millis(50);
/// Unit attentions that a LUN has to tell at most.
const ATTENTIONS: usize = 32;

/// Number of a LUN, and what it is; a clause: it does not say.
pub(crate) type Listed = (u16, Result<Unit, String>);

impl Session {
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
    pub(super) fn probe_if_disk(
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

    /// Whether the LUN says that it is a disk.
    pub(super) fn is_disk(&mut self, waiting: &mut Waiting<'_>) -> Result<bool, String> {
        self.ask(&command::test_unit_ready(), 0, waiting)?;
        Ok(unit::is_disk(&self.data_in(&command::inquiry(None, 36), 36, waiting)?).is_ok())
    }

    /// Asks the LUN and waits for its answer; unit attentions are taken note of.
    pub(super) fn ask(
        &mut self,
        cdb: &Cdb,
        len: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Answer, String> {
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
                    thread::sleep(BUSY);
                }
                Verdict::Done | Verdict::Failed(_) => return Ok(answer),
            }
        }
        Err("its LUN is busy, or goes on telling of changes".to_owned())
    }

    /// As [`Session::ask`]: what came, if the answer was good.
    pub(super) fn data_in(
        &mut self,
        cdb: &Cdb,
        len: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Vec<u8>, String> {
        let answer = self.ask(cdb, len, waiting)?;
        let came = len.saturating_sub(answer.missing).min(OWN_LEN);
        Ok(if answer.is_good() { self.own[..came].to_vec() } else { Vec::new() })
    }

    pub(super) fn probe(
        &mut self,
        address: &Address,
        waiting: &mut Waiting<'_>,
    ) -> Result<Unit, String> {
        let of_lun = |why: String| format!("LUN {} of {}: {why}", address.lun, address.target);
        let probed = self.probe_lun(address, waiting);
        probed.map_err(of_lun)
    }

    pub(super) fn probe_lun(
        &mut self,
        address: &Address,
        waiting: &mut Waiting<'_>,
    ) -> Result<Unit, String> {
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
}
