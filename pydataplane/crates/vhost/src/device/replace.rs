//! A target that goes on with another bdev, as the same disk to its guest.

use std::sync::Arc;
use std::time::Duration;

use bdev::Limits;
use scsi::{LunShared, Nexus};

use super::Device;
use crate::lun::Between;
use crate::mailbox::Countdown;
use crate::poller::DevicePoller;

/// How long a target that is to go on with another bdev waits for its I/O in flight.
const HALT_TIMEOUT: Duration = Duration::from_secs(5);

impl Device {
    /// Has `target` go on with another unit, of a volume with these limits, when nothing of its is in
    /// flight and `between` was done. New requests wait meanwhile, in their order.
    ///
    /// # Errors
    /// As a clause: the bdev cannot be opened, I/O in flight does not end within [`HALT_TIMEOUT`],
    /// `between` failed. Then all goes on as it was.
    pub(crate) fn replace(
        &mut self,
        target: u8,
        (shared, limits): (&Arc<LunShared>, &Arc<Limits>),
        between: Between,
    ) -> Result<(), String> {
        let Some(before) = self.attached[usize::from(target)].as_ref().filter(|a| !a.leaving)
        else {
            // This session did not get it.
            return between();
        };
        let (unit, before) = (Arc::clone(&before.shared), Arc::clone(&before.nexus));
        let nexus = shared.connect();
        let replaced = self.prepare_unit(target, (shared, limits), &nexus).and_then(|()| {
            let countdown = Countdown::new(self.workers.len(), None);
            for worker in &self.workers {
                let countdown = Arc::clone(&countdown);
                worker.call(move |p| p.halt_unit(target, move || countdown.count()));
            }
            if !countdown.wait(&format!("target {target} of {}", self.name), HALT_TIMEOUT) {
                let waited = HALT_TIMEOUT.as_secs();
                return Err(format!("its I/O in flight has not ended after {waited} s"));
            }
            self.workers.iter().for_each(|w| w.call(move |p| p.settle_unit(target)));
            between()?;
            nexus.follow(&before);
            shared.follow_medium(&unit);
            self.workers.iter().for_each(|w| w.call(move |p| p.switch_unit(target)));
            Ok(())
        });
        self.workers.iter().for_each(|w| w.call(move |p| p.go_on_unit(target)));
        replaced?;
        if let Some(attached) = &mut self.attached[usize::from(target)] {
            (attached.shared, attached.nexus) = (Arc::clone(shared), nexus);
        }
        Ok(())
    }

    /// Makes on every reactor what `target` is to go on with.
    fn prepare_unit(
        &self,
        target: u8,
        (shared, limits): (&Arc<LunShared>, &Arc<Limits>),
        nexus: &Arc<Nexus>,
    ) -> Result<(), String> {
        for worker in &self.workers {
            let (shared, session) = (Arc::clone(shared), (Arc::clone(nexus), Arc::clone(limits)));
            let (poller, owner) = (worker.poller, self.owner);
            let prepared = worker.reactor.call(move |cx| {
                let io = cx.io().owned_by(owner);
                let poller = cx.poller_mut::<DevicePoller>(poller);
                poller.map_or(Ok(()), |p| p.prepare_unit(target, &io, &shared, session))
            });
            prepared.map_err(|why| why.to_string())?;
        }
        Ok(())
    }
}
