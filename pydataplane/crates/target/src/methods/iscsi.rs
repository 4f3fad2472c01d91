//! Bdevs on LUNs of iSCSI targets, by SPDK's methods. A password that is given is recorded, as the target needs it
//! after a restart, in a file that only its user and root can read; it is neither logged nor shown.

use super::{BdevName, UuidText, check_name};
use crate::app::App;
use crate::privilege;
use crate::state::{Call, Item};
use bdev::Bdev;
use iscsi::{Address, CreateError, Disk, Isid, Library, Lun, Options};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The method that makes one.
const CREATE: &str = "bdev_iscsi_create";
/// The method that sets what holds for all.
const SET_OPTIONS: &str = "bdev_iscsi_set_options";

/// Longest name of an initiator, in bytes (RFC 7143 4.2.7).
const NAME_MAX: usize = 223;
/// How long the target may take to answer the logout.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long after an attempt to restore one the next is made.
pub const RETRY: Duration = Duration::from_secs(2);
/// Most seconds that I/O can wait: a day.
const SECONDS_MAX: u64 = 86_400;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name.
    name: String,
    /// The LUN: iscsi://[USER%PASSWORD@]HOST[:PORT]/TARGET/LUN; with
    /// ?target_user=USER&target_password=PASSWORD the target has to prove who it is, too.
    url: String,
    /// Name of the initiator, such as iqn.2026-11.org.example:host1. No other host may have it.
    initiator_iqn: String,
    /// UUID. Default: that of the LUN, the same on every host
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Have each write made durable (FUA), so that nothing that was answered is lost where the iSCSI target goes down
    /// and comes back (ours). Default: true where that is another host, its LUN has a volatile cache and can
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_through: Option<bool>,
    /// Identifier of the session (ISID), twelve hexadecimal digits that begin with 80; each login ends the session
    /// before that had it (ours). Default: one made of the initiator's name, the URL and the bdev's name
    #[serde(default, skip_serializing_if = "Option::is_none")]
    isid: Option<String>,
    /// Identity that the LUN has to have (ours). Default: the one that it has, which is recorded
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lun_uuid: Option<UuidText>,
    /// Bytes that a block of that LUN has to have, with `lun_uuid` (ours). Default: those that it has, which is
    /// recorded
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lun_block_size: Option<u32>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetOptions {
    /// Seconds that I/O of these bdevs waits for an answer, over any loss of the session, before it fails; 0: without
    /// end. Default: 60
    #[serde(default)]
    timeout_sec: Option<u64>,
}

/// A URL without passwords; `None`: it is none.
pub fn shown(url: &str) -> Option<String> {
    Some(Address::parse(url).ok()?.to_string())
}

/// Takes what is a secret out of a recorded call.
pub fn hide_secrets(call: &mut Call) {
    if call.method == CREATE
        && let Some(Value::String(url)) = call.params.get_mut("url")
    {
        *url = shown(url).unwrap_or_default();
    }
}

/// Why a bdev was not made, and whether it may be later.
struct NotMade {
    error: Error,
    passes: bool,
}

impl From<Error> for NotMade {
    fn from(error: Error) -> NotMade {
        NotMade { error, passes: false }
    }
}

impl From<CreateError> for NotMade {
    fn from(e: CreateError) -> NotMade {
        let errno = match (Library::loaded(), e.passes) {
            (Err(_), _) => Errno::NotSup,
            (Ok(_), true) => Errno::Io,
            (Ok(_), false) => Errno::Inval,
        };
        NotMade { error: Error::os(errno, &e), passes: e.passes }
    }
}

fn address(name: &str, url: &str) -> Result<Address, Error> {
    let address = Address::parse(url);
    let address = address.map_err(|why| Error::os(Errno::Inval, format!("bdev {name}: {why}")))?;
    // Who has a password is in no core dump.
    if address.has_secret() {
        privilege::keep_out_of_dumps();
    }
    Ok(address)
}

fn check_initiator(p: &Create) -> Result<(), Error> {
    let name = &p.initiator_iqn;
    let plain = name.bytes().all(|b| b.is_ascii_graphic());
    if plain && (1..=NAME_MAX).contains(&name.len()) {
        return Ok(());
    }
    let why = format!(
        "bdev {}: an initiator's name has 1 to {NAME_MAX} characters without space",
        p.name
    );
    Err(Error::os(Errno::Inval, why))
}

/// Which LUN it has to be.
fn expected(p: &Create) -> Result<Option<Lun>, Error> {
    match (&p.lun_uuid, p.lun_block_size) {
        (None, None) => Ok(None),
        (Some(UuidText(identity)), Some(block_size)) => {
            Ok(Some(Lun { identity: *identity, block_size }))
        }
        _ => {
            let why = format!("bdev {}: lun_uuid and lun_block_size are given together", p.name);
            Err(Error::os(Errno::Inval, why))
        }
    }
}

