//! Bdevs on LUNs of iSCSI targets, by SPDK's methods. A password that is given is recorded, as the target needs it
//! after a restart, in a file that only its user and root can read; it is neither logged nor shown.

use super::lunpool;
use super::rbd::Way;
use super::{BdevName, NotMade, UuidText, check_name};
use crate::app::App;
use crate::array::{Array, lun_name, lun_number};
use crate::guestdisks;
use crate::pools::{Backend, Pool};
use crate::privilege;
use crate::state::{Call, Item};
use crate::volume::Volume;
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
    /// User as whom the initiator logs in (CHAP), in place of one in the URL; with `password` (ours). Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// Password of that user, of any characters (ours). Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<String>,
    /// UUID. Default: that of the LUN, the same on every host
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Have each write made durable (FUA), so that nothing that was answered is lost where the iSCSI target goes down
    /// and comes back (ours). Default: true where that is another host, its LUN has a volatile cache and can
    #[serde(default, skip_serializing_if = "Option::is_none")]
    write_through: Option<bool>,
    /// Identifier of the session (ISID), twelve hexadecimal digits that begin with 80; each login ends the session
    /// before that had it (ours). Default: one made of the initiator's name, the URL and the bdev's name; of a
    /// guest's disk also of this host, so that no other has it
    #[serde(default, skip_serializing_if = "Option::is_none")]
    isid: Option<String>,
    /// Identity that the LUN has to have (ours). Default: the one that it has, which is recorded
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lun_uuid: Option<UuidText>,
    /// Bytes that a block of that LUN has to have, with `lun_uuid` (ours). Default: those that it has, which is
    /// recorded
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lun_block_size: Option<u32>,
    /// Refuse writes (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    read_only: Option<bool>,
    /// It is a guest's disk: what it holds is not looked at, and it goes when nobody uses it any more, or has
    /// within a minute (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guest_disk: Option<bool>,
    /// Other guests' disks that say so, too, may write to the LUN, which nobody is kept from (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<bool>,
    /// Name of the pool whose volume the LUN is: the pool's login is used, it is also called POOL/lun-NUMBER, what it
    /// holds is not looked at, and it goes when nobody uses it any more (ours). Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
}

impl Create {
    fn is_guest_disk(&self) -> bool {
        self.guest_disk.unwrap_or(false)
    }

    fn writes(&self) -> bool {
        !self.read_only.unwrap_or(false)
    }

    /// Whether it is on the LUN `lun` at `address`: by identity, or by number where its own is not known.
    fn is_on(&self, address: &Address, lun: UuidText) -> bool {
        let same = |its: Address| (its.target(), its.lun()) == (address.target(), address.lun());
        match self.lun_uuid {
            Some(its) => its == lun,
            None => Address::parse(&self.url).is_ok_and(same),
        }
    }

    /// Whether it is there for guests alone: what it holds is not looked at.
    fn is_for_guests(&self) -> bool {
        self.is_guest_disk() || self.pool.is_some()
    }

    /// Refuses one on the LUN `lun` that another bdev writes to, also one that waits for its target, if a guest has
    /// one of both; and one of nobody's, in which an lvstore would be looked for, on what a guest writes to.
    ///
    /// Not if both are shared either: reservations, and a COMPARE AND WRITE that the target does, are of one bdev.
    fn check_free(&self, app: &App, address: &Address, lun: UuidText) -> Result<(), Error> {
        let config = app.config();
        let all = config.items().filter(|item| is_lun(item)).filter_map(|item| params(item).ok());
        let in_the_way = |other: &Create| {
            let is_guests = other.is_for_guests();
            other.name != self.name
                && other.writes()
                && (is_guests || self.is_for_guests())
                && (self.writes() || !self.is_for_guests())
                && other.is_on(address, lun)
        };
        let Some(other) = all.into_iter().find(in_the_way) else { return Ok(()) };
        let both = |is: fn(&Create) -> bool| is(self) && is(&other);
        let what_to_do = match (other.is_for_guests(), self.is_for_guests()) {
            (false, _) => ", which is no guest's: delete that first (bdev_iscsi_delete)",
            (true, false) => {
                " by a guest, and what a guest writes is not looked at: detach it there first"
            }
            (true, true) if both(|p| p.shared.unwrap_or(false)) => {
                " by a guest that knows it by another name: give both domains the same source, by which they share \
                 its reservations"
            }
            (true, true) => {
                " by another guest: detach it there first, or give the disk <shareable/> and the same source in \
                 both domains"
            }
        };
        let (of, name) = (address.target(), &other.name);
        let why = format!("LUN {} of {of} is written to as bdev {name}{what_to_do}", address.lun());
        Err(Error::os(Errno::Busy, why))
    }
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
    if call.method != CREATE && call.method != lunpool::CREATE {
        return;
    }
    call.params.remove("password");
    if let Some(Value::String(url)) = call.params.get_mut("url") {
        *url = shown(url).unwrap_or_default();
    }
}

