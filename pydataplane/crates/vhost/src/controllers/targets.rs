//! Targets of a controller: adding and removing them, while its guest may be connected.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use bdev::{Bdev, Claim, ClaimMode};
use reactor::NotRun;
use scsi::{LunOptions, LunShared, Transport};

use super::{ControllerOptions, Controllers};
use crate::controller::Controller;
use crate::error::ControllerError;
use crate::front::{DISK, Front};
use crate::lun::{Between, Replacement, Target, TargetOptions, Times};
use crate::mailbox::{Mailbox, Order};
use crate::stats::LunCounters;

/// Tells the guest of a target to look at it again.
struct Events {
    mailbox: Mailbox,
    number: u8,
}

impl Transport for Events {
    fn parameters_changed(&self) {
        // Linux asks for capacity and modes then, whatever changed.
        self.mailbox.send(Order::Resized { target: self.number });
    }
}

impl Controllers {
    /// Makes a controller with one disk, the bdev `bdev_name` ([`Front::Blk`]), or gives one of
    /// [`Controllers::expect_blk`] its disk.
    pub fn create_blk(
        &self,
        name: &str,
        options: ControllerOptions,
        bdev_name: &str,
        disk: TargetOptions,
    ) -> Result<(), ControllerError> {
        let there = self.find(name).ok().filter(|c| c.awaits_disk.swap(false, Ordering::Relaxed));
        let starts = !options.delay;
        if there.is_none() {
            // Nobody is to find it without its disk.
            self.create(name, ControllerOptions { front: Front::Blk, delay: true, ..options })?;
        }
        if let Err(why) = self.show(name, DISK.into(), bdev_name, disk) {
            match there {
                Some(there) => there.awaits_disk.store(true, Ordering::Relaxed),
                // Nobody can have connected.
                None => _ = self.delete(name, true),
            }
            return Err(why);
        }
        match starts {
            true => self.start(name),
            false => Ok(()),
        }
    }

