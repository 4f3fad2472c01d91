//! What a unit says of itself where its owner chose it.

use crate::rig::*;
use bdev::{Features, Op};
use scsi::{Characteristics, LunError, LunOptions, LunShared};

fn inquiry(rig: &mut Rig, page: Option<u8>, allocation: u8) -> Answer {
    let cdb = [0x12, u8::from(page.is_some()), page.unwrap_or(0), 0, allocation, 0];
    rig.input(&cdb, allocation.into())
}

fn chosen(characteristics: Characteristics) -> Rig {
    let options = LunOptions { characteristics, ..LunOptions::default() };
    Setup { options, ..Setup::default() }.build()
}

#[test]
fn spc4_6_6_2_vendor_and_product_are_the_owners_choice() {
    let (vendor, product) = (Some("ACME".to_owned()), Some("two words".to_owned()));
    let mut rig = chosen(Characteristics { vendor, product, ..Default::default() });
    assert_eq!(&inquiry(&mut rig, None, 255).good()[8..32], b"ACME    two words       ");
    let page = inquiry(&mut rig, Some(0x83), 255).good().to_vec();
    // The second designator is the vendor's, with the serial.
    assert_eq!(&page[20..28], b"ACME    ");
}

#[test]
fn spc4_7_8_6_6_a_wwn_is_the_naa_designator() {
    let wwn = Some(0x5000_C500_15EA_71AD);
    let mut rig = chosen(Characteristics { wwn, ..Default::default() });
    let page = inquiry(&mut rig, Some(0x83), 255).good().to_vec();
    assert_eq!(page[4..16], [1, 3, 0, 8, 0x50, 0, 0xC5, 0, 0x15, 0xEA, 0x71, 0xAD]);
}

#[test]
fn sbc3_6_6_2_the_rotation_rate_is_the_owners_choice() {
    for (rotation_rate, shown) in [(None, 1), (Some(1), 1), (Some(7200), 7200)] {
        let mut rig = chosen(Characteristics { rotation_rate, ..Default::default() });
        let page = inquiry(&mut rig, Some(0xB1), 255).good().to_vec();
        assert_eq!(u16::from_be_bytes([page[4], page[5]]), shown);
    }
}

#[test]
fn characteristics_that_scsi_has_no_room_for_are_refused() {
    let text = |text: &str| Some(text.to_owned());
    let disk = Rig::new().disk;
    for characteristics in [
        Characteristics { wwn: Some(0x6000_0000_0000_0001), ..Default::default() },
        Characteristics { wwn: Some(0), ..Default::default() },
        Characteristics { vendor: text("123456789"), ..Default::default() },
        Characteristics { product: text("12345678901234567"), ..Default::default() },
        Characteristics { product: text("tab\t"), ..Default::default() },
        Characteristics { rotation_rate: Some(0), ..Default::default() },
        Characteristics { rotation_rate: Some(0x0400), ..Default::default() },
        Characteristics { rotation_rate: Some(0xFFFF), ..Default::default() },
    ] {
        let options = LunOptions { characteristics, ..LunOptions::default() };
        let refused = LunShared::new(disk.clone(), options).map(|_| ());
        assert!(matches!(refused, Err(LunError::Characteristics(_))), "{refused:?}");
    }
}

#[test]
fn sbc3_6_5_5_without_a_write_cache_what_changes_the_medium_is_durable_before_its_status() {
    for fua in [true, false] {
        let characteristics = Characteristics { write_through: true, ..Default::default() };
        let options = LunOptions { characteristics, ..LunOptions::default() };
        let features = Features { fua, ..ALL_FEATURES };
        let mut rig = Setup { options, features, ..Setup::default() }.build();
        let caching = rig.input(&[0x1A, 0x08, 8, 0, 255, 0], 255).good().to_vec();
        assert_eq!(caching[6], 0); // WCE
        let flush = (Op::Flush, 0, 0, false);
        for cdb in [&[0x0A, 0, 0, 3, 1, 0][..], &cdb10(0x2A, 0, 3, 1)] {
            rig.output(cdb, &[1; 512]).good();
            let asked = rig.asked();
            assert_eq!(asked[0], (Op::Write, 3, 1, fua));
            assert_eq!(asked[1..], if fua { vec![] } else { vec![flush] });
        }
        rig.output(&cdb10(0x41, 0, 8, 8), &[0; 512]).good(); // WRITE SAME of zeros
        assert_eq!(rig.asked(), [(Op::WriteZeroes, 8, 8, false), flush]);
        let mut list = [0u8; 24];
        list[1] = 22;
        list[3] = 16;
        list[15] = 8;
        list[19] = 8;
        rig.output(&cdb10(0x42, 0, 0, 24), &list).good(); // UNMAP
        assert_eq!(rig.asked(), [(Op::Unmap, 8, 8, false), flush]);
        rig.input(&cdb10(0x28, 0, 0, 1), 512).good();
        assert_eq!(rig.asked(), [(Op::Read, 0, 1, false)]);
    }
}

#[test]
fn sbc3_4_7_a_unit_that_is_to_take_no_unmap_says_so_and_takes_none() {
    let mut rig = chosen(Characteristics { no_unmap: true, ..Default::default() });
    assert_eq!(inquiry(&mut rig, Some(0xB2), 255).good()[5], 0); // LBPU, LBPWS, LBPWS10
    assert_eq!(inquiry(&mut rig, Some(0xB0), 255).good()[20..24], [0; 4]);
    assert_eq!(rig.input(&cdb16(0x9E, 0x10, 0, 32), 32).good()[14], 0); // LBPME
    assert_eq!(rig.output(&cdb10(0x42, 0, 0, 24), &[0; 24]).sense(), (0x5, 0x2000));
    rig.output(&cdb10(0x41, 0x08, 8, 8), &[0; 512]).invalid_cdb(1, Some(3));
    assert_eq!(rig.asked(), []);
}
