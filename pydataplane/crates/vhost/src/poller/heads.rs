//! The requests of one unit that are HEAD OF QUEUE and that a reactor has taken: until they have ended those that are
//! SIMPLE and were taken later do not begin (SAM-5 8.6).
//!
//! They begin at once, or in their order where they lack room or wait for a limit ([`super::lists`]), and end in any, so
//! who waits for the older ones is not to wait for all: a guest can have newer ones all the time. Nor are they to be searched for when one ends. So they are counted in two groups. One takes
//! in those that come, the other only loses its own; when it is empty they change places. Of each group the lowest
//! number of those that it ever had is known, and what is older than that of both groups waits for none of them: after
//! as long as two groups last. On their own reactor that is so only while none of them waits: one that does goes before
//! all that are not HEAD OF QUEUE.

/// No ticket ([`super::task_set`]).
const NO_TICKET: u64 = u64::MAX;

/// Some that came one after the other.
#[derive(Clone, Copy, Debug)]
struct Group {
    /// Those that have not ended.
    count: u32,
    /// How many requests were taken before the first of them, or fewer.
    order: u64,
    /// The lowest ticket of them, or a lower one.
    ticket: u64,
}

impl Group {
    const EMPTY: Group = Group { count: 0, order: u64::MAX, ticket: NO_TICKET };
}

/// Those of one unit on one reactor.
#[derive(Debug)]
pub(super) struct Heads {
    groups: [Group; 2],
    /// Where those stand that come.
    open: usize,
}

impl Heads {
    pub(super) const NONE: Heads = Heads { groups: [Group::EMPTY; 2], open: 0 };

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.groups.iter().all(|group| group.count == 0)
    }

    /// One waits, or is with its device, before which `order` requests were taken and which has that `ticket`, if it has
    /// one. Returns its group.
    pub(super) fn add(&mut self, order: u64, ticket: u64) -> u8 {
        let other = 1 - self.open;
        if self.groups[other].count == 0 {
            self.open = other;
        }
        let group = &mut self.groups[self.open];
        group.count += 1;
        group.order = group.order.min(order);
        group.ticket = group.ticket.min(ticket);
        self.open as u8
    }

    /// One of that group does not any more.
    pub(super) fn remove(&mut self, group: u8) {
        let group = &mut self.groups[usize::from(group)];
        group.count -= 1;
        if group.count == 0 {
            *group = Group::EMPTY;
        }
    }

    /// Whether what was taken after so many requests waits for none of them.
    pub(super) fn let_pass(&self, order: u64) -> bool {
        self.groups.iter().all(|group| order < group.order)
    }

    /// The lowest ticket of them, or a lower one; [`NO_TICKET`]: there is none.
    pub(super) fn first_ticket(&self) -> u64 {
        self.groups.iter().map(|group| group.ticket).fold(NO_TICKET, u64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_all_of_them_passes_and_nothing_else() {
        let mut heads = Heads::NONE;
        assert!(heads.is_empty() && heads.let_pass(u64::MAX - 1));
        let [first, second] = [5, 7].map(|order| heads.add(order, 10 * order));
        assert_eq!([4, 6, 8].map(|order| heads.let_pass(order)), [true, false, false]);
        assert_eq!(heads.first_ticket(), 50);
        heads.remove(first);
        assert_eq!([4, 6, 8].map(|order| heads.let_pass(order)), [true, true, false]);
        assert_eq!(heads.first_ticket(), 70);
        heads.remove(second);
        assert!(heads.is_empty() && heads.let_pass(8));
        assert_eq!(heads.first_ticket(), NO_TICKET);
    }

    #[test]
    fn one_that_begins_and_waits_again_stands_where_it_stood() {
        let mut heads = Heads::NONE;
        let mut groups = [1, 2, 3].map(|order| heads.add(order, 10 * order));
        for _ in 0..3 {
            heads.remove(groups[0]);
            groups[0] = heads.add(1, 10);
            assert_eq!([0, 1].map(|order| heads.let_pass(order)), [true, false]);
            assert_eq!(heads.first_ticket(), 10);
        }
        groups.into_iter().for_each(|group| heads.remove(group));
        assert!(heads.is_empty());
    }

    #[test]
    fn newer_ones_that_never_cease_hold_back_nothing_that_is_older() {
        /// In flight at a time, and how many come before one of them ends.
        const DEPTH: usize = 8;
        const LONGEST: u64 = 20;
        let (mut heads, mut in_flight) = (Heads::NONE, Vec::new());
        for order in 0..1000 {
            in_flight.push((order, heads.add(order, 10 * order)));
            if in_flight.len() > DEPTH {
                let is_late = |(of, _): &(u64, u8)| *of + LONGEST < order;
                let late = in_flight.iter().position(is_late);
                let at = late.unwrap_or((order * 7) as usize % DEPTH);
                heads.remove(in_flight.swap_remove(at).1);
            }
            let oldest = in_flight.iter().map(|(order, _)| *order).min().expect("there are some");
            assert!(!heads.let_pass(oldest) && heads.first_ticket() <= 10 * oldest);
            // As long as two groups last.
            let older = order.saturating_sub(3 * LONGEST);
            assert!(older == 0 || heads.let_pass(older), "{order}, {oldest}");
        }
    }
}
