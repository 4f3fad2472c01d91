//! Whose turn it is to hand the kernel a part of a large transfer.
//!
//! One thread serves many clients, so what bounds the time that the kernel takes of it is a budget of the
//! thread, not one of each client: [`TURN_BYTES`] between two submissions. Clients that want some of it
//! stand in one order and are served in rotation. The first may spend its credit, in one turn or in
//! several; then it goes to the end, where it gets as much again (deficit round robin: in the long run all
//! hand over the same number of bytes, however long their pieces are). A client that has nothing left to
//! hand over or is blocked leaves, and one that is first and does not ask for a whole turn gives way to the
//! next: nobody waits for a client that is not polled.

use std::collections::VecDeque;

/// Bytes of large transfers that the clients of a ring hand to the kernel in one turn of its thread, all
/// together, and of one piece of them at most: it takes the kernel 10 to 20 us to pin them.
pub const TURN_BYTES: u32 = 256 << 10;

/// A client in the order.
struct Share {
    client: u16,
    /// Bytes that it may hand over before it is the next one's turn.
    credit: u32,
}

/// The order of the clients of a ring, and what is left of the turn's budget.
pub(super) struct Shares {
    order: VecDeque<Share>,
    /// Bytes that may be handed over in this turn.
    left: u32,
    /// Who was first when the turn began.
    first: Option<u16>,
}

impl Shares {
    /// An empty order, before the first turn.
    pub(super) fn new() -> Self {
        Shares { order: VecDeque::new(), left: TURN_BYTES, first: None }
    }

    /// Has room for `clients` of them, so that nothing is allocated when they join.
    pub(super) fn reserve(&mut self, clients: usize) {
        self.order.reserve(clients.saturating_sub(self.order.len()));
    }

    /// A turn of the thread is over. Returns whether the end of the next one matters, too.
    pub(super) fn next_turn(&mut self) -> bool {
        if self.left == TURN_BYTES && self.first.is_some() && self.front() == self.first {
            self.order.rotate_left(1);
        }
        self.left = TURN_BYTES;
        self.first = self.front();
        self.first.is_some()
    }

    /// `client`, which does not stand in the order, does from now on, and is the last.
    pub(super) fn join(&mut self, client: u16) {
        self.order.push_back(Share { client, credit: TURN_BYTES });
    }

    /// Whether `client`, which stands in the order, may hand over `bytes` now (at most [`TURN_BYTES`]),
    /// which are then spent. If not, it asks again in the next turn.
    pub(super) fn spend(&mut self, client: u16, bytes: u32) -> bool {
        while let Some(first) = self.order.front_mut().filter(|first| first.client == client) {
            if bytes <= first.credit {
                if bytes > self.left {
                    return false;
                }
                first.credit -= bytes;
                self.left -= bytes;
                return true;
            }
            first.credit += TURN_BYTES;
            self.order.rotate_left(1);
        }
        false
    }

    /// `client`, which stands in the order, no longer does.
    pub(super) fn leave(&mut self, client: u16) {
        if self.front() == Some(client) {
            self.order.pop_front();
        } else {
            self.order.retain(|share| share.client != client);
        }
    }

    fn front(&self) -> Option<u16> {
        self.order.front().map(|share| share.client)
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

    fn joined(clients: impl IntoIterator<Item = u16>) -> Shares {
        let mut shares = Shares::new();
        clients.into_iter().for_each(|client| shares.join(client));
        shares
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
        shares.join(1);
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
