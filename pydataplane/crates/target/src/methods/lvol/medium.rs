//! What an lvstore has on its medium: compared with memory, and told page by page.

use super::{either, required};
use crate::app::App;
use crate::errors;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Check {
    /// UUID of an lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of an lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
    /// Bdev with an lvstore that is not loaded.
    #[serde(default)]
    bdev_name: Option<String>,
    /// Write anew what is not as it should be; of one that is not loaded a copy of the superblock, where
    /// nothing else is wrong. Default: false
    #[serde(default)]
    repair: bool,
}

/// What a check of an lvstore found.
#[derive(Serialize, JsonSchema)]
struct Checked {
    /// Metadata pages that were looked at.
    pages: u64,
    /// What was wrong.
    problems: Vec<Problem>,
}

/// Something on the medium that is not as it should be.
#[derive(Serialize, JsonSchema)]
struct Problem {
    /// Where.
    place: String,
    /// What is wrong.
    cause: String,
    /// It was written anew.
    repaired: bool,
}

fn check(app: &App, p: Check) -> Result<Checked, Error> {
    let found = match (p.bdev_name, either(p.uuid, p.lvs_name)?) {
        (Some(bdev), None) => app.lvstores.check_bdev(&bdev, p.repair),
        (None, Some(lvstore)) => app.lvstores.check_lvstore(&lvstore, p.repair),
        _ => return Err(Error::os(Errno::Inval, "give an lvstore, or a bdev with one")),
    };
    let found = found.map_err(errors::lvol)?;
    let problems = found.problems.into_iter();
    Ok(Checked {
        pages: found.pages,
        problems: problems
            .map(|p| Problem { place: p.place, cause: p.cause, repaired: p.repaired })
            .collect(),
    })
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Dump {
    /// UUID of an lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of an lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
    /// Bdev with an lvstore that is not loaded.
    #[serde(default)]
    bdev_name: Option<String>,
    /// Metadata page to begin with. Default: 0, with the superblock and the journal before it
    #[serde(default)]
    page: u64,
}

/// Some of what an lvstore has on its medium.
#[derive(Serialize, JsonSchema)]
struct Dumped {
    /// In the order of their places.
    entries: Vec<DumpEntry>,
    /// Metadata page that the next call is to begin with; null after the last.
    next_page: Option<u64>,
}

/// A page, or a record of the journal; schemas/blobstore.md says what the facts mean.
#[derive(Serialize, JsonSchema)]
struct DumpEntry {
    /// Where it begins on the device, in bytes.
    offset: u64,
    /// superblock, record, bitmap, root, extents, index, xattrs, or page for one that cannot be read.
    kind: String,
    /// What it says, by name.
    facts: BTreeMap<String, String>,
    /// Why it cannot be read; null: it can.
    problem: Option<String>,
}

fn dump(app: &App, p: Dump) -> Result<Dumped, Error> {
    let found = match (p.bdev_name, either(p.uuid, p.lvs_name)?) {
        (Some(bdev), None) => app.lvstores.dump_bdev(&bdev, p.page),
        (None, Some(lvstore)) => app.lvstores.dump_lvstore(&lvstore, p.page),
        _ => return Err(Error::os(Errno::Inval, "give an lvstore, or a bdev with one")),
    };
    let found = found.map_err(errors::lvol)?;
    let entries = found.entries.into_iter().map(|entry| DumpEntry {
        offset: entry.offset,
        kind: entry.kind.to_owned(),
        facts: entry.facts.into_iter().map(|(name, text)| (name.to_owned(), text)).collect(),
        problem: entry.problem,
    });
    Ok(Dumped { entries: entries.collect(), next_page: found.next })
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Scrub {
    /// UUID of an lvstore.
    #[serde(default)]
    uuid: Option<String>,
    /// Name of an lvstore.
    #[serde(default)]
    lvs_name: Option<String>,
    /// Byte of its device to begin with. Default: 0
    #[serde(default)]
    offset: u64,
}

/// Some of the data of an lvstore's lvols, read.
#[derive(Serialize, JsonSchema)]
struct Scrubbed {
    /// Bytes that were read, or could not be.
    bytes: u64,
    /// What could not be.
    unreadable: Vec<Unreadable>,
    /// Byte of the device that the next call is to begin with; null after the last.
    next_offset: Option<u64>,
}

/// Data that cannot be read.
#[derive(Serialize, JsonSchema)]
struct Unreadable {
    /// Where it begins on the device, in bytes.
    offset: u64,
    /// Bytes.
    length: u64,
    /// What the device says.
    cause: String,
    /// Whose it is.
    lvols: Vec<UnreadableOf>,
}

/// An lvol that has data which cannot be read.
#[derive(Serialize, JsonSchema)]
struct UnreadableOf {
    /// LVSTORE/LVOL.
    alias: String,
    /// Where it begins there, in bytes.
    offset: u64,
}

fn scrub(app: &App, p: Scrub) -> Result<Scrubbed, Error> {
    let lvstore = required(p.uuid, p.lvs_name)?;
    let found = app.lvstores.scrub_lvstore(&lvstore, p.offset).map_err(errors::lvol)?;
    let of = |(alias, offset)| UnreadableOf { alias, offset };
    let unreadable = found.unreadable.into_iter().map(|part| Unreadable {
        offset: part.offset,
        length: part.length,
        cause: part.cause,
        lvols: part.lvols.into_iter().map(of).collect(),
    });
    Ok(Scrubbed { bytes: found.bytes, unreadable: unreadable.collect(), next_offset: found.next })
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_lvstore_check",
            "Compare the metadata of an lvstore on the medium with what the target knows, while it is used, \
             and write anew what has gone bad; or look at one that is not loaded.",
            Flags::READ,
            move |p: Check| check(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::IlSeq, Errno::Inval, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvstore_dump",
            "Tell what an lvstore has on its medium, page by page: superblock, journal, metadata. Nothing \
             is judged, and nothing written.",
            Flags::READ,
            move |p: Dump| dump(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::Busy, Errno::IlSeq, Errno::Inval, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvstore_scrub",
            "Read some of the data of an lvstore's lvols, while they are used, and tell what cannot be read.",
            Flags::READ,
            move |p: Scrub| scrub(&a, p),
        )
        .errors(&[Errno::NoDev, Errno::Inval, Errno::Io]);
}
