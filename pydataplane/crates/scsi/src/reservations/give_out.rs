//! PERSISTENT RESERVE IN (SPC-4 6.15): keys, the reservation, what can be done, everything.

use super::{Reservations, Type, transport_id};
use crate::opcode::Cdb;
use crate::ports::port;
use crate::reply::Reply;
use crate::response::Fail;
use crate::sense::Sense;
use guestmem::Sg;

/// Answers from `of`, the volume's. `can_persist`: a registration may ask to outlive a loss of power.
pub(crate) fn persistent_reserve_in(
    of: &Reservations,
    can_persist: bool,
    cdb: &Cdb,
    data_in: &Sg,
) -> Result<u32, Fail> {
    let mut reply = Reply::new(data_in, usize::from(cdb.be16(7)));
    let held = of.held.as_ref();
    // Of all registrants there is no one holder's key.
    let holder_key =
        held.filter(|h| !h.kind.is_of_all()).and_then(|h| of.key_of(&h.by)).unwrap_or(0);
    match cdb.byte(1) & 0x1F {
        0x00 => {
            head(&mut reply, of, of.registrants.len() * 8);
            of.registrants.iter().for_each(|r| reply.put(&r.key.to_be_bytes()));
        }
        0x01 => {
            head(&mut reply, of, if held.is_some() { 16 } else { 0 });
            if let Some(held) = held {
                reply.put(&holder_key.to_be_bytes());
                reply.put(&[0, 0, 0, 0, 0, held.kind.code(), 0, 0]);
            }
        }
        0x02 => reply.put(&capabilities(can_persist, of.persist)),
        0x03 => {
            const DESCRIPTOR: usize = 24;
            let id_len = transport_id("").len();
            head(&mut reply, of, of.registrants.len() * (DESCRIPTOR + id_len));
            for registrant in &of.registrants {
                let holds = of.is_held_by(&registrant.nexus);
                let kind = held.filter(|_| holds).map_or(0, |held| held.kind.code());
                reply.put(&registrant.key.to_be_bytes());
                reply.put(&[0, 0, 0, 0, u8::from(holds), kind, 0, 0, 0, 0]);
                reply.put(&port(&registrant.nexus).to_be_bytes());
                reply.put(&(id_len as u32).to_be_bytes());
                reply.put(&transport_id(&registrant.nexus));
            }
        }
        _ => return Err(Sense::invalid_cdb(1, Some(4)).into()),
    }
    reply.end()
}

/// PRGENERATION and ADDITIONAL LENGTH.
fn head(reply: &mut Reply, of: &Reservations, length: usize) {
    reply.put(&of.generation.to_be_bytes());
    reply.put(&(length as u32).to_be_bytes());
}

/// REPORT CAPABILITIES (SPC-4 6.15.4).
fn capabilities(can_persist: bool, persists: bool) -> [u8; 8] {
    const RLR_C: u8 = 0x80;
    const TMV: u8 = 0x80;
    let [mut low, mut high] = [0u8; 2];
    for code in 1..=8u8 {
        if Type::of(code).is_some() {
            if code < 8 { low |= 1 << code } else { high |= 1 }
        }
    }
    [0, 8, RLR_C | u8::from(can_persist), TMV | u8::from(persists), low, high, 0, 0]
}
