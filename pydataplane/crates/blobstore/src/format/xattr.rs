//! Xattr records, packed into the root's inline area and then into overflow pages.

use super::{INLINE_XATTRS, PAYLOAD, XATTR_NAME_MAX, XATTR_PAGES, XATTR_VALUE_MAX};
use std::collections::BTreeMap;

/// Bytes of a record before its name.
const RECORD_HEADER: usize = 4;
const _: () = assert!(RECORD_HEADER + XATTR_NAME_MAX + XATTR_VALUE_MAX <= PAYLOAD);

/// The records of `xattrs`: first the inline area, then the overflow pages. `None` when they need
/// more than [`XATTR_PAGES`] of those.
pub(crate) fn pack(xattrs: &BTreeMap<String, Vec<u8>>) -> Option<Vec<Vec<u8>>> {
    let mut areas = vec![Vec::new()];
    for (name, value) in xattrs {
        let len = RECORD_HEADER + name.len() + value.len();
        // First fit: small records go inline even after a large one did not fit there.
        let room =
            |i: usize, a: &Vec<u8>| a.len() + len <= if i == 0 { INLINE_XATTRS } else { PAYLOAD };
        let at = areas.iter().enumerate().position(|(i, a)| room(i, a));
        let at = at.unwrap_or_else(|| {
            areas.push(Vec::new());
            areas.len() - 1
        });
        let area = &mut areas[at];
        area.extend_from_slice(&(name.len() as u16).to_le_bytes());
        area.extend_from_slice(&(value.len() as u16).to_le_bytes());
        area.extend_from_slice(name.as_bytes());
        area.extend_from_slice(value);
    }
    (areas.len() <= 1 + XATTR_PAGES).then_some(areas)
}

/// Adds the records of one area to `xattrs`; the error is a clause.
pub(crate) fn unpack(
    mut area: &[u8],
    xattrs: &mut BTreeMap<String, Vec<u8>>,
) -> Result<(), &'static str> {
    while !area.is_empty() {
        let (head, rest) = area.split_at_checked(RECORD_HEADER).ok_or("an xattr is cut off")?;
        let name_len = usize::from(u16::from_le_bytes([head[0], head[1]]));
        let value_len = usize::from(u16::from_le_bytes([head[2], head[3]]));
        if !(1..=XATTR_NAME_MAX).contains(&name_len) || value_len > XATTR_VALUE_MAX {
            return Err("an xattr's length is out of range");
        }
        let (name, rest) = rest.split_at_checked(name_len).ok_or("an xattr is cut off")?;
        let (value, rest) = rest.split_at_checked(value_len).ok_or("an xattr is cut off")?;
        if !name.iter().all(u8::is_ascii_graphic) {
            return Err("an xattr's name is not printable ASCII");
        }
        let name = String::from_utf8_lossy(name).into_owned();
        if xattrs.insert(name, value.to_vec()).is_some() {
            return Err("an xattr is there twice");
        }
        area = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(
            xattrs in prop::collection::btree_map("[!-~]{1,255}", prop::collection::vec(any::<u8>(), 0..=XATTR_VALUE_MAX), 0..20)
        ) {
            if let Some(areas) = pack(&xattrs) {
                prop_assert!(areas[0].len() <= INLINE_XATTRS);
                prop_assert!(areas[1..].iter().all(|a| a.len() <= PAYLOAD && !a.is_empty()));
                let mut back = BTreeMap::new();
                for a in &areas {
                    unpack(a, &mut back).unwrap();
                }
                prop_assert_eq!(back, xattrs);
            }
        }

        #[test]
        fn garbage_is_an_error_or_a_map_but_never_a_panic(
            area in prop::collection::vec(any::<u8>(), 0..100)
        ) {
            let _ = unpack(&area, &mut BTreeMap::new());
        }
    }
}
