//! Target ports and their groups (SPC-4 5.15, 6.37, 7.8.14).

use crate::rig::*;
use scsi::LunOptions;

fn named(nexus: &str) -> LunOptions {
    LunOptions { nexus: Some(nexus.to_owned()), ..LunOptions::default() }
}

fn groups(rig: &mut Rig, format: u8) -> Vec<u8> {
    let cdb = [0xA3, format << 5 | 0x0A, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    rig.input(&cdb, 256).good().to_vec()
}

/// Numbers of the port and of its group, of page 83h.
fn numbers(rig: &mut Rig) -> ([u8; 2], [u8; 2]) {
    let answer = rig.input(&[0x12, 1, 0x83, 0, 255, 0], 255);
    let data = answer.good();
    let of = |kind: u8| {
        let at = data.windows(4).position(|d| d == [1, kind, 0, 4]).unwrap();
        [data[at + 6], data[at + 7]]
    };
    (of(0x14), of(0x15))
}

#[test]
fn a_controller_is_a_group_and_each_of_its_targets_a_port() {
    let mut a = Setup { options: named("vm-a:0"), ..Setup::default() }.build();
    let mut second = a.another_unit(named("vm-a:1"));
    let mut b = a.another_unit(named("vm-b:0"));
    let all = [&mut a, &mut second, &mut b].map(numbers);
    assert_eq!(all[0].1, all[1].1);
    assert_ne!(all[0].1, all[2].1);
    assert_ne!(all[0].0, all[1].0);
    let told = groups(&mut a, 0);
    assert_eq!(told, groups(&mut b, 0), "by whichever port it is asked");
    assert_eq!(told[..4], [0, 0, 0, 8 + 4 + 4 + 8 + 4]);
    let mut rest = &told[4..];
    let mut found = Vec::new();
    while !rest.is_empty() {
        let ports = usize::from(rest[7]);
        // Active/optimized, and no other state.
        assert_eq!(rest[..2], [0, 1]);
        for port in rest[8..8 + 4 * ports].chunks(4) {
            found.push(([port[2], port[3]], [rest[2], rest[3]]));
        }
        rest = &rest[8 + 4 * ports..];
    }
    found.sort_unstable();
    let mut expected = all;
    expected.sort_unstable();
    assert_eq!(found, expected);
    // With the extended header.
    let extended = groups(&mut a, 1);
    assert_eq!(extended[..8], [0, 0, 0, 32, 0x10, 0, 0, 0]);
    assert_eq!(extended[8..], told[4..]);
    a.run(&[0xA3, 2 << 5 | 0x0A, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).invalid_cdb(1, Some(6));
    // One that has gone is a port no more.
    drop(b);
    assert_eq!(groups(&mut a, 0)[3], 16);
}

#[test]
fn spc4_7_8_14_page_88_names_each_port() {
    let mut a = Setup { options: named("vm-a:0"), ..Setup::default() }.build();
    let mut b = a.another_unit(named("vm-b:0"));
    let answer = a.input(&[0x12, 1, 0x88, 0, 255, 0], 255);
    let data = answer.good();
    assert_eq!(data[..4], [0, 0x88, 0, 48]);
    let mut found: Vec<[u8; 2]> = data[4..].chunks(24).map(|d| [d[2], d[3]]).collect();
    found.sort_unstable();
    let mut expected = [numbers(&mut a).0, numbers(&mut b).0];
    expected.sort_unstable();
    assert_eq!(found, expected);
    for port in data[4..].chunks(24) {
        assert_eq!((port[11], &port[12..16]), (12, &[1, 0x13, 0, 8][..]));
    }
}

#[test]
fn spc4_7_8_8_and_7_8_11_pages_86_and_87() {
    let mut rig = Rig::new();
    let answer = rig.input(&[0x12, 1, 0x86, 0, 255, 0], 255);
    assert_eq!(answer.good()[..14], [0, 0x86, 0, 60, 0, 7, 1, 1, 0, 0, 0, 0, 0, 18]);
    let answer = rig.input(&[0x12, 1, 0x87, 0, 255, 0], 255);
    assert_eq!(answer.good(), [0, 0x87, 0, 4, 0x3F, 0xFF, 0, 0]);
}
