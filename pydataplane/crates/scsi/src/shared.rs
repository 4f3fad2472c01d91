//! A logical unit as all threads see it.

use crate::characteristics::Characteristics;
use crate::copy;
use crate::log::{Room, SET_BYTES};
use crate::mode::{Modes, TagRanges};
use crate::nexus::{Nexus, NexusState, Preventers, UnitAttention};
use crate::opcode::Abilities;
use crate::options::{LunError, LunOptions, Transport, in_units, physical_exponent_of, shift_of};
use crate::policy::ErrorPolicy;
use crate::reservations::{Access, NexusName, NotKnown};
use crate::volume::{Volume, access_of};
use crate::watch::{Counts, Range};
use bdev::{AppTags, Bdev, Features, ProtectionType};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use uuid::Uuid;

/// Longest unit serial number, in bytes.
pub const MAX_SERIAL: usize = 64;

/// Longest transfer of a READ, WRITE or VERIFY, in bytes, unless the bdev's own limit is lower.
/// Reported as MAXIMUM TRANSFER LENGTH in VPD page B0h, and longer ones are refused, as SBC-3 6.6.3
/// has it; nothing is split behind the initiator's back.
pub const MAX_TRANSFER_BYTES: u64 = 4 << 20;
/// Most that one UNMAP can name, in bytes: 1,048,576 blocks of 512, which initiators take for much.
pub const MAX_UNMAP_BYTES: u64 = 512 << 20;
/// Most descriptors of one UNMAP.
pub const MAX_UNMAP_DESCRIPTORS: u16 = 256;
/// Most that one WRITE SAME can write, in blocks: what each form of it can name.
pub const MAX_WRITE_SAME_BLOCKS: u64 = 32 << 10;

/// What keeps commands from a unit, beside reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Gate {
    /// The volume is sanitized, or that has failed.
    Sanitize = 0x10,
    /// None that knows: what changes blocks of the volume tells [`Volume::changes`].
    Watched = 0x20,
    /// None but one that changes blocks of which some are kept ([`Volume::keep_blocks`]).
    Kept = 0x40,
    /// What is kept of the volume's modes cannot be read, so that nobody knows them.
    Modes = 0x80,
    /// An initiator has ejected the medium.
    Ejected = 0x100,
}

/// Bits of a unit's gates that are of [`access_of`].
const ACCESS: u32 = 0x07;

/// A logical unit as all threads see it.
pub struct LunShared {
    bdev: Arc<dyn Bdev>,
    identity: Uuid,
    serial: String,
    /// The bdev's; what counts blocks counts the unit's.
    pub(crate) features: Features,
    /// Commands that not every unit has.
    pub(crate) abilities: Abilities,
    /// What its blocks have beside their data, where they are the bdev's.
    pub(crate) protection: Option<ProtectionType>,
    pub(crate) read_only: bool,
    pub(crate) removable: bool,
    pub(crate) characteristics: Characteristics,
    pub(crate) error_policy: ErrorPolicy,
    /// Bytes of a logical block; does not change.
    pub(crate) block_size: u32,
    /// log2 of logical block size / block size of the bdev.
    pub(crate) bdev_shift: u32,
    /// log2 of physical block size / logical block size.
    pub(crate) physical_exponent: u8,
    /// Capacity as the initiators know it.
    num_blocks: AtomicU64,
    /// Counts LOGICAL UNIT RESETs.
    epoch: AtomicU32,
    /// Nexuses that prevent the removal of the medium.
    preventers: Arc<Preventers>,
    nexuses: Mutex<Vec<Weak<Nexus>>>,
    /// What it shares with other units of the same volume.
    pub(crate) volume: Arc<Volume>,
    nexus_name: NexusName,
    transport: Option<Arc<dyn Transport>>,
    /// What its nexus may do, of [`access_of`], and [`Gate`]s: 0 where a command has nothing to look for.
    gates: AtomicU32,
    /// [`Modes::bits`] of the volume's, and above them a number that changes with them.
    modes: AtomicU32,
    pub(crate) copies: Arc<copy::Copies>,
    /// On which side its threads count commands that begin (`watch`).
    side: AtomicU32,
    /// Commands of each of its threads that are not over.
    in_flight: Mutex<Vec<Weak<Counts>>>,
}

