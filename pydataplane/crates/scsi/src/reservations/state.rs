//! Who has registered with a volume, who holds its reservation, and what follows from that for others
//! (SPC-4 5.13). Pure: it decides, and says whom to tell; nothing is sent, saved or aborted here.

use std::sync::Arc;

/// Most registrants of a volume.
pub(crate) const MAX_REGISTRANTS: usize = 256;

/// An initiator's port with a port of ours (an I_T nexus), by a name that restarts do not change.
pub(crate) type NexusName = Arc<str>;

/// What a reservation keeps from whom (SPC-4 6.15.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Type {
    WriteExclusive,
    ExclusiveAccess,
    WriteExclusiveRegistrantsOnly,
    ExclusiveAccessRegistrantsOnly,
    WriteExclusiveAllRegistrants,
    ExclusiveAccessAllRegistrants,
}

impl Type {
    /// All, with their codes.
    const CODES: [(u8, Type); 6] = [
        (1, Type::WriteExclusive),
        (3, Type::ExclusiveAccess),
        (5, Type::WriteExclusiveRegistrantsOnly),
        (6, Type::ExclusiveAccessRegistrantsOnly),
        (7, Type::WriteExclusiveAllRegistrants),
        (8, Type::ExclusiveAccessAllRegistrants),
    ];

    pub(crate) fn of(code: u8) -> Option<Type> {
        Type::CODES.into_iter().find(|(of, _)| *of == code).map(|(_, kind)| kind)
    }

    pub(crate) fn code(self) -> u8 {
        Type::CODES.into_iter().find(|(_, kind)| *kind == self).map_or(0, |(code, _)| code)
    }

    /// Every registrant holds it.
    pub(crate) fn is_of_all(self) -> bool {
        matches!(self, Type::WriteExclusiveAllRegistrants | Type::ExclusiveAccessAllRegistrants)
    }

    /// Every registrant may do what its holder may.
    fn lets_registrants(self) -> bool {
        !matches!(self, Type::WriteExclusive | Type::ExclusiveAccess)
    }

    fn lets_all_read(self) -> bool {
        matches!(
            self,
            Type::WriteExclusive
                | Type::WriteExclusiveRegistrantsOnly
                | Type::WriteExclusiveAllRegistrants
        )
    }
}

/// What a nexus may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Full,
    /// It may read.
    Read,
    /// Only what tells about the unit.
    Nothing,
    /// As `Nothing`, by RESERVE(6), which does not even tell who has registered.
    Reserved,
    /// Less than `Nothing`, as what was kept cannot be read for now (SPC-4 5.13.5.2).
    Unread,
    /// As `Unread`, but for who replaces it, as it is lost (SPC-4 5.13.5.3.2).
    Lost,
}

/// What the other nexuses are told by a unit attention (SPC-4 5.13.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// 2Ah/03h RESERVATIONS PREEMPTED.
    ReservationsPreempted,
    /// 2Ah/04h RESERVATIONS RELEASED.
    ReservationsReleased,
    /// 2Ah/05h REGISTRATIONS PREEMPTED.
    RegistrationsPreempted,
}

/// What follows from a change for others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) told: Vec<(NexusName, Told)>,
    /// Who lost its registration to another.
    pub(crate) preempted: Vec<NexusName>,
}

/// Why there was no change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// RESERVATION CONFLICT.
    Conflict,
    /// 26h/04h INVALID RELEASE OF PERSISTENT RESERVATION.
    Release,
    /// 26h/00h INVALID FIELD IN PARAMETER LIST: the service action reservation key.
    ActionKey,
    /// 55h/04h INSUFFICIENT REGISTRATION RESOURCES.
    Full,
}

/// One registered nexus.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Registrant {
    pub(crate) nexus: NexusName,
    pub(crate) key: u64,
}

/// The reservation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Held {
    /// Whose it is; with a type of all registrants, who reserved.
    pub(crate) by: NexusName,
    pub(crate) kind: Type,
}

/// Of one volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Reservations {
    /// PRGENERATION: counts changes of registrations.
    pub(crate) generation: u32,
    pub(crate) registrants: Vec<Registrant>,
    pub(crate) held: Option<Held>,
    /// They survive a loss of power (APTPL of the last registration).
    pub(crate) persist: bool,
    /// By RESERVE(6), which no restart keeps (SPC-2 5.5.1).
    #[serde(skip)]
    pub(crate) reserved: Option<NexusName>,
}

impl Reservations {
    pub(crate) fn key_of(&self, nexus: &str) -> Option<u64> {
        self.registrants.iter().find(|r| *r.nexus == *nexus).map(|r| r.key)
    }

