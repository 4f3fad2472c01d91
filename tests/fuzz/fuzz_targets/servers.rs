//! See `servers::servers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::servers::servers(data));
