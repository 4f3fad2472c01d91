//! MODE SELECT (SPC-4 6.10, 6.11) and what follows from the pages.

use crate::rig::*;
use bdev::{Features, Op};
use parking_lot::Mutex;
use scsi::{LunOptions, Outcome, Record, RecordKeeper};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

const LIST_FIELD: (u8, u16) = (0x5, 0x2600);
const LIST_LENGTH: (u8, u16) = (0x5, 0x1A00);
const CHANGED: (u8, u16) = (0x6, 0x2A01);
const SWP: (u8, u16) = (0x7, 0x2702);
const KEPT_NOT: (u8, u16) = (0x4, 0x4400);
const GOOD: (u8, u16) = (0, 0);
const PF: u8 = 0x10;
const SP: u8 = 0x01;
/// Pages as they are: WCE; TST, GLTSD, reordering, TAS.
const CACHING: [u8; 20] = [8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CONTROL: [u8; 12] = [10, 10, 0x22, 0x10, 0, 0x40, 0, 0, 0, 0, 0, 0];

#[derive(Default)]
pub struct Keeper {
    pub text: Mutex<Option<String>>,
    fails: AtomicBool,
    pub is_unreadable: AtomicBool,
}

impl RecordKeeper for Keeper {
    fn keep(&self, record: Record, _: Uuid, text: Option<&str>) -> io::Result<()> {
        assert_eq!(record, Record::Mode);
        if self.fails.load(Ordering::Relaxed) {
            return Err(io::Error::other("no room"));
        }
        *self.text.lock() = text.map(str::to_owned);
        Ok(())
    }

    fn kept(&self, record: Record, _: Uuid) -> io::Result<Option<String>> {
        if record == Record::Mode && self.is_unreadable.load(Ordering::Relaxed) {
            return Err(io::Error::other("bad sector"));
        }
        Ok((record == Record::Mode).then(|| self.text.lock().clone()).flatten())
    }

    fn lock(&self, _: Record, _: Uuid) -> io::Result<Box<dyn Send>> {
        Ok(Box::new(()))
    }
}

pub fn options(keeper: &Arc<Keeper>) -> LunOptions {
    let records: Arc<dyn RecordKeeper> = keeper.clone();
    LunOptions { records: Some(records), ..LunOptions::default() }
}

fn kept() -> (Arc<Keeper>, Rig) {
    let keeper = Arc::default();
    let rig = Setup { options: options(&keeper), ..Setup::default() }.build();
    (keeper, rig)
}

fn select6(rig: &mut Rig, flags: u8, list: &[u8]) -> Answer {
    rig.output(&[0x15, flags, 0, 0, list.len() as u8, 0], list)
}

/// The outcome of MODE SELECT(6) of these pages.
fn select(rig: &mut Rig, flags: u8, pages: &[u8]) -> (u8, u16) {
    let answer = select6(rig, flags, &[&[0; 4], pages].concat());
    let response = answer.response();
    if response.sense_len == 0 { GOOD } else { answer.sense() }
}

/// A page with one byte changed.
fn with<const N: usize>(mut page: [u8; N], at: usize, value: u8) -> [u8; N] {
    page[at] = value;
    page
}

/// Of a page: values that the page control asks for.
fn page(rig: &mut Rig, control: u8, code: u8) -> Vec<u8> {
    let answer = rig.input(&[0x1A, 0x08, control << 6 | code, 0, 255, 0], 255);
    let mut page = answer.good()[4..].to_vec();
    page[0] &= 0x3F; // PS
    page
}

fn write(rig: &mut Rig) -> Answer {
    rig.output(&cdb10(0x2A, 0, 0, 1), &[1; 512])
}

#[test]
fn sbc3_6_5_5_without_wce_writes_are_durable() {
    let mut rig = Rig::new();
    write(&mut rig).good();
    assert_eq!(rig.asked(), [(Op::Write, 0, 1, false)]);
    assert_eq!(select(&mut rig, PF, &with(CACHING, 2, 0)), GOOD);
    assert_eq!(rig.asked(), [(Op::Flush, 0, 0, false)], "what was cached before");
    assert_eq!(page(&mut rig, 0, 8), with(CACHING, 2, 0));
    assert_eq!(page(&mut rig, 2, 8), CACHING);
    write(&mut rig).good();
    assert_eq!(rig.asked(), [(Op::Write, 0, 1, true)]);
    assert_eq!(select(&mut rig, PF, &CACHING), GOOD);
    write(&mut rig).good();
    assert_eq!(rig.asked(), [(Op::Write, 0, 1, false)]);
    // A cache that there is not cannot be turned on.
    let features = Features { volatile_cache: false, ..ALL_FEATURES };
    let mut rig = Setup { features, ..Setup::default() }.build();
    assert_eq!(select(&mut rig, PF, &CACHING), LIST_FIELD);
    assert_eq!(page(&mut rig, 1, 8)[2], 0);
}

#[test]
fn a_cache_that_cannot_be_flushed_is_told() {
    let mut rig = Rig::new();
    rig.fail(0, bdev::IoError::Flush);
    assert_eq!(select(&mut rig, PF, &with(CACHING, 2, 0)), (0x4, 0x0300));
}

#[test]
fn spc4_7_5_8_swp_refuses_writes_of_all_and_they_are_told() {
    let mut rig = Rig::new();
    let (mut session, mut unit) = (rig.another(), rig.another_unit(LunOptions::default()));
    assert_eq!(session.run(&[0; 6]).sense(), (0x6, 0x2900));
    assert_eq!(select(&mut rig, PF, &with(CONTROL, 4, 8)), GOOD);
    for other in [&mut session, &mut unit] {
        assert_eq!(other.run(&[0; 6]).sense(), CHANGED);
        assert_eq!(write(other).sense(), SWP);
    }
    assert_eq!(write(&mut rig).sense(), SWP);
    rig.input(&cdb10(0x28, 0, 0, 1), 512).good();
    // WP.
    assert_eq!(rig.input(&[0x1A, 8, 10, 0, 255, 0], 255).good()[2], 0x90);
    // Nothing that is new is nothing to tell.
    assert_eq!(select(&mut rig, PF, &with(CONTROL, 4, 8)), GOOD);
    session.run(&[0; 6]).good();
    assert_eq!(select(&mut unit, PF, &CONTROL), GOOD);
    assert_eq!(rig.run(&[0; 6]).sense(), CHANGED);
    write(&mut rig).good();
    // Of a unit that is not to be written to it says nothing.
    let read_only = LunOptions { read_only: true, ..LunOptions::default() };
    let mut unit = rig.another_unit(read_only);
    assert_eq!(page(&mut unit, 1, 10)[4], 0);
    assert_eq!(select(&mut unit, PF, &with(CONTROL, 4, 8)), LIST_FIELD);
}

#[test]
fn spc4_4_5_2_d_sense_is_the_format_of_sense_data() {
    let mut rig = Rig::new();
    assert_eq!(select(&mut rig, PF, &with(CONTROL, 2, 0x26)), GOOD);
    let response = rig.run(&cdb10(0x28, 0, u32::MAX, 1)).response();
    assert_eq!(response.sense[..8], [0x72, 5, 0x21, 0, 0, 0, 0, 0]);
    assert_eq!(response.sense_len, 8);
    let response = rig.run(&[0x12, 0, 1, 0, 96, 0]).response();
    assert_eq!(response.sense_len, 16);
    let field = [0x72, 5, 0x24, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0xC0, 0, 2, 0];
    assert_eq!(response.sense[..16], field);
}

#[test]
fn what_was_saved_outlives_reset_and_process_and_the_rest_only_the_process() {
    let (keeper, mut rig) = kept();
    assert_eq!(select(&mut rig, PF | SP, &with(CONTROL, 2, 0x26)), GOOD);
    assert_eq!(select(&mut rig, PF, &with(CACHING, 2, 0)), GOOD);
    let again = |rig: Rig| {
        let disk = rig.disk.clone();
        drop(rig);
        Setup { options: options(&keeper), ..Setup::default() }.fresh_of(disk)
    };
    let mut rig = again(rig);
    assert_eq!(rig.run(&[0; 6]).response().sense[..4], [0x72, 6, 0x29, 0]);
    assert_eq!((page(&mut rig, 0, 8)[2], page(&mut rig, 3, 8)[2]), (0, 4));
    assert_eq!((page(&mut rig, 0, 10)[2], page(&mut rig, 3, 10)[2]), (0x26, 0x26));
    // As of another boot of the host.
    let boot = format!("\"boot\":\"{}\"", Uuid::new_v4());
    let text = keeper.text.lock().take().unwrap();
    let (before, _) = text.split_once("\"boot\"").unwrap();
    *keeper.text.lock() = Some(format!("{before}{boot}}}"));
    let mut rig = again(rig);
    rig.run(&[0; 6]).response();
    assert_eq!((page(&mut rig, 0, 8)[2], page(&mut rig, 0, 10)[2]), (4, 0x26));
    assert_eq!(select(&mut rig, PF, &with(CACHING, 2, 0)), GOOD);
    rig.shared.reset();
    rig.run(&[0; 6]).response();
    assert_eq!((page(&mut rig, 0, 8)[2], page(&mut rig, 0, 10)[2]), (4, 0x26));
    assert_eq!(select(&mut rig, PF | SP, &CONTROL), GOOD);
    // Nothing is kept of the defaults; the reset's own record came before or not at all.
    assert_eq!(*keeper.text.lock(), None);
}

#[test]
fn what_cannot_be_kept_is_told() {
    let (keeper, mut rig) = kept();
    keeper.fails.store(true, Ordering::Relaxed);
    assert_eq!(select(&mut rig, PF | SP, &with(CONTROL, 4, 8)), KEPT_NOT);
    // Without a place to save to there is no saving.
    let mut rig = Rig::new();
    select6(&mut rig, PF | SP, &[0; 4]).invalid_cdb(1, Some(0));
}

#[test]
fn lists_that_are_refused_change_nothing() {
    let mut rig = Rig::new();
    let changed = with(CACHING, 2, 0);
    let after = |more: &[u8]| [&changed, more].concat();
    for (pages, expected) in [
        (after(&CONTROL[..11]), LIST_LENGTH),
        (after(&[0x4A, 1, 0]), LIST_LENGTH),
        (after(&[0x0A]), LIST_LENGTH),
        (after(&with(CONTROL, 1, 9)), LIST_FIELD),
        (after(&with(CONTROL, 2, 0x20)), LIST_FIELD), // GLTSD cannot be changed,
        (after(&with(CONTROL, 2, 0x02)), LIST_FIELD), // nor TST
        (after(&with(CONTROL, 11, 1)), LIST_FIELD),
        (after(&[0x1C, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), LIST_FIELD),
        (after(&[0x04, 0]), LIST_FIELD),
        (after(&[0x3F, 0]), LIST_FIELD),
        (after(&[&[0x4A, 1, 0, 28, 1][..], &[0; 27]].concat()), LIST_FIELD),
        (after(&[0x48, 0, 0, 18]), LIST_FIELD),
        (after(&[0x4A, 0xFF, 0, 18]), LIST_FIELD),
    ] {
        assert_eq!(select(&mut rig, PF, &pages), expected, "{pages:x?}");
    }
    assert_eq!(page(&mut rig, 0, 8), CACHING);
    select6(&mut rig, 0, &[0; 4]).invalid_cdb(1, Some(4));
    assert_eq!(select6(&mut rig, PF, &[0; 3]).sense(), LIST_LENGTH);
    assert_eq!(select6(&mut rig, PF, &[0, 0, 0, 8, 0, 0, 0, 0]).sense(), LIST_LENGTH);
    assert_eq!(select6(&mut rig, PF, &[0, 0, 0, 7]).sense(), LIST_FIELD);
    assert_eq!(select6(&mut rig, PF, &[0, 1, 0, 0]).sense(), LIST_FIELD);
    let short = rig.output(&[0x15, PF, 0, 0, 24, 0], &[0; 23]);
    assert_eq!(short.outcome, Outcome::Overrun);
    let long = rig.output(&cdb10(0x55, PF, 0, 513), &[0; 513]);
    assert_eq!(long.sense(), LIST_LENGTH);
    select6(&mut rig, PF, &[]).good();
}

#[test]
fn sbc3_6_5_2_block_descriptors_name_what_is() {
    let mut rig = Rig::new();
    let blocks = (BLOCKS as u32).to_be_bytes();
    for (number, size, expected) in [
        (blocks, 512u16, GOOD),
        ([0; 4], 512, GOOD),
        ([0xFF; 4], 512, GOOD),
        ([0, 0, 0, 9], 512, LIST_FIELD),
        (blocks, 4096, LIST_FIELD),
    ] {
        let [high, low] = size.to_be_bytes();
        let descriptor = [&number[..], &[0, 0, high, low]].concat();
        let list = [&[0, 0, 0, 8], &descriptor[..], &CACHING].concat();
        let answer = select6(&mut rig, PF, &list).response();
        assert_eq!((answer.sense_len == 0, GOOD), (expected == GOOD, GOOD), "{list:x?}");
    }
    let mut long = vec![0, 0, 0, 0, 1, 0, 0, 16];
    long.extend(BLOCKS.to_be_bytes());
    long.extend([0, 0, 0, 0, 0, 0, 2, 0]);
    long.extend(with(CACHING, 2, 0));
    let answer = rig.output(&cdb10(0x55, PF, 0, long.len() as u16), &long);
    assert_eq!(answer.response().sense_len, 0);
    assert_eq!(page(&mut rig, 0, 8)[2], 0);
}
