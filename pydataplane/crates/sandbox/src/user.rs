//! Who the process is: a user of its own, no capability.
//!
//! Accounts are those of /etc/passwd and /etc/group (passwd(5), group(5)), or numbers. Everything
//! here happens before the process has a second thread, for each thread has its own user to the
//! kernel.

use rustix::fs::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::collections::BTreeSet;
use std::fs;
use std::io;

/// An account that a process can run as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name, or its number as text.
    pub name: String,
    /// Its user id.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Further groups.
    pub groups: BTreeSet<u32>,
}

/// Why the process does not become another user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No such account.
    #[error("there is no user {0} in /etc/passwd: create it, or give an existing one or UID[:GID]")]
    NoUser(String),
    /// A thread would stay what it is.
    #[error("the process has {0} threads already: it can only change its user before that")]
    Threads(usize),
    /// The kernel says no.
    #[error("cannot {operation}: {source}")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel said yes and did not do it.
    #[error("the process still has rights that it gave up: {0}")]
    NotGivenUp(String),
}

fn os(operation: &'static str) -> impl Fn(rustix::io::Errno) -> UserError {
    move |e| UserError::Os { operation, source: e.into() }
}

impl Account {
    /// The account called `text`, a name or `UID` or `UID:GID` in numbers; `None` if there is none.
    pub fn find(text: &str) -> Option<Account> {
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let group = fs::read_to_string("/etc/group").unwrap_or_default();
        in_files(text, &passwd, &group)
    }
}

/// The name of a user id, or the number as text.
pub fn name_of(uid: u32) -> String {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let entry = passwd.lines().filter_map(entry).find(|e| e.uid == uid);
    entry.map_or_else(|| uid.to_string(), |e| e.name.to_owned())
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
}

/// A line of passwd(5).
fn entry(line: &str) -> Option<Entry<'_>> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let mut numbers = fields.skip(1).map(|field| field.parse().ok());
    Some(Entry { name, uid: numbers.next()??, gid: numbers.next()?? })
}

fn in_files(text: &str, passwd: &str, group: &str) -> Option<Account> {
    let by_name = passwd.lines().filter_map(entry).find(|e| e.name == text);
    if let Some(entry) = by_name {
        let groups = group.lines().filter_map(|line| {
            let fields: Vec<_> = line.split(':').collect();
            let members = fields.get(3)?.split(',');
            members.into_iter().any(|m| m == entry.name).then(|| fields[2].parse().ok())?
        });
        return Some(Account {
            name: entry.name.to_owned(),
            uid: entry.uid,
            gid: entry.gid,
            groups: groups.collect(),
        });
    }
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
    // The greatest number means "as it is" to the kernel (setresuid(2)).
    let valid = uid != u32::MAX && gid != u32::MAX;
    valid.then(|| Account { name: text.to_owned(), uid, gid, groups: BTreeSet::new() })
}

/// Makes the process `account`, member also of `groups`, without any capability now or later.
/// Only root can.
///
/// # Errors
/// [`UserError`]; the process must end then, for it may be half of each.
pub fn become_user(account: &Account, groups: &[u32]) -> Result<(), UserError> {
    check_single_thread()?;
    empty_bounding_set(CapabilitySet::empty())?;
    let all: BTreeSet<u32> = account.groups.iter().chain(groups).copied().collect();
    let all: Vec<Gid> = all.into_iter().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    rustix::thread::set_thread_groups(&all).map_err(os("set the groups"))?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(os("set the group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(os("set the user"))?;
    // Where securebits or ambient capabilities kept some, they go too.
    set_capabilities(CapabilitySet::empty())?;
    check_is(account)
}

/// Leaves the process its user and, of its capabilities, those of `keep`.
///
/// # Errors
/// [`UserError`]; the process has none but those that it kept then, or all.
pub fn keep_capabilities(keep: CapabilitySet) -> Result<(), UserError> {
    check_single_thread()?;
    let have = rustix::thread::capabilities(None).map_err(os("read the capabilities"))?;
    if have.effective.contains(CapabilitySet::SETPCAP) {
        empty_bounding_set(keep)?;
    }
    set_capabilities(keep & have.permitted)
}

fn set_capabilities(set: CapabilitySet) -> Result<(), UserError> {
    rustix::thread::clear_ambient_capability_set().map_err(os("clear ambient capabilities"))?;
    let sets =
        CapabilitySets { effective: set, permitted: set, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).map_err(os("set the capabilities"))
}

/// What is not in this set no program that the process runs ever gets (capabilities(7)).
fn empty_bounding_set(keep: CapabilitySet) -> Result<(), UserError> {
    for capability in CapabilitySet::all().iter().filter(|c| !keep.contains(*c)) {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // INVAL: younger than this kernel.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(e) => return Err(os("drop a capability from the bounding set")(e)),
        }
    }
    Ok(())
}

fn check_single_thread() -> Result<(), UserError> {
    let source = |source| UserError::Os { operation: "count the threads", source };
    match fs::read_dir("/proc/self/task").map_err(source)?.count() {
        1 => Ok(()),
        n => Err(UserError::Threads(n)),
    }
}

fn check_is(account: &Account) -> Result<(), UserError> {
    let not_given_up = |what: String| Err(UserError::NotGivenUp(what));
    let have = rustix::thread::capabilities(None).map_err(os("read the capabilities"))?;
    if !(have.effective | have.permitted | have.inheritable).is_empty() {
        return not_given_up(format!("capabilities {:?}", have.permitted));
    }
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if (uid.as_raw(), gid.as_raw()) != (account.uid, account.gid) {
        return not_given_up(format!("user {}, group {}", uid.as_raw(), gid.as_raw()));
    }
    if account.uid != 0 && rustix::thread::set_thread_uid(Uid::ROOT).is_ok() {
        return not_given_up("it can become root again".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nvirtlun:x:990:980::/:/bin/false\n";
    const GROUP: &str = "kvm:x:104:libvirt-qemu,virtlun\ndisk:x:6:virtlun\nvirt:x:1:virtlunx\n";

    #[test]
    fn accounts_are_found_with_their_groups() {
        let account = in_files("virtlun", PASSWD, GROUP).unwrap();
        assert_eq!((account.uid, account.gid), (990, 980));
        assert_eq!(account.groups, BTreeSet::from([6, 104]));
        assert_eq!(in_files("virtlunx", PASSWD, GROUP), None);
        assert_eq!(in_files("", PASSWD, GROUP), None);
    }

    #[test]
    fn numbers_are_accounts_too() {
        let account = in_files("5000:6000", PASSWD, GROUP).unwrap();
        assert_eq!((account.uid, account.gid), (5000, 6000));
        assert_eq!(in_files("5000", PASSWD, GROUP).unwrap().gid, 5000);
        for wrong in ["-1", "5000:", ":5", "5000:x", "4294967295", "5000:4294967295", "4294967296"]
        {
            assert_eq!(in_files(wrong, PASSWD, GROUP), None, "{wrong}");
        }
    }

    #[test]
    fn names_of_ids() {
        assert_eq!(name_of(0), "root");
        assert_eq!(name_of(4_000_000_000), "4000000000");
    }
}
