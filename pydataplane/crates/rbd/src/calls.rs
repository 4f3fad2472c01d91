//! What calls of Ceph's libraries take and return: texts, and errors.

use std::ffi::{CString, c_int};
use std::thread;

use crate::Error;
use crate::ffi::EBLOCKLISTED;

/// A text for Ceph.
pub(crate) fn text(what: &str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::ZeroByte(what.to_owned()))
}

/// Texts that follow each other in a buffer, each with its zero.
pub(crate) fn texts(buffer: &[u8]) -> impl Iterator<Item = String> + '_ {
    let all = buffer.strip_suffix(&[0]).filter(|_| !buffer.is_empty());
    let all = all.into_iter().flat_map(|all| all.split(|byte| *byte == 0));
    all.map(|text| String::from_utf8_lossy(text).into_owned())
}

/// The error of a call that returned something negative.
pub(crate) fn failed(what: impl Into<String>, returned: c_int) -> Error {
    let (mut what, errno) = (what.into(), returned.checked_neg().unwrap_or(libc::EIO));
    if errno == EBLOCKLISTED {
        what += ", whose cluster keeps this host's client out (stop what uses its images here, then try \
                 again: what is opened from then on has a new client)";
    }
    Error::Failed { what, errno }
}

/// Succeeds where a call returned nothing negative.
pub(crate) fn check(returned: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
    if returned < 0 { Err(failed(what(), returned)) } else { Ok(()) }
}

/// Starts a thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map(drop).map_err(|e| Error::Failed {
        what: format!("no thread for {name}"),
        errno: e.raw_os_error().unwrap_or(libc::EAGAIN),
    })
}
