//! What an image says of who had it locked last: another text for each bdev that has it.
//!
//! The target records the text of a bdev, so that its next process finds out whether the image is as the one
//! before left it: `UUID..BOOT` is of a bdev that had it locked from its start on, `UUID.DIGEST.BOOT` of one that
//! waited for another host to let go of it, with a digest of what the image said then. What is recorded needs no
//! change when the lock comes. A plain UUID is of an older target, which recorded it of both.
//!
//! An image that several hosts share says the same of all of them, so that who had it alone before finds that out.
//!
//! `BOOT` is of the host's boot: whoever used a bdev of another boot is gone, so that nobody here can go on with what
//! he knew of the image.

use uuid::Uuid;

/// What the image says while several hosts share it, and until one has it alone again.
pub(crate) const SHARED: &str = "shared";
/// Between the parts.
const MARK: char = '.';

/// What a recorded text tells of the bdev that it was recorded of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It may never have had the image locked: an older target recorded it.
    Unknown,
    /// It is of another boot of this host: nobody has it in use any more.
    Gone,
    /// It had the image locked when it was recorded.
    Locked,
    /// It waited for another host then.
    Waited,
}

impl Origin {
    pub(crate) fn of(text: &str, boot: &str) -> Origin {
        let mut parts = text.split(MARK).skip(1);
        match (parts.next(), parts.next()) {
            (None, _) => Origin::Unknown,
            (Some(_), of) if of != Some(short(boot)) => Origin::Gone,
            (Some(""), _) => Origin::Locked,
            (Some(_), _) => Origin::Waited,
        }
    }
}

/// One of a bdev that has the image locked before it is used.
pub(crate) fn locked(boot: &str) -> String {
    format!("{}{MARK}{MARK}{}", Uuid::new_v4(), short(boot))
}

/// One of a bdev that waits for whoever has the image, which says `seen`.
pub(crate) fn waiting(seen: Option<&str>, boot: &str) -> String {
    format!("{}{MARK}{}{MARK}{}", Uuid::new_v4(), digest(seen), short(boot))
}

/// Whether the bdev of `own` waited for whoever had the image when it said `seen`.
pub(crate) fn waited_for(own: &str, seen: Option<&str>) -> bool {
    own.split(MARK).nth(1).is_some_and(|its| its == digest(seen))
}

/// As much of a boot's id, a UUID, as the text has room for.
fn short(boot: &str) -> &str {
    boot.split('-').next().unwrap_or_default()
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

    const BOOT: &str = "0d1f6b1c-5ad1-4c7e-9d0e-0a54ad1b7a10";

    #[test]
    fn a_text_tells_whether_its_bdev_waited_and_for_whom() {
        let own = locked(BOOT);
        assert_eq!(Origin::of(&own, BOOT), Origin::Locked);
        assert_eq!(Origin::of(&Uuid::new_v4().to_string(), BOOT), Origin::Unknown);
        for seen in [None, Some(""), Some(&*own)] {
            let waits = waiting(seen, BOOT);
            assert_eq!(Origin::of(&waits, BOOT), Origin::Waited);
            assert!(waited_for(&waits, seen) && waits != waiting(seen, BOOT));
            for other in [None, Some(""), Some(&*own), Some("other")] {
                assert_eq!(waited_for(&waits, other), other == seen, "{other:?} for {seen:?}");
            }
            assert!(!waited_for(&own, seen));
        }
    }

    #[test]
    fn one_of_another_boot_is_of_nobody_who_is_still_there() {
        for text in [locked(BOOT), waiting(None, BOOT)] {
            assert_eq!(Origin::of(&text, "b7c4a3d2-5ad1-4c7e-9d0e-0a54ad1b7a10"), Origin::Gone);
            // With a zero behind it, in what is read of it.
            assert!(text.len() < crate::image::GENERATION_MAX);
        }
    }
}