impl LunShared {
    /// Makes `bdev` a logical unit.
    pub fn new(bdev: Arc<dyn Bdev>, options: LunOptions) -> Result<Arc<Self>, LunError> {
        let geometry = bdev.geometry();
        if !matches!(geometry.block_size, 512 | 4096) {
            return Err(LunError::BlockSize {
                name: bdev.name().to_owned(),
                block_size: geometry.block_size,
            });
        }
        let identity = options.characteristics.uuid.unwrap_or_else(|| bdev.uuid());
        let serial = match options.serial {
            Some(given) if !given.is_empty() => given,
            _ => identity.to_string(),
        };
        if serial.len() > MAX_SERIAL || !serial.bytes().all(|b| (0x20..0x7F).contains(&b)) {
            return Err(LunError::Serial(serial));
        }
        let characteristics = options.characteristics;
        characteristics.check()?;
        let block_size = options.block_size.unwrap_or(geometry.block_size);
        let bdev_shift = shift_of(&*bdev, block_size)?;
        let mut features = in_units(bdev.features(), bdev_shift);
        characteristics.restrict(&mut features);
        let own_exponent = (geometry.physical_block_size / block_size).max(1).ilog2().min(15) as u8;
        let physical_exponent = match characteristics.physical_block_size {
            Some(asked) => physical_exponent_of(&*bdev, &features, block_size, asked)?,
            None => own_exponent,
        };
        if physical_exponent > own_exponent {
            // An optimal length is one of whole physical blocks (SBC-3 6.6.3).
            features.optimal_blocks &= !((1 << physical_exponent) - 1);
        }
        let volume = Volume::of(identity, options.keeper, options.records);
        let protection = bdev.protection().filter(|_| bdev_shift == 0).map(|p| p.kind);
        let abilities = Abilities {
            // With its tuple, a block is longer than what a disk writes as a whole.
            atomic: geometry.physical_block_size >= block_size
                // Nor is a larger physical block than the volume's.
                && physical_exponent <= own_exponent
                && bdev.protection().is_none(),
            protection: protection.is_some(),
            unmap: features.unmap,
            block_erase: features.unmap && bdev.sparse().is_some(),
        };
        let nexus = options.nexus.unwrap_or_else(|| Uuid::new_v4().to_string());
        let unit = Arc::new(LunShared {
            identity,
            serial,
            features,
            abilities,
            protection,
            read_only: options.read_only || features.read_only,
            removable: options.removable,
            characteristics,
            error_policy: options.error_policy,
            block_size,
            bdev_shift,
            physical_exponent,
            num_blocks: AtomicU64::new(geometry.num_blocks >> bdev_shift),
            epoch: AtomicU32::new(0),
            preventers: Arc::default(),
            nexuses: Mutex::new(Vec::new()),
            volume,
            nexus_name: nexus.into(),
            transport: options.transport,
            gates: AtomicU32::new(0),
            modes: AtomicU32::new(0),
            copies: Arc::default(),
            side: AtomicU32::new(0),
            in_flight: Mutex::default(),
            bdev,
        });
        unit.volume.join(&unit);
        copy::register(&unit);
        unit.volume.reload_modes();
        unit.volume.go_on_sanitizing();
        Ok(unit)
    }

    /// Name of its I_T nexus.
    pub(crate) fn nexus_name(&self) -> &NexusName {
        &self.nexus_name
    }

    /// Whether there is anything that may keep a command from the unit.
    #[inline]
    pub(crate) fn has_gates(&self) -> bool {
        self.gates.load(Ordering::Acquire) != 0
    }

    /// What its nexus may do, as the volume's reservations have it.
    pub(crate) fn access(&self) -> Access {
        access_of(self.gates.load(Ordering::Acquire) & ACCESS)
    }

    /// Why it is not known what is reserved, so that its initiators are kept out; `None`: it is known.
    pub fn reservations_not_known(&self) -> Option<NotKnown> {
        match self.access() {
            Access::Unread => Some(NotKnown::Unread),
            Access::Lost => Some(NotKnown::Lost),
            _ => None,
        }
    }

