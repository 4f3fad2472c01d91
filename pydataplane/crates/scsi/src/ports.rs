//! Target ports: each target of a controller is one, and each controller is a target port group (SPC-4 5.15).
//! All are active and optimized: what differs between them is only whose they are.
//!
//! Their numbers are made of their names, so that they are the same after a restart, and for every
//! controller of a volume: two of a volume have the same one once in 65,535 times.

use crate::opcode::Cdb;
use crate::reply::Reply;
use crate::response::Fail;
use crate::sense::Sense;
use crate::shared::LunShared;
use guestmem::Sg;
use std::collections::{BTreeMap, BTreeSet};

/// Implicit asymmetric access (TPGS, SPC-4 6.6.2): nobody sets it.
pub(crate) const TPGS: u8 = 0x10;

/// FNV-1a.
pub(crate) fn hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// A number of 16 bits that is not 0.
fn number(name: &str) -> u16 {
    let hash = hash(name);
    let folded = hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48);
    match folded as u16 {
        0 => 1,
        number => number,
    }
}

/// RELATIVE TARGET PORT IDENTIFIER of the port of a nexus.
pub(crate) fn port(nexus: &str) -> u16 {
    number(nexus)
}

/// TARGET PORT GROUP of the port of a nexus: its name without the number of the target.
pub(crate) fn group(nexus: &str) -> u16 {
    number(nexus.rsplit_once(':').map_or(nexus, |(controller, _)| controller))
}

/// Name of the port of a nexus: a locally assigned NAA (3h).
pub(crate) fn port_name(nexus: &str) -> [u8; 8] {
    ((hash(nexus) & 0x0FFF_FFFF_FFFF_FFFF) | 0x3000_0000_0000_0000).to_be_bytes()
}

/// A designation descriptor (SPC-4 7.8.6) of a target port: 8 bytes before its designator.
const OF_PORT: u8 = 0x10;

/// Those of the unit's port in page 83h: its number, its group's and its name.
pub(crate) fn designators(nexus: &str) -> [u8; 28] {
    const BINARY: u8 = 1;
    const NAA: u8 = 3;
    const RELATIVE_PORT: u8 = 4;
    const PORT_GROUP: u8 = 5;
    let mut data = [0u8; 28];
    for (at, kind, number) in [(0, RELATIVE_PORT, port(nexus)), (8, PORT_GROUP, group(nexus))] {
        data[at..at + 4].copy_from_slice(&[BINARY, OF_PORT | kind, 0, 4]);
        data[at + 6..at + 8].copy_from_slice(&number.to_be_bytes());
    }
    data[16..20].copy_from_slice(&[BINARY, OF_PORT | NAA, 0, 8]);
    data[20..].copy_from_slice(&port_name(nexus));
    data
}

/// SCSI ports (SPC-4 7.8.14, page 88h): each by which the volume is reached.
pub(crate) fn page(unit: &LunShared, code: u8, reply: &mut Reply) {
    const NAME: usize = 12;
    const DESCRIPTOR: usize = 12 + NAME;
    let names: BTreeSet<_> =
        unit.volume.units().iter().map(|unit| unit.nexus_name().clone()).collect();
    let length = (names.len() * DESCRIPTOR).min(u16::MAX.into()) as u16;
    reply.put(&[0, code]);
    reply.put(&length.to_be_bytes());
    for name in &names {
        reply.put(&[0, 0]);
        reply.put(&port(name).to_be_bytes());
        reply.put(&[0, 0, 0, 0, 0, 0, 0, NAME as u8]);
        reply.put(&[1, OF_PORT | 3, 0, 8]);
        reply.put(&port_name(name));
    }
}

/// REPORT TARGET PORT GROUPS (SPC-4 6.37).
///
/// # Errors
/// INVALID FIELD IN CDB for a format that there is not.
pub(crate) fn report_groups(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    /// PARAMETER DATA FORMAT.
    const LENGTH_ONLY: u8 = 0;
    const EXTENDED: u8 = 1;
    /// Active/optimized is the only state.
    const AO_SUP: u8 = 0x01;
    let format = cdb.byte(1) >> 5;
    if format > EXTENDED {
        return Err(Sense::invalid_cdb(1, Some(7)).into());
    }
    let mut groups: BTreeMap<u16, BTreeSet<u16>> = BTreeMap::new();
    for unit in unit.volume.units() {
        let name = unit.nexus_name();
        groups.entry(group(name)).or_default().insert(port(name));
    }
    let head = if format == LENGTH_ONLY { 0 } else { 4 };
    let length = head + groups.values().map(|ports| 8 + 4 * ports.len()).sum::<usize>();
    let mut reply = Reply::new(data_in, cdb.be32(6) as usize);
    reply.put(&(length as u32).to_be_bytes());
    if format == EXTENDED {
        reply.put(&[EXTENDED << 4, 0, 0, 0]);
    }
    for (group, ports) in &groups {
        reply.put(&[0, AO_SUP]);
        reply.put(&group.to_be_bytes());
        reply.put(&[0, 0, 0, ports.len().min(u8::MAX.into()) as u8]);
        for port in ports {
            reply.put(&[0, 0]);
            reply.put(&port.to_be_bytes());
        }
    }
    reply.end()
}
