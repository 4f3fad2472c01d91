//! PERSISTENT RESERVE OUT (SPC-4 6.16): what its parameter list orders.

use super::{Refusal, Type};
use crate::opcode::Cdb;
use crate::response::{Fail, Status};
use crate::sense::{Code, Sense};
use guestmem::Sg;

/// Bytes of the basic parameter list, and of that of REGISTER AND MOVE before its TransportID.
const LIST_LEN: usize = 24;
/// Longest TransportID that is looked at; a longer one is of no nexus of ours.
const ID_LEN: usize = 24;
/// The service action.
pub(crate) const REPLACE_LOST_RESERVATION: u8 = 0x08;

/// What is to be done, with the keys that it is to be done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Register { key: Option<u64>, new: u64, persist: bool },
    Reserve { key: u64, kind: Type },
    Release { key: u64, kind: Type },
    Clear { key: u64 },
    Preempt { key: u64, of: u64, kind: Type, abort: bool },
    Move { key: u64, new: u64, to: [u8; ID_LEN], ends: bool, persist: bool },
    Replace { new: u64, kind: Type, persist: bool },
}

/// Reads the CDB and the parameter list.
///
/// # Errors
/// PARAMETER LIST LENGTH ERROR, INVALID FIELD IN CDB for a scope or type that there is not, INVALID FIELD IN
/// PARAMETER LIST for other initiators' or all target ports (SPEC_I_PT, ALL_TG_PT), which REPORT CAPABILITIES
/// does not offer, for what it cannot keep (APTPL), and for keys of which REPLACE LOST RESERVATION has none or has to
/// have one.
pub(crate) fn parse(cdb: &Cdb, data_out: &Sg, can_persist: bool) -> Result<Order, Fail> {
    const LOGICAL_UNIT: u8 = 0;
    /// SPEC_I_PT, ALL_TG_PT.
    const OTHERS: u8 = 0x0C;
    let (action, length) = (cdb.byte(1) & 0x1F, cdb.be32(5) as usize);
    let moves = action == 0x07;
    if length < LIST_LEN || (length > LIST_LEN && !moves) {
        return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    if data_out.len() < length {
        return Err(Fail::Overrun);
    }
    let mut list = [0u8; LIST_LEN + ID_LEN];
    let taken = length.min(list.len());
    data_out.copy_to_slice(0, &mut list[..taken]);
    let be64 = |at: usize| list[at..at + 8].iter().fold(0u64, |all, b| all << 8 | u64::from(*b));
    let (key, action_key) = (be64(0), be64(8));
    let kind = || {
        let (scope, kind) = (cdb.byte(2) >> 4, Type::of(cdb.byte(2) & 0xF));
        kind.filter(|_| scope == LOGICAL_UNIT).ok_or(Sense::invalid_cdb(2, None))
    };
    let flags_at = if moves { 17 } else { 20 };
    let persist = list[flags_at] & 0x01 != 0;
    if persist && !can_persist {
        return Err(Sense::invalid_parameter(flags_at as u16).into());
    }
    let register = |key| match list[20] & OTHERS {
        0 => Ok(Order::Register { key, new: action_key, persist }),
        _ => Err(Sense::invalid_parameter(20)),
    };
    Ok(match action {
        0x00 => register(Some(key))?,
        0x01 => Order::Reserve { key, kind: kind()? },
        0x02 => Order::Release { key, kind: kind()? },
        0x03 => Order::Clear { key },
        0x04 | 0x05 => Order::Preempt { key, of: action_key, kind: kind()?, abort: action == 0x05 },
        0x06 => register(None)?,
        0x07 => {
            let be32 =
                |at: usize| list[at..at + 4].iter().fold(0u32, |all, b| all << 8 | u32::from(*b));
            if be32(20) as usize != ID_LEN || length != LIST_LEN + ID_LEN {
                return Err(Sense::illegal(Code::PARAMETER_LIST_LENGTH_ERROR).into());
            }
            let to = list[LIST_LEN..].try_into().expect("the rest of the list is a TransportID");
            let ends = list[17] & 0x02 != 0;
            Order::Move { key, new: action_key, to, ends, persist }
        }
        REPLACE_LOST_RESERVATION => {
            let kind = kind()?;
            let wrong = [(0, key != 0), (8, action_key == 0), (20, list[20] & OTHERS != 0)];
            if let Some((at, _)) = wrong.into_iter().find(|(_, is_wrong)| *is_wrong) {
                return Err(Sense::invalid_parameter(at).into());
            }
            Order::Replace { new: action_key, kind, persist }
        }
        _ => return Err(Sense::invalid_cdb(1, Some(4)).into()),
    })
}

impl From<Refusal> for Fail {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Conflict => Fail::Bare(Status::ReservationConflict),
            Refusal::Release => {
                Sense::illegal(Code::INVALID_RELEASE_OF_PERSISTENT_RESERVATION).into()
            }
            Refusal::ActionKey => Sense::invalid_parameter(8).into(),
            Refusal::Full => Sense::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES).into(),
        }
    }
}