    /// Makes a controller, not started, whose disk follows by [`Controllers::create_blk`]: what can be made
    /// before that is there.
    pub fn expect_blk(
        &self,
        name: &str,
        options: ControllerOptions,
    ) -> Result<(), ControllerError> {
        self.create(name, ControllerOptions { front: Front::Blk, delay: true, ..options })?;
        self.find(name)?.awaits_disk.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Shows the bdev `bdev_name` as target `number`, or the lowest free one for -1. A connected
    /// guest is told. Returns the number.
    pub fn add_target(
        &self,
        name: &str,
        number: i64,
        bdev_name: &str,
        options: TargetOptions,
    ) -> Result<u8, ControllerError> {
        self.check_scsi(name)?;
        self.show(name, number, bdev_name, options)
    }

    fn check_scsi(&self, name: &str) -> Result<(), ControllerError> {
        match self.find(name)?.front {
            Front::Scsi => Ok(()),
            Front::Blk => Err(ControllerError::NotScsi(name.into())),
        }
    }

    fn show(
        &self,
        name: &str,
        number: i64,
        bdev_name: &str,
        options: TargetOptions,
    ) -> Result<u8, ControllerError> {
        // The thread may be waiting for I/O of its guest, so nobody else is kept waiting for it:
        // the number is reserved, and no lock is held.
        let controller = self.find(name)?;
        let reservation = Reservation::new(&controller, number)?;
        let number = reservation.number;
        let mode = match options.shareable {
            true => ClaimMode::Shared,
            false => ClaimMode::Exclusive,
        };
        let owner = match controller.front {
            Front::Scsi => format!("target {number} of controller {name}"),
            Front::Blk => format!("controller {name}"),
        };
        let claim = self.inner.registry.claim_as(bdev_name, &owner, mode)?;
        let lun_options = self.lun_options(&controller, number, &options);
        let shared = LunShared::new(Arc::clone(claim.bdev()), lun_options)?;
        let counters: Vec<Arc<LunCounters>> =
            controller.reactors.iter().map(|_| Arc::default()).collect();
        let mut times = Times::new();
        let mut inherited = None;
        let mut suspended = None;
        if let Some(then) = controller.inherited(number) {
            // It was opened in the process before, and is again if it has a session.
            counters[0].begin_with(&then.counters);
            times = Times::restored(then.attached_at, then.event_at, then.resize_event_at).into();
            inherited = then.nexus.map(Into::into);
            suspended = then.suspended.and_then(Into::into);
        } else {
            // A volume that cannot be opened is refused now, not when a VM connects.
            let bdev = Arc::clone(claim.bdev());
            controller.reactors[0].call(move |cx| bdev.open(cx.io()).map(drop))?;
        }
        let inherited = Mutex::new(inherited);
        let leaving = false;
        let suspended = Mutex::new(suspended);
        let target = Target {
            number,
            shared,
            options,
            times,
            leaving,
            inherited,
            suspended,
            counters,
            counted_before: Mutex::default(),
            claim,
        };
        let (call, caller) = reactor::call(target);
        controller.mailbox.send(Order::Add(call));
        let waited = self.method_timeout();
        match caller.wait(waited) {
            Ok(added) => added?,
            Err(NotRun::Busy) => {
                return Err(ControllerError::Waiting { controller: name.into(), waited });
            }
            Err(NotRun::Gone) => return Err(ControllerError::NotFound(name.into())),
        }
        Ok(number)
    }

    /// What the guest of a controller sees.
    ///
    /// # Errors
    /// There is no such controller.
    pub fn front(&self, name: &str) -> Result<Front, ControllerError> {
        Ok(self.find(name)?.front)
    }

    /// The bdev that a target belongs to, and its unit. The disk of [`Front::Blk`] is target 0.
    ///
    /// # Errors
    /// There is no such controller or target.
    pub fn unit(
        &self,
        name: &str,
        number: u8,
    ) -> Result<(String, Arc<LunShared>), ControllerError> {
        let controller = self.find(name)?;
        let targets = controller.targets();
        let there = targets.get(usize::from(number)).and_then(Option::as_ref);
        let target = there.filter(|target| !target.leaving).ok_or_else(|| {
            ControllerError::NoTarget { controller: name.into(), target: number.into() }
        })?;
        Ok((target.bdev_name().to_owned(), Arc::clone(&target.shared)))
    }

    /// A unit as a target's options have it.
    fn lun_options(
        &self,
        controller: &Controller,
        number: u8,
        options: &TargetOptions,
    ) -> LunOptions {
        LunOptions {
            serial: options.serial.clone(),
            read_only: options.read_only,
            removable: options.removable,
            block_size: options.block_size,
            characteristics: options.characteristics.clone(),
            error_policy: options.error_policy,
            nexus: Some(format!("{}:{number}", controller.name)),
            keeper: self.inner.keeper.get().cloned(),
            records: self.inner.records.get().cloned(),
            transport: Some(Arc::new(Events { mailbox: controller.mailbox.clone(), number })),
        }
    }

    /// How a target was added.
    ///
    /// # Errors
    /// As [`Controllers::unit`].
    pub fn options(&self, name: &str, number: u8) -> Result<TargetOptions, ControllerError> {
        let controller = self.find(name)?;
        let targets = controller.targets();
        let there = targets.get(usize::from(number)).and_then(Option::as_ref);
        there.map(|target| target.options.clone()).ok_or_else(|| ControllerError::NoTarget {
            controller: name.into(),
            target: number.into(),
        })
    }

    /// Has a target that is on the bdev `on` go on with `bdev`, which shows the same data at that moment, as the
    /// same disk to its guest: number, identity and unit attentions that wait stay. Requests wait until nothing is
    /// in flight, and `between` was called. With `volume` the target belongs to that bdev from then on, and was
    /// added with those options; else it still belongs to the one that it does.
    ///
    /// # Errors
    /// There is no such target, it is on another bdev, `bdev` cannot be such a disk, I/O in flight does not end, or
    /// `between` failed: then all goes on as it was.
    pub fn replace(
        &self,
        name: &str,
        number: u8,
        on: &Arc<dyn Bdev>,
        bdev: Arc<dyn Bdev>,
        volume: Option<(Claim, TargetOptions)>,
        between: Between,
    ) -> Result<(), ControllerError> {
        let controller = self.find(name)?;
        let (shown, before) = self.unit(name, number)?;
        // Its own bdev again: as it was added.
        let options = match bdev.name() == shown && volume.is_none() {
            true => self.lun_options(&controller, number, &self.options(name, number)?),
            false => before.options(),
        };
        let shared = LunShared::new(bdev, options)?;
        // It would go on with the bdev that it began with.
        let between: Between = Box::new(move || match before.is_being_sanitized() {
            true => Err("its volume is being sanitized or formatted".to_owned()),
            false => {
                before.set_replaced(true);
                between().inspect_err(|_| before.set_replaced(false))
            }
        });
        let (call, caller) =
            reactor::call(Replacement { number, on: Arc::clone(on), shared, volume, between });
        controller.mailbox.send(Order::Replace(call));
        let waited = self.method_timeout();
        match caller.wait(waited) {
            Ok(replaced) => replaced.map_err(|why| ControllerError::Stays {
                controller: name.into(),
                target: number,
                bdev: shown,
                why,
            }),
            Err(NotRun::Busy) => Err(ControllerError::Waiting { controller: name.into(), waited }),
            Err(NotRun::Gone) => Err(ControllerError::NotFound(name.into())),
        }
    }

    /// Takes a target away: waits for its I/O in flight, tells a connected guest, and lets go of
    /// the volume.
    pub fn remove_target(&self, name: &str, number: i64) -> Result<(), ControllerError> {
        self.remove(name, number, |_| true)
    }

    /// The same, unless the guest prevents the removal (PREVENT ALLOW MEDIUM REMOVAL, SPC-4 6.22):
    /// it either did before, and keeps the target, or cannot any more.
    pub fn remove_target_unless_prevented(
        &self,
        name: &str,
        number: i64,
    ) -> Result<(), ControllerError> {
        self.remove(name, number, LunShared::leave_unless_prevented)
    }

    fn remove(
        &self,
        name: &str,
        number: i64,
        may_go: impl FnOnce(&LunShared) -> bool,
    ) -> Result<(), ControllerError> {
        self.check_scsi(name)?;
        let controller = self.find(name)?;
        let none = || ControllerError::NoTarget { controller: name.into(), target: number };
        let target = u8::try_from(number).map_err(|_| none())?;
        let (gone, is_gone) = channel();
        {
            let targets = controller.targets();
            let there = targets.get(usize::from(target)).and_then(Option::as_ref);
            if !may_go(&there.ok_or_else(none)?.shared) {
                return Err(ControllerError::Prevented { controller: name.into(), target });
            }
            // While it is there for sure: the number may be another target's at once.
            controller.mailbox.send(Order::Remove { target, gone: Some(gone) });
        }
        let waited = self.method_timeout();
        is_gone.recv_timeout(waited).map_err(|_| ControllerError::StillBusy {
            controller: name.into(),
            target,
            waited,
        })
    }
}

/// A target number that nobody else gets meanwhile.
struct Reservation<'a> {
    controller: &'a Controller,
    number: u8,
}

