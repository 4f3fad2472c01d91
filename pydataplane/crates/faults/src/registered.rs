//! The bdevs of this crate, as the registry has them: found by their bases, and ended.

use crate::{Delaying, Failing};
use bdev::{Event, Op, Registry, Subscription};

/// The name of the bdev of this crate on the bdev `base`, by the latter's name.
pub fn on(registry: &Registry, base: &str) -> Option<String> {
    let above = registry.above(base)?;
    let is_ours = [Failing::PRODUCT, Delaying::PRODUCT].contains(&above.product_name());
    is_ours.then(|| above.name().to_owned())
}

/// Ends all faults that were asked for, and has I/Os go on that wait for somebody: the process ends.
pub fn end_all(registry: &Registry) {
    for bdev in registry.list() {
        if let Some(failing) = registry.get_as::<Failing>(bdev.name()) {
            failing.inject(&Op::ALL, None);
            failing.resume_pending();
        }
    }
}

/// Has such bdevs follow their bases until the subscription is dropped: the size, and the end of one whose
/// base is taken away by somebody who knows nothing of it.
pub fn follow(registry: &Registry) -> Subscription {
    let known = registry.clone();
    registry.subscribe(move |event| match event {
        Event::Resized(base) => {
            if let Some(name) = on(&known, base.name()) {
                known.notify_resized(&name);
            }
        }
        Event::Removed(base) => {
            let Some(name) = on(&known, base.name()) else { return };
            if let Some(failing) = known.get_as::<Failing>(&name) {
                failing.resume_pending();
            }
            known.unregister_beside(&name);
        }
        Event::Registered(_) | Event::Space { .. } => {}
    })
}
