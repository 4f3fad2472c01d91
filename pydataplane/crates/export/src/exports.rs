//! All exports of the process.

use bdev::{Event, Registry, Subscription};
use fuser::INodeNo;
use parking_lot::{Mutex, MutexGuard};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

use crate::errors::ExportError;
use crate::fs::{Files, Table};
use crate::mount::{Mount, detach_dead};
use crate::volume::Volume;

/// How long [`Exports::delete`] waits for a file to be closed: the kernel tells of a close, and a
/// loop device lets go, a moment later.
pub const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long [`Exports::park`] waits for what is being written.
pub const PARK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long [`Exports::delete`] and [`Exports::stop`] wait for I/O in flight to end.
pub const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How often it looks meanwhile.
const RELEASE_POLL: Duration = Duration::from_millis(5);

/// An export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Name of the bdev.
    pub bdev_name: String,
    /// UUID of the bdev, the name of the file.
    pub uuid: Uuid,
    /// The file.
    pub path: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether others may claim the bdev, and writes are refused for now.
    pub parked: bool,
    /// How often the file is open.
    pub opens: u32,
    /// Size in bytes.
    pub size: u64,
}

/// What only control threads touch; held during a control operation.
struct Control {
    mount: Option<Mount>,
    next_ino: u64,
}

struct Inner {
    registry: Registry,
    dir: PathBuf,
    control: Mutex<Control>,
    table: Table,
}

/// All exports. Every method may wait for I/O: for control threads.
pub struct Exports {
    inner: Arc<Inner>,
    _events: Subscription,
}

impl Exports {
    /// None yet; they will be files in `dir`, which is mounted with the first.
    pub fn new(registry: Registry, dir: &Path) -> Exports {
        let inner = Arc::new(Inner {
            registry: registry.clone(),
            dir: dir.to_owned(),
            control: Mutex::new(Control { mount: None, next_ino: INodeNo::ROOT.0 + 1 }),
            table: Table::default(),
        });
        let weak = Arc::downgrade(&inner);
        let events = registry.subscribe(move |event| on_event(&weak, event));
        Exports { inner, _events: events }
    }

    /// Detaches the mount of a process that was killed.
    ///
    /// # Errors
    /// [`ExportError::DirInUse`] when that process lives; the kernel refuses.
    pub fn detach_dead(&self) -> Result<(), ExportError> {
        detach_dead(&self.inner.dir)
    }

    /// Shows the bdev (name, alias or UUID) as a file and returns its path. One that is exported
    /// the same way already stays as it is.
    ///
    /// # Errors
    /// [`ExportError`]: no such bdev, another face has it, exported the other way, no mount.
    pub fn create(&self, key: &str, read_only: bool) -> Result<PathBuf, ExportError> {
        self.make(key, read_only, false)
    }

    /// As [`Exports::create`], and it is parked when this returns: a new one was never anything
    /// else, so that the bdev may be in use already.
    ///
    /// # Errors
    /// Those of [`Exports::create`] and [`Exports::park`].
    pub fn create_parked(&self, key: &str, read_only: bool) -> Result<PathBuf, ExportError> {
        let path = self.make(key, read_only, true)?;
        self.park(key)?;
        Ok(path)
    }

    fn make(&self, key: &str, read_only: bool, parked: bool) -> Result<PathBuf, ExportError> {
        let inner = &self.inner;
        let mut control = inner.control();
        let bdev = inner.registry.require(key)?;
        let path = inner.dir.join(bdev.uuid().to_string());
        // Files that are open through one that was unmounted are served by it until they are closed.
        if control.mount.take_if(|mount| !mount.is_there()).is_some() {
            tracing::warn!(dir = %inner.dir.display(), "the exports were unmounted: mounted again");
            control.mount = Some(inner.mount()?);
        }
        if let Some(there) = inner.named(bdev.name()) {
            if there.read_only != (read_only || bdev.features().read_only) {
                let how = if there.read_only { "read-only" } else { "for writing" };
                return Err(ExportError::OtherMode { name: bdev.name().into(), how });
            }
            return Ok(path);
        }
        if control.mount.is_none() {
            control.mount = Some(inner.mount()?);
        }
        let ino = INodeNo(control.next_ino);
        let owner = format!("the export {}", path.display());
        let volume = Volume::start(ino, &inner.registry, bdev.name(), owner, read_only, parked)?;
        control.next_ino += 1;
        inner.write().insert(ino.0, Arc::new(volume));
        Ok(path)
    }

