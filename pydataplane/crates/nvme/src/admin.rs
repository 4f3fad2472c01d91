//! The admin queue at work: the controller is kept alive, and asked again for what it says has changed.

use std::time::{Duration, Instant};

use reactor::IoContext;

use crate::ana::{Groups, Limits};
use crate::buffer::Buffer;
use crate::command::{self, Command, IDENTIFY_LEN, identify, property};
use crate::conversation::{Data, Ended};
use crate::identify::{Controller, Namespace, active, chosen};
use crate::name::{Identified, Name};
use crate::queue::{Link, Queue};
use crate::shared::Shared;
use crate::status::words;

/// Commands, by tag.
const EVENT: u32 = 0;
const KEEP_ALIVE: u32 = 1;
const LOOK: u32 = 2;
const CONFIGURE: u32 = 3;
const STATUS: u32 = 4;

/// How often namespaces are looked at whose controller does not tell of changes.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long each command of a look may take; a keep-alive timeout where that is longer.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// What a look asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    Ana,
    Changed,
    /// Of one that is a bdev, and of one that is none.
    Namespace(Subject),
    Descriptors(Subject),
    Active,
}

/// A namespace that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Unit(usize),
    /// By its number.
    New(u32),
}

/// What was heard.
pub(crate) enum Heard {
    /// How groups of namespaces can be used now.
    Groups(Groups),
    /// What a namespace is now; one that is no bdev yet, too.
    Namespace(Namespace),
    /// It is not there any more.
    Absent(usize),
    /// Number of one of its bdevs that no bdev can be on any more, and why.
    Unusable(u32, String),
    /// A property was set, or not.
    Configured(bool),
    /// The status of the controller (CSTS).
    Status(u64),
}

/// The queue, and what is asked over it.
pub(crate) struct Admin {
    // First: what it has in flight uses the rest.
    pub(crate) queue: Queue,
    buffer: Buffer,
    /// For the log page of asymmetric access, if there is any.
    log: Option<(Buffer, Limits)>,
    /// What was told of the namespace that more is asked of.
    before: Box<[u8; IDENTIFY_LEN]>,
    serial: String,
    keep_alive: Duration,
    tells_namespaces: bool,
    /// Units that the look has gone through: what becomes one later is looked at by its number.
    through: usize,
    /// Numbers of namespaces that are to be looked at, the next one last.
    news: Vec<u32>,
    /// When the last Keep Alive went off, and whether it waits for its answer.
    kept: Instant,
    waits: bool,
    look: Option<Look>,
    wants_groups: bool,
    wants_namespaces: bool,
    looked: Instant,
    /// When the command of the look that is under way was sent.
    asked: Instant,
}

impl Admin {
    pub(crate) fn new(
        link: Link,
        io: &IoContext,
        now: Instant,
        keep_alive: Duration,
        of: &Controller,
        serial: String,
    ) -> std::io::Result<Admin> {
        let queue = Queue::new(link, io, true)?;
        let mut admin = Admin {
            queue,
            buffer: Buffer::new(IDENTIFY_LEN),
            log: of.ana_log().map(|(len, limits)| (Buffer::new(len), limits)),
            before: Box::new([0; IDENTIFY_LEN]),
            serial,
            keep_alive,
            tells_namespaces: of.tells_namespaces,
            through: 0,
            news: Vec::new(),
            kept: now,
            waits: false,
            look: None,
            wants_groups: false,
            wants_namespaces: false,
            looked: now,
            asked: now,
        };
        admin.ask(command::async_event(), Data::None, EVENT);
        Ok(admin)
    }

    fn ask(&mut self, command: Command, data: Data, tag: u32) {
        let taken = self.queue.talk.submit(command, data, tag);
        debug_assert!(taken, "one command of a tag at a time");
    }

    /// Sets the controller's configuration; heard as [`Heard::Configured`].
    pub(crate) fn configure(&mut self, value: u32) {
        let command = command::property_set(property::CONFIGURATION, value);
        self.ask(command, Data::None, CONFIGURE);
    }

    /// Asks for the controller's status; heard as [`Heard::Status`].
    pub(crate) fn ask_status(&mut self) {
        self.ask(command::property_get(property::STATUS, false), Data::None, STATUS);
    }

    /// The states of groups are to be asked for, if there are any.
    pub(crate) fn want_groups(&mut self) {
        self.wants_groups = self.log.is_some();
    }

