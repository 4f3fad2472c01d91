//! See `checksums::checksums`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::checksums::checksums(data));
