//! A blob in memory, and its pages as they are on the medium.

use crate::extents::Extents;
use crate::format::{
    DIRECT, FLAG_DELETING, FLAG_DIF_1, FLAG_DIF_3, FLAG_DIF_4096, FLAG_EXTERNAL, FLAG_READ_ONLY,
    FLAG_SNAPSHOT, FLAG_THIN, HOLE, Kind, POINTERS, Page, PageId, Root, encode_name, pack,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};

/// Identifies a blob within its store, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobId(pub(crate) u64);

/// What a blob is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobInfo {
    /// Its number in the store.
    pub id: BlobId,
    /// Identity for ever.
    pub uuid: Uuid,
    /// Name for people.
    pub name: String,
    /// Size in clusters.
    pub size: u64,
    /// Clusters that it owns.
    pub allocated: u64,
    /// Whether clusters are allocated on first write only.
    pub thin: bool,
    /// The protection information that it keeps in itself.
    pub dif: Option<Dif>,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether it is a snapshot: others may have it as their parent.
    pub snapshot: bool,
    /// The snapshot that shows where this one has nothing of its own.
    pub parent: Option<BlobId>,
    /// The parent outside of the store that does so instead.
    pub external: Option<Uuid>,
    /// It shows in the clusters before this one.
    pub parent_clusters: u64,
    /// Those whose parent it is, in order.
    pub clones: Vec<BlobId>,
}

/// Types of protection information (SBC-4 4.22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DifType {
    /// Type 1.
    Type1,
    /// Type 3.
    Type3,
}

/// Protection information that a blob keeps in itself, for ever. The store knows nothing else of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dif {
    /// Its type.
    pub kind: DifType,
    /// It is of blocks of 4096 bytes, or else of 512: where it lies depends on that.
    pub large_blocks: bool,
}

/// The flags of a blob that has it, or has none.
pub(crate) fn dif_flags(dif: Option<Dif>) -> u32 {
    let Some(dif) = dif else { return 0 };
    let kind = match dif.kind {
        DifType::Type1 => FLAG_DIF_1,
        DifType::Type3 => FLAG_DIF_3,
    };
    kind | if dif.large_blocks { FLAG_DIF_4096 } else { 0 }
}

/// An extents page: 1008 consecutive clusters of the blob.
pub(crate) struct Chunk {
    /// Its metadata page.
    pub page: u32,
    /// Entries that are not 0.
    pub used: u32,
    /// The device's cluster of each; 0: unallocated; [`HOLE`].
    pub extents: Extents,
}

/// An index page; its entries are the pages of the chunks that it covers.
pub(crate) struct Index {
    /// Its metadata page.
    pub page: u32,
    /// Entries that are not 0.
    pub used: u32,
}

/// Which page of a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Root,
    Extents(u32),
    Index(u32),
    Xattrs(u32),
}

/// Everything about one blob.
pub(crate) struct Blob {
    pub id: u64,
    /// Its root page.
    pub root: u32,
    pub uuid: Uuid,
    pub name: String,
    /// In clusters.
    pub size: u64,
    pub allocated: u64,
    pub flags: u32,
    /// The snapshot that shows where this one has nothing; 0: none.
    pub parent: u64,
    /// What is outside of the store and shows there instead: never beside a parent.
    pub external: Option<Uuid>,
    /// It shows in the clusters before this one.
    pub parent_clusters: u64,
    /// Blobs whose parent this is; not on the medium.
    pub clones: BTreeSet<u64>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Overflow xattr pages.
    pub xattr_pages: Vec<u32>,
    /// By number of the extents page.
    pub chunks: BTreeMap<u32, Chunk>,
    /// By number of the index page.
    pub indexes: BTreeMap<u32, Index>,
}

/// Extents page and entry of a cluster of a blob.
pub(crate) fn place(cluster: u64) -> (u32, usize) {
    ((cluster / POINTERS as u64) as u32, (cluster % POINTERS as u64) as usize)
}

/// Index page that points to extents page `chunk`; `None`: the root does.
pub(crate) fn index_of(chunk: u32) -> Option<u32> {
    chunk.checked_sub(DIRECT as u32).map(|i| i / POINTERS as u32)
}

/// Extents pages that index page `index` points to.
pub(crate) fn chunks_of_index(index: u32) -> std::ops::Range<u32> {
    let first = DIRECT as u32 + index * POINTERS as u32;
    first..first + POINTERS as u32
}

impl Blob {
    pub fn thin(&self) -> bool {
        self.flags & FLAG_THIN != 0
    }

    /// The protection information that it keeps in itself.
    pub fn dif(&self) -> Option<Dif> {
        let kind = match self.flags & (FLAG_DIF_1 | FLAG_DIF_3) {
            0 => return None,
            FLAG_DIF_1 => DifType::Type1,
            _ => DifType::Type3,
        };
        Some(Dif { kind, large_blocks: self.flags & FLAG_DIF_4096 != 0 })
    }

    pub fn read_only(&self) -> bool {
        self.flags & FLAG_READ_ONLY != 0
    }

    pub fn snapshot(&self) -> bool {
        self.flags & FLAG_SNAPSHOT != 0
    }

    pub fn deleting(&self) -> bool {
        self.flags & FLAG_DELETING != 0
    }

    /// Whether anything shows where this one has nothing.
    pub fn has_below(&self) -> bool {
        self.parent != 0 || self.external.is_some()
    }