    /// With the lock of the volume's reservations held.
    pub(crate) fn set_access(&self, access: Access) {
        let code = (0..6).find(|code| access_of(*code) == access).unwrap_or(0);
        let set = |gates: u32| Some((gates & !ACCESS) | code);
        _ = self.gates.fetch_update(Ordering::SeqCst, Ordering::SeqCst, set);
    }

    /// Whether that is in the way.
    pub(crate) fn is_at(&self, gate: Gate) -> bool {
        self.gates.load(Ordering::Acquire) & gate as u32 != 0
    }

    /// Puts it there, or takes it away.
    pub(crate) fn set_gate(&self, gate: Gate, there: bool) {
        match there {
            true => _ = self.shut(gate),
            false => _ = self.gates.fetch_and(!(gate as u32), Ordering::SeqCst),
        }
    }

    /// Puts it there. Whether it was not there before.
    pub(crate) fn shut(&self, gate: Gate) -> bool {
        self.gates.fetch_or(gate as u32, Ordering::SeqCst) & gate as u32 == 0
    }

    /// Whether that of [`Modes::bits`] is set.
    #[inline]
    pub(crate) fn has_mode(&self, bit: u32) -> bool {
        self.modes.load(Ordering::Acquire) & bit != 0
    }

    /// With the lock of the volume's modes held.
    pub(crate) fn set_modes(&self, bits: u32) {
        // Application tags are those of blocks that the unit does not have.
        let others = if self.protection.is_none() { Modes::APPLICATION_TAGS } else { 0 };
        self.modes.store(bits & !others, Ordering::SeqCst);
    }

    /// A number that is another one after each change of the volume's modes.
    pub(crate) fn modes_version(&self) -> u32 {
        self.modes.load(Ordering::Acquire) >> Modes::VERSION_SHIFT
    }

    /// The application tags that these blocks are to have. Takes a lock: not for the I/O path.
    pub(crate) fn tags_of(&self, lba: u64, blocks: u64) -> AppTags {
        match self.has_mode(Modes::APPLICATION_TAGS) {
            true => self.volume.tags().of(lba, blocks),
            false => AppTags::NONE,
        }
    }

    /// Whether what changes the medium is durable before its status.
    #[inline]
    pub(crate) fn writes_through(&self) -> bool {
        self.characteristics.write_through || self.has_mode(Modes::NO_CACHE)
    }

    /// Whether a command, counted on that side, is to wait before it changes these blocks.
    #[inline]
    pub(crate) fn is_kept_from(&self, side: u32, lba: u64, blocks: u64) -> bool {
        self.is_at(Gate::Kept) && self.is_range_kept_from(side, self.range(lba, blocks))
    }

    /// As [`LunShared::is_kept_from`], of these bytes.
    pub(crate) fn is_range_kept_from(&self, side: u32, range: Range) -> bool {
        self.is_at(Gate::Kept) && self.volume.is_kept_from(self, side, range)
    }

    /// Blocks in bytes.
    pub(crate) fn range(&self, lba: u64, blocks: u64) -> Range {
        let block = u64::from(self.block_size);
        Range { at: lba.saturating_mul(block), bytes: blocks.saturating_mul(block) }
    }

    /// Another thread counts its commands of the unit there.
    pub(crate) fn counts(&self, in_flight: Weak<Counts>) {
        let mut all = self.in_flight.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(in_flight);
    }

    /// Whether any thread has a command of it that is not over.
    pub(crate) fn is_busy(&self) -> bool {
        self.commands_in_flight() > 0
    }

    /// Commands of it that are not over, in all threads.
    pub(crate) fn commands_in_flight(&self) -> u32 {
        self.in_flight.lock().iter().filter_map(Weak::upgrade).map(|counts| counts.all()).sum()
    }

    /// Whether any thread has a command of it on that side that may change blocks.
    pub(crate) fn is_writing(&self, side: u32) -> bool {
        self.in_flight.lock().iter().filter_map(Weak::upgrade).any(|c| c.has_writing(side))
    }

    /// The side on which commands that begin are counted.
    #[inline]
    pub(crate) fn side(&self) -> u32 {
        // Who sees a side sees all that was stored before it was named.
        self.side.load(Ordering::Acquire)
    }

