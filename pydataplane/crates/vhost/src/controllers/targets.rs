//! Targets of a controller: adding and removing them, while its guest may be connected.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;

use bdev::ClaimMode;
use reactor::NotRun;
use scsi::{LunOptions, LunShared};

use super::Controllers;
use crate::controller::Controller;
use crate::error::ControllerError;
use crate::lun::{Target, TargetOptions, Times};
use crate::mailbox::Order;
use crate::stats::LunCounters;

impl Controllers {
    /// Shows the bdev `bdev_name` as target `number`, or the lowest free one for -1. A connected
    /// guest is told. Returns the number.
    pub fn add_target(
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
        let owner = format!("target {number} of controller {name}");
        let claim = self.inner.registry.claim_as(bdev_name, &owner, mode)?;
        let lun_options = LunOptions {
            serial: options.serial.clone(),
            read_only: options.read_only,
            removable: options.removable,
            block_size: options.block_size,
            characteristics: options.characteristics.clone(),
            error_policy: options.error_policy,
            nexus: Some(format!("{name}:{number}")),
            keeper: self.inner.keeper.get().cloned(),
        };
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
