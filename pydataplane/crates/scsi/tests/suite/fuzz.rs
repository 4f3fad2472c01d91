//! Whatever a guest sends: no panic, no byte outside its buffers, no GOOD over an error.

use crate::rig::*;
use bdev::{Features, IoError};
use proptest::prelude::*;
use scsi::{Outcome, Status, missing_lun};

/// Any CDB, mostly with an operation code that the unit knows and small numbers in it.
pub fn cdbs() -> impl Strategy<Value = [u8; 32]> {
    let known = prop::sample::select(vec![
        0x00u8, 0x03, 0x08, 0x0A, 0x12, 0x1A, 0x1B, 0x1E, 0x25, 0x28, 0x2A, 0x2F, 0x35, 0x41, 0x42,
        0x5A, 0x83, 0x84, 0x88, 0x8A, 0x8F, 0x91, 0x93, 0x9E, 0xA0, 0xA3, 0xA8, 0xAA, 0xAF,
    ]);
    let byte = prop_oneof![4 => Just(0u8), 2 => 0u8..32, 1 => any::<u8>()];
    let shaped = (known, prop::array::uniform32(byte)).prop_map(|(opcode, mut cdb)| {
        cdb[0] = opcode;
        cdb
    });
    prop_oneof![1 => any::<[u8; 32]>(), 6 => shaped]
}

/// Data of any length; sometimes zeros, sometimes whole blocks.
pub fn data() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![0usize..1100, (0usize..20).prop_map(|n| n * 512), 0usize..70_000];
    (length, any::<u64>(), any::<bool>()).prop_map(|(length, seed, zero)| {
        let byte = |i: usize| (seed.rotate_left(i as u32) as u8) >> (i % 5);
        (0..length).map(|i| if zero { 0 } else { byte(i) }).collect()
    })
}

pub fn features() -> impl Strategy<Value = Features> {
    let flags = any::<[bool; 8]>();
    let limit = prop_oneof![Just(0u32), Just(1), 1u32..300];
    (flags, limit, 0u32..3).prop_map(|(f, max_blocks, unmap_granularity)| Features {
        read_only: f[0] && f[1],
        volatile_cache: f[2],
        fua: f[3],
        unmap: f[4] || f[1],
        unmap_zeroes: f[5],
        unmap_skips: f[7],
        write_zeroes: f[6],
        thin: f[0],
        unmap_granularity,
        optimal_blocks: unmap_granularity,
        max_blocks,
        boot: None,
        remote: false,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_command_ends_and_stays_in_its_buffers(
        commands in prop::collection::vec((cdbs(), data(), 0usize..70_000), 1..4),
        features in features(),
        big in any::<bool>(),
        later in any::<bool>(),
        fail in prop::option::of((0usize..4, prop::sample::select(IoError::ALL.to_vec()))),
    ) {
        let (block_size, mode) = (
            if big { 4096 } else { 512 },
            if later { Mode::Later } else { Mode::AtOnce },
        );
        let setup = Setup { features, block_size, mode, num_blocks: 300, ..Setup::default() };
        let mut rig = setup.fresh();
        rig.state.borrow_mut().fail = fail;
        for (cdb, out, into) in commands {
            let before = rig.state.borrow().errors_given;
            // `io` checks the bytes around both buffers, and `State::run` the channel's contract.
            let answer = rig.io(&cdb, &out, into);
            let failed = rig.state.borrow().errors_given > before;
            match answer.outcome {
                Outcome::Done(response) => {
                    prop_assert!(!failed || response.status != Status::Good);
                    prop_assert!(response.transferred as usize <= out.len().max(into));
                    prop_assert_eq!(
                        response.sense_len > 0,
                        response.status == Status::CheckCondition
                    );
                    prop_assert!(response.status == Status::Good || response.transferred == 0);
                }
                Outcome::Overrun => prop_assert!(!failed),
                Outcome::Pending => unreachable!("the rig runs tasks to their end"),
                Outcome::Suspended(_) => unreachable!("the unit's policy is to tell"),
            }
        }
    }

    #[test]
    fn any_command_for_a_missing_unit_ends_and_stays_in_its_buffer(
        cdb in cdbs(), into in 0usize..300,
    ) {
        let buffer = Buffer::new(&vec![0; into], 7);
        let outcome = missing_lun(&cdb, &buffer.sg());
        prop_assert!(outcome != Outcome::Pending);
        prop_assert_eq!(buffer.bytes().len(), into);
    }
}