impl From<CreateError> for NotMade {
    fn from(e: CreateError) -> NotMade {
        let errno = match (Library::loaded(), e.passes) {
            (Err(_), _) => Errno::NotSup,
            (Ok(_), _) if e.silent => Errno::TimedOut,
            (Ok(_), true) => Errno::Io,
            (Ok(_), false) => Errno::Inval,
        };
        NotMade { error: Error::os(errno, &e), passes: e.passes }
    }
}

/// The LUN, and as whom the initiator logs in.
fn address(app: &App, p: &Create) -> Result<Address, Error> {
    let address = logging_in(Address::parse(&p.url), p.user.as_deref(), p.password.as_deref());
    let address = address.and_then(|address| match &p.pool {
        None => Ok(address),
        // It is what its name says, so that it is known to be a volume's.
        Some(_) if p.lun_uuid.map(|lun| lun.0.to_string()).as_ref() != Some(&p.name) => {
            Err("that of a pool is called by its lun_uuid".to_owned())
        }
        Some(pool) => of_pool(app, pool, &address),
    });
    address.map_err(|why| Error::os(Errno::Inval, format!("bdev {}: {why}", p.name)))
}

/// The address with the login of CHAP that is given beside it; who has a password is in no core dump.
///
/// # Errors
/// A clause: it is none, or half a login.
pub fn logging_in(
    address: Result<Address, String>,
    user: Option<&str>,
    password: Option<&str>,
) -> Result<Address, String> {
    let address = match (address?, user, password) {
        (address, Some(user), Some(password)) => address.with_login(user, password)?,
        (address, None, None) => address,
        _ => return Err("user and password are given together".to_owned()),
    };
    if address.has_secret() {
        privilege::keep_out_of_dumps();
    }
    Ok(address)
}

/// The LUN at `address` with the login of the pool that it is of.
fn of_pool(app: &App, name: &str, address: &Address) -> Result<Address, String> {
    let pool = app.pools.get(name);
    let its = pool.as_ref().and_then(|pool| match &pool.backend {
        Backend::Array(Array::Iscsi { address, .. }) => Some(address),
        _ => None,
    });
    let its = its.filter(|its| its.target() == address.target());
    its.map(|its| its.at(address.lun())).ok_or_else(|| format!("its LUN is of no pool {name}"))
}

