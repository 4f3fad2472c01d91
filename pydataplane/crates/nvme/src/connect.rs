//! An association: the connections to a controller, and what it said of itself, made by a thread that may block.

use std::time::{Duration, Instant};

use reactor::{IoContext, stream};
use rustix::net::sockopt;
use uuid::Uuid;

use crate::address::Address;
use crate::ana::Groups;
use crate::buffer::Buffer;
use crate::command::{self, CONNECT_LEN, Command, IDENTIFY_LEN, feature, identify, property};
use crate::conversation::{Conversation, DEPTH, Data, FABRICS_IN_CAPSULE};
use crate::identify::{Controller, NAMESPACES_MAX, Names, Namespace, active, chosen, group_of};
use crate::name::{Identified, Name, Use};
use crate::queue::{Link, Queue};
use crate::silent;
use crate::status::words;
use crate::wire::{Completion, INIT, Terms, init_request};

/// Entries of the admin queue.
const ADMIN_ENTRIES: u16 = 32;
/// Between two looks whether a controller is ready.
const READY_POLL: Duration = Duration::from_millis(20);
/// Longest wait of the thread for an answer, in microseconds, before it looks at the clock.
const WAIT_US: u64 = 50_000;

/// Added to the time in which a controller notices that it hears nothing, for what is under way in the network.
const MARGIN: Duration = Duration::from_secs(1);

/// Of Asynchronous Event Configuration (Set Features, 0Bh): what a controller may tell of.
const EVENT_NAMESPACES: u32 = 1 << 8;
const EVENT_ANA: u32 = 1 << 11;

/// Who connects, to what.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub subnqn: String,
    pub hostnqn: String,
    pub host: Uuid,
    pub header_digest: bool,
    pub data_digest: bool,
    /// Queues for I/O that are asked for.
    pub queues: u16,
    pub keep_alive: Duration,
    /// The volume whose namespace alone is used; `None`: all are.
    pub only: Option<Uuid>,
    /// By number: what is recorded of namespaces.
    pub recorded: Vec<(u32, Uuid)>,
}

impl Identity {
    /// What the namespace of a number is used as.
    pub(crate) fn used(&self, nsid: u32) -> Use {
        let recorded = || self.recorded.iter().find(|(number, _)| *number == nsid);
        match self.only {
            Some(_) => Use::Volume,
            None => Use::Bdev(recorded().map(|(_, uuid)| *uuid)),
        }
    }
}

/// A namespace, as it was asked.
pub(crate) struct Listed {
    pub nsid: u32,
    /// It was answered what it is.
    pub told: bool,
    /// By this path it cannot be used now (asymmetric access), and may not be told as it is.
    pub is_elsewhere: bool,
    /// `None`: it has none, or does not say.
    pub name: Option<Name>,
    /// A clause: it does not say what it is, or none is that a bdev can be on.
    pub is: Result<Namespace, String>,
}

/// A controller that is ready.
pub(crate) struct Association {
    pub admin: Link,
    pub queues: Vec<Link>,
    pub id: u16,
    pub controller: Controller,
    pub names: Names,
    pub namespaces: Vec<Namespace>,
    /// Asymmetric access; `None`: all namespaces are there.
    pub groups: Option<Groups>,
    pub keep_alive: Duration,
}

impl std::fmt::Debug for Association {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "controller {}", self.id)
    }
}

/// The admin queue of a controller that is ready, and what that said of itself.
struct Ready<'a> {
    admin: OneByOne<'a>,
    id: u16,
    /// Of its queues for I/O.
    entries: u16,
    controller: Controller,
    names: Names,
}

/// Connects to the admin queue of a controller, and has it get ready, until `end`. Whether it does is noted.
///
/// # Errors
/// A clause: it is not there, lets nobody in, or is none that bdevs can be on.
fn ready<'a>(
    address: &Address,
    identity: &Identity,
    io: &'a IoContext,
    end: Instant,
) -> Result<Ready<'a>, String> {
    let begun = Instant::now();
    let ready = get_ready(address, identity, io, end);
    silent::note(&identity.subnqn, address, ready.is_ok(), begun.elapsed());
    ready
}

