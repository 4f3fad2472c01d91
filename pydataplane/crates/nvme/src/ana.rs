//! Asymmetric namespace access: which groups of namespaces a controller serves how (base specification 2.1, 8.1.1).

use crate::wire::{u16_at, u32_at};

/// Bytes of the log page's header, and of a group without its list of namespaces.
const HEADER: usize = 16;
const GROUP: usize = 32;
/// Groups that are told of at most.
const GROUPS_MAX: u32 = 4096;

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

/// Which groups a controller may tell of (Identify Controller).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The largest number of one (ANAGRPMAX).
    pub highest: u32,
    /// How many there are at most (NANAGRPID).
    pub count: u32,
}

impl Limits {
    /// Bytes of the log page that are to be read, by one command, which takes `most` bytes: groups alone (RGO). In
    /// parts it would be read wrongly of Linux's target, which says that it gives parts and does not look at where
    /// they begin; and a page that changes meanwhile is not one page.
    pub(crate) fn log_len(self, most: u64) -> usize {
        let all = HEADER + GROUP * self.count.min(GROUPS_MAX) as usize;
        usize::try_from(most).map_or(all, |most| all.min(most))
    }
}

/// The states of groups, as a log page tells them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Groups(Vec<(u32, AnaState)>);

impl Groups {
    /// Reads the page, of groups alone, in the order of their numbers (base specification 2.1, 5.2.12.1.13).
    ///
    /// # Errors
    /// A clause: it says what cannot be, or has more groups than it was read for.
    pub(crate) fn parse(page: &[u8], limits: Limits) -> Result<Groups, String> {
        let broken = |what: String| {
            Err(format!("its controller tells of asymmetric access what cannot be: {what}"))
        };
        let count = u16_at(page, 8);
        if u32::from(count) > limits.count {
            return broken(format!("{count} groups where {} are most (NANAGRPID)", limits.count));
        }
        let there = page.len().saturating_sub(HEADER) / GROUP;
        if usize::from(count) > there {
            return Err(format!(
                "it has {count} groups of namespaces, of which one command tells {there} (MDTS; {GROUPS_MAX} at most)"
            ));
        }
        let mut groups: Vec<(u32, AnaState)> = Vec::with_capacity(usize::from(count));
        for at in (0..usize::from(count)).map(|n| HEADER + n * GROUP) {
            let (number, highest) = (u32_at(page, at), limits.highest);
            if number == 0 || number > highest {
                return broken(format!("group {number} where {highest} is the last (ANAGRPMAX)"));
            }
            if let Some((before, _)) = groups.last().filter(|(before, _)| *before >= number) {
                return broken(format!("group {number} after group {before}"));
            }
            if u32_at(page, at + 4) != 0 {
                return broken("namespaces, which it was not asked for (RGO)".to_owned());
            }
            match AnaState::parse(page[at + 16]) {
                Some(state) => groups.push((number, state)),
                None => return broken(format!("state {} of group {number}", page[at + 16] & 0xF)),
            }
        }
        Ok(Groups(groups))
    }

    /// Whether a group is told of.
    pub(crate) fn has(&self, group: u32) -> bool {
        self.0.iter().any(|(number, _)| *number == group)
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { highest: 200, count: 128 };

    /// A page of groups and their states.
    fn page(groups: &[(u32, u8)]) -> Vec<u8> {
        let mut page = vec![0; LIMITS.log_len(u64::MAX)];
        page[8..10].copy_from_slice(&(groups.len() as u16).to_le_bytes());
        for (n, (number, state)) in groups.iter().enumerate() {
            let at = HEADER + n * GROUP;
            page[at..at + 4].copy_from_slice(&number.to_le_bytes());
            page[at + 16] = *state;
        }
        page
    }

    #[test]
    fn groups_are_read_and_what_cannot_be_is_refused() {
        let mut groups = Groups::parse(&page(&[(1, 1), (7, 0x0F), (200, 2)]), LIMITS).unwrap();
        assert_eq!((groups.of(1), groups.of(7)), (AnaState::Optimized, AnaState::Change));
        assert_eq!(
            (groups.of(2), groups.of(200)),
            (AnaState::Inaccessible, AnaState::NonOptimized)
        );
        groups.lose(1);
        assert!(!groups.of(1).is_usable());
        let refuses = |page: &[u8], words: &str| {
            let why = Groups::parse(page, LIMITS).unwrap_err();
            assert!(why.contains(words), "{why}");
        };
        refuses(&page(&[(1, 5)]), "state 5 of group 1");
        refuses(&page(&[(0, 1)]), "group 0 where 200 is the last");
        refuses(&page(&[(7, 1), (201, 1)]), "group 201 where 200 is the last");
        refuses(&page(&[(7, 1), (6, 1)]), "group 6 after group 7");
        refuses(&page(&[(7, 1), (7, 1)]), "group 7 after group 7");
        let mut with_namespaces = page(&[(1, 1)]);
        with_namespaces[HEADER + 4] = 1;
        refuses(&with_namespaces, "namespaces, which it was not asked for");
        let mut many = page(&[]);
        many[8] = 129;
        refuses(&many, "129 groups where 128 are most");
    }

    #[test]
    fn as_many_groups_as_there_may_be_are_read_at_once_as_far_as_one_command_takes() {
        let all: Vec<(u32, u8)> =
            (1..=128).map(|number| (number, 1 + (number == 128) as u8)).collect();
        let page = page(&all);
        assert_eq!(page.len(), 16 + 32 * 128);
        assert_eq!(Groups::parse(&page, LIMITS).unwrap().of(128), AnaState::NonOptimized);
        assert_eq!(LIMITS.log_len(4096), 4096);
        let why = Groups::parse(&page[..4096], LIMITS).unwrap_err();
        assert!(why.contains("128 groups of namespaces, of which one command tells 127"), "{why}");
        let hostile = Limits { highest: u32::MAX, count: u32::MAX };
        assert_eq!(hostile.log_len(u64::MAX), 16 + 32 * 4096);
    }
}
