//! The methods: SPDK's names, parameters and results, and ours with the prefix `virtlun_`.
//!
//! A file per subsystem. Each method is a closure over the [`App`]; a mutating one records what it
//! did in the configuration, which is saved before the reply.

mod arraypool;
mod bdev;
mod copy;
pub mod crypto;
mod export;
mod faults;
pub mod file;
mod framework;
mod histogram;
mod integrity;
mod iostat;
pub mod iscsi;
pub mod limits;
mod log;
mod lunpool;
mod lvol;
mod malloc;
mod moves;
pub mod nbd;
mod notify;
mod null;
pub mod nvme;
mod nvmepool;
mod owner;
pub mod pool;
mod protected;
pub mod rbd;
mod status;
mod ublk;
pub mod vhost;
mod xattr;

use crate::app::App;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use uuid::Uuid;

pub use owner::Journal;

/// Why a device on a server was not made, and whether it may be later.
struct NotMade {
    error: Error,
    passes: bool,
}

impl From<Error> for NotMade {
    fn from(error: Error) -> NotMade {
        NotMade { error, passes: false }
    }
}

/// The table of all methods on `app`.
pub fn table(app: &Arc<App>) -> Arc<Methods> {
    let mut methods = Methods::new();
    for add in [
        framework::add,
        log::add,
        notify::add,
        status::add,
        bdev::add,
        iostat::add,
        histogram::add,
        limits::add,
        malloc::add,
        null::add,
        file::add,
        crypto::add,
        integrity::add,
        faults::add,
        nbd::add,
        rbd::add,
        iscsi::add,
        nvme::add,
        pool::add,
        lunpool::add,
        nvmepool::add,
        lvol::add,
        xattr::add,
        moves::add,
        vhost::add,
        copy::add,
        owner::add,
        export::add,
        ublk::add,
    ] {
        add(&mut methods, app);
    }
    let (restorer, recorder) = (app.clone(), app.clone());
    let (opener, closer) = (app.clone(), app.clone());
    methods.on_call(move |method, params| opener.before_call(method, params));
    methods.on_end(move || {
        closer.close_unused_volumes();
        closer.close_unused_guest_disks();
    });
    methods.on_change(move || restorer.restore_appeared());
    methods.on_commit(move || recorder.commit());
    let methods = methods.finish();
    app.set_methods(&methods);
    methods
}

/// A UUID as text, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(transparent)]
pub struct UuidText(#[schemars(with = "String", extend("format" = "uuid"))] Uuid);

/// Parameters of a method on one bdev.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevName {
    /// Name of the bdev.
    name: String,
}

/// Refuses a parameter that SPDK has and we have not yet.
fn unsupported(method: &str, given: &[(&str, bool)]) -> Result<(), Error> {
    match given.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((name, _)) => Err(Error::os(
            Errno::NotSup,
            format_args!("{method} does not support \"{name}\" yet; leave it out"),
        )),
    }
}

/// Bytes in a MiB.
const MIB: u64 = 1 << 20;

/// `mib` in bytes.
fn mib_to_bytes(mib: u64) -> Result<u64, Error> {
    mib.checked_mul(MIB)
        .ok_or_else(|| Error::os(Errno::Inval, format_args!("{mib} MiB are too many")))
}

/// Longest name of a bdev, in bytes.
const MAX_NAME: usize = 255;

/// Checks the name of a new bdev: printable, not empty, without `/` so that it is no lvol's alias.
fn check_name(name: &str) -> Result<(), Error> {
    check_name_of("bdev", name)
}

/// As [`check_name`], of something else.
pub fn check_name_of(what: &str, name: &str) -> Result<(), Error> {
    let plain = name.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
    if name.is_empty() || name.len() > MAX_NAME || !plain {
        return Err(Error::os(
            Errno::Inval,
            format_args!(
                "{name:?} cannot name a {what}: 1 to {MAX_NAME} printable ASCII characters without \
                 space and slash can"
            ),
        ));
    }
    Ok(())
}

/// The bdev `name`, if it is of the product `kind`.
fn of_kind(app: &App, name: &str, kind: &str) -> Result<Arc<dyn ::bdev::Bdev>, Error> {
    // No lvol is of such a kind, so whether one waits for its key does not matter.
    let bdev = app.registry.get(name).ok_or_else(|| crate::errors::no_bdev(name))?;
    match bdev.product_name() {
        product if product == kind => Ok(bdev),
        product => Err(Error::os(
            Errno::NoDev,
            format_args!("bdev {name} is a {product}, not a {kind}; use the methods of its kind"),
        )),
    }
}

/// Makes a new bdev known and records the call that made it; returns its name.
fn created(
    app: &App,
    bdev: Arc<dyn ::bdev::Bdev>,
    method: &str,
    params: &impl Serialize,
) -> Result<String, Error> {
    let name = bdev.name().to_owned();
    app.add_bdev(bdev)?;
    app.config().record(method, params);
    Ok(name)
}

/// Deletes the bdev `name` of the product `kind`, or forgets one that could not be restored.
fn delete(app: &App, name: &str, kind: &str) -> Result<bool, Error> {
    if app.registry.get(name).is_some() {
        of_kind(app, name, kind)?;
    }
    app.remove_bdev(name)?;
    Ok(true)
}

/// Adds the method that deletes bdevs of the product `kind`.
fn add_delete(
    methods: &mut Methods,
    app: &Arc<App>,
    method: &'static str,
    doc: &'static str,
    kind: &'static str,
) {
    let a = app.clone();
    methods
        .add(method, doc, Flags::LONG_WRITE, move |p: BdevName| delete(&a, &p.name, kind))
        .errors(&[Errno::NoDev, Errno::Busy]);
}
