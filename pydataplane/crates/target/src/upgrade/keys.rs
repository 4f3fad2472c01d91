//! Keys of encrypted bdevs, from program to program in memory that is in no file system.

use super::message::KeyState;
use crate::privilege;
use crypto::{Key, Keys};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{Read, Seek, Write};
use vhost_scsi::handover::Fds;
use zeroize::Zeroizing;

/// Most bytes of a key.
const MAX_BYTES: u64 = 4096;

/// Puts all keys into `fds`.
///
/// # Errors
/// In one sentence: there is no memory for one.
pub fn put(keys: &Keys, fds: &mut Fds) -> Result<Vec<KeyState>, String> {
    let put = |key: &Key| {
        let mut file = File::from(memfd_create("key", MemfdFlags::CLOEXEC)?);
        file.write_all(key.secret())?;
        Ok::<_, std::io::Error>(KeyState {
            name: key.name().to_owned(),
            destroy_with_last: key.goes_with_last(),
            secret: fds.put(file.into()),
        })
    };
    let states = keys.list().iter().map(|key| key.as_ref()).map(put).collect::<Result<_, _>>();
    states.map_err(|e| format!("a key cannot be given along: {e}"))
}

/// Takes keys out of `fds`.
///
/// # Errors
/// In one sentence: one of them is none.
pub fn take(keys: &Keys, states: Vec<KeyState>, fds: &mut Fds) -> Result<(), String> {
    if !states.is_empty() {
        privilege::keep_out_of_dumps();
    }
    for KeyState { name, destroy_with_last, secret } in states {
        let mut file = File::from(fds.take(secret).map_err(|e| e.to_string())?);
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES as usize));
        let read = file.rewind().and_then(|()| file.take(MAX_BYTES).read_to_end(&mut bytes));
        read.map_err(|e| format!("key {name} cannot be read: {e}"))?;
        let key = Key::from_bytes(&name, bytes, destroy_with_last).map_err(|e| e.to_string())?;
        keys.add(key).map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{DumpableBehavior, dumpable_behavior};

    #[test]
    fn keys_go_along_and_no_message_has_them() {
        let (old, new) = (Keys::default(), Keys::default());
        let (data, tweak) = ("ab".repeat(32), "cd".repeat(32));
        for (name, with_last) in [("a", true), ("b", false)] {
            old.add(Key::from_hex(name, &data, &tweak, with_last).unwrap()).unwrap();
        }
        let mut fds = Fds::default();
        let states = put(&old, &mut fds).unwrap();
        let text = serde_json::to_string(&states).unwrap();
        assert!(!text.contains("abab") && !text.contains("171"), "{text}");
        take(&new, states, &mut fds).unwrap();
        assert_eq!(dumpable_behavior(), Ok(DumpableBehavior::NotDumpable));
        for key in old.list() {
            let other = new.get(key.name()).unwrap();
            assert_eq!(other.secret(), key.secret());
            assert_eq!(other.goes_with_last(), key.goes_with_last());
        }
    }
}
