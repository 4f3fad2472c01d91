//! INQUIRY: standard data and vital product data (SPC-4 6.6, 7.8).

use crate::rig::*;
use scsi::{LunError, LunOptions, LunShared};

fn inquiry(rig: &mut Rig, page: Option<u8>, allocation: u16) -> Answer {
    let [high, low] = allocation.to_be_bytes();
    let evpd = u8::from(page.is_some());
    let cdb = [0x12, evpd, page.unwrap_or(0), high, low, 0];
    rig.input(&cdb, allocation.into())
}

fn with_serial(serial: &str) -> LunOptions {
    LunOptions { serial: Some(serial.to_owned()), ..LunOptions::default() }
}

#[test]
fn spc4_6_6_2_standard_data() {
    let answer = inquiry(&mut Rig::new(), None, 255);
    let data = answer.good();
    assert_eq!(data.len(), 96);
    assert_eq!(data[..8], [0, 0, 6, 0x12, 91, 0x18, 0, 2]);
    assert_eq!(&data[8..32], b"VIRTLUN Logical Volume  ");
    let version = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));
    assert_eq!(std::str::from_utf8(&data[32..36]).unwrap().trim_end(), version);
    assert_eq!(data[58..64], [0x00, 0xA0, 0x04, 0x60, 0x04, 0xC0]); // SAM-5, SPC-4, SBC-3
}

#[test]
fn spc4_4_2_5_6_an_allocation_length_cuts_and_is_never_an_error() {
    let mut rig = Rig::new();
    let whole = inquiry(&mut rig, None, 96).data;
    for allocation in [0, 1, 5, 36, 95, 96] {
        let answer = inquiry(&mut rig, None, allocation);
        assert_eq!(answer.good(), &whole[..usize::from(allocation)]);
    }
    // A buffer that is longer than the allocation length keeps its rest.
    let answer = rig.input(&[0x12, 0, 0, 0, 36, 0], 96);
    assert_eq!(answer.good().len(), 36);
    assert!(answer.data[36..].iter().all(|b| *b == 0xEE));
    // A long allocation length is no overrun while the data fits.
    assert_eq!(rig.input(&[0x12, 0, 0, 0xFF, 0xFF, 0], 96).good().len(), 96);
}

#[test]
fn spc4_6_6_1_pages_that_are_not_there_are_invalid_fields() {
    let mut rig = Rig::new();
    for page in [0x85, 0xB3, 0xB4, 0xB5, 0xB6] {
        inquiry(&mut rig, Some(page), 255).invalid_cdb(2, None);
    }
    rig.input(&[0x12, 0, 0x80, 0, 255, 0], 255).invalid_cdb(2, None); // a page without EVPD
    rig.input(&[0x12, 2, 0, 0, 255, 0], 255).invalid_cdb(1, Some(1)); // CMDDT is obsolete
}

#[test]
fn spc4_7_8_page_00_names_every_page_and_each_names_itself() {
    let mut rig = Rig::new();
    let list = inquiry(&mut rig, Some(0), 255).good().to_vec();
    assert_eq!(list, [0, 0, 0, 10, 0x00, 0x80, 0x83, 0x86, 0x87, 0x88, 0x8F, 0xB0, 0xB1, 0xB2]);
    for page in &list[4..] {
        let answer = rig.input(&[0x12, 1, *page, 4, 0, 0], 1024);
        let data = answer.good();
        assert_eq!(data[..2], [0, *page]);
        assert_eq!(usize::from(u16::from_be_bytes([data[2], data[3]])), data.len() - 4);
    }
}

#[test]
fn spc4_7_8_page_80_is_the_serial_or_the_uuid() {
    let mut rig = Rig::new();
    let answer = inquiry(&mut rig, Some(0x80), 255);
    assert_eq!(&answer.good()[4..], rig.disk.uuid.to_string().as_bytes());
    let options = with_serial("disk-0042 of $tenant");
    let answer = inquiry(&mut Setup { options, ..Setup::default() }.build(), Some(0x80), 255);
    assert_eq!(&answer.good()[4..], b"disk-0042 of $tenant");
    let options = with_serial("");
    let answer = inquiry(&mut Setup { options, ..Setup::default() }.build(), Some(0x80), 255);
    assert_eq!(answer.good().len(), 40);
}

#[test]
fn spc4_7_8_6_page_83_names_the_volume_three_times() {
    for serial in ["S1", &"x".repeat(64)] {
        let mut rig = Setup { options: with_serial(serial), ..Setup::default() }.build();
        let answer = inquiry(&mut rig, Some(0x83), 255);
        let mut rest = &answer.good()[4..];
        let mut found = Vec::new();
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(4);
            let (body, next) = tail.split_at(usize::from(head[3]));
            found.push((head[0], head[1], body.to_vec()));
            rest = next;
        }
        let (high, low) = rig.disk.uuid.as_u64_pair();
        let naa = ((high ^ low) & (u64::MAX >> 4)) | 3 << 60;
        let t10 = format!("VIRTLUN {serial}").into_bytes();
        let uuid = [&[0x10, 0], &rig.disk.uuid.as_bytes()[..]].concat();
        let expected = [(1, 3, naa.to_be_bytes().to_vec()), (2, 1, t10), (1, 0xA, uuid)];
        assert_eq!(found[..3], expected);
        // Those of the port: its number, its group's, its name.
        assert_eq!(found[3..].iter().map(|d| d.1).collect::<Vec<_>>(), [0x14, 0x15, 0x13]);
        assert!(found[3..5].iter().all(|d| d.2[..2] == [0, 0] && d.2[2..] != [0, 0]));
        assert_eq!(found[5].2[0] >> 4, 3);
    }
}

#[test]
fn sbc3_6_6_2_page_b1_does_not_rotate() {
    let answer = inquiry(&mut Rig::new(), Some(0xB1), 255);
    assert_eq!(answer.good().len(), 64);
    assert_eq!(answer.good()[..6], [0, 0xB1, 0, 60, 0, 1]);
}

#[test]
fn serials_that_a_page_cannot_hold_are_refused_in_one_sentence() {
    let disk = Rig::new().disk;
    for serial in ["x".repeat(65), "tab\t".to_owned(), "ü".to_owned()] {
        let error = LunShared::new(disk.clone(), with_serial(&serial)).err().unwrap();
        assert_eq!(error, LunError::Serial(serial.clone()));
        assert!(error.to_string().contains("1 to 64 printable ASCII characters"), "{error}");
    }
}

#[test]
fn odd_block_sizes_are_refused_in_one_sentence() {
    let disk = Disk {
        uuid: uuid::Uuid::new_v4(),
        features: ALL_FEATURES,
        block_size: 520,
        physical_block_size: 520,
        num_blocks: 8.into(),
        room: None,
    };
    let error = LunShared::new(std::sync::Arc::new(disk), LunOptions::default()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "bdev disk has blocks of 520 bytes: only 512 and 4096 can be a SCSI disk"
    );
}
