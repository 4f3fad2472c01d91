//! See `stores::stores`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::stores::stores(data));
