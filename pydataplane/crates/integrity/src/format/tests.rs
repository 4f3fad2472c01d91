use super::*;

fn superblock() -> Superblock {
    Superblock {
        generation: 3,
        uuid: Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        name: "lvs-lvs0-sums".into(),
        device_pages: 70_000,
    }
}

#[test]
fn a_superblock_is_read_as_it_was_written_and_lies_in_one_sector() {
    let page = superblock().encode();
    assert_eq!(Superblock::decode(&page), Ok(superblock()));
    assert_eq!(&page[..8], b"VLINTEGR");
    assert_eq!(page[48..64], superblock().uuid.as_bytes()[..]);
    assert_eq!(&page[64..77], b"lvs-lvs0-sums");
    assert_eq!(page[144..152], 70_000u64.to_le_bytes());
    assert!(page[512..].iter().all(|byte| *byte == 0));
    assert_eq!(superblock().store(), 0x0807_0605_0403_0201);
    assert_eq!(Superblock::decode(&[0; PAGE]), Err(Fault::Zero));
    assert_eq!(Superblock::decode(&[7; PAGE]), Err(Fault::Magic));
    assert_eq!(Superblock::decode(&[7; 100]), Err(Fault::Magic));
}

#[test]
fn a_damaged_copy_is_replaced_by_the_other_but_not_one_of_something_else() {
    let (a, later) = (superblock(), Superblock { generation: 4, ..superblock() });
    let (pa, pb) = (a.encode(), later.encode());
    assert_eq!(choose(&pa, &pb), Ok(Some(later.clone())));
    assert_eq!(choose(&pa, &[0; PAGE]), Ok(Some(a.clone())));
    assert_eq!(choose(&[0; PAGE], &pb), Ok(None), "it was being deleted");
    let mut rotten = pa.clone();
    rotten[3] ^= 4;
    assert_eq!(choose(&rotten, &pb), Ok(Some(later)));
    rotten[3] ^= 4;
    rotten[150] ^= 4;
    assert_eq!(choose(&rotten, &[0; PAGE]), Err(Fault::Checksum));
    let other = [0x5a; PAGE];
    assert_eq!(choose(&other, &pb), Ok(None));
    assert_eq!(choose(&other, &other), Ok(None));
}

#[test]
fn every_flipped_bit_of_a_page_is_noticed() {
    let marks = [Mark::Dirty; REGIONS as usize];
    let pages = [superblock().encode(), encode_map(5, 1, &marks), encode_sums(5, 9, |_| 3)];
    for (nth, page) in pages.iter().enumerate() {
        for bit in 0..PAGE * 8 {
            // The tail of each page is alike: every 61st bit of it.
            if bit > 1024 && bit % 61 != 0 {
                continue;
            }
            let mut page = page.clone();
            page[bit / 8] ^= 1 << (bit % 8);
            let found = match nth {
                0 => Superblock::decode(&page).is_err(),
                1 => decode_map(&page, 5, 1).is_err(),
                _ => decode_sums(&page, 5, 9).1.is_some(),
            };
            assert!(found, "bit {bit} of page {nth}");
        }
    }
}

#[test]
fn fields_out_of_range_and_later_versions_are_refused() {
    for (at, value, why) in [
        (12, 2, "it is of version 2, which this program does not know"),
        (32, 1, "it has features this program does not know"),
        (40, 1, "it has features this program does not know"),
        (128, 1, "its field page_size, head_pages or zone_regions is out of range"),
        (140, 1, "its field region_blocks is out of range"),
        (144, 0, "its field device_pages is out of range"),
        (151, 1, "its field device_pages is out of range"),
        (16, 0, "its field generation is out of range"),
        (64, b' ', "its field name is out of range"),
        (64, 0, "its field name is out of range"),
        (100, b'x', "its field name is out of range"),
    ] {
        let mut page = superblock().encode();
        let width = if matches!(at, 144) { 8 } else { 1 };
        page[at..at + width].fill(value);
        seal(&mut page);
        assert_eq!(Superblock::decode(&page).unwrap_err().to_string(), why, "{at}");
    }
}

#[test]
fn a_map_has_two_bits_a_region_in_one_sector_and_knows_its_place() {
    let mut marks = [Mark::Unused; REGIONS as usize];
    (marks[0], marks[1], marks[5], marks[239]) =
        (Mark::Clean, Mark::Dirty, Mark::Clean, Mark::Dirty);
    let page = encode_map(77, 4, &marks);
    assert_eq!((page[32], page[33], page[91]), (0b0110, 0b1000, 0b0100_0000));
    assert!(page[512..].iter().all(|byte| *byte == 0));
    assert_eq!(decode_map(&page, 77, 4), Ok(marks));
    assert_eq!(decode_map(&page, 77, 5), Err(Fault::Misplaced));
    assert_eq!(decode_map(&page, 78, 4), Err(Fault::Misplaced));
    let mut page = page;
    page[32] = 3;
    seal(&mut page);
    assert_eq!(decode_map(&page, 77, 4), Err(Fault::Field("marks")));
}

#[test]
fn checksums_of_a_damaged_page_are_taken_as_they_are_but_none_as_missing() {
    let mut page = encode_sums(7, 300, |at| at as u32);
    let (sums, fault) = decode_sums(&page, 7, 300);
    assert_eq!((sums[0], sums[1007], fault), (0, 1007, None));
    assert_eq!(decode_sums(&page, 7, 301).1, Some(Fault::Misplaced));
    page[64 + 4 * 9] ^= 1;
    let (sums, fault) = decode_sums(&page, 7, 300);
    assert_eq!((sums[0], sums[9], sums[10], fault), (1, 8, 10, Some(Fault::Checksum)));
    assert_eq!(decode_sums(&[0; PAGE], 7, 300), ([1; 1008], Some(Fault::Zero)));
}

#[test]
fn an_entry_is_the_crc_and_never_zero() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283, "RFC 3720, CRC-32C check value");
    assert_eq!(entry(&[0; PAGE]), 0x98f9_4189);
    // What makes the register zero in the end is its complement as the last four bytes.
    let mut block = [0x5a; PAGE];
    block[PAGE - 4..].fill(0);
    assert_ne!(entry(&block), 0);
}
