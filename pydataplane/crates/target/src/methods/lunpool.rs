//! iSCSI targets whose LUNs are volumes, beside those of lvstores. A password that is given is recorded, as those of
//! `iscsi` are.

use super::iscsi::{check_initiator, logging_in};
use super::pool::{self, Name, check_new};
use crate::app::App;
use crate::pools::{Backend, LIST_TIMEOUT, Pool};
use crate::state::Item;
use iscsi::Address;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use uuid::Uuid;

/// The method that adds such a pool.
pub const CREATE: &str = "virtlun_iscsi_pool_create";

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name, which the names of its volumes begin with.
    name: String,
    /// Where the iSCSI target is: HOST[:PORT].
    portal: String,
    /// Name of the iSCSI target.
    target_iqn: String,
    /// Name of the initiator, such as iqn.2026-11.org.example:host1. No other host may have it.
    initiator_iqn: String,
    /// User as whom the initiator logs in (CHAP), with `password`. Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// Password of that user, of any characters. Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<String>,
}

/// Whether `item` adds such a pool.
pub fn is_pool(item: &Item) -> bool {
    item.call.method == CREATE
}

fn pool_of(p: &Create) -> Result<Pool, Error> {
    check_initiator(&format!("pool {}", p.name), &p.initiator_iqn)?;
    let address = Address::new(&p.portal, &p.target_iqn, 0);
    let address = logging_in(address, p.user.as_deref(), p.password.as_deref());
    let wrong = |why| Error::os(Errno::Inval, format!("pool {}: {why}", p.name));
    let address = address.map_err(wrong)?;
    // The same on every host, by whatever portal.
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, p.target_iqn.as_bytes());
    let backend = Backend::Array { address, initiator: p.initiator_iqn.clone() };
    Ok(Pool::new(p.name.clone(), backend, uuid))
}

fn create(app: &App, p: &Create) -> Result<String, Error> {
    check_new(app, &p.name)?;
    let pool = pool_of(p)?;
    app.pools.check_new(&pool)?;
    let wait = app.waits.begin(format!("pool {}", p.name), "its iSCSI target to answer".into());
    pool.volumes(LIST_TIMEOUT)?;
    drop(wait);
    add(app, pool, p)
}

fn add(app: &App, pool: Pool, p: &Create) -> Result<String, Error> {
    let uuid = pool.uuid;
    app.pools.add(pool)?;
    app.config().record(CREATE, p);
    Ok(uuid.to_string())
}

/// Adds the pool of `item`, one of [`is_pool`], again, if it is not there; without asking its target.
///
/// # Errors
/// It cannot be added at all.
pub fn restore(app: &App, item: &Item) -> Result<(), Error> {
    let p = serde_json::from_value::<Create>(Value::Object(item.call.params.clone()));
    let p = p.map_err(|e| Error::params(format!("wrong parameters of {CREATE}: {e}")))?;
    match app.pools.get(&p.name) {
        Some(_) => Ok(()),
        None => add(app, pool_of(&p)?, &p).map(drop),
    }
}

/// Adds the methods.
pub fn add_methods(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Have the LUNs of an iSCSI target as volumes POOL/lun-NUMBER, which the methods on lvols list and those that \
             use bdevs open; return the pool's UUID, the same on every host. Needs the option --iscsi and Debian's \
             package libiscsi7.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, &p),
        )
        .secrets(&["password"])
        .errors(&[Errno::Exist, Errno::Inval, Errno::Io, Errno::NotSup, Errno::TimedOut]);
    let a = app.clone();
    methods
        .add(
            "virtlun_iscsi_pool_delete",
            "Have the LUNs of an iSCSI target as volumes no more; refused while one is in use. The LUNs stay.",
            Flags::LONG_WRITE,
            move |p: Name| pool::delete(&a, &p.name, "iscsi"),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
