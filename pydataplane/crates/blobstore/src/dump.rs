//! What a store has on the medium, page by page, for a person who looks for a fault.
//!
//! Nothing is believed that a load would not believe, and nothing is judged: `check` does that. What the
//! journal has not brought to its place yet stands in its records alone.

use crate::disk::{Disk, DiskError};
use crate::error::Error;
use crate::format::{
    BITMAP_BITS, COPY_A, COPY_B, FLAG_DELETING, FLAG_DIF_1, FLAG_DIF_3, FLAG_DIF_4096,
    FLAG_EXTERNAL, FLAG_READ_ONLY, FLAG_SNAPSHOT, FLAG_THIN, HOLE, Kind, PAGE_SIZE, Page,
    RecordHeader, Root, Superblock, decode_name, unpack,
};
use crate::load::choose_superblock;
use crate::store::Store;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Metadata pages that one step reads.
const STEP_PAGES: u64 = 256;
/// Records of the journal that are told; the latest count for more than their number does.
const RECORDS_MAX: usize = 4096;

/// One page, or one record of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins on the device, in bytes.
    pub offset: u64,
    /// What it is: `superblock`, `record`, `bitmap`, `root`, `extents`, `index`, `xattrs`, or `page` for
    /// one that cannot be read.
    pub kind: &'static str,
    /// What it says, by name.
    pub facts: Vec<(&'static str, String)>,
    /// Why it cannot be read.
    pub problem: Option<String>,
}

/// What one step of [`Store::dump`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dumped {
    /// In the order of their places.
    pub entries: Vec<Entry>,
    /// The metadata page to go on with; `None`: that was all.
    pub next: Option<u64>,
}

impl<D: Disk> Store<D> {
    /// Tells what is on the medium, from metadata page `from` on; with the first pages the superblock and the
    /// journal, too. Writes nothing. Of a store that is used pages change meanwhile.
    ///
    /// # Errors
    /// [`Error::NotAStore`], [`Error::Unsupported`], [`Error::Damaged`] where no superblock can be read, or
    /// the device's failure to read.
    pub fn dump(disk: &mut D, from: u64) -> Result<Dumped, Error> {
        let sb = choose_superblock(disk)?;
        let mut found = Dumped::default();
        if from == 0 {
            superblocks(disk, &mut found.entries).map_err(Error::Data)?;
            records(disk, &sb, &mut found.entries).map_err(Error::Data)?;
        }
        let end = sb.md_pages.min(from.saturating_add(STEP_PAGES));
        let mut bitmap: Option<(u64, Option<Page>)> = None;
        for number in from..end {
            let of = number / BITMAP_BITS;
            if bitmap.as_ref().is_none_or(|(known, _)| *known != of) {
                let page = read(disk, sb.page_offset(of as u32)).map_err(Error::Data)?;
                bitmap = Some((of, Page::verify(&page, sb.store_id(), of as u32).ok()));
            }
            let bit = (number % BITMAP_BITS) as usize;
            let marks = bitmap.as_ref().and_then(|(_, page)| page.as_ref());
            let in_use = marks.is_none_or(|page| page.payload()[bit / 8] & 1 << (bit % 8) != 0);
            if in_use {
                found.entries.push(page(disk, &sb, number as u32).map_err(Error::Data)?);
            }
        }
        found.next = (end < sb.md_pages).then_some(end);
        Ok(found)
    }
}

fn read<D: Disk>(disk: &mut D, offset: u64) -> Result<[u8; PAGE_SIZE], DiskError> {
    let mut bytes = [0; PAGE_SIZE];
    disk.read(offset, &mut bytes).map(|()| bytes)
}