    /// Takes the file of a bdev away. While it is open it stays, unless `force`: then what has it
    /// open gets errors.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Open`] after [`RELEASE_TIMEOUT`];
    /// [`ExportError::StillEnding`] after [`END_TIMEOUT`], and then it is deleted.
    pub fn delete(&self, key: &str, force: bool) -> Result<(), ExportError> {
        self.delete_within(key, force, END_TIMEOUT)
    }

    fn delete_within(&self, key: &str, force: bool, timeout: Duration) -> Result<(), ExportError> {
        let inner = &self.inner;
        let control = inner.control();
        let name = inner.registry.get(key).map_or_else(|| key.to_owned(), |b| b.name().to_owned());
        let end = Instant::now() + RELEASE_TIMEOUT;
        loop {
            let volume =
                inner.named(&name).ok_or_else(|| ExportError::NotExported(key.to_owned()))?;
            {
                let mut table = inner.write();
                let opens = volume.opens.load(Ordering::Relaxed);
                if opens == 0 || force {
                    table.remove(&volume.ino.0);
                    drop(table);
                    drop(control);
                    let seconds = timeout.as_secs();
                    return match volume.end().wait(timeout) {
                        true => Ok(()),
                        false => Err(ExportError::StillEnding { name, seconds }),
                    };
                }
                if Instant::now() > end {
                    return Err(ExportError::Open { name, opens });
                }
            }
            thread::sleep(RELEASE_POLL);
        }
    }

    /// Lets others claim an exported bdev, a controller for a VM above all: writes to its file fail
    /// from now on (EROFS), those in flight have ended when this returns, reads are served on. The
    /// file and what has it open stay. Does nothing to a parked one.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Changing`] after [`PARK_TIMEOUT`].
    pub fn park(&self, key: &str) -> Result<(), ExportError> {
        self.require(key)?.park(&self.inner.registry, PARK_TIMEOUT)
    }

    /// Claims the bdev of a parked export alone again and takes writes. Does nothing to one that is
    /// not parked. What the kernel cached of the file while others wrote the bdev is not dropped.
    ///
    /// # Errors
    /// [`ExportError::NotExported`]; [`ExportError::Registry`] when somebody holds the bdev, and
    /// then it stays parked.
    pub fn unpark(&self, key: &str) -> Result<(), ExportError> {
        self.require(key)?.unpark(&self.inner.registry)
    }

    /// The export of a bdev (name, alias or UUID).
    fn require(&self, key: &str) -> Result<Arc<Volume>, ExportError> {
        let registry = &self.inner.registry;
        let name = registry.get(key).map_or_else(|| key.to_owned(), |b| b.name().to_owned());
        self.inner.named(&name).ok_or_else(|| ExportError::NotExported(key.to_owned()))
    }

    /// All exports, in the order in which they were made.
    pub fn list(&self) -> Vec<Info> {
        let table = self.inner.table.read();
        let info = |v: &Arc<Volume>| Info {
            bdev_name: v.bdev.name().to_owned(),
            uuid: v.uuid,
            path: self.inner.dir.join(v.uuid.to_string()),
            read_only: v.read_only,
            parked: v.is_parked(),
            opens: v.opens.load(Ordering::Relaxed),
            size: v.bdev.geometry().bytes(),
        };
        table.values().map(info).collect()
    }

    /// Ends all exports and the mount: before lvstores are unloaded. Open files give errors.
    /// `false`: I/O of some has not ended after [`END_TIMEOUT`], so that bdevs must be left as they
    /// are.
    #[must_use]
    pub fn stop(&self) -> bool {
        let mut control = self.inner.control();
        let all = std::mem::take(&mut *self.inner.write());
        let endings: Vec<_> = all.values().map(|volume| volume.end()).collect();
        let end = Instant::now() + END_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        let ended = endings.into_iter().all(|ending| ending.wait(left()));
        if let Some(mount) = control.mount.take() {
            mount.end();
        }
        ended
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        _ = self.stop();
    }
}

impl Inner {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock()
    }

    fn write(
        &self,
    ) -> parking_lot::RwLockWriteGuard<'_, std::collections::BTreeMap<u64, Arc<Volume>>> {
        self.table.write()
    }

    fn mount(&self) -> Result<Mount, ExportError> {
        Mount::new(&self.dir, Files::new(Table::clone(&self.table)))
    }

    fn named(&self, name: &str) -> Option<Arc<Volume>> {
        let table = self.table.read();
        table.values().find(|v| v.bdev.name() == name).cloned()
    }
}