    /// Whether the parent shows in `cluster` where this one has nothing there.
    pub fn shows_parent(&self, cluster: u64) -> bool {
        cluster < self.parent_clusters
    }

    pub fn info(&self) -> BlobInfo {
        BlobInfo {
            id: BlobId(self.id),
            uuid: self.uuid,
            name: self.name.clone(),
            size: self.size,
            allocated: self.allocated,
            thin: self.thin(),
            dif: self.dif(),
            read_only: self.read_only(),
            snapshot: self.snapshot(),
            parent: (self.parent != 0).then_some(BlobId(self.parent)),
            external: self.external,
            parent_clusters: self.parent_clusters,
            clones: self.clones.iter().copied().map(BlobId).collect(),
        }
    }

    /// What stands for `cluster` of the blob: the device's cluster, 0 or [`HOLE`]. What it says must be in
    /// memory, as for all that looks at entries.
    pub fn entry(&self, cluster: u64) -> u32 {
        let (chunk, entry) = place(cluster);
        self.chunks.get(&chunk).map_or(0, |c| c.extents.get(entry))
    }

    /// The device's cluster that the blob itself has for `cluster`; 0: none.
    pub fn cluster(&self, cluster: u64) -> u32 {
        match self.entry(cluster) {
            HOLE => 0,
            to => to,
        }
    }

    /// All entries but 0 of some clusters: allocated ones and holes.
    pub fn entries(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u32)> + '_ {
        let chunk = |cluster| u32::try_from(cluster / POINTERS as u64).unwrap_or(u32::MAX);
        let last = chunk(range.end.saturating_sub(1));
        let all = self.chunks.range(chunk(range.start).min(last)..=last).flat_map(|(n, c)| {
            let base = u64::from(*n) * POINTERS as u64;
            let used = c.extents.iter().enumerate().filter(|(_, cluster)| *cluster != 0);
            used.map(move |(i, cluster)| (base + i as u64, cluster))
        });
        all.filter(move |(cluster, _)| range.contains(cluster))
    }

    /// All pages that the blob uses.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::once(self.root)
            .chain(self.xattr_pages.iter().copied())
            .chain(self.chunks.values().map(|c| c.page))
            .chain(self.indexes.values().map(|i| i.page))
    }

    /// The number of the page that holds `part`; `None`: the blob has no such part any more.
    pub fn page_of(&self, part: Part) -> Option<u32> {
        match part {
            Part::Root => Some(self.root),
            Part::Extents(i) => self.chunks.get(&i).map(|c| c.page),
            Part::Index(i) => self.indexes.get(&i).map(|x| x.page),
            Part::Xattrs(i) => self.xattr_pages.get(i as usize).copied(),
        }
    }

    /// The page that holds `part`, not sealed; the part exists.
    pub fn render(&self, part: Part, store: u64) -> Page {
        let number = self.page_of(part).expect("the part exists");
        let (kind, index) = match part {
            Part::Root => (Kind::Root, 0),
            Part::Extents(i) => (Kind::Extents, i),
            Part::Index(i) => (Kind::Index, i),
            Part::Xattrs(i) => (Kind::Xattrs, i),
        };
        let mut page = Page::new(PageId { kind, owner: self.id, index }, store, number);
        match part {
            Part::Root => self.render_root(Root::of_mut(page.payload_mut())),
            Part::Extents(i) => {
                let chunk = &self.chunks[&i];
                for (to, from) in page.pointers_mut().iter_mut().zip(chunk.extents.iter()) {
                    *to = U32::new(from);
                }
                page.set_used(chunk.used);
            }
            Part::Index(i) => {
                let covered = chunks_of_index(i);
                let first = covered.start;
                for (n, chunk) in self.chunks.range(covered) {
                    page.pointers_mut()[(n - first) as usize] = U32::new(chunk.page);
                }
                page.set_used(self.indexes[&i].used);
            }
            Part::Xattrs(i) => {
                let areas = pack(&self.xattrs).expect("was checked when it was set");
                let area = &areas[1 + i as usize];
                page.payload_mut()[..area.len()].copy_from_slice(area);
                page.set_used(area.len() as u32);
            }
        }
        page
    }

    fn render_root(&self, root: &mut Root) {
        root.uuid = self.uuid.into_bytes();
        root.name = encode_name(&self.name);
        root.size = U64::new(self.size);
        let external = if self.external.is_some() { FLAG_EXTERNAL } else { 0 };
        root.flags = U32::new(self.flags | external);
        root.external = self.external.unwrap_or_default().into_bytes();
        root.parent = U64::new(self.parent);
        root.parent_clusters = U64::new(self.parent_clusters);
        root.xattr_pages = U16::new(self.xattr_pages.len() as u16);
        for (to, from) in root.xattr_page.iter_mut().zip(&self.xattr_pages) {
            *to = U32::new(*from);
        }
        let areas = pack(&self.xattrs).expect("was checked when it was set");
        root.xattr_bytes = U16::new(areas[0].len() as u16);
        root.inline_xattrs[..areas[0].len()].copy_from_slice(&areas[0]);
        for (n, chunk) in self.chunks.range(..DIRECT as u32) {
            root.direct[*n as usize] = U32::new(chunk.page);
        }
        for (n, index) in &self.indexes {
            root.indirect[*n as usize] = U32::new(index.page);
        }
    }
}
