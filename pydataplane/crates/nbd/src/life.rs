//! How long a device's threads go on: as long as it, or a channel of it, is there.

use std::sync::Arc;

use crate::lane::Carrier;
use crate::shared::Shared;

/// Ends the device's threads with its last user.
pub(crate) struct Life {
    pub(crate) shared: Arc<Shared>,
    pub(crate) carrier: Option<Arc<Carrier>>,
}

impl Drop for Life {
    fn drop(&mut self) {
        self.shared.orders.stop();
        if let Some(carrier) = &self.carrier {
            carrier.stop();
        }
    }
}
