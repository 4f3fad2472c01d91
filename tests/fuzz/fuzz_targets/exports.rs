//! See `exports::exports`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::exports::exports(data));