fn superblocks<D: Disk>(disk: &mut D, entries: &mut Vec<Entry>) -> Result<(), DiskError> {
    for (name, copy) in [("A", COPY_A), ("B", COPY_B)] {
        let offset = copy * PAGE_SIZE as u64;
        let mut facts = vec![("copy", name.to_owned())];
        let problem = match Superblock::decode(&read(disk, offset)?) {
            Ok(sb) => {
                facts.extend([
                    ("version", sb.version.to_string()),
                    ("generation", sb.generation.to_string()),
                    ("uuid", sb.uuid.to_string()),
                    ("name", sb.name.clone()),
                    ("cluster_size", sb.cluster_size.to_string()),
                    ("block_size", sb.block_size.to_string()),
                    ("device_pages", sb.device_pages.to_string()),
                    ("journal_start", sb.journal_start.to_string()),
                    ("journal_pages", sb.journal_pages.to_string()),
                    ("md_start", sb.md_start.to_string()),
                    ("md_pages", sb.md_pages.to_string()),
                    ("bitmap_pages", sb.bitmap_pages.to_string()),
                    ("first_data_cluster", sb.first_data_cluster.to_string()),
                    ("data_clusters", sb.data_clusters.to_string()),
                    ("tail_page", sb.tail_page.to_string()),
                    ("tail_seq", sb.tail_seq.to_string()),
                    ("mount", sb.mount.to_string()),
                ]);
                if sb.shares {
                    facts.push(("share_clusters", "true".into()));
                }
                None
            }
            Err(fault) => Some(fault.to_string()),
        };
        entries.push(Entry { offset, kind: "superblock", facts, problem });
    }
    Ok(())
}

/// The records from the tail on, as far as each is the next of the same load of the store.
fn records<D: Disk>(
    disk: &mut D,
    sb: &Superblock,
    entries: &mut Vec<Entry>,
) -> Result<(), DiskError> {
    let (mut at, mut seq, mut left) = (sb.tail_page, sb.tail_seq, sb.journal_pages);
    for _ in 0..RECORDS_MAX {
        let offset = (sb.journal_start + at % sb.journal_pages) * PAGE_SIZE as u64;
        let Some(header) = RecordHeader::decode(&read(disk, offset)?) else { break };
        let pages = header.targets.len() as u64 + 1;
        let follows = (header.store, header.mount, header.seq) == (sb.store_id(), sb.mount, seq);
        if !follows || pages > left {
            break;
        }
        let boot = match header.boot {
            0 => "final".to_owned(),
            boot => Uuid::from_u128(boot).to_string(),
        };
        let facts = vec![
            ("seq", seq.to_string()),
            ("boot", boot),
            ("open", header.open.to_string()),
            ("pages", runs(header.targets.iter().map(|page| u64::from(*page)))),
        ];
        entries.push(Entry { offset, kind: "record", facts, problem: None });
        at = at.wrapping_add(pages) % sb.journal_pages;
        (seq, left) = (seq.wrapping_add(1), left - pages);
    }
    Ok(())
}

fn page<D: Disk>(disk: &mut D, sb: &Superblock, number: u32) -> Result<Entry, DiskError> {
    let offset = sb.page_offset(number);
    let mut facts = vec![("page", number.to_string())];
    let page = match Page::verify(&read(disk, offset)?, sb.store_id(), number) {
        Ok(page) => page,
        Err(cause) => return Ok(Entry { offset, kind: "page", facts, problem: Some(cause) }),
    };
    let id = page.id();
    facts.push(("lsn", page.lsn().to_string()));
    if id.kind != Kind::Bitmap {
        facts.push(("blob", id.owner.to_string()));
    }
    if !matches!(id.kind, Kind::Root) {
        facts.push(("index", id.index.to_string()));
    }
    let mut problem = None;
    let kind = match id.kind {
        Kind::Bitmap => {
            facts.push((
                "used",
                page.payload().iter().map(|b| b.count_ones()).sum::<u32>().to_string(),
            ));
            "bitmap"
        }
        Kind::Root => {
            problem = root(&page, &mut facts);
            "root"
        }
        Kind::Extents => {
            facts.push(("clusters", extents(&page)));
            "extents"
        }
        Kind::Index => {
            let pointers = page.pointers().iter().map(|pointer| u64::from(pointer.get()));
            facts.push(("pages", runs(pointers.filter(|pointer| *pointer != 0))));
            "index"
        }
        Kind::Xattrs => {
            let used = (page.used() as usize).min(page.payload().len());
            problem = xattrs(&page.payload()[..used], &mut facts);
            "xattrs"
        }
    };
    Ok(Entry { offset, kind, facts, problem })
}

