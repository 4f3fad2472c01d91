//! Bdevs whose base is an NBD server.

use super::{NotMade, UuidText, check_name};
use crate::app::App;
use crate::guestdisks::{self, Unlocked};
use crate::state::Item;
use bdev::Bdev;
use nbd::{Address, CreateError, Nbd, Options};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The method that makes one.
pub const CREATE: &str = "virtlun_nbd_create";

/// Seconds between two attempts to connect, and without an answer until I/O fails, by default.
const RECONNECT_DELAY_S: u32 = 1;
const GIVE_UP_S: u32 = 60;

/// Seconds that either may be at most: a day.
const SECONDS_MAX: u32 = 86_400;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name.
    name: String,
    /// Server and export as an NBD URI: nbd+unix:///EXPORT?socket=PATH, or nbd://ADDRESS:PORT/EXPORT with an
    /// IP address. No TLS.
    uri: String,
    /// Bytes of a block: 512 or 4096. Default: the least that the server takes
    #[serde(default)]
    block_size: Option<u32>,
    /// Refuse writes. Default: false
    #[serde(default)]
    readonly: Option<bool>,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Have each write made durable (FUA), so that nothing that was answered is lost where the server's host
    /// goes down and comes back. Default: true where the server is on another host and can
    #[serde(default)]
    write_through: Option<bool>,
    /// Seconds between two attempts to connect. Default: 1
    #[serde(default)]
    reconnect_delay_s: Option<u32>,
    /// Seconds that I/O waits for an answer, over any loss of the connection, before it fails. Default: 60
    #[serde(default)]
    give_up_s: Option<u32>,
    /// It is a guest's disk: what it holds is not looked at, and it goes when nobody uses it any more, or has
    /// within a minute. Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guest_disk: Option<bool>,
    /// Other guests' disks that say so, too, may write to the export: a server keeps nobody from it. Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<bool>,
}

impl Create {
    fn is_guest_disk(&self) -> bool {
        self.guest_disk.unwrap_or(false)
    }

    fn unlocked(&self) -> Unlocked {
        Unlocked {
            name: self.name.clone(),
            on: self.uri.clone(),
            writes: !self.readonly.unwrap_or(false),
            shared: self.shared.unwrap_or(false),
        }
    }

    /// Refuses a guest's disk on an export that another one writes to, also one that waits for its server.
    fn check_free(&self, app: &App) -> Result<(), Error> {
        let config = app.config();
        let all = config.items().filter(|item| is_nbd(item)).filter_map(|item| params(item).ok());
        let others = all.filter(|other| other.is_guest_disk() && other.uri == self.uri);
        self.unlocked().check_free(others.map(|other| other.unlocked()))
    }
}

fn error(e: &CreateError) -> Error {
    let errno = e.errno.map_or(Errno::Inval, Errno::from_raw);
    Error::os(errno, e)
}

/// Whether the process may connect to a server.
fn allowed(app: &App, address: &Address) -> Result<(), String> {
    match app.network || !address.is_ip() {
        true => Ok(()),
        false => Err(format!(
            "{address} is a server by TCP, and the target may make no network connections: start it with --network"
        )),
    }
}

fn seconds(name: &str, what: &str, given: Option<u32>, default: u32) -> Result<Duration, Error> {
    let seconds = given.unwrap_or(default);
    if (1..=SECONDS_MAX).contains(&seconds) {
        return Ok(Duration::from_secs(seconds.into()));
    }
    let why = format!("bdev {name}: {what} is 1 to {SECONDS_MAX}, not {seconds}");
    Err(Error::os(Errno::Inval, why))
}