impl<'a> Reservation<'a> {
    /// Reserves the number `wanted`, or the lowest free one for -1.
    fn new(controller: &'a Controller, wanted: i64) -> Result<Self, ControllerError> {
        // In this order everywhere: reserved, then targets.
        let mut reserved = controller.reserved();
        let number = free_number(controller, &reserved, wanted)?;
        reserved.insert(number);
        Ok(Reservation { controller, number })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.controller.reserved().remove(&self.number);
    }
}

/// The target number that `wanted` means: itself, or the lowest free one for -1.
fn free_number(
    controller: &Controller,
    reserved: &BTreeSet<u8>,
    wanted: i64,
) -> Result<u8, ControllerError> {
    let targets = controller.targets();
    if wanted == -1 {
        let mut numbers = targets.iter().enumerate().map(|(n, target)| (n as u8, target));
        let free = numbers.find(|(n, target)| target.is_none() && !reserved.contains(n));
        return match free {
            Some((number, _)) => Ok(number),
            None => Err(ControllerError::Full(controller.name.clone())),
        };
    }
    let bad = ControllerError::TargetNumber(wanted);
    let Ok(number) = u8::try_from(wanted) else { return Err(bad) };
    let taken = |bdev: &str| ControllerError::TargetTaken {
        controller: controller.name.clone(),
        target: number,
        bdev: bdev.into(),
    };
    match targets.get(usize::from(number)) {
        Some(None) if reserved.contains(&number) => Err(taken("that is being added")),
        Some(None) => Ok(number),
        Some(Some(there)) => Err(taken(there.bdev_name())),
        None => Err(bad),
    }
}