fn get_ready<'a>(
    address: &Address,
    identity: &Identity,
    io: &'a IoContext,
    end: Instant,
) -> Result<Ready<'a>, String> {
    let mut admin = OneByOne::open(address, identity, io, ADMIN_ENTRIES, FABRICS_IN_CAPSULE, end)?;
    let id = admin.connect(identity, 0, ADMIN_ENTRIES, None)?;
    let capabilities = admin.property(property::CAPABILITIES, true)?;
    let entries = (capabilities as u16).saturating_add(1).clamp(2, DEPTH);
    admin.enable()?;
    let mut data = Box::new([0; IDENTIFY_LEN]);
    admin.identify(identify::CONTROLLER, 0, &mut data)?;
    let page_shift = (capabilities >> 48 & 0xF) as u32;
    let mut controller = Controller::parse(&data, page_shift)?;
    if controller.keep_alive_step_ms == 0 {
        return Err(
            "its controller has no Keep Alive (KAS), without which nobody knows when it has ended what it had to do"
                .to_owned(),
        );
    }
    let names = Names::parse(&data);
    // Controllers before 2.0 have none, whatever they say then.
    match admin.identify(identify::LIMITS, 0, &mut data) {
        Ok(()) => controller.limit(&data, page_shift),
        Err(_) if admin.refused.is_some() => {}
        Err(why) => return Err(why),
    }
    Ok(Ready { admin, id, entries, controller, names })
}

/// Connects to a controller of the subsystem, until `end`. Where it has more namespaces than are used, those of the
/// numbers `known` are used before others.
///
/// # Errors
/// A clause: it is not there, lets nobody in, or is none that bdevs can be on; the one namespace that is used is not
/// there.
pub(crate) fn establish(
    address: &Address,
    identity: &Identity,
    known: &[u32],
    end: Instant,
) -> Result<Association, String> {
    let io = IoContext::new().map_err(|e| format!("no io_uring: {e}"))?;
    let Ready { mut admin, id, entries, controller, names } = ready(address, identity, &io, end)?;
    // Before anything is looked at: what changes from then on is told.
    let mut events = 0;
    for (tells, event) in
        [(controller.tells_namespaces, EVENT_NAMESPACES), (controller.tells_ana, EVENT_ANA)]
    {
        events |= if tells { event } else { 0 };
    }
    if events != 0 {
        admin.ask("Set Features", command::set_features(feature::EVENTS, events), Data::None)?;
    }
    let namespaces = match identity.only {
        Some(only) => vec![admin.only(identity, only, known, &names)?],
        None => admin.namespaces(identity, known, &names)?,
    };
    let groups = admin.groups(&controller)?;
    let asked = u32::from(identity.queues.max(1)) - 1;
    let asked = command::set_features(feature::QUEUES, asked | asked << 16);
    let granted = admin.ask("Set Features", asked, Data::None)?.result as u32;
    let granted = (granted & 0xFFFF).min(granted >> 16).min(0xFFFE) as u16 + 1;
    let mut queues = Vec::new();
    for number in 1..=granted.min(identity.queues.max(1)) {
        let mut queue =
            OneByOne::open(address, identity, &io, entries, controller.in_capsule, end)?;
        queue.connect(identity, number, entries, Some(id))?;
        queues.push(queue.into_link()?);
    }
    let keep_alive = identity.keep_alive;
    let admin = admin.into_link()?;
    Ok(Association { admin, queues, id, controller, names, namespaces, groups, keep_alive })
}

