//! Whose turn it is to hand the kernel a part of a large transfer.
//!
//! One thread serves many clients, so what bounds the time that the kernel takes of it is a budget of the
//! thread, not one of each client: [`TURN_BYTES`] between two submissions. Those that want some of it stand in
//! an order and are served in rotation: first owners, however many clients each has (a guest has one for each
//! of its disks), then the clients of the owner whose turn it is. What is nobody's, the target's own, is one
//! more owner's.
//!
//! The first may spend its credit, in one turn or in several; then it goes to the end, where it gets as much
//! again (deficit round robin: in the long run all owners hand over the same number of bytes, and so do all
//! clients of one, however long their pieces are). A client that has nothing left to hand over or is
//! blocked leaves, and one whose turn it is and that does not ask for a whole turn gives way, with its owner,
//! to the next: nobody waits for a client that is not polled.

use std::collections::VecDeque;

use crate::Owner;

/// Bytes of large transfers that the clients of a ring hand to the kernel in one turn of its thread, all
/// together, and of one piece of them at most: it takes the kernel 10 to 20 us to pin them.
pub const TURN_BYTES: u32 = 256 << 10;

/// A client in the order of its owner.
struct Share {
    client: u16,
    owner: Option<Owner>,
    /// Bytes that it may hand over before it is the turn of the owner's next.
    credit: u32,
}

/// An owner in the order of all.
struct OwnerShare {
    owner: Option<Owner>,
    /// Bytes that its clients may hand over before it is the next one's turn.
    credit: u32,
}

/// The order of the clients of a ring, and what is left of the turn's budget.
pub(super) struct Shares {
    /// Those with clients in `clients`.
    owners: VecDeque<OwnerShare>,
    /// Of all owners; those of one in their order.
    clients: Vec<Share>,
    /// Place in `clients` of whose turn it is: the first of the first owner.
    first: usize,
    /// Bytes that may be handed over in this turn.
    left: u32,
    /// Whose turn it was when the turn began.
    began: Option<u16>,
}

impl Shares {
    /// An empty order, before the first turn.
    pub(super) fn new() -> Self {
        let (owners, clients) = (VecDeque::new(), Vec::new());
        Shares { owners, clients, first: 0, left: TURN_BYTES, began: None }
    }

    /// Has room for `clients` of them, so that nothing is allocated when they join.
    pub(super) fn reserve(&mut self, clients: usize) {
        self.clients.reserve(clients.saturating_sub(self.clients.len()));
        self.owners.reserve(clients.saturating_sub(self.owners.len()));
    }

    /// A turn of the thread is over. Returns whether the end of the next one matters, too.
    pub(super) fn next_turn(&mut self) -> bool {
        if self.left == TURN_BYTES && self.began.is_some() && self.front() == self.began {
            self.next_client();
            self.owners.rotate_left(1);
            self.find_first();
        }
        self.left = TURN_BYTES;
        self.began = self.front();
        self.began.is_some()
    }

    /// `client` of `owner`, which does not stand in the order, does from now on, and is the owner's last.
    pub(super) fn join(&mut self, client: u16, owner: Option<Owner>) {
        self.clients.push(Share { client, owner, credit: TURN_BYTES });
        if !self.owners.iter().any(|share| share.owner == owner) {
            self.owners.push_back(OwnerShare { owner, credit: TURN_BYTES });
            if self.owners.len() == 1 {
                self.find_first();
            }
        }
    }

    /// Whether `client`, which stands in the order, may hand over `bytes` now (at most [`TURN_BYTES`]),
    /// which are then spent. If not, it asks again in the next turn.
    #[inline]
    pub(super) fn spend(&mut self, client: u16, bytes: u32) -> bool {
        while self.front() == Some(client) {
            let (share, owner) = (&mut self.clients[self.first], &mut self.owners[0]);
            let (has, may) = (bytes <= share.credit, bytes <= owner.credit);
            if has && may {
                if bytes > self.left {
                    return false;
                }
                share.credit -= bytes;
                owner.credit -= bytes;
                self.left -= bytes;
                return true;
            }
            if !has {
                share.credit += TURN_BYTES;
                self.next_client();
            }
            if !may {
                self.owners[0].credit += TURN_BYTES;
                self.owners.rotate_left(1);
            }
            self.find_first();
        }
        false
    }

    /// `client`, which stands in the order, no longer does.
    pub(super) fn leave(&mut self, client: u16) {
        let Some(at) = self.clients.iter().position(|share| share.client == client) else { return };
        let owner = self.clients.remove(at).owner;
        if !self.clients.iter().any(|share| share.owner == owner) {
            self.owners.retain(|share| share.owner != owner);
        }
        self.find_first();
    }

    /// Whose turn it is.
    #[inline]
    fn front(&self) -> Option<u16> {
        self.clients.get(self.first).map(|share| share.client)
    }

    /// The client whose turn it is becomes the last of all.
    fn next_client(&mut self) {
        self.clients[self.first..].rotate_left(1);
    }