    /// Asks for what is due; when to call it again.
    ///
    /// # Errors
    /// A clause: it does not answer.
    pub(crate) fn step(&mut self, shared: &Shared, now: Instant) -> Result<Instant, String> {
        let since = now - self.kept;
        if self.waits && since >= self.keep_alive {
            let seconds = self.keep_alive.as_secs_f32();
            return Err(format!("it has not answered Keep Alive for {seconds} s"));
        }
        if self.look.is_some() && now - self.asked >= self.keep_alive.max(LOOK_WITHIN) {
            return Err("it has not answered Identify or Get Log Page for too long".to_owned());
        }
        if !self.waits && since >= self.keep_alive / 2 {
            (self.kept, self.waits) = (now, true);
            self.ask(command::keep_alive(), Data::None, KEEP_ALIVE);
        }
        self.wants_namespaces |= !self.tells_namespaces && now - self.looked >= LOOK_EVERY;
        if self.look.is_none() && self.wants_groups {
            self.wants_groups = false;
            self.begin(Look::Ana, shared, now);
        } else if self.look.is_none() && self.wants_namespaces {
            self.wants_namespaces = false;
            self.looked = now;
            self.begin(Look::Changed, shared, now);
        }
        // The thread may sleep from here on.
        self.queue.pump();
        let kept = self.kept + if self.waits { self.keep_alive } else { self.keep_alive / 2 };
        Ok(match self.look {
            Some(_) => kept.min(self.asked + self.keep_alive.max(LOOK_WITHIN)),
            None if self.tells_namespaces => kept,
            None => kept.min(self.looked + LOOK_EVERY),
        })
    }

    fn begin(&mut self, look: Look, shared: &Shared, now: Instant) {
        (self.look, self.asked) = (Some(look), now);
        let nsid = |of: Subject| match of {
            Subject::Unit(unit) => shared.units[unit].namespace.nsid,
            Subject::New(nsid) => nsid,
        };
        let buffer = match (look, &self.log) {
            (Look::Ana, Some((log, _))) => log,
            _ => &self.buffer,
        };
        let command = match look {
            Look::Ana => command::ana_log(buffer.len()),
            Look::Changed => command::changed_namespaces_log(IDENTIFY_LEN),
            Look::Active => command::identify(identify::ACTIVE, 0),
            Look::Namespace(of) => command::identify(identify::NAMESPACE, nsid(of)),
            Look::Descriptors(of) => command::identify(identify::DESCRIPTORS, nsid(of)),
        };
        // SAFETY: one look at a time uses a buffer; the queue is dropped first.
        let data = unsafe { buffer.fill() };
        self.ask(command, data, LOOK);
    }

    /// The next thing that was heard.
    ///
    /// # Errors
    /// A clause: the connection is of no more use.
    pub(crate) fn next(&mut self, shared: &Shared, now: Instant) -> Result<Option<Heard>, String> {
        while let Some(ended) = self.queue.talk.next_ended() {
            if let Some(heard) = self.heard(&ended, shared, now)? {
                return Ok(Some(heard));
            }
        }
        Ok(None)
    }

    fn heard(
        &mut self,
        ended: &Ended,
        shared: &Shared,
        now: Instant,
    ) -> Result<Option<Heard>, String> {
        let completion = ended.completion;
        let good = completion.is_good();
        match ended.tag {
            EVENT if good => {
                self.event(completion.result as u32)?;
                self.ask(command::async_event(), Data::None, EVENT);
            }
            EVENT => {
                tracing::info!("no events of {}: {}", shared.name(), words(&completion));
                self.tells_namespaces = false;
            }
            KEEP_ALIVE if good => self.waits = false,
            KEEP_ALIVE => return Err(format!("it refuses Keep Alive: {}", words(&completion))),
            CONFIGURE => return Ok(Some(Heard::Configured(good))),
            STATUS if good => return Ok(Some(Heard::Status(completion.result & 0xFFFF_FFFF))),
            STATUS => return Err(format!("it refuses Property Get: {}", words(&completion))),
            _ => return self.seen(ended, shared, now),
        }
        Ok(None)
    }

    /// Asynchronous Event Request (base specification 2.1, 5.2.2).
    fn event(&mut self, result: u32) -> Result<(), String> {
        match (result & 7, result >> 8 & 0xFF) {
            // An error: persistent internal error.
            (0, 3) => return Err("its controller has an internal error".to_owned()),
            // A notice: attributes of namespaces, and asymmetric access.
            (2, 0) => self.wants_namespaces = true,
            (2, 3) => self.want_groups(),
            _ => {}
        }
        Ok(())
    }