    /// Whether the nexus holds the reservation.
    pub(crate) fn is_held_by(&self, nexus: &str) -> bool {
        self.held.as_ref().is_some_and(|held| match held.kind.is_of_all() {
            true => self.key_of(nexus).is_some(),
            false => *held.by == *nexus,
        })
    }

    /// What the nexus may do (SPC-4 5.13.1, tables 47 and 48).
    pub(crate) fn access(&self, nexus: &str) -> Access {
        if self.reserved.as_ref().is_some_and(|by| **by != *nexus) {
            return Access::Reserved;
        }
        let Some(held) = &self.held else { return Access::Full };
        let lets = held.kind.lets_registrants() && self.key_of(nexus).is_some();
        match () {
            () if lets || self.is_held_by(nexus) => Access::Full,
            () if held.kind.lets_all_read() => Access::Read,
            () => Access::Nothing,
        }
    }

    /// All registered nexuses but one.
    fn others(&self, than: &str) -> impl Iterator<Item = NexusName> {
        let others = self.registrants.iter().filter(move |r| *r.nexus != *than);
        others.map(|r| Arc::clone(&r.nexus)).collect::<Vec<_>>().into_iter()
    }

    /// The nexus is registered with that key.
    fn check_key(&self, nexus: &str, key: u64) -> Result<(), Refusal> {
        if self.key_of(nexus) == Some(key) { Ok(()) } else { Err(Refusal::Conflict) }
    }

