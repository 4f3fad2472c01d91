//! What a client can send to the JSON-RPC socket: any bytes, cut into reads anywhere.

use rpc::frame::{Framer, MAX_DEPTH, MAX_REQUEST_BYTES};
use rpc::{Flags, Methods, NoParams};
use serde_json::Value;

/// The values up to the end or the first error, with reads of `step` bytes; whether an error came.
fn cut(bytes: &[u8], step: usize) -> (Vec<Value>, bool) {
    let mut framer = Framer::default();
    let mut values = Vec::new();
    for read in bytes.chunks(step.max(1)) {
        framer.push(read);
        loop {
            match framer.next_value() {
                Ok(Some(value)) => values.push(value),
                Ok(None) => break,
                Err(_) => return (values, true),
            }
        }
        // What a pause would find wrong can never become a value.
        let _ = framer.check_syntax();
    }
    (values, false)
}

/// Requests cut out of a stream, and answered. No input may make it panic, depend on how the bytes
/// arrive, take what is no JSON, or give an answer that is not one line of JSON.
pub fn frames(data: &[u8]) {
    let Some((&step, stream)) = data.split_first() else { return };
    assert!(stream.len() < MAX_REQUEST_BYTES, "libFuzzer's inputs are small");
    let (values, failed) = cut(stream, usize::from(step));
    assert_eq!((values.clone(), failed), cut(stream, stream.len()), "reads of {step} bytes");
    // The library cuts bare values as well, but allows more kinds and levels of them.
    let known = || serde_json::Deserializer::from_slice(stream).into_iter::<Value>();
    let is_request = |v: &Value| (v.is_object() || v.is_array()) && depth(v) <= MAX_DEPTH;
    let least = known().take_while(|v| v.as_ref().is_ok_and(is_request)).count();
    assert!(values.len() >= least, "{} of {least} requests", values.len());
    for (value, known) in values.iter().zip(known()) {
        assert_eq!(Some(value), known.ok().as_ref());
        assert!(is_request(value));
    }
    let mut methods = Methods::new();
    methods.add("get", "Gives a number.", Flags::READ, |_: NoParams| Ok(1));
    let methods = methods.finish();
    for value in values {
        let Some(answer) = methods.answer(value) else {
            continue;
        };
        let (end, line) = answer.split_last().expect("an answer is not empty");
        assert!(*end == b'\n' && line.is_ascii() && !line.contains(&b'\n'));
        serde_json::from_slice::<Value>(line).expect("an answer is JSON");
    }
}

fn depth(value: &Value) -> u32 {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(items) => 1 + items.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}
