//! See `commands::commands`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::commands::commands(data));