/// A bdev that goes away takes its file with it; nobody waits here for I/O in flight.
fn on_event(inner: &Weak<Inner>, event: &Event) {
    let Event::Removed(bdev) = event else { return };
    let Some(inner) = inner.upgrade() else { return };
    let Some(volume) = inner.named(bdev.name()) else { return };
    inner.write().remove(&volume.ino.0);
    _ = volume.end();
}

#[cfg(test)]
mod tests {
    use super::*;
    use bdev::testing::FaultBdev;
    use bdev::{Bdev, Malloc, MallocOptions, Null, Op};
    use rustix::fs::{FallocateFlags, fallocate};
    use std::fs::{self, File};
    use std::io::ErrorKind;
    use std::os::unix::fs::FileExt;

    const BLOCK: usize = 512;

    fn malloc(registry: &Registry, name: &str, num_blocks: u64) -> Arc<Malloc> {
        let bdev = Malloc::create(MallocOptions {
            name: name.into(),
            block_size: BLOCK as u32,
            physical_block_size: 0,
            num_blocks,
            uuid: None,
        })
        .unwrap();
        registry.register(bdev.clone()).unwrap();
        bdev
    }

    fn exports() -> (tempfile::TempDir, Registry, Exports) {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::new();
        let exports = Exports::new(registry.clone(), &dir.path().join("e"));
        (dir, registry, exports)
    }

