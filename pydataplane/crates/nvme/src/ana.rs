//! Asymmetric namespace access: which groups of namespaces a controller serves how (base specification 2.1, 8.1.1).

use crate::wire::{u16_at, u32_at};

/// Bytes of the log page that are read at a time: groups without their lists of namespaces.
pub(crate) const LOG_LEN: usize = 4096;
/// Bytes of its header, and of a group without namespaces.
const HEADER: usize = 16;
const GROUP: usize = 32;
/// Groups that are told of at most.
const GROUPS_MAX: usize = 4096;
/// Times that the page may change while it is read.
const TRIES: u32 = 16;

/// How a namespace can be used by a controller; the first is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AnaState {
    /// As well as by any.
    Optimized,
    /// Not as fast as by another.
    NonOptimized,
    /// Not now.
    Inaccessible,
    /// Not again.
    PersistentLoss,
    /// It is between two of these.
    Change,
}

impl AnaState {
    fn parse(state: u8) -> Option<AnaState> {
        Some(match state & 0xF {
            1 => AnaState::Optimized,
            2 => AnaState::NonOptimized,
            3 => AnaState::Inaccessible,
            4 => AnaState::PersistentLoss,
            0xF => AnaState::Change,
            _ => return None,
        })
    }

    /// Whether I/O can go there.
    pub fn is_usable(self) -> bool {
        matches!(self, AnaState::Optimized | AnaState::NonOptimized)
    }

    /// The name that SPDK gives it.
    pub fn name(self) -> &'static str {
        match self {
            AnaState::Optimized => "optimized",
            AnaState::NonOptimized => "non_optimized",
            AnaState::Inaccessible => "inaccessible",
            AnaState::PersistentLoss => "persistent_loss",
            AnaState::Change => "change",
        }
    }
}

/// The states of groups, as a log page tells them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Groups(Vec<(u32, AnaState)>);

impl Groups {
    /// Reads the page, of groups alone.
    ///
    /// # Errors
    /// A clause: it contradicts itself.
    pub(crate) fn parse(page: &[u8]) -> Result<Groups, String> {
        let broken = || "its controller tells of asymmetric access what cannot be".to_owned();
        let count = usize::from(u16_at(page, 8));
        if page.len() < HEADER + count * GROUP {
            return Err(broken());
        }
        let mut groups = Vec::with_capacity(count);
        for at in (0..count).map(|n| HEADER + n * GROUP) {
            // It was asked for no namespaces (RGO).
            if u32_at(page, at + 4) != 0 {
                return Err(broken());
            }
            let state = AnaState::parse(page[at + 16]).ok_or_else(broken)?;
            groups.push((u32_at(page, at), state));
        }
        Ok(Groups(groups))
    }

    /// Of a group; one that is not told of cannot be used.
    pub(crate) fn of(&self, group: u32) -> AnaState {
        let found = self.0.iter().find(|(number, _)| *number == group);
        found.map_or(AnaState::Inaccessible, |(_, state)| *state)
    }

    /// Until it is told anew, a group cannot be used.
    pub(crate) fn lose(&mut self, group: u32) {
        if let Some((_, state)) = self.0.iter_mut().find(|(number, _)| *number == group) {
            *state = AnaState::Inaccessible;
        }
    }
}

/// The log page, read in parts; one of several parts is whole if it has not changed meanwhile.
pub(crate) struct Reading {
    page: Vec<u8>,
    /// All of it is there: whether it changed is asked next.
    again: bool,
    tries: u32,
    /// The controller gives it in parts.
    parts: bool,
}

impl Reading {
    /// `parts`: the controller gives log pages in parts.
    pub(crate) fn new(parts: bool) -> Reading {
        Reading { page: Vec::new(), again: false, tries: 0, parts }
    }

    /// The byte of the page from which [`LOG_LEN`] are to be read next.
    pub(crate) fn offset(&self) -> u64 {
        if self.again { 0 } else { self.page.len() as u64 }
    }

