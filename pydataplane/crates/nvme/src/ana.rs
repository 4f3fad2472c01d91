//! Asymmetric namespace access: which groups of namespaces a controller serves how (base specification 2.1, 8.1.1).

use crate::wire::{u16_at, u32_at};

/// Bytes of the log page that are read: groups without their lists of namespaces.
pub(crate) const LOG_LEN: usize = 4096;
/// Bytes of its header, and of a group without namespaces.
const HEADER: usize = 16;
const GROUP: usize = 32;
/// Groups that are told of at most.
pub(crate) const GROUPS_MAX: usize = (LOG_LEN - HEADER) / GROUP;

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
        if count > GROUPS_MAX {
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
}
