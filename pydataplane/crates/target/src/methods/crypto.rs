//! Keys and encrypted bdevs, by SPDK's methods. A key is nowhere but in memory: neither recorded, nor
//! logged, nor told to anybody.

use super::{BdevName, check_name, check_name_of};
use crate::app::App;
use crate::errors;
use crate::privilege;
use crate::state::Item;
use bdev::Bdev;
use crypto::{CreateError, Crypto, Key, KeyError, PRODUCT};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use uuid::Uuid;
use zeroize::Zeroizing;

/// The method that makes an encrypted bdev.
pub const CREATE: &str = "bdev_crypto_create";

/// Parameters that are secrets.
const SECRETS: &[&str] = &["key", "key2"];

/// Xattr of an lvol with the check value of the key that its data is encrypted with.
const CHECK_XATTR: &str = "virtlun.key_check";

/// How often, and after which pauses, a key is looked at that goes with its last bdev, while what used
/// that ends.
const LETTING_GO: (u32, Duration) = (200, Duration::from_millis(5));

/// A secret as text, wiped when it is dropped.
#[derive(Deserialize, JsonSchema)]
#[serde(transparent)]
struct Secret(#[schemars(with = "String")] Zeroizing<String>);

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
enum Cipher {
    #[serde(rename = "AES_CBC")]
    Cbc,
    #[serde(rename = "AES_XTS")]
    Xts,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
enum TweakMode {
    #[serde(rename = "SIMPLE_LBA")]
    Simple,
    #[serde(rename = "JOIN_NEG_LBA_WITH_LBA")]
    JoinNegated,
    #[serde(rename = "INCR_512_FULL_LBA")]
    Incr512Full,
    #[serde(rename = "INCR_512_UPPER_LBA")]
    Incr512Upper,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateKey {
    /// Cipher. Not supported but for AES_XTS.
    cipher: Cipher,
    /// Key of the data, hexadecimal: 64 digits for AES-256, 32 for AES-128.
    key: Secret,
    /// Key of the tweaks, as many digits; not the same ones. Required.
    #[serde(default)]
    key2: Option<Secret>,
    /// What makes each block's tweak. Not supported but for SIMPLE_LBA. Default: SIMPLE_LBA
    #[serde(default)]
    tweak_mode: Option<TweakMode>,
    /// Name.
    name: String,
    /// Destroy the key with the last bdev that uses it (ours). Default: false
    #[serde(default)]
    destroy_with_last: Option<bool>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DestroyKey {
    /// Name of the key.
    key_name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetKeys {
    /// Name of one key. Default: all
    #[serde(default)]
    key_name: Option<String>,
}

/// A key, with SPDK's fields but for the key itself.
#[derive(Serialize, JsonSchema)]
struct KeyInfo {
    name: String,
    cipher: Cipher,
    tweak_mode: TweakMode,
    /// Bits of AES: 128 or 256 (ours).
    bits: usize,
    /// Whether it goes with the last bdev that uses it (ours).
    destroy_with_last: bool,
    /// Encrypted bdevs and lvols that use it (ours).
    used_by: Vec<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Bdev to lie on.
    base_bdev_name: String,
    /// Name.
    name: String,
    /// Name of the key. Default: a key of its own, of `key` and `key2`
    #[serde(default)]
    key_name: Option<String>,
    /// Key of the data, hexadecimal, for a key of its own, NAME_AES_XTS, which goes with it.
    #[serde(default)]
    key: Option<Secret>,
    /// Key of the tweaks, for that.
    #[serde(default)]
    key2: Option<Secret>,
    /// Cipher of that. Not supported but for AES_XTS.
    #[serde(default)]
    cipher: Option<Cipher>,
    /// No effect: the processor's instructions are used.
    #[serde(default)]
    #[allow(dead_code)]
    crypto_pmd: Option<String>,
    /// Check value that the key must have, as recorded (ours). Default: any
    #[serde(default)]
    key_check: Option<String>,
}

/// What is recorded of an encrypted bdev.
#[derive(Serialize)]
struct Record<'a> {
    base_bdev_name: &'a str,
    name: &'a str,
    key_name: &'a str,
    /// Tells this key from others, and nothing else of it.
    key_check: &'a str,
}

/// Of a key.
fn key_error(e: KeyError) -> Error {
    let errno = match &e {
        KeyError::Exists(_) => Errno::Exist,
        KeyError::NotFound(_) => Errno::NoEnt,
        KeyError::InUse(_) => Errno::Busy,
        KeyError::Length { .. }
        | KeyError::Digits { .. }
        | KeyError::Halves { .. }
        | KeyError::Same { .. } => Errno::Inval,
        KeyError::Library { .. } => Errno::NotSup,
    };
    Error::os(errno, e)
}

/// Whether `item` makes an encrypted bdev.
pub fn is_crypto(item: &Item) -> bool {
    item.call.method == CREATE
}

/// The name of the key of `item`, one of [`is_crypto`].
pub fn key_of(item: &Item) -> Option<&str> {
    item.call.params.get("key_name").and_then(Value::as_str)
}

/// The name of a key that the bdev of that name waits for, if it does. For an lvol that is not there it is
/// any that a bdev waits for: the lvol may be on that.
pub fn awaited_key(app: &App, bdev: &str) -> Option<String> {
    if let Some(key) = app.lvstores.awaited_key(bdev) {
        return Some(key);
    }
    let config = app.config();
    let awaited = |item: &Item| {
        let key = key_of(item).filter(|_| is_crypto(item) && item.problem.is_some())?;
        app.keys.get(key).is_err().then(|| key.to_owned())
    };
    match config.get(&crate::state::bdev_key(bdev)) {
        Some(item) => awaited(item),
        None if Uuid::parse_str(bdev).is_ok() && app.registry.get(bdev).is_none() => {
            config.items().find_map(awaited)
        }
        None => None,
    }
}

/// The key of its halves in hexadecimal.
fn key(
    name: &str,
    cipher: Cipher,
    (data, tweak): (&Secret, Option<&Secret>),
    with_last: bool,
) -> Result<Key, Error> {
    // Also where this one is refused: it was sent.
    privilege::keep_out_of_dumps();
    if cipher != Cipher::Xts {
        let why = format!(
            "key {name}: AES_CBC is not supported, as it is not safe for disks; take AES_XTS"
        );
        return Err(Error::os(Errno::NotSup, why));
    }
    let Some(tweak) = tweak else {
        let why = format!("key {name} has no key2, the other half of a key of AES_XTS");
        return Err(Error::os(Errno::Inval, why));
    };
    check_name_of("key", name)?;
    Key::from_hex(name, &data.0, &tweak.0, with_last).map_err(key_error)
}

fn create_key(app: &App, p: &CreateKey) -> Result<bool, Error> {
    if !matches!(p.tweak_mode, None | Some(TweakMode::Simple)) {
        let why = format!("key {}: of the tweak modes only SIMPLE_LBA is supported", p.name);
        return Err(Error::os(Errno::NotSup, why));
    }
    let with_last = p.destroy_with_last.unwrap_or(false);
    let key = key(&p.name, p.cipher, (&p.key, p.key2.as_ref()), with_last)?;
    check_waiting(app, &key)?;
    app.keys.add(key).map_err(key_error)?;
    app.awaited.note_key(&p.name);
    Ok(true)
}

/// Whether a key is that of all bdevs and lvols that wait for one of its name.
fn check_waiting(app: &App, key: &Key) -> Result<(), Error> {
    let check = key.check().map_err(key_error)?;
    let mut lvols = app.lvstores.encrypted().into_iter().filter(|e| e.encryption.key == key.name());
    if let Some(other) = lvols.find(|lvol| lvol.encryption.check != check) {
        return Err(wrong_key(key.name(), &format!("lvol {}", other.alias), "was made with"));
    }
    let config = app.config();
    let mut of_key = config.items().filter(|item| key_of(item) == Some(key.name()));
    let recorded =
        |item: &&Item| item.call.params.get("key_check").and_then(Value::as_str).map(str::to_owned);
    match of_key.find(|item| recorded(item).is_some_and(|recorded| recorded != check)) {
        None => Ok(()),
        Some(item) => Err(wrong_key(key.name(), &item.key, "was made with")),
    }
}

fn wrong_key(key: &str, of: &str, how: &str) -> Error {
    Error::os(
        Errno::Inval,
        format_args!("this key {key} is not the one that {of} {how}: give that one"),
    )
}

fn destroy_key(app: &App, name: &str) -> Result<bool, Error> {
    match app.keys.destroy(name) {
        Ok(()) => Ok(true),
        Err(KeyError::InUse(_)) => {
            let users = users(app, name).join(", ");
            Err(Error::os(
                Errno::Busy,
                format_args!("key {name} is in use by bdev {users}; delete that first"),
            ))
        }
        Err(e) => Err(key_error(e)),
    }
}

/// Encrypted bdevs and lvols with that key.
fn users(app: &App, key: &str) -> Vec<String> {
    let bdevs = Crypto::all(&app.registry).into_iter().filter(|bdev| bdev.key().name() == key);
    let lvols = app.lvstores.encrypted().into_iter();
    let lvols = lvols.filter(|lvol| lvol.encryption.key == key && !lvol.waits);
    bdevs.map(|bdev| bdev.name().to_owned()).chain(lvols.map(|lvol| lvol.alias)).collect()
}

fn get_keys(app: &App, p: &GetKeys) -> Result<Vec<KeyInfo>, Error> {
    let keys = match &p.key_name {
        Some(name) => vec![app.keys.get(name).map_err(key_error)?],
        None => app.keys.list(),
    };
    let info = |key: Arc<Key>| KeyInfo {
        name: key.name().to_owned(),
        cipher: Cipher::Xts,
        tweak_mode: TweakMode::Simple,
        bits: key.bits(),
        destroy_with_last: key.goes_with_last(),
        used_by: users(app, key.name()),
    };
    Ok(keys.into_iter().map(info).collect())
}

/// The key of that name, for `what`.
///
/// # Errors
/// It is not here: with `errno`.
pub fn given(app: &App, name: &str, what: &str, errno: Errno) -> Result<Arc<Key>, Error> {
    app.keys.get(name).map_err(|_| {
        let why = format!(
            "{what} needs its key {name}: give it with accel_crypto_key_create, or \
             `virtlun key create`"
        );
        Error::os(errno, why)
    })
}

/// The key of a new bdev.
fn key_for(app: &App, p: &Create) -> Result<Arc<Key>, Error> {
    if let Some(name) = &p.key_name {
        return given(app, name, &format!("bdev {}", p.name), Errno::NoEnt);
    }
    let Some(data) = &p.key else {
        let why = format!("bdev {} has no key; give the name of one in key_name", p.name);
        return Err(Error::os(Errno::Inval, why));
    };
    let (name, cipher) = (format!("{}_AES_XTS", p.name), p.cipher.unwrap_or(Cipher::Xts));
    app.keys.add(key(&name, cipher, (data, p.key2.as_ref()), true)?).map_err(key_error)
}

fn create(app: &App, p: &Create) -> Result<String, Error> {
    check_name(&p.name)?;
    let key = key_for(app, p).inspect_err(|_| reserve(app, p))?;
    let name = key.name().to_owned();
    let created = create_with(app, p, key);
    if created.is_err() {
        app.keys.destroy_unused(&name);
    }
    created
}

/// Has nobody else use the base of a recorded bdev whose key is not here.
fn reserve(app: &App, p: &Create) {
    let waits = {
        let config = app.config();
        config.get(&crate::state::bdev_key(&p.name)).is_some_and(is_crypto)
            && app.registry.get(&p.name).is_none()
    };
    if let Some(key) =
        p.key_name.as_ref().filter(|_| waits && app.registry.get(&p.base_bdev_name).is_some())
    {
        app.awaited.reserve(&app.registry, &p.name, &p.base_bdev_name, key);
    }
}

fn create_with(app: &App, p: &Create, key: Arc<Key>) -> Result<String, Error> {
    let check = key.check().map_err(key_error)?;
    if p.key_check.as_ref().is_some_and(|recorded| *recorded != check) {
        return Err(wrong_key(key.name(), &format!("bdev {}", p.name), "was made with"));
    }
    let base = app.bdev(&p.base_bdev_name)?;
    if app.lvstores.lvol(base.name()).is_ok_and(|lvol| lvol.key_name.is_some()) {
        let why = format!("lvol {} is encrypted itself, with a key of its own", p.base_bdev_name);
        return Err(Error::os(Errno::Inval, why));
    }
    let is_noted = check_lvol(app, &*base, &key, &check)?;
    app.awaited.release(&p.name);
    let crypto = Crypto::create(&app.registry, &p.name, base.name(), key.clone());
    let crypto = crypto.map_err(|e| match e {
        CreateError::Registry(e) => errors::registry(e),
        CreateError::Key(e) => key_error(e),
    })?;
    if !is_noted && is_lvol(&*base) && !base.features().read_only {
        let noted = app.lvstores.set_xattr(base.name(), CHECK_XATTR, check.as_bytes());
        noted.map_err(errors::lvol)?;
    }
    let record = Record {
        base_bdev_name: base.name(),
        name: &p.name,
        key_name: key.name(),
        key_check: &check,
    };
    super::created(app, crypto, CREATE, &record)
}

fn is_lvol(bdev: &dyn Bdev) -> bool {
    bdev.product_name() == "Logical Volume"
}

/// Whether the check value of the key is noted on the lvol `base`.
///
/// # Errors
/// That of another key is.
fn check_lvol(app: &App, base: &dyn Bdev, key: &Key, check: &str) -> Result<bool, Error> {
    if !is_lvol(base) {
        return Ok(false);
    }
    let Ok(noted) = app.lvstores.xattr(base.name(), CHECK_XATTR) else { return Ok(false) };
    if noted == check.as_bytes() {
        return Ok(true);
    }
    let of = base.aliases().into_iter().next().unwrap_or_else(|| base.name().to_owned());
    Err(wrong_key(key.name(), &format!("lvol {of}"), "is encrypted with"))
}

/// Wipes the key of that name, if it goes with the last bdev that used it, and none does. What still
/// ends its use of such a bdev is waited for, a second at most.
pub fn let_go(app: &App, key: &str) {
    let (times, pause) = LETTING_GO;
    for _ in 0..times {
        let goes = app.keys.get(key).is_ok_and(|key| key.goes_with_last());
        if !goes || !users(app, key).is_empty() || app.keys.destroy_unused(key) {
            return;
        }
        thread::sleep(pause);
    }
    tracing::error!("key {key} stays: its last bdev is gone, but not what used that");
}

fn delete(app: &App, name: &str) -> Result<bool, Error> {
    let key = app.registry.get_as::<Crypto>(name).map(|crypto| crypto.key().name().to_owned());
    let deleted = super::delete(app, name, PRODUCT)?;
    if let Some(key) = key {
        let_go(app, &key);
    }
    Ok(deleted)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "accel_crypto_key_create",
            "Give the target a key. It is kept in memory only, goes along in an upgrade, and has to be given \
             again after a restart: then the bdevs that wait for it come back. Another key than theirs is \
             refused.",
            Flags::LONG_WRITE,
            move |p: CreateKey| create_key(&a, &p),
        )
        .secrets(SECRETS)
        .errors(&[Errno::Exist, Errno::Inval, Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "accel_crypto_key_destroy",
            "Wipe a key; refused while a bdev uses it.",
            Flags::WRITE,
            move |p: DestroyKey| destroy_key(&a, &p.key_name),
        )
        .errors(&[Errno::NoEnt, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "accel_crypto_keys_get",
            "Get all keys, or one: what they are, never the keys themselves.",
            Flags::READ,
            move |p: GetKeys| get_keys(&a, &p),
        )
        .errors(&[Errno::NoEnt]);
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Create a bdev whose blocks lie encrypted on another, which it has for itself. An lvstore on \
             it is loaded. An lvol notes which key its data is encrypted with, as a check value.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, &p),
        )
        .secrets(SECRETS)
        .errors(&[
            Errno::NoEnt,
            Errno::NoDev,
            Errno::NoKey,
            Errno::Exist,
            Errno::Busy,
            Errno::Inval,
            Errno::NotSup,
            Errno::Io,
        ]);
    let a = app.clone();
    methods
        .add(
            "bdev_crypto_delete",
            "Delete an encrypted bdev; an lvstore on it is unloaded first. The encrypted data stays.",
            Flags::LONG_WRITE,
            move |p: BdevName| delete(&a, &p.name),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