    /// Takes what was read; `None`: there is more to be read.
    ///
    /// # Errors
    /// A clause: it contradicts itself, has too many groups, or changes all the time.
    pub(crate) fn add(&mut self, part: &[u8; LOG_LEN]) -> Result<Option<Groups>, String> {
        if self.again {
            // The change count.
            if part[..8] == self.page[..8] {
                return Groups::parse(&self.page).map(Some);
            }
            self.tries += 1;
            if self.tries == TRIES {
                return Err("what it tells of asymmetric access changes all the time".to_owned());
            }
            self.again = false;
            self.page.clear();
        }
        self.page.extend_from_slice(part);
        let count = usize::from(u16_at(&self.page, 8));
        if count > GROUPS_MAX {
            return Err(format!("it has {count} groups of namespaces, more than {GROUPS_MAX}"));
        }
        if HEADER + count * GROUP <= LOG_LEN {
            return Groups::parse(&self.page).map(Some);
        }
        if !self.parts {
            return Err(format!(
                "it has {count} groups of namespaces, and gives no log page in parts (LPA)"
            ));
        }
        self.again = self.page.len() >= HEADER + count * GROUP;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_and_what_cannot_be_is_refused() {
        let mut page = vec![0; LOG_LEN];
        page[8] = 2;
        (page[16], page[32]) = (1, 1);
        (page[48], page[64]) = (7, 0x0F);
        let mut groups = Groups::parse(&page).unwrap();
        assert_eq!((groups.of(1), groups.of(7)), (AnaState::Optimized, AnaState::Change));
        assert_eq!(groups.of(2), AnaState::Inaccessible);
        groups.lose(1);
        assert!(!groups.of(1).is_usable());
        page[64] = 5;
        assert!(Groups::parse(&page).is_err());
        (page[64], page[52]) = (2, 1);
        assert!(Groups::parse(&page).is_err());
        (page[8], page[52]) = (128, 0);
        assert!(Groups::parse(&page).is_err());
    }

    /// The part from byte `offset` of a page of so many groups, which has changed so often.
    fn part(offset: u64, count: u16, changes: u8) -> [u8; LOG_LEN] {
        let mut page = vec![0; 3 * LOG_LEN];
        page[0] = changes;
        page[8..10].copy_from_slice(&count.to_le_bytes());
        for n in 0..usize::from(count) {
            let at = HEADER + n * GROUP;
            page[at..at + 4].copy_from_slice(&(n as u32 + 1).to_le_bytes());
            page[at + 16] = if n == 127 { 2 } else { 1 };
        }
        page[offset as usize..][..LOG_LEN].try_into().unwrap()
    }

    #[test]
    fn a_page_of_many_groups_is_read_in_parts_and_anew_where_it_changed() {
        let mut reading = Reading::new(true);
        let mut offsets = Vec::new();
        let groups = loop {
            let offset = reading.offset();
            offsets.push(offset);
            // It changes as its second part has been read.
            let changes = u8::from(offsets.len() > 2);
            if let Some(groups) = reading.add(&part(offset, 200, changes)).unwrap() {
                break groups;
            }
        };
        // What was read as whether it changed is the first part anew.
        assert_eq!(offsets, [0, 4096, 0, 4096, 0]);
        // One lies across two parts.
        assert_eq!((groups.of(128), groups.of(200)), (AnaState::NonOptimized, AnaState::Optimized));
        assert_eq!(groups.of(201), AnaState::Inaccessible);
        let mut one = Reading::new(false);
        assert!(one.add(&part(0, 127, 0)).unwrap().is_some());
        let why = Reading::new(false).add(&part(0, 128, 0)).unwrap_err();
        assert!(why.contains("no log page in parts"), "{why}");
        let why = Reading::new(true).add(&part(0, 300, 0).map(|_| 0xFF)).unwrap_err();
        assert!(why.contains("more than 4096"), "{why}");
        let mut restless = Reading::new(true);
        let why = (0..=255).find_map(|n| restless.add(&part(restless.offset(), 200, n)).err());
        assert!(why.unwrap().contains("changes all the time"));
    }
}