    /// What a look asked for is there.
    fn seen(
        &mut self,
        ended: &Ended,
        shared: &Shared,
        now: Instant,
    ) -> Result<Option<Heard>, String> {
        let Some(look) = self.look.take() else { return Ok(None) };
        let good = ended.completion.is_good();
        if ended.damaged {
            // Once more.
            self.begin(look, shared, now);
            return Ok(None);
        }
        let mut heard = None;
        let next = match look {
            Look::Ana if !good => {
                let why = words(&ended.completion);
                return Err(format!("it does not tell of asymmetric access: {why}"));
            }
            Look::Ana => {
                let groups = self.log.as_ref().map(|(log, limits)| Groups::parse(log, *limits));
                heard = groups.transpose()?.map(Heard::Groups);
                None
            }
            Look::Changed => Some(Look::Namespace(Subject::Unit(0))),
            Look::Active => {
                let page: Option<&[u8; IDENTIFY_LEN]> =
                    self.buffer[..].try_into().ok().filter(|_| good);
                self.news = page.map(active).transpose()?.unwrap_or_default();
                // Another path may have made units of some meanwhile.
                let is_new = |at: Option<usize>| at.is_none_or(|at| at >= self.through);
                self.news.retain(|nsid| is_new(shared.units.position(*nsid)));
                self.news = chosen(std::mem::take(&mut self.news), &shared.known());
                self.news.reverse();
                self.next_new()
            }
            Look::Namespace(of) if good => {
                self.before.copy_from_slice(&self.buffer);
                Some(Look::Descriptors(of))
            }
            // It is not there now, or that cannot be told; its I/O says so.
            Look::Namespace(of) => {
                if ended.completion.is_of_none() {
                    heard = absent(of);
                }
                self.after(of, shared)
            }
            // What it is cannot be told now.
            Look::Descriptors(of) if !good && !ended.completion.is_unknown() => {
                self.after(of, shared)
            }
            Look::Descriptors(of) => {
                // One of no blocks is not active.
                heard = match self.before[..8] == [0; 8] {
                    true => absent(of),
                    false => self.told(of, good, shared),
                };
                self.after(of, shared)
            }
        };
        if let Some(next) = next {
            self.begin(next, shared, now);
        }
        Ok(heard)
    }

    /// What is looked at after a namespace.
    fn after(&mut self, of: Subject, shared: &Shared) -> Option<Look> {
        match of {
            Subject::Unit(unit) if unit + 1 < shared.units.len() => {
                Some(Look::Namespace(Subject::Unit(unit + 1)))
            }
            Subject::Unit(unit) => {
                self.through = unit + 1;
                // Of one namespace nobody else's matters.
                shared.options.only.is_none().then_some(Look::Active)
            }
            Subject::New(_) => self.next_new(),
        }
    }

    fn next_new(&mut self) -> Option<Look> {
        self.news.pop().map(|nsid| Look::Namespace(Subject::New(nsid)))
    }

    /// What was told of a namespace; `has`: also by descriptors.
    fn told(&self, of: Subject, has: bool, shared: &Shared) -> Option<Heard> {
        let descriptors: Option<&[u8; IDENTIFY_LEN]> =
            if has { self.buffer[..].try_into().ok() } else { None };
        let nsid = match of {
            Subject::Unit(unit) => shared.units[unit].namespace.nsid,
            Subject::New(nsid) => nsid,
        };
        let subnqn = &shared.options.subnqn;
        let name = Name::parse(descriptors, &self.before);
        let used = shared.identity.used(nsid);
        let is = Identified::new(name, subnqn, &self.serial, nsid, used);
        let is = Namespace::parse(nsid, &self.before, is);
        match of {
            // One that no bdev can be on; that is logged with each new connection.
            Subject::New(_) => is.ok().map(Heard::Namespace),
            Subject::Unit(_) => {
                Some(is.map_or_else(|why| Heard::Unusable(nsid, why), Heard::Namespace))
            }
        }
    }
}

/// What is heard of a namespace that is not there.
fn absent(of: Subject) -> Option<Heard> {
    match of {
        Subject::Unit(unit) => Some(Heard::Absent(unit)),
        Subject::New(_) => None,
    }
}
