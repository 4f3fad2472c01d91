//! See `inflight::inflight`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| virtlun_fuzz::inflight::inflight(data));