/// Connects to a controller of the subsystem, until `end`, and asks its active namespaces what they are, `within` that
/// time.
///
/// # Errors
/// A clause: it is not there, lets nobody in, or does not answer.
pub(crate) fn list(
    address: &Address,
    identity: &Identity,
    end: Instant,
    within: Duration,
) -> Result<Vec<Listed>, String> {
    let io = IoContext::new().map_err(|e| format!("no io_uring: {e}"))?;
    let Ready { mut admin, names, controller, .. } = ready(address, identity, &io, end)?;
    admin.end = Instant::now() + within;
    let mut listed = Vec::new();
    for nsid in admin.active()? {
        let (namespace, group) = admin.namespace(identity, &names, nsid)?;
        listed.push((namespace, group));
    }
    // Where it does not say, what it told of the namespaces is taken.
    let groups = admin.groups(&controller).ok().flatten();
    let of = |(mut namespace, group): (Listed, u32)| {
        let unusable = groups.as_ref().is_some_and(|groups| !groups.of(group).is_usable());
        namespace.is_elsewhere |= namespace.told && unusable;
        namespace
    };
    Ok(listed.into_iter().map(of).collect())
}

/// How long a controller that hears nothing more of this host may still carry out what it has: three times the
/// keep-alive timeout, twice where it does not count commands for it (TBKAS), and the time to quiesce that it tells (CQT);
/// base specification 2.1, 9.6, as TP4129 has it. The timeout is in steps of the controller's (KAS), rounded up.
pub(crate) fn expires(keep_alive: Duration, of: &Controller) -> Duration {
    let step = of.keep_alive_step_ms.max(1);
    let kept = Duration::from_millis((keep_alive.as_millis() as u64).next_multiple_of(step));
    let times = if of.traffic_based { 3 } else { 2 };
    kept * times + Duration::from_millis(of.quiesce_ms) + MARGIN
}

/// A connection that one command at a time goes over.
struct OneByOne<'a> {
    // First: what it has in flight uses the buffers.
    queue: Queue,
    io: &'a IoContext,
    buffer: Buffer,
    log: Option<Buffer>,
    end: Instant,
    /// How the last command ended, if not well.
    refused: Option<Completion>,
}