fn root(page: &Page, facts: &mut Vec<(&'static str, String)>) -> Option<String> {
    let root = Root::of(page.payload());
    let flags = [
        (FLAG_THIN, "thin"),
        (FLAG_READ_ONLY, "read-only"),
        (FLAG_SNAPSHOT, "snapshot"),
        (FLAG_DELETING, "deleting"),
        (FLAG_EXTERNAL, "external"),
        (FLAG_DIF_1, "dif-1"),
        (FLAG_DIF_3, "dif-3"),
        (FLAG_DIF_4096, "dif-4096"),
    ];
    let set = flags.iter().filter(|(flag, _)| root.flags.get() & flag != 0);
    let words: Vec<&str> = set.map(|(_, word)| *word).collect();
    let pages =
        |pointers: &mut dyn Iterator<Item = u32>| runs(pointers.map(u64::from).filter(|p| *p != 0));
    facts.extend([
        ("uuid", Uuid::from_bytes(root.uuid).to_string()),
        ("name", decode_name(&root.name).unwrap_or_else(|| "?".to_owned())),
        ("clusters", root.size.to_string()),
        ("flags", words.join(",")),
        ("extents_pages", pages(&mut root.direct.iter().map(|p| p.get()))),
        ("index_pages", pages(&mut root.indirect.iter().map(|p| p.get()))),
        ("xattr_pages", pages(&mut root.xattr_page.iter().map(|p| p.get()))),
    ]);
    if root.parent.get() != 0 {
        facts.push(("parent", root.parent.to_string()));
        facts.push(("parent_clusters", root.parent_clusters.to_string()));
    }
    if root.external != [0; 16] {
        facts.push(("external", Uuid::from_bytes(root.external).to_string()));
    }
    let used = usize::from(root.xattr_bytes.get()).min(root.inline_xattrs.len());
    xattrs(&root.inline_xattrs[..used], facts)
}

fn xattrs(area: &[u8], facts: &mut Vec<(&'static str, String)>) -> Option<String> {
    let mut found = BTreeMap::new();
    let problem = unpack(area, &mut found).err().map(str::to_owned);
    if !found.is_empty() {
        facts.push(("xattrs", found.into_keys().collect::<Vec<_>>().join(",")));
    }
    problem
}

/// The clusters of an extents page, `of the blob`-`on the device`, neighbours as one.
fn extents(page: &Page) -> String {
    let first = u64::from(page.id().index) * page.pointers().len() as u64;
    let mut all: Vec<(u64, u64, u64)> = Vec::new();
    let mut holes = 0;
    for (i, pointer) in page.pointers().iter().enumerate() {
        let (cluster, to) = (first + i as u64, u64::from(pointer.get()));
        match all.last_mut() {
            _ if to == 0 => {}
            _ if pointer.get() == HOLE => holes += 1,
            Some((from, at, count)) if *from + *count == cluster && *at + *count == to => {
                *count += 1
            }
            _ => all.push((cluster, to, 1)),
        }
    }
    let mut words: Vec<String> =
        all.iter().map(|(cluster, to, count)| format!("{cluster}+{count}@{to}")).collect();
    if holes > 0 {
        words.push(format!("{holes} holes"));
    }
    words.join(",")
}

/// Numbers, neighbours as one: `3-5,9`.
fn runs(numbers: impl Iterator<Item = u64>) -> String {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match all.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => all.push((number, number)),
        }
    }
    let words = all.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    words.collect::<Vec<_>>().join(",")
}
