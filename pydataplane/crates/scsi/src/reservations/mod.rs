//! Persistent reservations (SPC-4 5.13) and RESERVE(6): who may use a volume that several share.
//!
//! | file | what |
//! | --- | --- |
//! | `state` | who has registered, who holds it, what follows; pure |
//! | `access` | which commands a reservation keeps from others, or that it is not known |
//! | `take_in`, `give_out` | PERSISTENT RESERVE OUT and IN: parameter lists and data |
//! | `keeping` | how they outlive the process |
//!
//! A volume has one [`Reservations`], whichever controllers show it. Each logical unit is one nexus: that of
//! its initiator with its target port. What the unit's nexus may do stands in the unit, where a command
//! looks with one load; it is changed with the volume's lock held. What was kept and cannot be read is taken for a
//! reservation of somebody else's, until it can be, or an initiator has replaced it.

mod access;
mod give_out;
mod keeping;
mod state;
mod take_in;

use crate::ports::hash;
pub(crate) use access::{is_allowed, refused};
pub(crate) use give_out::persistent_reserve_in;
pub(crate) use keeping::{Keeping, Saved};
pub use keeping::{KeptReservations, NotKnown, ReservationKeeper};
pub(crate) use state::{Access, Changed, NexusName, Refusal, Reservations, Told, Type};
pub(crate) use take_in::{Order, REPLACE_LOST_RESERVATION, parse};

/// The SAS address that stands for a nexus in TransportIDs (SPC-4 7.6.4.6): virtio has none of its own, and
/// this form every initiator can print. A locally assigned NAA (3h) of the name's FNV-1a hash.
pub(crate) fn transport_id(nexus: &str) -> [u8; 24] {
    const SAS: u8 = 0x06;
    let address = (hash(nexus) & 0x0FFF_FFFF_FFFF_FFFF) | 0x3000_0000_0000_0000;
    let mut id = [0; 24];
    id[0] = SAS;
    id[4..12].copy_from_slice(&address.to_be_bytes());
    id
}
