//! The namespaces of a subsystem, without a device on them.

use std::time::{Duration, Instant};

use bdev::Medium;

use crate::address::Address;
use crate::connect::{self, Listed};
use crate::controller::{NO_PATH, identity_of};
use crate::identify::Namespace;
use crate::options::Options;
use crate::silent::{self, Known};

/// How long the namespaces of a controller may take to say what they are, once it is connected.
const LIST_WITHIN: Duration = Duration::from_secs(10);

/// A namespace of a subsystem.
#[derive(Clone, Debug)]
pub struct Found {
    /// What it is called, the same as long as it is there: `uuid.UUID`, or `eui.` and its NGUID or EUI-64, as Linux
    /// does; `nsid.NUMBER` of one that says nothing of itself.
    pub name: String,
    /// Its number.
    pub nsid: u32,
    /// What it is; a clause: it is none that a bdev can be on, or could not be told from another.
    pub is: Result<Medium, String>,
}

/// What one is called that cannot be told from others.
pub fn unnamed(nsid: u32) -> String {
    format!("nsid.{nsid}")
}

impl Namespace {
    /// As a volume of a pool of its subsystem; the identity of one without a name is not used.
    pub(crate) fn medium(&self, subnqn: &str) -> Medium {
        Medium {
            identity: self.name.map_or(self.identity, |name| name.volume(subnqn)),
            block_size: self.geometry.block_size,
            size: self.geometry.bytes(),
            read_only: self.read_only,
            thin: self.thin,
        }
    }

    /// What it is called; see [`Found::name`].
    pub(crate) fn called(&self) -> String {
        self.name.map_or_else(|| unnamed(self.nsid), |name| name.to_string())
    }
}

impl Found {
    fn new(listed: Listed, subnqn: &str) -> Found {
        let Listed { nsid, name, told, is, .. } = listed;
        let nameless = || {
            "it has neither UUID nor NGUID nor EUI-64, so it could not be told from another one: give it one at the \
             array"
                .to_owned()
        };
        let is = is.map(|namespace| namespace.medium(subnqn));
        match name {
            Some(name) => Found { name: name.to_string(), nsid, is },
            None if !told => Found { name: unnamed(nsid), nsid, is },
            None => Found { name: unnamed(nsid), nsid, is: Err(nameless()) },
        }
    }
}

/// Connects by the first of `paths` that can be, as no device, and returns the active namespaces that this host is
/// shown; takes some seconds for each path at most. Those come last that did not answer before. What cannot be used by
/// that path is asked by the others, but not by those that have kept somebody waiting just before.
///
/// # Errors
/// In one clause: none of the paths leads to such a controller, or it does not tell its namespaces.
pub fn list(options: &Options, paths: &[Address]) -> Result<Vec<Found>, String> {
    let identity = identity_of(options);
    let mut listed: Result<Vec<Listed>, String> = Err(NO_PATH.to_owned());
    for Known { address, rests } in silent::last(&options.subnqn, paths) {
        let is_enough = |all: &Vec<Listed>| rests || !all.iter().any(|each| each.is_elsewhere);
        if listed.as_ref().is_ok_and(is_enough) {
            break;
        }
        let end = Instant::now() + options.connect_within;
        match (connect::list(&address, &identity, end, LIST_WITHIN), &mut listed) {
            (Ok(by_other), Ok(listed)) => complete(listed, by_other),
            (Err(_), Ok(_)) => {}
            (by_this, none) => *none = by_this.map_err(|why| format!("{address}: {why}")),
        }
    }
    Ok(listed?.into_iter().map(|each| Found::new(each, &options.subnqn)).collect())
}

/// Takes what another path tells of those that cannot be used by the first.
fn complete(listed: &mut [Listed], by_other: Vec<Listed>) {
    for other in by_other.into_iter().filter(|other| !other.is_elsewhere) {
        let is_it = |each: &&mut Listed| {
            let is_same = !each.told || each.name == other.name;
            each.is_elsewhere && each.nsid == other.nsid && is_same
        };
        if let Some(each) = listed.iter_mut().find(is_it) {
            *each = other;
        }
    }
}