    /// Finds the first client of the first owner.
    fn find_first(&mut self) {
        let owner = self.owners.front().map(|share| share.owner);
        let of = |share: &Share| Some(share.owner) == owner;
        self.first = self.clients.iter().position(of).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns in which each of `clients`, polled in this order, hands over pieces of so many bytes for as
    /// long as it may. Returns the bytes that each handed over.
    fn turns(shares: &mut Shares, clients: &[(u16, u32)], turns: u32) -> Vec<u64> {
        let mut given = vec![0; clients.len()];
        for _ in 0..turns {
            let mut of_turn = 0;
            for (&(client, piece), given) in clients.iter().zip(&mut given) {
                while shares.spend(client, piece) {
                    *given += u64::from(piece);
                    of_turn += piece;
                }
            }
            assert!(of_turn <= TURN_BYTES, "{of_turn} bytes in one turn");
            shares.next_turn();
        }
        given
    }

    /// Clients of an owner of its own each.
    fn joined(clients: impl IntoIterator<Item = u16>) -> Shares {
        let mut shares = Shares::new();
        clients.into_iter().for_each(|client| shares.join(client, Some(Owner::new())));
        shares
    }

    #[test]
    fn an_owner_of_many_clients_has_no_more_than_one_of_one_client() {
        // Of 64 channels, 1, 3, and what the target does itself; each with pieces of its own length.
        let counts = [64, 1, 3, 2];
        let piece = |client: u16| [TURN_BYTES, 100 << 10, 20 << 10][usize::from(client) % 3];
        let owners = [Some(Owner::new()), Some(Owner::new()), Some(Owner::new()), None];
        let of: Vec<usize> = (0..4).flat_map(|n| vec![n; counts[n]]).collect();
        for active in 1..=4 {
            let mut shares = Shares::new();
            // Whoever comes first: all of the first owner stand before the second.
            for (client, owner) in of.iter().enumerate().filter(|(_, n)| **n < active) {
                shares.join(client as u16, owners[*owner]);
            }
            let clients: Vec<_> = (0..of.len() as u16).map(|n| (n, piece(n))).collect();
            let clients = &clients[..of.iter().filter(|n| **n < active).count()];
            let given = turns(&mut shares, clients, 40_000);
            let mut sums = vec![0; active];
            of.iter().zip(&given).for_each(|(owner, bytes)| sums[*owner] += bytes);
            let (least, most) = (sums.iter().min().unwrap(), sums.iter().max().unwrap());
            assert!(most - least <= 3 * u64::from(TURN_BYTES), "{sums:?}");
            assert!(sums.iter().sum::<u64>() >= 20_000 * u64::from(TURN_BYTES), "{sums:?}");
            // And an owner's clients share what it has.
            let of_first = &given[..64];
            let (least, most) = (of_first.iter().min().unwrap(), of_first.iter().max().unwrap());
            assert!(*least >= most / 2 && *least > 0, "{of_first:?}");
        }
    }

    #[test]
    fn an_owners_client_that_does_not_ask_costs_others_a_turn_at_most() {
        let (mut shares, many, one) = (Shares::new(), Some(Owner::new()), Some(Owner::new()));
        (0..3).for_each(|client| shares.join(client, many));
        shares.join(3, one);
        shares.next_turn();
        // Of the three only the last asks.
        let given = turns(&mut shares, &[(2, TURN_BYTES), (3, TURN_BYTES)], 60);
        assert!(given[0] >= 10 * u64::from(TURN_BYTES), "{given:?}");
        assert!(given[1] >= 20 * u64::from(TURN_BYTES), "{given:?}");
    }

    #[test]
    fn in_the_long_run_all_hand_over_as_much_however_long_their_pieces_are() {
        let clients = [(0, 256 << 10), (1, 20 << 10), (2, 130 << 10), (3, 255 << 10), (4, 512)];
        let mut shares = joined(0..5);
        let given = turns(&mut shares, &clients, 10_000);
        let (least, most) = (given.iter().min().unwrap(), given.iter().max().unwrap());
        assert!(most - least <= 2 * u64::from(TURN_BYTES), "{given:?}");
        assert!(given.iter().sum::<u64>() >= 5_000 * u64::from(TURN_BYTES), "{given:?}");
    }

    #[test]
    fn one_that_does_not_ask_is_waited_for_a_turn_and_no_longer() {
        let mut shares = joined(0..3);
        shares.next_turn();
        let given = turns(&mut shares, &[(1, TURN_BYTES), (2, TURN_BYTES)], 9);
        assert_eq!(given, [3, 3].map(|turns| turns * u64::from(TURN_BYTES)));
        // It has lost nothing but its turns.
        let given = turns(&mut shares, &[(0, TURN_BYTES)], 3);
        assert_eq!(given, [u64::from(TURN_BYTES)]);
    }

    #[test]
    fn who_leaves_is_not_waited_for_and_comes_back_as_the_last() {
        let mut shares = joined(0..3);
        shares.leave(1);
        assert!(shares.spend(0, TURN_BYTES));
        assert!(!shares.spend(0, 1), "its credit is spent");
        assert!(!shares.spend(2, 1), "and the turn's budget");
        shares.join(1, Some(Owner::new()));
        for client in [2, 0, 1, 2] {
            assert!(shares.next_turn());
            assert!((0..3).filter(|other| *other != client).all(|other| !shares.spend(other, 1)));
            assert!(shares.spend(client, TURN_BYTES));
            assert!(!shares.spend(client, 1));
        }
        (0..3).for_each(|client| shares.leave(client));
        assert!(!shares.next_turn());
    }
}