    fn change_registrations(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// REGISTER (SPC-4 5.13.7): `key` is the present one, or 0 for a nexus that is not registered; `None`,
    /// whatever it is (REGISTER AND IGNORE EXISTING KEY). A new key of 0 ends the registration.
    pub(crate) fn register(
        &mut self,
        nexus: &NexusName,
        key: Option<u64>,
        new: u64,
        persist: bool,
    ) -> Result<Changed, Refusal> {
        let present = self.key_of(nexus);
        if key.is_some_and(|key| key != present.unwrap_or(0)) {
            return Err(Refusal::Conflict);
        }
        let mut changed = Changed::default();
        match (present, new) {
            (None, 0) => return Ok(changed),
            (None, key) => {
                if self.registrants.len() == MAX_REGISTRANTS {
                    return Err(Refusal::Full);
                }
                self.registrants.push(Registrant { nexus: Arc::clone(nexus), key });
            }
            (Some(_), 0) => changed = self.unregister(nexus),
            (Some(_), key) => {
                let its = self.registrants.iter_mut().filter(|r| r.nexus == *nexus);
                its.for_each(|r| r.key = key);
            }
        }
        self.persist = persist;
        self.change_registrations();
        Ok(changed)
    }

    /// Ends a registration, and with it the reservation that is its own, or was the last one's of all
    /// (SPC-4 5.13.11.3).
    fn unregister(&mut self, nexus: &str) -> Changed {
        let mut changed = Changed::default();
        self.registrants.retain(|r| *r.nexus != *nexus);
        let Some(held) = &self.held else { return changed };
        let ends = match held.kind.is_of_all() {
            true => self.registrants.is_empty(),
            false => *held.by == *nexus,
        };
        if ends {
            if held.kind.lets_registrants() {
                changed.told =
                    self.others(nexus).map(|n| (n, Told::ReservationsReleased)).collect();
            }
            self.held = None;
        }
        changed
    }

    /// RESERVE (SPC-4 5.13.9).
    pub(crate) fn reserve(
        &mut self,
        nexus: &NexusName,
        key: u64,
        kind: Type,
    ) -> Result<Changed, Refusal> {
        self.check_key(nexus, key)?;
        match &self.held {
            Some(held) if held.kind != kind || !self.is_held_by(nexus) => Err(Refusal::Conflict),
            Some(_) => Ok(Changed::default()),
            None => {
                self.held = Some(Held { by: Arc::clone(nexus), kind });
                Ok(Changed::default())
            }
        }
    }

    /// RELEASE (SPC-4 5.13.11.2).
    pub(crate) fn release(
        &mut self,
        nexus: &str,
        key: u64,
        kind: Type,
    ) -> Result<Changed, Refusal> {
        self.check_key(nexus, key)?;
        let Some(held) = &self.held else { return Ok(Changed::default()) };
        if !self.is_held_by(nexus) {
            return Ok(Changed::default());
        }
        if held.kind != kind {
            return Err(Refusal::Release);
        }
        self.held = None;
        let told = match kind.lets_registrants() {
            true => self.others(nexus).map(|n| (n, Told::ReservationsReleased)).collect(),
            false => Vec::new(),
        };
        Ok(Changed { told, ..Changed::default() })
    }

    /// CLEAR (SPC-4 5.13.11.6).
    pub(crate) fn clear(&mut self, nexus: &str, key: u64) -> Result<Changed, Refusal> {
        self.check_key(nexus, key)?;
        let told = self.others(nexus).map(|n| (n, Told::ReservationsPreempted)).collect();
        self.registrants.clear();
        self.held = None;
        self.change_registrations();
        Ok(Changed { told, ..Changed::default() })
    }

    /// PREEMPT (SPC-4 5.13.11.4): the registrations with the key `of` end, and where one of them holds the
    /// reservation it is the nexus' own then, of type `kind`. Of a reservation of all registrants a key of
    /// 0 is that of all.
    pub(crate) fn preempt(
        &mut self,
        nexus: &NexusName,
        key: u64,
        of: u64,
        kind: Type,
    ) -> Result<Changed, Refusal> {
        self.check_key(nexus, key)?;
        let takes = match &self.held {
            Some(held) if held.kind.is_of_all() => of == 0,
            Some(held) => of != 0 && self.key_of(&held.by) == Some(of),
            None => false,
        };
        if of == 0 && !takes {
            return Err(Refusal::ActionKey);
        }
        let hit = |r: &Registrant| of == 0 || r.key == of;
        if !self.registrants.iter().any(hit) {
            return Err(Refusal::Conflict);
        }
        let mut changed = Changed::default();
        for lost in self.registrants.extract_if(.., |r| r.nexus != *nexus && hit(r)) {
            changed.told.push((Arc::clone(&lost.nexus), Told::RegistrationsPreempted));
            changed.preempted.push(lost.nexus);
        }
        if takes {
            let before = self.held.replace(Held { by: Arc::clone(nexus), kind });
            if before.is_some_and(|held| held.kind != kind) {
                changed.told.extend(self.others(nexus).map(|n| (n, Told::ReservationsReleased)));
            }
        }
        self.change_registrations();
        Ok(changed)
    }

    /// REGISTER AND MOVE (SPC-4 5.13.8): `to` is registered with the key `new`, and holds the reservation
    /// instead of the nexus, which keeps its registration unless it is to be ended.
    pub(crate) fn hand_over(
        &mut self,
        nexus: &NexusName,
        key: u64,
        to: &NexusName,
        new: u64,
        ends: bool,
    ) -> Result<Changed, Refusal> {
        self.check_key(nexus, key)?;
        if !self.held.as_ref().is_some_and(|h| h.by == *nexus && !h.kind.is_of_all()) {
            return Err(Refusal::Conflict);
        }
        if new == 0 {
            return Err(Refusal::ActionKey);
        }
        let is_full = self.registrants.len() == MAX_REGISTRANTS && !ends;
        match self.registrants.iter_mut().find(|r| r.nexus == *to) {
            Some(registrant) => registrant.key = new,
            None if is_full => return Err(Refusal::Full),
            None => self.registrants.push(Registrant { nexus: Arc::clone(to), key: new }),
        }
        self.held.iter_mut().for_each(|held| held.by = Arc::clone(to));
        if ends {
            self.registrants.retain(|r| r.nexus != *nexus);
        }
        self.change_registrations();
        Ok(Changed::default())
    }

    /// REPLACE LOST RESERVATION (SPC-4 5.13.11.3): nobody but the nexus is registered, which holds the reservation.
    pub(crate) fn replaced(nexus: &NexusName, key: u64, kind: Type, persist: bool) -> Self {
        Reservations {
            generation: 0,
            registrants: vec![Registrant { nexus: Arc::clone(nexus), key }],
            held: Some(Held { by: Arc::clone(nexus), kind }),
            persist,
            reserved: None,
        }
    }

    /// RESERVE(6) (SPC-2 7.21): of the whole unit. Who has registered is not overruled by it.
    pub(crate) fn reserve_unit(&mut self, nexus: &NexusName) -> Result<(), Refusal> {
        let registered = !self.registrants.is_empty();
        if registered || self.reserved.as_ref().is_some_and(|by| by != nexus) {
            return Err(Refusal::Conflict);
        }
        self.reserved = Some(Arc::clone(nexus));
        Ok(())
    }

    /// RELEASE(6) (SPC-2 7.16): of who has not reserved it, without effect.
    pub(crate) fn release_unit(&mut self, nexus: &str) -> Result<(), Refusal> {
        if !self.registrants.is_empty() {
            return Err(Refusal::Conflict);
        }
        if self.reserved.as_ref().is_some_and(|by| **by == *nexus) {
            self.reserved = None;
        }
        Ok(())
    }

    /// LOGICAL UNIT RESET, or the end of a session: what RESERVE(6) has reserved is free (SPC-2 5.5.1).
    pub(crate) fn forget_reserved(&mut self, by: Option<&str>) {
        if by.is_none_or(|by| self.reserved.as_ref().is_some_and(|of| **of == *by)) {
            self.reserved = None;
        }
    }
}

#[cfg(test)]
mod tests;
