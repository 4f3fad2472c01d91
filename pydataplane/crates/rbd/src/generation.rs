//! What an image says of who had it locked last: another text for each bdev that has it.
//!
//! The target records the text of a bdev, so that its next process finds out whether the image is as the one
//! before left it: `UUID.` is of a bdev that had it locked from its start on, `UUID.DIGEST` of one that waited
//! for another host to let go of it, with a digest of what the image said then. What is recorded needs no change
//! when the lock comes. A plain UUID is of an older target, which recorded it of both.

use uuid::Uuid;

/// Between the parts.
const MARK: char = '.';

/// What a recorded text tells of the bdev that it was recorded of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It may never have had the image locked: an older target recorded it.
    Unknown,
    /// It had the image locked when it was recorded.
    Locked,
    /// It waited for another host then.
    Waited,
}

impl Origin {
    pub(crate) fn of(text: &str) -> Origin {
        match text.split_once(MARK) {
            None => Origin::Unknown,
            Some((_, "")) => Origin::Locked,
            Some(_) => Origin::Waited,
        }
    }
}

/// One of a bdev that has the image locked before it is used.
pub(crate) fn locked() -> String {
    format!("{}{MARK}", Uuid::new_v4())
}

/// One of a bdev that waits for whoever has the image, which says `seen`.
pub(crate) fn waiting(seen: Option<&str>) -> String {
    format!("{}{MARK}{}", Uuid::new_v4(), digest(seen))
}

/// Whether the bdev of `own` waited for whoever had the image when it said `seen`.
pub(crate) fn waited_for(own: &str, seen: Option<&str>) -> bool {
    own.split_once(MARK).is_some_and(|(_, its)| its == digest(seen))
}

/// Short, so that the whole fits into what is read of it; other texts have others.
fn digest(seen: Option<&str>) -> String {
    // That of nothing is of no text.
    let said = seen.map_or_else(String::new, |seen| format!("={seen}"));
    let (digest, _) = Uuid::new_v5(&Uuid::nil(), said.as_bytes()).as_u64_pair();
    format!("{digest:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_tells_whether_its_bdev_waited_and_for_whom() {
        let own = locked();
        assert_eq!(Origin::of(&own), Origin::Locked);
        assert_eq!(Origin::of(&Uuid::new_v4().to_string()), Origin::Unknown);
        for seen in [None, Some(""), Some(&*own)] {
            let waits = waiting(seen);
            assert_eq!(Origin::of(&waits), Origin::Waited);
            assert!(waited_for(&waits, seen) && waits != waiting(seen));
            for other in [None, Some(""), Some(&*own), Some("other")] {
                assert_eq!(waited_for(&waits, other), other == seen, "{other:?} for {seen:?}");
            }
            assert!(!waited_for(&own, seen));
        }
    }
}
