//! What is copied how: RECEIVE COPY OPERATING PARAMETERS (SPC-4 6.19) and the INQUIRY page Third-party Copy (7.8.17).

use super::operation::MAX_OPERATIONS;
use super::order::{
    BLOCK_TO_BLOCK, IDENTIFICATION, MAX_CSCDS, MAX_DESCRIPTORS, MAX_SEGMENT_BLOCKS, MAX_SEGMENTS,
};
use super::ranges::{DEFAULT_INACTIVITY_S, MAX_INACTIVITY_S, MAX_TOKEN_BYTES, OPTIMAL_BYTES};
use super::token::{CHANGE_VULNERABLE, ZEROS};
use crate::opcode::{Cdb, TABLE};
use crate::reply::{Reply, send};
use crate::response::Fail;
use crate::shared::LunShared;
use crate::watch::MAX_RANGES;
use guestmem::Sg;

/// log2 of bytes in which segments are counted.
const GRANULARITY: u8 = 9;

/// RECEIVE COPY OPERATING PARAMETERS (SPC-4 6.19).
pub(crate) fn parameters(unit: &LunShared, cdb: &Cdb, data_in: &Sg) -> Result<u32, Fail> {
    const SNLID: u8 = 0x01;
    let mut data = [0u8; 46];
    data[3] = data.len() as u8 - 4;
    data[4] = SNLID;
    data[8..10].copy_from_slice(&(MAX_CSCDS as u16).to_be_bytes());
    data[10..12].copy_from_slice(&(MAX_SEGMENTS as u16).to_be_bytes());
    data[12..16].copy_from_slice(&(MAX_DESCRIPTORS as u32).to_be_bytes());
    data[16..20].copy_from_slice(&max_segment(unit).to_be_bytes());
    data[35] = MAX_OPERATIONS as u8;
    data[36] = MAX_OPERATIONS as u8;
    data[37] = GRANULARITY;
    data[43] = 2;
    data[44..].copy_from_slice(&[BLOCK_TO_BLOCK, IDENTIFICATION]);
    send(data_in, cdb.be32(10) as usize, &data)
}

/// Bytes of a segment at most.
fn max_segment(unit: &LunShared) -> u32 {
    (MAX_SEGMENT_BLOCKS * u64::from(unit.block_size)) as u32
}

/// A descriptor with the fields that are not 0.
fn put<const N: usize>(page: &mut Vec<u8>, kind: u16, fields: &[(usize, &[u8])]) {
    let mut data = [0; N];
    data[..2].copy_from_slice(&kind.to_be_bytes());
    data[2..4].copy_from_slice(&(N as u16 - 4).to_be_bytes());
    for (at, bytes) in fields {
        data[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    page.extend(data);
}

/// The service actions of an operation code.
fn actions(opcode: u8) -> Vec<u8> {
    let of = TABLE.iter().filter(|entry| entry.opcode == opcode);
    let actions: Vec<u8> = of.filter_map(|entry| entry.action).collect();
    [&[opcode, actions.len() as u8], &actions[..]].concat()
}

/// Third-party copy (SPC-4 7.8.17, page 8Fh; of tokens SBC-3 6.6.6). For a command that is rare: allocates.
pub(crate) fn page(unit: &LunShared, code: u8, reply: &mut Reply) {
    const TOKEN_OUT: u8 = 0x01;
    const TOKEN_IN: u8 = 0x02;
    let blocks = |bytes: u64| unit.blocks(bytes).to_be_bytes();
    let ranges = (MAX_RANGES as u16).to_be_bytes();
    let (most_s, default_s) = (MAX_INACTIVITY_S.to_be_bytes(), DEFAULT_INACTIVITY_S.to_be_bytes());
    let (cscds, segments) = ((MAX_CSCDS as u16).to_be_bytes(), (MAX_SEGMENTS as u16).to_be_bytes());
    let descriptors = (MAX_DESCRIPTORS as u32).to_be_bytes();
    let commands = [actions(OUT), actions(IN)].concat();
    let (of_token, optimal) = (MAX_TOKEN_BYTES.to_be_bytes(), OPTIMAL_BYTES.to_be_bytes());
    let operations = (MAX_OPERATIONS as u32).to_be_bytes();
    let mut page = Vec::new();
    // Block device ROD token limits.
    let (most, best) = (blocks(MAX_TOKEN_BYTES), blocks(OPTIMAL_BYTES));
    put::<36>(
        &mut page,
        0x0000,
        &[(10, &ranges), (12, &most_s), (16, &default_s), (20, &most), (28, &best)],
    );
    // Supported commands.
    put::<20>(&mut page, 0x0001, &[(4, &[commands.len() as u8]), (5, &commands)]);
    // Parameter data.
    put::<32>(&mut page, 0x0004, &[(8, &cscds), (10, &segments), (12, &descriptors)]);
    // Supported descriptors.
    put::<8>(&mut page, 0x0008, &[(4, &[2, BLOCK_TO_BLOCK, IDENTIFICATION])]);
    // Supported CSCD descriptor IDs: none that names a unit by itself.
    put::<8>(&mut page, 0x000C, &[]);
    // ROD token features, and of block devices: not of other targets. A token is revoked at any time.
    put::<96>(
        &mut page,
        0x0106,
        &[
            (24, &most_s),
            (46, &[0, 48]),
            (50, &[0, 44]),
            (56, &of_token),
            (64, &optimal),
            (72, &optimal),
            (80, &optimal),
        ],
    );
    // Supported ROD token and ROD types.
    put::<136>(
        &mut page,
        0x0108,
        &[
            (6, &[0, 128]),
            (8, &CHANGE_VULNERABLE.to_be_bytes()),
            (12, &[TOKEN_IN | TOKEN_OUT, 0, 0, 1]),
            (72, &ZEROS.to_be_bytes()),
            (76, &[TOKEN_IN]),
        ],
    );
    // General copy operations.
    put::<36>(
        &mut page,
        0x8001,
        &[
            (4, &operations),
            (8, &operations),
            (12, &max_segment(unit).to_be_bytes()),
            (16, &[GRANULARITY]),
        ],
    );
    let [high, low] = (page.len() as u16).to_be_bytes();
    reply.put(&[0, code, high, low]);
    reply.put(&page);
}

/// THIRD-PARTY COPY OUT and IN.
const OUT: u8 = 0x83;
const IN: u8 = 0x84;
