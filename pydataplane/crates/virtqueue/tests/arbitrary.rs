//! The fuzz harness of tests/fuzz with a fixed budget: what a hostile guest can write.

#[path = "../../../../tests/fuzz/src/harness.rs"]
#[allow(missing_docs)]
mod harness;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_guest_memory_harms_the_ring(data in prop::collection::vec(any::<u8>(), 0..1500)) {
        harness::ring(&data);
    }

    #[test]
    fn no_address_leaves_guest_memory(data in prop::collection::vec(any::<u8>(), 0..400)) {
        harness::memory(&data);
    }
}
