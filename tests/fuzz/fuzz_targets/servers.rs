//! See `servers::servers` and `controllers::controllers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::servers(data));
