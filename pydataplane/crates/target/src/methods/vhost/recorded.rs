//! What is recorded of a disk counts, also while that cannot be shown, as its bdev is not there. A pivot is
//! recorded before anybody else hears of it: who ended meanwhile asks for the bdev that the guest has left.

use crate::app::App;
use crate::state;
use ::vhost_scsi::ControllerError;
use bdev::Bdev;
use rpc::{Errno, Error};
use serde_json::Value;

/// Numbers that targets have.
const NUMBERS: std::ops::RangeInclusive<u8> = 0..=254;

/// Whether a disk that is not shown is recorded under `key`, its bdev in `parameter`: it is the one that is
/// asked for.
///
/// # Errors
/// It is another one.
pub(super) fn is(app: &App, key: &str, parameter: &str, asked: &dyn Bdev) -> Result<bool, Error> {
    let (recorded, problem) = {
        let config = app.config();
        let Some(item) = config.get(key) else { return Ok(false) };
        // A SCSI controller has none; what is another kind of controller there is refused as such.
        let Some(name) = item.call.params.get(parameter).and_then(Value::as_str) else {
            return Ok(true);
        };
        (name.to_owned(), item.problem.clone())
    };
    let name = asked.name();
    if recorded == name || app.registry.get(&recorded).is_some_and(|its| its.name() == name) {
        return Ok(true);
    }
    let why = problem.map_or_else(String::new, |why| format!(" ({why})"));
    Err(Error::os(
        Errno::Busy,
        format_args!(
            "{key} is on bdev {recorded} by what is recorded, and cannot be shown{why}: bdev {name} may lack \
             what its guest wrote last; wait for the other, or have {key} removed first"
        ),
    ))
}

/// The number of a target that is to have the number `wanted`, or any for -1: none that a target is recorded
/// with which is not shown. -1: the lowest that is free.
///
/// # Errors
/// There is none.
pub(super) fn number(app: &App, ctrlr: &str, wanted: i64) -> Result<i64, Error> {
    if wanted != -1 {
        return Ok(wanted);
    }
    let is_recorded =
        |number: u8| app.config().get(&state::target_key(ctrlr, u64::from(number))).is_some();
    let is_shown = |number: u8| app.controllers.options(ctrlr, number).is_ok();
    if !NUMBERS.into_iter().any(|number| is_recorded(number) && !is_shown(number)) {
        return Ok(-1);
    }
    let free = NUMBERS.into_iter().find(|&number| !is_recorded(number) && !is_shown(number));
    let none = || crate::errors::controller(ControllerError::Full(ctrlr.to_owned()));
    free.map(i64::from).ok_or_else(none)
}