impl<'a> OneByOne<'a> {
    fn open(
        address: &Address,
        identity: &Identity,
        io: &'a IoContext,
        entries: u16,
        in_capsule: usize,
        end: Instant,
    ) -> Result<OneByOne<'a>, String> {
        let left = end.saturating_duration_since(Instant::now());
        let fd = stream::connect_tcp(&address.0, left.max(Duration::from_millis(1)))
            .map_err(|e| format!("it cannot be connected to: {e}"))?;
        // Closing it resets it, also when this process is killed: the kernel is not to send on what the controller
        // would carry out later.
        sockopt::set_socket_linger(&fd, Some(Duration::ZERO)).map_err(|e| e.to_string())?;
        let Identity { header_digest, data_digest, .. } = *identity;
        let request = init_request(header_digest, data_digest);
        let failed = |e| format!("it does not answer as a controller over TCP does: {e}");
        stream::transmit(&fd, &request, end).map_err(failed)?;
        let mut answer = [0; INIT];
        stream::receive(&fd, &mut answer, end).map_err(failed)?;
        let terms = Terms::parse(&answer, header_digest, data_digest)?;
        stream::unlimit(&fd).map_err(failed)?;
        // One entry of a queue stays free.
        let talk = Conversation::new(terms, entries - 1, in_capsule);
        let queue = Queue::new(Link { fd, talk }, io, false).map_err(failed)?;
        let buffer = Buffer::new(IDENTIFY_LEN);
        Ok(OneByOne { queue, io, buffer, log: None, end, refused: None })
    }

    /// Carries out a command; what has failed for another reason than that it was refused may still be in flight.
    fn ask(&mut self, what: &str, command: Command, data: Data) -> Result<Completion, String> {
        self.refused = None;
        let taken = self.queue.talk.submit(command, data, 0);
        debug_assert!(taken, "one command at a time");
        let mut ended = None;
        loop {
            ended = ended.or_else(|| self.queue.talk.next_ended());
            if let Some(ended) = ended.as_ref().filter(|_| self.queue.is_idle()) {
                if ended.damaged {
                    return Err(format!("it answers {what} with data that came damaged"));
                }
                let is_good = ended.completion.is_good();
                self.refused = (!is_good).then_some(ended.completion);
                return match is_good {
                    true => Ok(ended.completion),
                    false => Err(format!("it refuses {what}: {}", words(&ended.completion))),
                };
            }
            if let Some(why) = self.queue.broken() {
                return Err(format!("it is lost with {what}: {why}"));
            }
            if Instant::now() >= self.end {
                return Err(format!("it does not answer {what}"));
            }
            self.queue.pump();
            self.io.wait(WAIT_US).map_err(|e| format!("no io_uring: {e}"))?;
            self.queue.poll();
        }
    }

    /// Makes it be a queue of the controller, whose number is returned.
    fn connect(
        &mut self,
        identity: &Identity,
        number: u16,
        entries: u16,
        controller: Option<u16>,
    ) -> Result<u16, String> {
        let Identity { host, subnqn, hostnqn, keep_alive, .. } = identity;
        self.buffer[..CONNECT_LEN]
            .copy_from_slice(&command::connect_data(*host, controller, subnqn, hostnqn));
        let keep_alive = if number == 0 { keep_alive.as_millis() as u32 } else { 0 };
        let command = command::connect(number, entries, keep_alive);
        // SAFETY: the first command of a queue, which is dropped first.
        let data = unsafe { self.buffer.send(CONNECT_LEN) };
        let told = self.ask("Connect", command, data)?.result;
        // ATR or ASCR.
        if told >> 17 & 3 != 0 {
            return Err(
                "it wants this host to authenticate (DH-HMAC-CHAP), which is not supported".into(),
            );
        }
        Ok(told as u16)
    }

    fn property(&mut self, property: u32, is_long: bool) -> Result<u64, String> {
        let told =
            self.ask("Property Get", command::property_get(property, is_long), Data::None)?;
        Ok(if is_long { told.result } else { told.result & 0xFFFF_FFFF })
    }

    /// Enables the controller, and waits until it is ready.
    fn enable(&mut self) -> Result<(), String> {
        let enable = command::property_set(property::CONFIGURATION, property::ENABLE);
        self.ask("Property Set", enable, Data::None)?;
        loop {
            let status = self.property(property::STATUS, false)?;
            if status & 2 != 0 {
                return Err("its controller has failed (CSTS.CFS)".to_owned());
            }
            if status & 1 != 0 {
                return Ok(());
            }
            if Instant::now() >= self.end {
                return Err("its controller does not become ready".to_owned());
            }
            std::thread::sleep(READY_POLL);
        }
    }

    fn identify(
        &mut self,
        cns: u8,
        nsid: u32,
        into: &mut [u8; IDENTIFY_LEN],
    ) -> Result<(), String> {
        // SAFETY: nobody goes on after a command that may still be in flight; the queue is dropped first.
        let data = unsafe { self.buffer.fill() };
        self.ask("Identify", command::identify(cns, nsid), data)?;
        into.copy_from_slice(&self.buffer);
        Ok(())
    }

    /// How groups of namespaces can be used; `None`: all can.
    fn groups(&mut self, of: &Controller) -> Result<Option<Groups>, String> {
        let Some((len, limits)) = of.ana_log() else { return Ok(None) };
        let log = self.log.insert(Buffer::new(len));
        // SAFETY: asked for once, into a buffer of its own; the queue is dropped first.
        let data = unsafe { log.fill() };
        self.ask("Get Log Page", command::ana_log(len), data)?;
        self.log.as_deref().map(|log| Groups::parse(log, limits)).transpose()
    }

    /// The numbers of the active namespaces.
    fn active(&mut self) -> Result<Vec<u32>, String> {
        let mut data = Box::new([0; IDENTIFY_LEN]);
        self.identify(identify::ACTIVE, 0, &mut data)?;
        active(&data)
    }

    /// What an active namespace is, and the group that it is in; one that is not there by now, or does not say, is none
    /// that a bdev can be on.
    ///
    /// # Errors
    /// A clause: the controller does not answer.
    fn namespace(
        &mut self,
        who: &Identity,
        names: &Names,
        nsid: u32,
    ) -> Result<(Listed, u32), String> {
        let mut data = Box::new([0; IDENTIFY_LEN]);
        let mut descriptors = Box::new([0; IDENTIFY_LEN]);
        let mut asked = self.identify(identify::NAMESPACE, nsid, &mut data);
        let mut tells = false;
        if asked.is_ok() {
            // Controllers before 1.3 have none.
            match self.identify(identify::DESCRIPTORS, nsid, &mut descriptors) {
                Ok(()) => tells = true,
                Err(_) if self.refused.is_some_and(|how| how.is_unknown()) => {}
                Err(why) => asked = Err(why),
            }
        }
        let group = group_of(&data);
        match (asked, self.refused) {
            (Err(why), Some(how)) => {
                let is_elsewhere = how.is_of_path();
                let listed = Listed { nsid, told: false, is_elsewhere, name: None, is: Err(why) };
                return Ok((listed, group));
            }
            (asked, _) => asked?,
        }
        let name = Name::parse(tells.then_some(&*descriptors), &data);
        let identified = Identified::new(name, &who.subnqn, &names.serial, nsid, who.used(nsid));
        let is = Namespace::parse(nsid, &data, identified);
        Ok((Listed { nsid, told: true, is_elsewhere: false, name, is }, group))
    }

    /// The active namespaces that bdevs can be on; of the others it is logged why not, and if there is no other, an
    /// error.
    fn namespaces(
        &mut self,
        who: &Identity,
        known: &[u32],
        names: &Names,
    ) -> Result<Vec<Namespace>, String> {
        let (mut found, mut refused) = (Vec::new(), None);
        let active = self.active()?;
        if active.len() > NAMESPACES_MAX {
            let count = active.len();
            tracing::warn!(
                subsystem = who.subnqn,
                "it has {count} namespaces, of which {NAMESPACES_MAX} are used"
            );
        }
        for nsid in chosen(active, known) {
            let (listed, _) = self.namespace(who, names, nsid)?;
            match listed.is {
                Ok(namespace) => found.push(namespace),
                Err(why) if !listed.told => return Err(why),
                Err(why) => {
                    tracing::warn!(subsystem = who.subnqn, "{why}");
                    refused.get_or_insert(why);
                }
            }
        }
        match (found.is_empty(), refused) {
            (true, Some(why)) => Err(why),
            (true, None) => Err("it shows this host no namespace".to_owned()),
            (false, _) => Ok(found),
        }
    }

    /// The active namespace of the volume `only`, that of one of the numbers `known` before others.
    ///
    /// # Errors
    /// A clause: there is none, or none that a bdev can be on.
    fn only(
        &mut self,
        who: &Identity,
        only: Uuid,
        known: &[u32],
        names: &Names,
    ) -> Result<Namespace, String> {
        let mut active = self.active()?;
        active.sort_by_key(|nsid| !known.contains(nsid));
        for nsid in active {
            let (Listed { name, is, .. }, _) = self.namespace(who, names, nsid)?;
            // What has no name goes by its number, which another one may have by now.
            if name.is_some_and(|name| name.volume(&who.subnqn) == only) {
                return is;
            }
        }
        Err(format!("it does not show this host the namespace of the volume {only}"))
    }

    fn into_link(self) -> Result<Link, String> {
        self.queue.into_link().ok_or_else(|| "it sends what was not asked for".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::tests::controller_data;

    #[test]
    fn a_controller_is_waited_for_as_long_as_it_may_need_to_notice_and_to_quiesce() {
        let of = |ms, traffic_based: bool, step, quiesce_ms: u16| {
            let mut data = controller_data();
            (data[96], data[320]) = (u8::from(traffic_based) << 6, step);
            data[386..388].copy_from_slice(&quiesce_ms.to_le_bytes());
            let controller = Controller::parse(&data, 0).unwrap();
            expires(Duration::from_millis(ms), &controller) - MARGIN
        };
        assert_eq!(of(10_000, true, 10, 0), Duration::from_secs(30));
        assert_eq!(of(10_000, false, 10, 0), Duration::from_secs(20));
        assert_eq!(of(10_000, false, 1, 1500), Duration::from_millis(21_500));
        // Rounded up to its steps, as it does.
        assert_eq!(of(1100, true, 10, 0), Duration::from_secs(6));
    }
}