    /// They are counted on that one from now on.
    pub(crate) fn set_side(&self, side: u32) {
        self.side.store(side, Ordering::SeqCst);
    }

    /// Blocks are about to change, from that block of the unit's on: before the I/O is submitted, and within a
    /// command that is counted.
    #[inline]
    pub(crate) fn changes(&self, lba: u64, blocks: u64) {
        if self.is_at(Gate::Watched) {
            self.range_changes(self.range(lba, blocks));
        }
    }

    /// As [`LunShared::changes`], of these bytes.
    pub(crate) fn range_changes(&self, range: Range) {
        if self.is_at(Gate::Watched) {
            self.volume.changes(self, range);
        }
    }

    /// Every task in flight ends as TASK ABORTED once its outstanding I/O has ended, one that waits to begin with none.
    /// Who sees that one has ended so sees that of all others.
    pub(crate) fn abort_tasks(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// The bdev behind the unit.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// The room of a thin unit; `None` of another one, and where its bdev does not tell.
    pub(crate) fn room(&self) -> Option<Room> {
        let sparse = self.bdev.sparse().filter(|_| self.features.thin)?;
        let sets = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        Some(Room {
            available: sets(sparse.free_bytes()? / SET_BYTES),
            used: sets(sparse.allocated_bytes().div_ceil(SET_BYTES)),
        })
    }

    /// Whose disk it shows itself as.
    pub fn identity(&self) -> Uuid {
        self.identity
    }

    /// What to make a unit of another bdev with, for it to show itself as this one.
    pub fn options(&self) -> LunOptions {
        let mut characteristics = self.characteristics.clone();
        characteristics.uuid = Some(self.identity);
        characteristics.product.get_or_insert_with(|| {
            self.bdev.product_name().chars().take(crate::characteristics::PRODUCT_LEN).collect()
        });
        LunOptions {
            serial: Some(self.serial.clone()),
            read_only: self.read_only,
            removable: self.removable,
            block_size: Some(self.block_size),
            characteristics,
            error_policy: self.error_policy,
            nexus: Some(self.nexus_name.to_string()),
            // Those of the volume, which is the same, are known.
            keeper: None,
            records: None,
            transport: self.transport.clone(),
        }
    }

    /// Whether a SANITIZE of its volume goes on.
    pub fn is_being_sanitized(&self) -> bool {
        self.volume.sanitize.is_running()
    }

    /// Says whether another unit takes its place: then nothing is copied from or to it any more (EXTENDED
    /// COPY), and its ROD tokens are revoked. Waits for an I/O that is under way: for control threads.
    pub fn set_replaced(&self, replaced: bool) {
        self.copies.set_replaced(replaced);
        if replaced {
            self.volume.all_changes();
        }
    }

    /// The unit is removed: nothing more is copied from or to it. Waits for an I/O that is under way, a second at
    /// most: for control threads.
    pub fn end_copies(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.copies.end(Duration::from_secs(1));
    }

    /// Takes the place of the unit `before`, whose sessions have nothing in flight and
    /// [follow](Nexus::follow): resets that were counted there are not forgotten. One that comes meanwhile is of both.
    pub fn replace(&self, before: &LunShared) {
        self.volume.look(|_| self.epoch.store(before.epoch(), Ordering::Release));
    }

    /// The medium is out or in as that of the unit `before` is, whose place this one takes. Called when nothing of
    /// that is in flight any more, which could eject or load it, and after [`LunShared::connect`], which loads it.
    pub fn follow_medium(&self, before: &LunShared) {
        self.set_gate(Gate::Ejected, before.is_at(Gate::Ejected));
    }

    /// Tells every session, unless the unit is removable, in what this unit differs from `before`, whose
    /// place it took: 3Fh/03h, 2Ah/09h (SPC-4 6.6.1, SBC-3 5.15.1), or nothing. Whether it has another size.
    pub fn tell_difference(&self, before: &LunShared) -> bool {
        if !crate::inquiry::look_the_same(self, before) {
            self.post(UnitAttention::InquiryChanged);
        }
        let resized = self.num_blocks() != before.num_blocks();
        if resized {
            self.post(UnitAttention::CapacityChanged);
        }
        resized
    }

    /// Unit serial number (VPD page 0x80).
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// A new session, with POWER ON pending unless the unit is removable ([`Nexus`] says why). It
    /// ends when the last `Arc` of it is dropped. A medium that another has ejected is in again. Takes a lock:
    /// for control threads.
    pub fn connect(&self) -> Arc<Nexus> {
        self.volume.reload();
        self.volume.reload_modes();
        self.volume.go_on_sanitizing();
        self.load_medium(None);
        let first = (!self.removable).then_some(UnitAttention::Reset);
        let reserves = (Arc::clone(&self.volume), Arc::clone(&self.nexus_name));
        let (preventers, copies) = (Arc::clone(&self.preventers), Arc::clone(&self.copies));
        let nexus = Arc::new(Nexus::new(first, preventers, reserves, copies));
        let mut nexuses = self.nexuses();
        nexuses.retain(|n| n.strong_count() > 0);
        nexuses.push(Arc::downgrade(&nexus));
        nexus
    }

    /// A session that goes on where `state` says: the initiator notices nothing, unless it could not ask for the
    /// capacity and now can, of which it is told. As for [`LunShared::connect`] otherwise.
    pub fn connect_as(&self, state: NexusState) -> Arc<Nexus> {
        let nexus = self.connect();
        nexus.restore(state);
        // Later it is told by who reads what is not known yet.
        if state.could_not_ask && self.reservations_not_known().is_none() {
            self.can_be_asked_again();
        }
        nexus
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Capacity in logical blocks, as the initiators know it.
    pub fn capacity(&self) -> u64 {
        self.num_blocks()
    }

    /// What the unit can do; what counts blocks counts logical ones.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// log2 of physical block size / logical block size.
    pub fn physical_exponent(&self) -> u8 {
        self.physical_exponent
    }

    /// Longest read or write, in bytes.
    pub fn max_transfer(&self) -> u64 {
        self.max_transfer_blocks() * u64::from(self.block_size)
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// What it says of itself as its owner chose.
    pub fn characteristics(&self) -> &Characteristics {
        &self.characteristics
    }

    /// What becomes of commands whose I/O fails.
    pub fn error_policy(&self) -> ErrorPolicy {
        self.error_policy
    }

    /// Whether the medium is removable.
    pub fn is_removable(&self) -> bool {
        self.removable
    }

    /// Whether any initiator prevents the removal of the medium: Linux does while a removable disk
    /// is open, a mounted one for instance.
    pub fn removal_prevented(&self) -> bool {
        self.preventers.any()
    }

    /// Decides that the unit goes, for good, unless an initiator prevents the removal of the medium
    /// (`false`). Nobody can prevent it afterwards: to PREVENT ALLOW MEDIUM REMOVAL (SPC-4 6.22)
    /// there is no such unit any more (25h/00h). Other commands are served until the transport has
    /// taken it away.
    pub fn leave_unless_prevented(&self) -> bool {
        self.preventers.close()
    }

    /// When the first of the present sessions first asked for the capacity, since the epoch.
    /// Takes a lock: for control threads.
    pub fn seen_at(&self) -> Option<Duration> {
        self.present().iter().filter_map(|n| n.seen_at()).min()
    }

    /// The bdev's size may have changed: takes the new one and, if it did, tells every session
    /// (2Ah/09h), unless the unit is removable. Until then commands are checked against the old
    /// size. Takes a lock: for control threads.
    pub fn notify_resized(&self) {
        let now = self.bdev.geometry().num_blocks >> self.bdev_shift;
        let before = self.num_blocks.swap(now, Ordering::Release);
        if now < before {
            self.changes(now, u64::MAX);
        }
        if before != now {
            self.post(UnitAttention::CapacityChanged);
            let tags: TagRanges = self.volume.modes().0.tags;
            if self.protection.is_some() && tags.cut(before) != tags.cut(now) {
                self.post(UnitAttention::ModeChanged);
            }
        }
    }

    /// Makes `attention` pending for every session, unless the unit is removable. Takes a lock: for
    /// control threads.
    pub fn post(&self, attention: UnitAttention) {
        if self.removable {
            return;
        }
        self.present().iter().for_each(|nexus| nexus.post(attention));
    }

    /// Makes `attention` pending for every session but one, unless the unit is removable.
    pub(crate) fn post_to_others(&self, attention: UnitAttention, than: &Nexus) {
        if self.removable {
            return;
        }
        let present = self.present();
        let others = present.iter().filter(|nexus| !std::ptr::eq(&***nexus, than));
        others.for_each(|nexus| nexus.post(attention));
    }

    /// Nobody was told the capacity for a while. Whoever has not asked for it before knows none, and asks again: told
    /// by 2Ah/09h, unless the unit is removable, and by the transport. Takes a lock: for control threads.
    pub(crate) fn can_be_asked_again(&self) {
        if !self.removable {
            let present = self.present();
            let without = present.iter().filter(|nexus| nexus.seen_at().is_none());
            without.for_each(|nexus| nexus.post(UnitAttention::CapacityChanged));
        }
        self.transport.iter().for_each(|transport| transport.parameters_changed());
    }

    /// LOGICAL UNIT RESET (SAM-5 6.3.3, 7.7), of all that show the volume, through whichever
    /// controllers: every task in flight, of every session, ends as TASK ABORTED once its
    /// outstanding I/O has ended, and one that [waits to begin](crate::Task::wait) without any, as if all were
    /// ended at the same time; what was reserved by RESERVE(6) is free, modes are the saved ones,
    /// every session gets 29h/00h (not of a removable unit), and none prevents the removal of the
    /// medium any more (SBC-3 4.11). The transport answers the task management function when its own
    /// tasks are done, which may be before those of other controllers are. Takes locks that are held
    /// for microseconds.
    pub fn reset(&self) {
        let units = self.volume.abort_all_tasks();
        self.volume.forget_reserved(None);
        self.volume.reset_modes();
        for unit in &units {
            unit.copies.forget_failures();
            unit.present().iter().for_each(|nexus| nexus.forget_prevention());
            unit.post(UnitAttention::Reset);
        }
    }

    /// I_T NEXUS RESET (SAM-5 7.6) of `nexus`, whose tasks the transport ends.
    pub fn reset_nexus(&self, nexus: &Nexus) {
        nexus.forget_prevention();
        nexus.forget_reserved();
        self.copies.cancel();
        self.copies.forget_failures();
        if !self.removable {
            nexus.post(UnitAttention::Reset);
        }
    }

    /// How often all its tasks were ended so far: by a reset, by PREEMPT AND ABORT or by SANITIZE.
    #[inline]
    pub fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Capacity in blocks, as the initiators know it.
    #[inline]
    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks.load(Ordering::Relaxed)
    }

    /// `bytes` in blocks.
    pub(crate) fn blocks(&self, bytes: u64) -> u64 {
        bytes / u64::from(self.block_size)
    }

    /// Blocks that a WRITE ATOMIC writes at most (SBC-4 4.29): those of one physical block, which is on the
    /// medium as a whole or not at all. 0: there is no WRITE ATOMIC.
    pub(crate) fn atomic_blocks(&self) -> u32 {
        let of_one = u64::from(1u32 << self.physical_exponent);
        if self.abilities.atomic { of_one.min(self.max_transfer_blocks()) as u32 } else { 0 }
    }

    /// Longest READ, WRITE or VERIFY in blocks.
    pub(crate) fn max_transfer_blocks(&self) -> u64 {
        let ours = self.blocks(MAX_TRANSFER_BYTES);
        match self.features.max_blocks {
            0 => ours,
            limit => ours.min(u64::from(limit)),
        }
    }

    /// The nexuses of now. The lock is free when this returns, and the caller holds none: whoever has the last
    /// of a nexus ends it, which takes the lock of the volume's reservations.
    pub(crate) fn present(&self) -> Vec<Arc<Nexus>> {
        self.nexuses().iter().filter_map(Weak::upgrade).collect()
    }

    fn nexuses(&self) -> MutexGuard<'_, Vec<Weak<Nexus>>> {
        self.nexuses.lock()
    }
}
