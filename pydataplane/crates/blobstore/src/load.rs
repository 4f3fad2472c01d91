//! From the medium to a [`Store`]: choose the superblock, replay the journal (`store::replay`), read the pages in
//! use, and check all of it. Nothing is written before everything was found whole.

use crate::blob::{Blob, Chunk, Index, chunks_of_index};
use crate::disk::{Disk, DiskError};
use crate::error::Error;
use crate::format::{
    COPY_A, COPY_B, COUNT_MAX, EXTENTS_MAX, FLAG_DELETING, FLAG_DIF_1, FLAG_DIF_3, FLAG_DIF_4096,
    FLAG_EXTERNAL, FLAG_READ_ONLY, FLAG_SNAPSHOT, FLAG_THIN, FLAGS_1, FLAGS_2, HOLE, INLINE_XATTRS,
    Kind, PAGE_SIZE, PAYLOAD, POINTERS, Page, PageId, Root, Superblock, SuperblockFault,
    XATTR_PAGES, decode_name, pack, unpack,
};
use crate::store::{Identity, READ_RUN_PAGES, Replayed, Store};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use uuid::Uuid;

mod found;

use found::{Clusters, Found};

impl<D: Disk> Store<D> {
    /// Which store the device holds; `None` where neither superblock copy is one.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Unsupported`], or the device's failure.
    pub fn probe(disk: &mut D) -> Result<Option<Identity>, Error> {
        match choose_superblock(disk) {
            Ok(sb) => Ok(Some(Identity { uuid: sb.uuid, name: sb.name })),
            Err(Error::NotAStore { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Loads the store on `disk`. A damaged one is refused and stays as it is.
    ///
    /// # Errors
    /// [`Error::NotAStore`], [`Error::Truncated`], [`Error::Unsupported`], [`Error::Damaged`],
    /// or the device's failure.
    pub fn load(disk: D) -> Result<Self, Error> {
        Store::load_what_counts(disk, true)
    }

    /// As [`Store::load`], without the changes that were not durable: for a device of which a flush
    /// failed, and which may have lost what they stand on.
    ///
    /// # Errors
    /// As [`Store::load`].
    pub fn load_durable(disk: D) -> Result<Self, Error> {
        Store::load_what_counts(disk, false)
    }

    fn load_what_counts(disk: D, tentative: bool) -> Result<Self, Error> {
        let (mut store, replayed) = Store::read_all(disk, tentative)?;
        store.begin_new_journal(&replayed)?;
        store.finish_deletions()?;
        store.learn_zeros_from(0);
        Ok(store)
    }

    /// As [`Store::load`], without writing: for a device whose flushes fail for the reason `why`. The
    /// store takes no changes, as one that [`stopped`](Store::stopped) for that reason; what its blobs
    /// have can be read and overwritten, but is durable only after a load.
    ///
    /// # Errors
    /// As [`Store::load`].
    pub fn load_stopped(disk: D, why: DiskError) -> Result<Self, Error> {
        let (mut store, replayed) = Store::read_all(disk, false)?;
        store.dirty = replayed.pages;
        store.stopped = Some(why);
        Ok(store)
    }

    /// Reads all of the store, and its journal; records that are not final count if `tentative` and they
    /// are of this boot.
    pub(crate) fn read_all(mut disk: D, tentative: bool) -> Result<(Self, Replayed), Error> {
        let sb = choose_superblock(&mut disk)?;
        let need = sb.device_pages * PAGE_SIZE as u64;
        let have = disk.size();
        if have < need {
            return Err(Error::Truncated { name: sb.name, need, have });
        }
        let mut store = Store::empty(disk, sb);
        let replayed = store.replay(tentative)?;
        let mut pages = store.read_pages(&replayed.pages)?;
        store.take_blobs(&mut pages)?;
        if let Some(number) = pages.keys().min() {
            return Err(store.damaged(*number, "it is in use, but nobody reaches it"));
        }
        Ok((store, replayed))
    }

    /// Reads the bitmap, then every page in use except the bitmap's own.
    fn read_pages(&mut self, replayed: &BTreeMap<u32, Page>) -> Result<HashMap<u32, Found>, Error> {
        for index in 0..self.sb.bitmap_pages as u32 {
            let mut bytes = [0; PAGE_SIZE];
            self.disk.read(self.sb.page_offset(index), &mut bytes).map_err(Error::Data)?;
            let page = self.verified(index, &bytes, replayed)?;
            if page.id() != (PageId { kind: Kind::Bitmap, owner: 0, index }) {
                return Err(self.damaged(index, "it is not the bitmap page that it should be"));
            }
            if !self.pages.set_part(index as usize, PAYLOAD, page.payload()) {
                return Err(self.damaged(index, "it marks pages that do not exist"));
            }
        }
        if (0..self.sb.bitmap_pages).any(|i| !self.pages.get(i)) {
            return Err(self.damaged(0, "it says that a bitmap page is free"));
        }
        let mut found = HashMap::new();
        let mut at = self.sb.bitmap_pages;
        let mut bytes = vec![0; READ_RUN_PAGES as usize * PAGE_SIZE];
        while at < self.sb.md_pages {
            if !self.pages.get(at) {
                at += 1;
                continue;
            }
            let longest = READ_RUN_PAGES.min(self.sb.md_pages - at);
            let run = (1..longest).take_while(|i| self.pages.get(at + i)).count() as u64 + 1;
            let bytes = &mut bytes[..run as usize * PAGE_SIZE];
            self.disk.read(self.sb.page_offset(at as u32), bytes).map_err(Error::Data)?;
            for (i, bytes) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
                let number = at as u32 + i as u32;
                let page = self.verified(number, bytes, replayed)?;
                let is = match page.id().kind {
                    Kind::Extents => Found::Extents(self.take_clusters(number, &page)?),
                    _ => Found::Page(page),
                };
                found.insert(number, is);
            }
            at += run;
        }
        Ok(found)
    }

    /// The replayed image of a page, or what is in its place.
    pub(crate) fn verified(
        &self,
        number: u32,
        bytes: &[u8],
        replayed: &BTreeMap<u32, Page>,
    ) -> Result<Page, Error> {
        match replayed.get(&number) {
            Some(page) => Ok(page.clone()),
            None => Page::verify(bytes, self.sb.store_id(), number)
                .map_err(|cause| self.damaged(number, &cause)),
        }
    }

    pub(crate) fn damaged(&self, page: u32, cause: &str) -> Error {
        Error::Damaged { place: self.place(page), cause: cause.to_owned() }
    }

    /// Where a metadata page is, for people.
    pub(crate) fn place(&self, page: u32) -> String {
        format!("metadata page {page} at byte {}", self.sb.page_offset(page))
    }

    /// Takes the pages that a page of the bitmap marks.
    pub(crate) fn mark(&mut self, index: u32, page: &Page) {
        self.pages.set_part(index as usize, PAYLOAD, page.payload());
    }

    /// Builds every blob from its root, taking each page that it reaches out of `pages`.
    fn take_blobs(&mut self, pages: &mut HashMap<u32, Found>) -> Result<(), Error> {
        let is_root = |p: &Found| p.id().kind == Kind::Root;
        let mut roots: Vec<_> =
            pages.iter().filter(|(_, p)| is_root(p)).map(|(n, p)| (p.id().owner, *n)).collect();
        roots.sort_unstable();
        for (id, number) in roots {
            let Some(Found::Page(page)) = pages.remove(&number) else { continue };
            let blob = self.take_blob(id, number, &page, pages)?;
            if self.by_name.insert(blob.name.clone(), id).is_some() {
                return Err(self.damaged(number, "another blob has the same name"));
            }
            if self.by_uuid.insert(blob.uuid, id).is_some() {
                return Err(self.damaged(number, "another blob has the same UUID"));
            }
            if self.blobs.insert(id, blob).is_some() {
                return Err(self.damaged(number, "another blob has the same number"));
            }
            self.next_id = id + 1;
        }
        self.check_parents()
    }

    /// Every parent is a snapshot, nobody is its own ancestor, and what is being deleted has one clone.
    fn check_parents(&mut self) -> Result<(), Error> {
        let pairs: Vec<_> = self.blobs.values().map(|b| (b.id, b.parent, b.root)).collect();
        for (id, parent, root) in pairs.iter().copied().filter(|(_, parent, _)| *parent != 0) {
            let dif = self.blobs[&id].dif();
            match self.blobs.get_mut(&parent) {
                Some(parent) if parent.dif() != dif => {
                    return Err(self.damaged(root, "its parent has other protection information"));
                }
                Some(parent) if parent.snapshot() => _ = parent.clones.insert(id),
                _ => return Err(self.damaged(root, "its parent is not a snapshot of the store")),
            }
        }
        let mut checked = BTreeSet::new();
        for (id, _, root) in pairs {
            let (mut at, mut way) = (id, BTreeSet::new());
            while at != 0 && !checked.contains(&at) {
                if !way.insert(at) {
                    return Err(self.damaged(root, "it is its own ancestor"));
                }
                at = self.blobs[&at].parent;
            }
            checked.extend(way);
            let blob = &self.blobs[&id];
            if blob.deleting() && blob.clones.len() != 1 {
                return Err(self.damaged(root, "it is being deleted, but has not one clone"));
            }
        }
        Ok(())
    }

    fn take_blob(
        &mut self,
        id: u64,
        number: u32,
        page: &Page,
        pages: &mut HashMap<u32, Found>,
    ) -> Result<Blob, Error> {
        let root = Root::of(page.payload());
        let bad = |cause: &str| Err(self.damaged(number, cause));
        let Some(name) = decode_name(&root.name) else { return bad("its name is not possible") };
        if id == 0 || id >= COUNT_MAX || page.id().index != 0 {
            return bad("its blob number is not possible");
        }
        let old = self.sb.version == 1;
        let known = if old { FLAGS_1 } else { FLAGS_2 };
        let (flags, parent) = (root.flags.get(), root.parent.get());
        let parent_clusters = if old { 0 } else { root.parent_clusters.get() };
        if flags & !known != 0 || old && parent != 0 {
            return bad("it has flags or a parent that this version does not know");
        }
        let external = flags & FLAG_EXTERNAL != 0;
        if external && parent != 0 {
            return bad("it has two parents");
        }
        let has_parent = external || parent != 0;
        if has_parent && flags & FLAG_THIN == 0 {
            return bad("it has a parent, but is thick");
        }
        if parent_clusters > if has_parent { root.size.get() } else { 0 } {
            return bad("its parent shows past its end");
        }
        let dif_types = (flags & (FLAG_DIF_1 | FLAG_DIF_3)).count_ones();
        if dif_types > 1
            || dif_types == 0 && flags & FLAG_DIF_4096 != 0
            || dif_types > 0 && external
        {
            return bad("its flags are not possible together");
        }
        if flags & FLAG_SNAPSHOT != 0 && flags & FLAG_READ_ONLY == 0
            || flags & FLAG_DELETING != 0
                && flags & (FLAG_SNAPSHOT | FLAG_THIN) != FLAG_SNAPSHOT | FLAG_THIN
        {
            return bad("its flags are not possible together");
        }
        if root.size.get() > EXTENTS_MAX * POINTERS as u64 {
            return bad("its size is not possible");
        }
        let xattr_pages = usize::from(root.xattr_pages.get());
        let inline = usize::from(root.xattr_bytes.get());
        if xattr_pages > XATTR_PAGES || inline > INLINE_XATTRS {
            return bad("its xattr lengths are out of range");
        }
        let mut blob = Blob {
            id,
            root: number,
            uuid: Uuid::from_bytes(root.uuid),
            name,
            size: root.size.get(),
            allocated: 0,
            flags: flags & !FLAG_EXTERNAL,
            parent,
            external: external.then(|| Uuid::from_bytes(root.external)),
            parent_clusters,
            clones: BTreeSet::new(),
            xattrs: BTreeMap::new(),
            xattr_pages: Vec::new(),
            chunks: BTreeMap::new(),
            indexes: BTreeMap::new(),
        };
        if let Err(cause) = unpack(&root.inline_xattrs[..inline], &mut blob.xattrs) {
            return bad(cause);
        }
        let mut areas = vec![root.inline_xattrs[..inline].to_vec()];
        for (i, to) in root.xattr_page[..xattr_pages].iter().enumerate() {
            let page = self.take_page_of(pages, number, to.get(), &blob, Kind::Xattrs, i as u32)?;
            let used = page.used() as usize;
            let unpacked = match page.payload().get(..used) {
                Some(area) => unpack(area, &mut blob.xattrs),
                None => Err("its xattr length is out of range"),
            };
            unpacked.map_err(|cause| self.damaged(to.get(), cause))?;
            areas.push(page.payload()[..used].to_vec());
            blob.xattr_pages.push(to.get());
        }
        // A change of the root alone would tear apart what is packed in another way.
        if pack(&blob.xattrs).as_ref() != Some(&areas) {
            return bad("its xattrs are not packed by first fit in the order of their names");
        }
        for (i, to) in root.direct.iter().enumerate().filter(|(_, to)| to.get() != 0) {
            self.take_extents(pages, number, to.get(), &mut blob, i as u32)?;
        }
        for (i, to) in root.indirect.iter().enumerate().filter(|(_, to)| to.get() != 0) {
            let (i, at) = (i as u32, to.get());
            let page = self.take_page_of(pages, number, at, &blob, Kind::Index, i)?;
            let mut used = 0;
            for (n, to) in chunks_of_index(i).zip(page.pointers()) {
                if to.get() != 0 {
                    self.take_extents(pages, at, to.get(), &mut blob, n)?;
                    used += 1;
                }
            }
            if used == 0 || used != page.used() {
                return Err(self.damaged(at, "its number of entries is wrong"));
            }
            blob.indexes.insert(i, Index { page: at, used });
        }
        if !blob.thin() && blob.allocated != blob.size {
            let cause = format!(
                "its blob is thick with {} clusters, but {} are allocated",
                blob.size, blob.allocated
            );
            return Err(self.damaged(number, &cause));
        }
        Ok(blob)
    }

    fn take_extents(
        &self,
        pages: &mut HashMap<u32, Found>,
        from: u32,
        at: u32,
        blob: &mut Blob,
        n: u32,
    ) -> Result<(), Error> {
        let Found::Extents(found) = self.take(pages, from, at, blob, Kind::Extents, n)? else {
            return Err(self.damaged(at, "it is not the page that it should be"));
        };
        let Clusters { said, used, holes, end, extents, .. } = found;
        if u64::from(n) * POINTERS as u64 + end as u64 > blob.size {
            return Err(self.damaged(at, "it has clusters past the end of its blob"));
        }
        if holes > 0 && (self.sb.version == 1 || !blob.thin()) {
            let cause = format!("its cluster {HOLE} is outside the data area");
            return Err(self.damaged(at, &cause));
        }
        if used == 0 || used != said {
            return Err(self.damaged(at, "its number of entries is wrong"));
        }
        blob.allocated += u64::from(used - holes);
        blob.chunks.insert(n, Chunk { page: at, used, extents });
        Ok(())
    }

    /// As [`Store::take`] of one that is no extents page.
    fn take_page_of(
        &self,
        pages: &mut HashMap<u32, Found>,
        from: u32,
        at: u32,
        blob: &Blob,
        kind: Kind,
        index: u32,
    ) -> Result<Page, Error> {
        match self.take(pages, from, at, blob, kind, index)? {
            Found::Page(page) => Ok(page),
            Found::Extents(_) => Err(self.damaged(at, "it is not the page that it should be")),
        }
    }

    /// Takes the page `at`, to which page `from` points, out of `pages`.
    fn take(
        &self,
        pages: &mut HashMap<u32, Found>,
        from: u32,
        at: u32,
        blob: &Blob,
        kind: Kind,
        index: u32,
    ) -> Result<Found, Error> {
        let Some(page) = pages.remove(&at) else {
            let cause = format!("it points to page {at}, which is free or has another owner too");
            return Err(self.damaged(from, &cause));
        };
        if page.id() != (PageId { kind, owner: blob.id, index }) {
            let cause = format!("it points to page {at}, which is not the one that it should be");
            return Err(self.damaged(from, &cause));
        }
        Ok(page)
    }
}

/// The superblock copy that counts.
pub(crate) fn choose_superblock<D: Disk>(disk: &mut D) -> Result<Superblock, Error> {
    if disk.size() < (COPY_B + 1) * PAGE_SIZE as u64 {
        return Err(Error::NotAStore { why: format!("it has only {} bytes", disk.size()) });
    }
    let mut read = |copy| {
        let mut bytes = [0; PAGE_SIZE];
        disk.read(copy * PAGE_SIZE as u64, &mut bytes).map(|()| Superblock::decode(&bytes))
    };
    let (a, b) = match (read(COPY_A), read(COPY_B)) {
        (Ok(a), Ok(b)) => (a, b),
        // One that cannot be read, as where its checksum is wrong, does not count.
        (Err(_), Ok(Ok(one))) | (Ok(Ok(one)), Err(_)) => return Ok(one),
        (Err(e), _) | (_, Err(e)) => return Err(Error::Data(e)),
    };
    match (a, b) {
        (Err(SuperblockFault::Unsupported(why)), _)
        | (_, Err(SuperblockFault::Unsupported(why))) => Err(Error::Unsupported { why }),
        (Ok(a), Ok(b)) => Ok(if a.generation >= b.generation { a } else { b }),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
        (Err(a), Err(b)) => {
            use SuperblockFault::{Magic, Zero};
            let foreign = |f: &SuperblockFault| matches!(f, Zero | Magic);
            // A store that is being created or destroyed has one copy empty.
            if foreign(&a) || foreign(&b) {
                let why = if foreign(&a) { a } else { b };
                let why = format!("where a superblock should be, {}", said(&why));
                return Err(Error::NotAStore { why });
            }
            let cause = format!("copy A: {a}; copy B: {b}");
            Err(Error::Damaged { place: "the superblock".into(), cause })
        }
    }
}

fn said(fault: &SuperblockFault) -> &'static str {
    match fault {
        SuperblockFault::Zero => "the device is empty",
        _ => "the device holds something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_and_indirect_cover_the_same_chunks_in_both_directions() {
        assert_eq!(crate::blob::index_of(255), None);
        for n in [256, 257, 256 + 1007, 256 + 1008, 256 + 191 * 1008, 256 + 192 * 1008 - 1] {
            let index = crate::blob::index_of(n).unwrap();
            assert!(chunks_of_index(index).contains(&n), "{n} in {index}");
        }
    }
}