fn create(app: &App, mut p: Create, item: Option<&Item>) -> Result<String, NotMade> {
    check_name(&p.name)?;
    check_initiator(&p)?;
    let address = address(&p.name, &p.url)?;
    let isid = match &p.isid {
        None => Isid::of(&p.initiator_iqn, &address, &p.name),
        Some(text) => Isid::parse(text).ok_or_else(|| {
            let why =
                format!("bdev {}: isid is twelve hexadecimal digits that begin with 80", p.name);
            Error::os(Errno::Inval, why)
        })?,
    };
    if item.is_none() && app.registry.get(&p.name).is_some() {
        let why = format!("there is a bdev {} already", p.name);
        return Err(Error::os(Errno::Exist, why).into());
    }
    let shown = address.to_string();
    let options = Options {
        name: p.name.clone(),
        address,
        initiator: p.initiator_iqn.clone(),
        isid,
        uuid: p.uuid.map(|uuid| uuid.0),
        expected: expected(&p)?,
        write_through: p.write_through,
    };
    let wait = app.waits.begin(format!("bdev {}", p.name), format!("{shown} to answer"));
    let made = Disk::create(&app.registry, options)?;
    drop(wait);
    app.flush_errors.attach(&*made, Path::new(&shown));
    (p.uuid, p.isid) = (Some(UuidText(made.uuid())), Some(isid.to_string()));
    let lun = made.lun();
    (p.lun_uuid, p.lun_block_size) = (Some(UuidText(lun.identity)), Some(lun.block_size));
    let bdev: Arc<dyn Bdev> = made;
    match item {
        Some(item) => app.add_restored(bdev.clone(), item)?,
        None => app.add_bdev(bdev.clone())?,
    }
    app.record_bdev(&bdev, CREATE, &p);
    Ok(p.name)
}

/// Whether `item` makes such a bdev.
pub fn is_lun(item: &Item) -> bool {
    item.call.method == CREATE
}

/// Whether `item` sets what holds for all of them.
pub fn is_options(item: &Item) -> bool {
    item.call.method == SET_OPTIONS
}

fn params(item: &Item) -> Result<Create, Error> {
    let params = Value::Object(item.call.params.clone());
    let wrong = |e| Error::params(format!("wrong parameters of {CREATE}: {e}"));
    Create::deserialize(params).map_err(wrong)
}

/// Makes the bdev of `item`, one of [`is_lun`], again; not if the item is deleted or replaced meanwhile.
///
/// # Errors
/// As those of the method; or it is not wanted any more. Whether the iSCSI target may be there later.
pub fn restore(app: &App, item: &Item) -> Result<(), (Error, bool)> {
    let made = params(item).map_err(NotMade::from).and_then(|p| create(app, p, Some(item)));
    made.map(drop).map_err(|e| (e.error, e.passes))
}

/// Asks for the LUN of `item`, one of [`is_lun`], which another process may use meanwhile.
///
/// # Errors
/// In one clause: the iSCSI target does not answer, lets nobody in, or has no such disk.
pub fn ask(item: &Item) -> Result<(), String> {
    let p = params(item).map_err(|e| e.message)?;
    let address = address(&p.name, &p.url).map_err(|e| e.message)?;
    iscsi::reach(&address, &p.initiator_iqn).map_err(|why| format!("{address}: {why}"))
}

fn set_options(app: &App, p: &SetOptions) -> Result<bool, Error> {
    let seconds = p.timeout_sec.unwrap_or(iscsi::DEFAULT_TIMEOUT_S);
    if seconds > SECONDS_MAX {
        let why = format!("timeout_sec is 0 to {SECONDS_MAX}, not {seconds}");
        return Err(Error::os(Errno::Inval, why));
    }
    iscsi::set_timeout(Some(Duration::from_secs(seconds)).filter(|timeout| !timeout.is_zero()));
    app.config().record(SET_OPTIONS, p);
    Ok(true)
}

fn delete(app: &App, name: &str) -> Result<bool, Error> {
    let closing = app.registry.get_as::<Disk>(name).map(|disk| disk.closing());
    super::delete(app, name, Disk::PRODUCT)?;
    if closing.is_some_and(|closing| !closing.wait(CLOSE_TIMEOUT)) {
        tracing::warn!("bdev {name} is deleted, but its target has not answered the logout yet");
    }
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Create a bdev on a LUN of an iSCSI target. Where the session is lost, I/O waits and what was not \
             answered is sent again. An lvstore on it is loaded. Needs the option --iscsi and Debian's package \
             libiscsi7.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, p, None).map_err(|e| e.error),
        )
        .secrets(&["url"])
        .errors(&[Errno::Io, Errno::Exist, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            SET_OPTIONS,
            "Set what holds for all bdevs on LUNs of iSCSI targets, from now on.",
            Flags::WRITE,
            move |p: SetOptions| set_options(&a, &p),
        )
        .errors(&[Errno::Inval]);
    let a = app.clone();
    methods
        .add(
            "bdev_iscsi_delete",
            "Delete a bdev on a LUN of an iSCSI target, and log out; an lvstore on it is unloaded first. The LUN \
             stays as it is.",
            Flags::LONG_WRITE,
            move |p: BdevName| delete(&a, &p.name),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