fn create(app: &App, mut p: Create, item: Option<&Item>) -> Result<String, NotMade> {
    check_name(&p.name)?;
    let wrong = |why| Error::os(Errno::Inval, format_args!("bdev {}: {why}", p.name));
    let address = Address::parse(&p.uri).map_err(wrong)?;
    allowed(app, &address).map_err(|why| Error::os(Errno::NotSup, why))?;
    p.uri = address.to_string();
    let options = Options {
        name: p.name.clone(),
        address,
        block_size: p.block_size,
        read_only: p.readonly.unwrap_or(false),
        uuid: p.uuid.map(|uuid| uuid.0),
        write_through: p.write_through,
        reconnect_delay: seconds(
            &p.name,
            "reconnect_delay_s",
            p.reconnect_delay_s,
            RECONNECT_DELAY_S,
        )?,
        give_up: seconds(&p.name, "give_up_s", p.give_up_s, GIVE_UP_S)?,
    };
    let is_guest_disk = p.is_guest_disk();
    if is_guest_disk && item.is_none() {
        app.ask_for_guest_disk(&p.name, false)?;
        p.check_free(app)?;
    }
    if item.is_none() && app.registry.get(&p.name).is_some() {
        let why = format!("there is a bdev {} already", p.name);
        return Err(Error::os(Errno::Exist, why).into());
    }
    let wait = app.waits.begin(format!("bdev {}", p.name), format!("{} to answer", p.uri));
    let made = Nbd::create(&app.registry, options)
        .map_err(|e| NotMade { error: error(&e), passes: e.unreachable })?;
    drop(wait);
    app.flush_errors.attach(&*made, Path::new(&p.uri));
    p.uuid = Some(UuidText(made.uuid()));
    let bdev: Arc<dyn Bdev> = made;
    let _making = is_guest_disk.then(|| app.guest_disks.making.lock());
    match item {
        Some(item) => {
            if is_guest_disk {
                app.guest_disks.add_used(&p.name);
            }
            app.add_restored(bdev.clone(), item)?;
        }
        None if is_guest_disk => {
            p.check_free(app)?;
            app.guest_disks.add(&p.name);
            app.register(bdev.clone())?;
        }
        None => app.add_bdev(bdev.clone())?,
    }
    app.record_bdev(&bdev, CREATE, &p);
    Ok(p.name)
}

/// Whether `item` makes such a bdev.
pub fn is_nbd(item: &Item) -> bool {
    item.call.method == CREATE
}

fn params(item: &Item) -> Result<Create, Error> {
    let params = Value::Object(item.call.params.clone());
    let wrong = |e| Error::params(format!("wrong parameters of {CREATE}: {e}"));
    Create::deserialize(params).map_err(wrong)
}

/// Makes the bdev of `item`, one of [`is_nbd`], again; not if the item is deleted or replaced meanwhile.
///
/// # Errors
/// As those of the method; or it is not wanted any more. Whether the server may be there later.
pub fn restore(app: &App, item: &Item) -> Result<(), (Error, bool)> {
    let made = params(item).map_err(NotMade::from).and_then(|p| create(app, p, Some(item)));
    made.map(drop).map_err(|e| (e.error, e.passes))
}

/// How long after an attempt to restore the bdev of `item` the next one is made.
pub fn retry_delay(item: &Item) -> Duration {
    let given = params(item).ok().and_then(|p| p.reconnect_delay_s);
    Duration::from_secs(given.unwrap_or(RECONNECT_DELAY_S).clamp(1, SECONDS_MAX).into())
}

/// Asks the server of `item`, one of [`is_nbd`], for its terms.
///
/// # Errors
/// In one clause: it does not give them.
pub fn ask(app: &App, item: &Item) -> Result<(), String> {
    let address = Address::parse(&params(item).map_err(|e| e.message)?.uri)?;
    allowed(app, &address)?;
    nbd::reach(&address).map(drop).map_err(|e| e.to_string())
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Create a bdev whose base is an export of an NBD server. Where the connection is lost, I/O waits \
             and is sent again. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: Create| {
                let is_guest_disk = p.is_guest_disk();
                let made = create(&a, p, None).map_err(|e| e.error);
                if is_guest_disk {
                    guestdisks::watch(&a);
                }
                made
            },
        )
        .errors(&[
            Errno::NoEnt,
            Errno::Io,
            Errno::Access,
            Errno::Exist,
            Errno::Busy,
            Errno::Inval,
            Errno::NotSup,
            Errno::TimedOut,
        ]);
    super::add_delete(
        methods,
        app,
        "virtlun_nbd_delete",
        "Delete a bdev of virtlun_nbd_create; an lvstore on it is unloaded first. The export stays as it is.",
        Nbd::PRODUCT,
    );
}
