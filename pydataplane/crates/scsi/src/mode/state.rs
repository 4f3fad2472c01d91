//! The mode parameters of a volume that initiators can set, and how they outlive the process.

use super::tags::TagRanges;
use crate::nexus::{Nexus, UnitAttention};
use crate::opcode::Command;
use crate::records::Record;
use crate::response::Fail;
use crate::sense::{Code, Key, Sense};
use crate::shared::Gate;
use crate::volume::Volume;
use bdev::host_boot;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// What could not be read is tried again after so long.
const AGAIN: Duration = Duration::from_millis(200);

/// What can be set, as it differs from the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Modes {
    /// WCE is 0 although there is a volatile cache: writes are durable before their status.
    pub(crate) no_cache: bool,
    /// SWP: writes are refused.
    pub(crate) write_protected: bool,
    /// D_SENSE: sense data is in the descriptor format.
    pub(crate) descriptor_sense: bool,
    /// ATMPE: blocks are to have the application tags below.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) tags_enabled: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) tags: TagRanges,
}

/// What an earlier version does not know is not in the text where it was not set.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Modes {
    pub(crate) const NO_CACHE: u32 = 1;
    pub(crate) const WRITE_PROTECTED: u32 = 2;
    pub(crate) const DESCRIPTOR_SENSE: u32 = 4;
    pub(crate) const APPLICATION_TAGS: u32 = 8;
    /// Above them a unit has how often it was told, for its threads to know that there is something new.
    pub(crate) const VERSION_SHIFT: u32 = 8;

    /// As a unit has them for its commands to look at.
    pub(crate) fn bits(self) -> u32 {
        let bit = |is: bool, bit: u32| if is { bit } else { 0 };
        bit(self.no_cache, Modes::NO_CACHE)
            | bit(self.write_protected, Modes::WRITE_PROTECTED)
            | bit(self.descriptor_sense, Modes::DESCRIPTOR_SENSE)
            | bit(self.tags_enabled, Modes::APPLICATION_TAGS)
    }
}

/// What is kept of a volume. To its initiators a restart of the process is none, but one of the host is.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeptModes {
    current: Modes,
    saved: Modes,
    boot: Option<Uuid>,
}

#[derive(Default)]
struct State {
    current: Modes,
    saved: Modes,
    /// What is kept was read, or there is nothing.
    is_known: bool,
    /// Changes since the process has them.
    changes: u64,
    /// Times that units were told.
    version: u32,
}

/// Those of one volume.
#[derive(Default)]
pub(crate) struct ModeState {
    state: Mutex<State>,
    /// One is kept at a time.
    turn: Mutex<()>,
    /// When what is kept was read, where that failed.
    failed: Mutex<Option<Instant>>,
}

/// A change that is being kept.
pub(crate) struct Keeping(Arc<AtomicU32>);

impl Keeping {
    const KEPT: u32 = 1;
    const FAILED: u32 = 2;

    /// Whether it is kept.
    ///
    /// # Errors
    /// It could not be: the change counts, but would be lost with the process.
    pub(crate) fn is_over(&self) -> Result<bool, Fail> {
        match self.0.load(Ordering::Acquire) {
            Keeping::KEPT => Ok(true),
            Keeping::FAILED => {
                Err(Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE).into())
            }
            _ => Ok(false),
        }
    }
}

fn present_boot() -> Option<Uuid> {
    host_boot().map(Uuid::from_u128)
}

impl Volume {
    /// Current and saved ones.
    pub(crate) fn modes(&self) -> (Modes, Modes) {
        let state = self.modes.state.lock();
        (state.current, state.saved)
    }

    /// The application tags that its blocks are to have. Holds a lock that is never held for longer than a change
    /// in memory.
    pub(crate) fn tags(&self) -> TagRanges {
        let (current, _) = self.modes();
        if current.tags_enabled { current.tags } else { TagRanges::default() }
    }

