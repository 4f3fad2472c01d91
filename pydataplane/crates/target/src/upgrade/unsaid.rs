//! What a program of an older release knows and does not say: which flushes failed. While it answers
//! RPC clients it is asked as one of them.
//!
//! A flush that fails between the answer and the end of that program is not known to the new one.

use crate::flusherror::FlushError;
use bdev::{FlushCause, FlushFailure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Most bytes of an answer.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Deserialize)]
struct Reply {
    result: Vec<Bdev>,
}

/// A bdev of `bdev_get_bdevs`.
#[derive(Deserialize)]
struct Bdev {
    name: String,
    flush_error: Option<String>,
}

/// By bdev: that a flush failed, in the target of `rpc_socket`, which has `timeout` for each piece of
/// the answer. The cause and the time are not known.
///
/// # Errors
/// A clause: why that cannot be told.
pub fn flush_errors(
    rpc_socket: &Path,
    timeout: Duration,
) -> Result<BTreeMap<String, FlushError>, String> {
    let ask = || -> std::io::Result<Reply> {
        let mut stream = UnixStream::connect(rpc_socket)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        stream.write_all(br#"{"jsonrpc": "2.0", "id": 1, "method": "bdev_get_bdevs"}"#)?;
        // Up to the end of the value: the connection stays open.
        let mut values =
            serde_json::Deserializer::from_reader(BufReader::new(stream.take(MAX_BYTES)));
        Ok(Reply::deserialize(&mut values)?)
    };
    let reply = ask().map_err(|e| {
        format!("which flushes failed cannot be asked at {}: {e}", rpc_socket.display())
    })?;
    let failure = FlushFailure { cause: FlushCause::Flush, errno: None, at: SystemTime::now() };
    let failed = |bdev: Bdev| bdev.flush_error.map(|_| (bdev.name, FlushError::from(failure)));
    Ok(reply.result.into_iter().filter_map(failed).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn answered(answer: &str) -> Result<BTreeMap<String, FlushError>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rpc.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            // It stays open until the answer was understood.
            let asked = scope.spawn(|| flush_errors(&path, Duration::from_secs(60)));
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 256];
            let n = stream.read(&mut request).unwrap();
            assert!(String::from_utf8_lossy(&request[..n]).contains("bdev_get_bdevs"));
            stream.write_all(answer.as_bytes()).unwrap();
            asked.join().unwrap()
        })
    }

    #[test]
    fn bdevs_whose_flushes_fail_are_named() {
        let answer = r#"{"jsonrpc": "2.0", "id": 1, "result": [
            {"name": "a", "flush_error": "a flush failed", "other": [1]}, {"name": "b"}]}"#;
        let found = answered(answer).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn what_does_not_tell_is_an_error() {
        for answer in [r#"{"id": 1, "error": {"code": -1}}"#, "[]", "no"] {
            let why = answered(answer).unwrap_err();
            assert!(why.contains("which flushes failed cannot be asked at "), "{why}");
        }
    }
}
