//! See `upgrades::upgrades`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::upgrades::upgrades(data));
