//! The fuzz harness of tests/fuzz with a fixed budget: what a hostile guest can write.

#[path = "../../../../tests/fuzz/src/harness.rs"]
#[allow(missing_docs)]
mod harness;
#[path = "../../../../tests/fuzz/src/input.rs"]
#[allow(dead_code, reason = "other targets need the rest")]
mod input;

use proptest::prelude::*;

/// Miri runs the same harness, some ten thousand times slower.
fn cases() -> ProptestConfig {
    let config = ProptestConfig::with_cases(if cfg!(miri) { 20 } else { 3000 });
    if cfg!(miri) { ProptestConfig { failure_persistence: None, ..config } } else { config }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn no_guest_memory_harms_the_ring(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        harness::ring(&data);
    }

    #[test]
    fn no_address_leaves_guest_memory(data in prop::collection::vec(any::<u8>(), 0..400)) {
        harness::memory(&data);
    }
}