    /// Takes what is kept, unless something was changed here, and has all units know it. What is no modes is
    /// the default. As long as it cannot be read the units take no commands. For control threads.
    pub(crate) fn reload_modes(&self) {
        let read = self.records().map_or(Ok(None), |r| r.kept(Record::Mode, self.uuid()));
        *self.modes.failed.lock() = read.is_err().then(Instant::now);
        let is_read = read.is_ok();
        let text = read.ok().flatten();
        let kept = text.and_then(|text| serde_json::from_str::<KeptModes>(&text).ok());
        let mut state = self.modes.state.lock();
        state.is_known |= is_read;
        if let (Some(kept), 0) = (kept, state.changes) {
            let same_boot = kept.boot.is_some() && kept.boot == present_boot();
            state.current = if same_boot { kept.current } else { kept.saved };
            state.saved = kept.saved;
        }
        self.tell_modes(&mut state);
    }

    /// Each unit knows the current ones.
    fn tell_modes(&self, state: &mut State) {
        state.version = state.version.wrapping_add(1);
        let bits = state.current.bits() | state.version << Modes::VERSION_SHIFT;
        for unit in self.units() {
            unit.set_modes(bits);
            unit.set_gate(Gate::Modes, !state.is_known);
        }
    }

    /// Whether a command is for units whose modes are not known, which are read again soon.
    ///
    /// # Errors
    /// NOT READY: it could write where that is not allowed, or what is not to be.
    pub(crate) fn check_modes(self: &Arc<Self>, command: Command) -> Result<(), Sense> {
        use Command as C;
        if matches!(command, C::Inquiry | C::ReportLuns | C::RequestSense) {
            return Ok(());
        }
        let mut failed = self.modes.failed.lock();
        if failed.is_some_and(|failed| failed.elapsed() >= AGAIN) {
            // Nobody else begins before that is over.
            let volume = Arc::clone(self);
            if crate::aside::run("modes", move || volume.reload_modes()) {
                *failed = None;
            }
        }
        Err(Sense::new(Key::NotReady, Code::BECOMING_READY))
    }

    /// MODE SELECT of a nexus: `change` makes the new ones of the present ones, and they are saved where `save`
    /// says so. All other nexuses are told.
    pub(crate) fn select_modes(
        self: &Arc<Self>,
        by: &Nexus,
        save: bool,
        change: impl FnOnce(Modes) -> Result<Modes, Fail>,
    ) -> Result<(Modes, Keeping), Fail> {
        let mut state = self.modes.state.lock();
        let before = (state.current, state.saved);
        state.current = change(state.current)?;
        if save {
            state.saved = state.current;
        }
        if before == (state.current, state.saved) {
            return Ok((before.0, Keeping(Arc::new(AtomicU32::new(Keeping::KEPT)))));
        }
        state.changes += 1;
        self.tell_modes(&mut state);
        drop(state);
        self.units().iter().for_each(|unit| unit.post_to_others(UnitAttention::ModeChanged, by));
        Ok((before.0, self.keep_modes()))
    }

    /// LOGICAL UNIT RESET: what was saved counts (SPC-4 6.8).
    pub(crate) fn reset_modes(self: &Arc<Self>) {
        let mut state = self.modes.state.lock();
        if state.current != state.saved {
            state.current = state.saved;
            state.changes += 1;
            self.tell_modes(&mut state);
            drop(state);
            drop(self.keep_modes());
        }
    }

    /// Has them kept by a thread of its own.
    fn keep_modes(self: &Arc<Self>) -> Keeping {
        let told = Arc::new(AtomicU32::default());
        let (volume, tells) = (Arc::clone(self), Arc::clone(&told));
        let keep = move || {
            let state = if volume.keep_now() { Keeping::KEPT } else { Keeping::FAILED };
            tells.store(state, Ordering::Release);
        };
        if !crate::aside::run("modes", keep) {
            told.store(Keeping::FAILED, Ordering::Release);
        }
        Keeping(told)
    }

    fn keep_now(&self) -> bool {
        let Some(records) = self.records() else { return true };
        let _turn = self.modes.turn.lock();
        let (current, saved) = self.modes();
        let kept = KeptModes { current, saved, boot: present_boot() };
        let is_default = current == Modes::default() && saved == Modes::default();
        let text = (!is_default).then(|| serde_json::to_string(&kept).ok()).flatten();
        records.keep(Record::Mode, self.uuid(), text.as_deref()).is_ok()
    }
}