/// Refuses what cannot be the name of an initiator; `what` is to have it.
pub fn check_initiator(what: &str, name: &str) -> Result<(), Error> {
    let plain = name.bytes().all(|b| b.is_ascii_graphic());
    if plain && (1..=NAME_MAX).contains(&name.len()) {
        return Ok(());
    }
    let why = format!("{what}: an initiator's name has 1 to {NAME_MAX} characters without space");
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

/// What tells this host's target from those of others, the same each time: its machine-id and state
/// directory. `None`: the host has no machine-id, as in an image that was not started yet, or a container.
fn host(app: &App) -> Option<String> {
    let id = std::fs::read_to_string("/etc/machine-id").ok()?;
    // What systemd writes before a first boot is over.
    let id = Some(id.trim()).filter(|id| !matches!(*id, "" | "uninitialized"))?;
    Some(format!("{id}\0{}", app.paths.state_dir.display()))
}

fn create(app: &App, mut p: Create, item: Option<&Item>) -> Result<String, NotMade> {
    check_name(&p.name)?;
    check_initiator(&format!("bdev {}", p.name), &p.initiator_iqn)?;
    let address = address(app, &p)?;
    let (is_guest_disk, is_for_guests) = (p.is_guest_disk(), p.is_for_guests());
    let isid = match &p.isid {
        // Other hosts may have the same domain, and so the same names.
        None if is_for_guests => match host(app) {
            Some(host) => Isid::of(&format!("{}\0{host}", p.initiator_iqn), &address, &p.name),
            None => Isid::random(),
        },
        None => Isid::of(&p.initiator_iqn, &address, &p.name),
        Some(text) => Isid::parse(text).ok_or_else(|| {
            let why =
                format!("bdev {}: isid is twelve hexadecimal digits that begin with 80", p.name);
            Error::os(Errno::Inval, why)
        })?,
    };
    if is_guest_disk && item.is_none() {
        app.ask_for_guest_disk(&p.name, false)?;
    }
    if let (None, Some(lun)) = (item, p.lun_uuid) {
        p.check_free(app, &address, lun)?;
    }
    if item.is_none() && app.registry.get(&p.name).is_some() {
        let why = format!("there is a bdev {} already", p.name);
        return Err(Error::os(Errno::Exist, why).into());
    }
    let shown = address.to_string();
    let medium = self::shown(&p.url).unwrap_or_default();
    let options = Options {
        name: p.name.clone(),
        alias: p.pool.as_ref().map(|pool| format!("{pool}/{}", lun_name(address.lun()))),
        address: address.clone(),
        initiator: p.initiator_iqn.clone(),
        isid,
        uuid: p.uuid.map(|uuid| uuid.0),
        expected: expected(&p)?,
        read_only: p.read_only.unwrap_or(false),
        write_through: p.write_through,
    };
    let wait = app.waits.begin(format!("bdev {}", p.name), format!("{shown} to answer"));
    let made = Disk::create(&app.registry, options)?;
    drop(wait);
    (p.uuid, p.isid) = (Some(UuidText(made.uuid())), Some(isid.to_string()));
    let lun = made.lun();
    (p.lun_uuid, p.lun_block_size) = (Some(UuidText(lun.identity)), Some(lun.block_size));
    let making = item.is_none().then(|| app.guest_disks.making.lock());
    if item.is_none() {
        p.check_free(app, &address, UuidText(lun.identity))?;
    }
    app.flush_errors.attach_lun(&*made, lun.identity, Path::new(&medium));
    let (found, bdev) = (made.found(), made as Arc<dyn Bdev>);
    match (&p.pool, item) {
        (Some(pool), _) => app.add_opened(pool, bdev.clone(), found.into(), item)?,
        (None, Some(item)) => {
            if is_guest_disk {
                app.guest_disks.add_used(&p.name);
            }
            app.add_restored(bdev.clone(), item)?;
        }
        (None, None) => app.register(bdev.clone())?,
    }
    if is_guest_disk && item.is_none() {
        app.guest_disks.add(&p.name);
    }
    app.record_bdev(&bdev, CREATE, &p);
    drop(making);
    if item.is_none() && !is_for_guests {
        app.load_lvstore(&p.name);
    }
    Ok(p.name)
}

/// Opens a volume of a pool of LUNs and makes it a bdev.
///
/// # Errors
/// As those of the method; or it cannot be used.
pub fn open_volume(app: &App, pool: &Pool, volume: &Volume, way: Way) -> Result<(), Error> {
    let lun = lun_number(&volume.image);
    let (Backend::Array(Array::Iscsi { address, initiator }), Some(lun)) = (&pool.backend, lun)
    else {
        return Err(Error::internal(format!("{} is no LUN", pool.alias(volume))));
    };
    let p = Create {
        name: volume.uuid.to_string(),
        url: address.without_login().at(lun).to_string(),
        initiator_iqn: initiator.clone(),
        user: None,
        password: None,
        uuid: Some(UuidText(volume.uuid)),
        write_through: None,
        isid: None,
        // Which it was found by.
        lun_uuid: Some(UuidText(volume.uuid)),
        lun_block_size: Some(volume.block_size),
        read_only: None,
        guest_disk: None,
        shared: way.shared.then_some(true),
        pool: Some(pool.name.clone()),
    };
    create(app, p, None).map(drop).map_err(|e| e.error)
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
pub fn ask(app: &App, item: &Item) -> Result<(), String> {
    let p = params(item).map_err(|e| e.message)?;
    let address = address(app, &p).map_err(|e| e.message)?;
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
    let closing = app.closing(name);
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
            move |p: Create| {
                let is_guest_disk = p.is_guest_disk();
                let made = create(&a, p, None).map_err(|e| e.error);
                if is_guest_disk {
                    guestdisks::watch(&a);
                }
                made
            },
        )
        .secrets(&["url", "password"])
        .errors(&[
            Errno::Io,
            Errno::Exist,
            Errno::Busy,
            Errno::Inval,
            Errno::NotSup,
            Errno::TimedOut,
        ]);
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