    #[test]
    fn a_file_reads_what_was_written_from_many_threads() {
        let (_dir, registry, exports) = exports();
        let bdev = malloc(&registry, "m0", 8192);
        let path = exports.create("m0", false).unwrap();
        assert_eq!(path.file_name().unwrap().to_str().unwrap(), bdev.uuid().to_string());
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        thread::scope(|s| {
            for t in 0..4u64 {
                let file = &file;
                s.spawn(move || {
                    for i in 0..64u64 {
                        let at = (t * 64 + i) * 16384;
                        file.write_all_at(&[(t * 64 + i) as u8; 16384], at).unwrap();
                    }
                });
            }
        });
        file.sync_all().unwrap();
        let mut data = vec![0; 4 << 20];
        // In odd lengths, and as one read that is longer than a request may be.
        file.read_exact_at(&mut data[..100_001], 0).unwrap();
        file.read_exact_at(&mut data[100_001..], 100_001).unwrap();
        for (i, chunk) in data.chunks(16384).enumerate() {
            assert!(chunk.iter().all(|b| *b == i as u8), "{i}");
        }
        assert_eq!(file.read_at(&mut data, 4 << 20).unwrap(), 0);
        assert_eq!(file.write_at(&[0; 512], 4 << 20).unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(file.write_at(&[0; 100], 0).unwrap_err().kind(), ErrorKind::InvalidInput);
        drop(file);
        exports.delete("m0", false).unwrap();
        assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(registry.owners("m0").is_empty());
    }

    #[test]
    fn creating_again_is_the_same_and_the_other_way_is_refused() {
        let (dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        let path = exports.create("m0", true).unwrap();
        assert_eq!(exports.create("m0", true).unwrap(), path);
        let e = exports.create("m0", false).unwrap_err();
        assert_eq!(
            e.to_string(),
            "bdev m0 is exported read-only already; delete that export first"
        );
        let open = File::options().write(true).open(&path).unwrap_err();
        assert_eq!(open.kind(), ErrorKind::ReadOnlyFilesystem);
        let names: Vec<_> = fs::read_dir(dir.path().join("e")).unwrap().collect();
        assert_eq!(names.len(), 1);
        assert_eq!(exports.list().len(), 1);
        let e = registry.claim("m0", "target 0 of controller vm-1").unwrap_err();
        assert!(e.to_string().contains(&format!("in use by the export {}", path.display())), "{e}");
    }

    #[test]
    fn a_claimed_or_missing_bdev_is_refused_with_the_holder_named() {
        let (_dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        let _held = registry.claim_shared("m0", "target 3 of controller vm-1").unwrap();
        let e = exports.create("m0", false).unwrap_err().to_string();
        assert_eq!(e, "bdev m0 is in use by target 3 of controller vm-1: release it there first");
        assert!(exports.create("m1", false).is_err());
        assert!(matches!(exports.delete("m0", false), Err(ExportError::NotExported(_))));
    }

    #[test]
    fn a_parked_export_serves_reads_and_lets_another_have_the_bdev() {
        let (_dir, registry, exports) = exports();
        malloc(&registry, "m0", 64);
        let e = exports.park("m0").unwrap_err();
        assert!(matches!(e, ExportError::NotExported(_)), "{e}");
        let path = exports.create("m0", false).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.write_all_at(&[7; BLOCK], 0).unwrap();
        for _ in 0..2 {
            exports.park("m0").unwrap();
            assert!(exports.list()[0].parked);
        }
        let mut data = [0; BLOCK];
        file.read_exact_at(&mut data, 0).unwrap();
        assert_eq!(data, [7; BLOCK]);
        let e = file.write_at(&[8; BLOCK], 0).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::ReadOnlyFilesystem);
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        assert!(fallocate(&file, flags, 0, BLOCK as u64).is_err());
        file.sync_all().unwrap();
        // It is opened on, and creating it again changes nothing.
        File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(exports.create("m0", false).unwrap(), path);
        assert!(exports.list()[0].parked);

        let lun = registry.claim("m0", "target 0 of controller vm-1").unwrap();
        let e = exports.unpark("m0").unwrap_err().to_string();
        assert_eq!(e, "bdev m0 is in use by target 0 of controller vm-1: release it there first");
        assert!(file.write_at(&[8; BLOCK], 0).is_err() && exports.list()[0].parked);
        drop(lun);
        for _ in 0..2 {
            exports.unpark("m0").unwrap();
            assert!(!exports.list()[0].parked);
        }
        assert!(registry.claim("m0", "another").is_err());
        file.write_all_at(&[9; BLOCK], 0).unwrap();
        file.read_exact_at(&mut data, 0).unwrap();
        assert_eq!(data, [9; BLOCK]);
    }

    #[test]
    fn parking_waits_for_writes_in_flight_and_gives_up_as_it_was() {
        let (_dir, registry, exports) = exports();
        let bdev = FaultBdev::new("f0", BLOCK as u32, 64);
        registry.register(bdev.clone()).unwrap();
        bdev.defer(Some(1));
        bdev.hold();
        let path = exports.create(bdev.name(), false).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        thread::scope(|s| {
            let write = s.spawn(|| file.write_all_at(&[7; BLOCK], 0));
            while bdev.held() == 0 {
                thread::yield_now();
            }
            let volume = exports.require(bdev.name()).unwrap();
            let e = volume.park(&registry, Duration::from_millis(1)).unwrap_err();
            assert!(matches!(e, ExportError::Changing { .. }), "{e}");
            assert!(!exports.list()[0].parked);
            let park = s.spawn(|| exports.park(bdev.name()));
            while !exports.list()[0].parked {
                thread::yield_now();
            }
            // It refuses writes, and still has the bdev.
            assert!(file.write_at(&[8; BLOCK], 0).is_err());
            assert!(registry.claim(bdev.name(), "another").is_err());
            assert!(!park.is_finished() && !write.is_finished());
            bdev.release();
            write.join().unwrap().unwrap();
            park.join().unwrap().unwrap();
        });
        let _lun = registry.claim(bdev.name(), "another").unwrap();
    }

    #[test]
    fn a_parked_export_is_made_of_a_bdev_in_use_and_goes_with_it() {
        let (_dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        let lun = registry.claim("m0", "target 0 of controller vm-1").unwrap();
        let path = exports.create_parked("m0", false).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [0; 8 * BLOCK]);
        // The bdev stays until the export's channel is closed.
        assert_eq!(registry.owners("m0").len(), 2);
        drop(lun);
        registry.unregister("m0").unwrap();
        assert!(exports.list().is_empty());
        malloc(&registry, "m1", 8);
        exports.create("m1", false).unwrap();
        exports.create_parked("m1", false).unwrap();
        assert!(exports.list()[0].parked);
        exports.delete("m1", false).unwrap();
        assert!(registry.owners("m1").is_empty());
    }

    #[test]
    fn an_open_file_holds_its_export_unless_forced() {
        let (_dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        let path = exports.create("m0", false).unwrap();
        let file = File::open(&path).unwrap();
        let e = exports.delete("m0", false).unwrap_err().to_string();
        assert!(e.contains("is open 1 times"), "{e}");
        exports.delete("m0", true).unwrap();
        assert!(file.read_at(&mut [0; 512], 0).is_err());
        assert!(registry.owners("m0").is_empty());
    }

    #[test]
    fn the_size_follows_and_a_removed_bdev_takes_its_file_along() {
        let (_dir, registry, exports) = exports();
        let bdev = Null::create("n0", 4096, 8, None).unwrap();
        registry.register(bdev.clone()).unwrap();
        let path = exports.create("n0", false).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 8 * 4096);
        registry.unregister("n0").unwrap();
        assert!(fs::metadata(&path).is_err());
        assert!(exports.list().is_empty());
    }

    #[test]
    fn discards_of_a_whole_disk_are_cut_and_wait_their_turn() {
        let (_dir, registry, exports) = exports();
        // 3.5 GiB, and more of them at a time than the channel takes.
        let bdev = Null::create("n0", 4096, 7 << 17, None).unwrap();
        registry.register(bdev.clone()).unwrap();
        let path = exports.create("n0", false).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        thread::scope(|s| {
            for _ in 0..2 * crate::DEPTH {
                s.spawn(|| fallocate(&file, flags, 0, 7 << 29).unwrap());
            }
        });
        let io = bdev.stats().unwrap().snapshot();
        let done = io.op(Op::WriteZeroes);
        assert_eq!((done.ops, done.bytes), (256 * 2, 128 * (7 << 29)));
    }

    #[test]
    fn io_that_does_not_end_keeps_the_bdev_and_nobody_waiting() {
        let (_dir, registry, exports) = exports();
        let bdev = FaultBdev::new("f0", BLOCK as u32, 64);
        registry.register(bdev.clone()).unwrap();
        bdev.defer(Some(1));
        bdev.hold();
        let path = exports.create(bdev.name(), false).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        thread::scope(|s| {
            let write = s.spawn(|| file.write_all_at(&[7; BLOCK], 0));
            while bdev.held() == 0 {
                thread::yield_now();
            }
            let e = exports.delete_within(bdev.name(), true, Duration::from_millis(5)).unwrap_err();
            assert!(matches!(e, ExportError::StillEnding { .. }), "{e}");
            assert!(exports.list().is_empty());
            assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
            // Others are served, and it can be made anew when it is free.
            malloc(&registry, "m0", 8);
            fs::read(exports.create("m0", false).unwrap()).unwrap();
            let e = exports.create(bdev.name(), false).unwrap_err().to_string();
            assert!(e.contains("is in use by the export"), "{e}");
            bdev.release();
            write.join().unwrap().unwrap();
        });
        while exports.create(bdev.name(), false).is_err() {
            thread::yield_now();
        }
        // The one that was deleted stays so for whoever has it open.
        assert!(file.read_at(&mut [0; BLOCK], 0).is_err());
        assert_eq!(fs::read(&path).unwrap()[..BLOCK], [7; BLOCK]);
    }

    #[test]
    fn what_was_unmounted_behind_our_back_is_mounted_again() {
        let (dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        malloc(&registry, "m1", 8);
        let path = exports.create("m0", false).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mount = dir.path().join("e");
        for (key, held) in [("m0", true), ("m1", false), ("m0", false)] {
            rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::DETACH).unwrap();
            assert!(!path.exists());
            let made = exports.create(key, false).unwrap();
            File::options().write(true).open(&made).unwrap().write_all_at(&[5; BLOCK], 0).unwrap();
            assert_eq!(fs::read(&made).unwrap()[..BLOCK], [5; BLOCK]);
            if held {
                file.write_all_at(&[4; BLOCK], 0).unwrap();
                assert_eq!(fs::read(&path).unwrap()[..BLOCK], [4; BLOCK]);
            }
        }
        // None of the closes that the kernel did not tell of is left.
        let since = Instant::now();
        while exports.list()[0].opens != 1 || exports.list()[1].opens != 0 {
            assert!(since.elapsed() < Duration::from_secs(20), "{:?}", exports.list());
            thread::yield_now();
        }
        drop(file);
        exports.delete("m0", false).unwrap();
    }

    #[test]
    fn the_end_leaves_no_mount() {
        let (dir, registry, exports) = exports();
        malloc(&registry, "m0", 8);
        let path = exports.create("m0", false).unwrap();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(table.contains(dir.path().join("e").to_str().unwrap()));
        let other = Exports::new(registry.clone(), &dir.path().join("e"));
        let e = other.detach_dead().unwrap_err().to_string();
        assert!(e.contains("mounted by another living process"), "{e}");
        drop(exports);
        assert!(!path.exists());
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!table.contains(dir.path().join("e").to_str().unwrap()));
        assert!(registry.owners("m0").is_empty());
    }
}
