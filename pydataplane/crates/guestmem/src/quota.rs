//! What one peer may take of things of which the process has only so many.
//!
//! A peer decides how much memory it shares, and in how many pieces: with a sparse file that costs it
//! nothing, and it must not be able to leave nothing for the VM that comes next. So the first ones may
//! take much, and each later one a part of what the others left ([`PARTS`]). What counts is the peer's
//! memory table; a bound that followed from that, too, would be one of the peer's own choice. Whatever
//! dozens of peers take together, something is left for one more. A VM that takes as much as any does, its share of
//! the pool's [`Pool::new`] `always`, has it as long as anything is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// A peer may take one of so many parts of what the others left.
const PARTS: u64 = 6;

/// Something of which all peers together have only so much.
#[derive(Debug)]
pub struct Pool {
    total: u64,
    /// What any peer may have, however little is left.
    always: u64,
    used: Mutex<u64>,
}

/// What one peer has of a pool.
#[derive(Debug, Default)]
pub struct Account(AtomicU64);

/// Some of a pool, given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    pool: &'static Pool,
    account: Arc<Account>,
    amount: u64,
}

impl Pool {
    /// `total` for all, and `always` for each as long as anything is left.
    pub const fn new(total: u64, always: u64) -> Pool {
        Pool { total, always, used: Mutex::new(0) }
    }

    /// Takes `amount`, which makes `whole` of what the peer will have when it is done with what it
    /// had before: while a memory table replaces another it has both. `None`: that is more than it
    /// may have.
    pub fn take(&'static self, account: &Arc<Account>, whole: u64, amount: u64) -> Option<Share> {
        let mut used = self.used.lock();
        // Changed under this lock only.
        let own = account.0.load(Ordering::Relaxed);
        let most = self.always.max((self.total - (*used - own)) / PARTS);
        let sum = used.checked_add(amount).filter(|sum| *sum <= self.total && whole <= most)?;
        *used = sum;
        account.0.store(own + amount, Ordering::Relaxed);
        Some(Share { pool: self, account: Arc::clone(account), amount })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut used = self.pool.used.lock();
        *used -= self.amount;
        self.account.0.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_many_peers_take_something_is_left_for_one_more() {
        static POOL: Pool = Pool::new(96 << 40, 64 << 30);
        const HONEST: u64 = 16 << 30;
        let mut hostile = Vec::new();
        for peer in 0..30 {
            let account = Arc::new(Account::default());
            let mut shares = Vec::new();
            let (mut has, mut step) = (0, 16 << 40);
            // As much as it gets, in ever smaller pieces.
            while step >= 1 << 20 {
                match POOL.take(&account, has + step, step) {
                    Some(share) => {
                        shares.push(share);
                        has += step;
                    }
                    None => step /= 2,
                }
            }
            assert!(has >= 64 << 30, "peer {peer}: {has}");
            hostile.push(shares);
            let honest = Arc::new(Account::default());
            assert!(POOL.take(&honest, HONEST, HONEST).is_some(), "after {peer}");
        }
        drop(hostile);
        assert_eq!(*POOL.used.lock(), 0);
    }

    #[test]
    fn a_table_may_replace_one_of_the_same_size() {
        static POOL: Pool = Pool::new(600, 10);
        let account = Arc::new(Account::default());
        let first = POOL.take(&account, 100, 100).expect("a sixth");
        assert!(POOL.take(&account, 101, 1).is_none());
        let second = POOL.take(&account, 100, 100).expect("instead of the first");
        drop(first);
        let other = Arc::new(Account::default());
        assert!(POOL.take(&other, 84, 84).is_none());
        let third = POOL.take(&other, 83, 83).expect("a sixth of 500");
        drop((second, third));
        assert_eq!(account.0.load(Ordering::Relaxed), 0);
        assert!(POOL.take(&account, u64::MAX, u64::MAX).is_none());
    }
}
