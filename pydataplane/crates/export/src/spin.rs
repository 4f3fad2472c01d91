//! How long a thread looks for more before it sleeps.
//!
//! Sleeping and being woken costs more than a small I/O on a fast disk. So the thread looks again and
//! again for as long as experience says that something comes soon, and not at all where it does not:
//! an export that nobody uses, or a disk that takes its time, costs no CPU.

use reactor::ticks;

/// Longest that is looked, in microseconds.
const MOST_US: u64 = 50;

/// Shortest, once something came soon, in microseconds.
const LEAST_US: u64 = 10;

/// What was learnt of waits of one kind. Times are in ticks.
#[derive(Debug)]
pub(crate) struct Spin {
    window: u64,
    least: u64,
    most: u64,
}

impl Spin {
    /// Sleeps at once, until something has come soon.
    pub fn new() -> Spin {
        Spin { window: 0, least: ticks::from_us(LEAST_US), most: ticks::from_us(MOST_US) }
    }

    /// How long to look before the next sleep.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Learns how long a wait took, with or without a sleep.
    pub fn learn(&mut self, waited: u64) {
        if waited > self.most {
            self.window /= 2;
            if self.window < self.least {
                self.window = 0;
            }
        } else if waited > self.window {
            self.window = (2 * self.window).clamp(self.least, self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spin() -> Spin {
        Spin { window: 0, least: 10, most: 50 }
    }

    #[test]
    fn what_comes_soon_is_looked_for_and_what_does_not_is_slept_for() {
        let mut spin = spin();
        let windows: Vec<u64> = [49, 9, 30, 30, 50, 45]
            .into_iter()
            .map(|waited| {
                spin.learn(waited);
                spin.window()
            })
            .collect();
        assert_eq!(windows, [10, 10, 20, 40, 50, 50]);
        for expected in [25, 12, 0, 0] {
            spin.learn(1_000_000);
            assert_eq!(spin.window(), expected);
        }
    }

    #[test]
    fn nobody_looks_before_something_has_come() {
        assert_eq!(Spin::new().window(), 0);
    }
}
