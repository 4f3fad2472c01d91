//! Pools of Ceph whose images are volumes, beside those of lvstores: the methods on lvols work on them, too. What is
//! the same of all kinds of pools is here as well.

use super::{UuidText, arraypool, check_name_of};
use crate::app::App;
use crate::array::lun_name;
use crate::errors;
use crate::pools::{Backend, DATA_TIMEOUT, LIST_TIMEOUT, Pool};
use crate::state::{self, Item};
use bdev::Geometry;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use std::thread;
use uuid::Uuid;

/// The method that adds a pool.
pub const CREATE: &str = "virtlun_rbd_pool_create";
/// Bytes of a block, unless the caller says.
const BLOCK_SIZE: u32 = 512;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name, which the names of its volumes begin with.
    name: String,
    /// Name of a cluster that is registered.
    cluster_name: String,
    /// Pool of that cluster, or POOL/NAMESPACE.
    pool_name: String,
    /// Bytes of a block of its volumes: 512 or 4096. Default: 512
    #[serde(default)]
    block_size: Option<u32>,
    /// Its UUID, as it is recorded. Default: the cluster is asked
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Bytes of an object of a new image, as it is recorded. Default: the cluster is asked
    #[serde(default)]
    object_size: Option<u64>,
}

/// A pool.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Name {
    /// Name of the pool.
    pub name: String,
}

/// Whether `item` adds a pool, of whatever kind.
pub fn is_pool(item: &Item) -> bool {
    item.call.method == CREATE || arraypool::is_pool(item)
}

/// Names of the pools on a cluster, also of those that are not restored.
pub fn pools_on(app: &App, cluster: &str) -> Vec<String> {
    let text = |item: &Item, name: &str| Some(item.call.params.get(name)?.as_str()?.to_owned());
    let config = app.config();
    let its = config.items().filter(|item| is_pool(item));
    let its = its.filter(|item| text(item, "cluster_name").as_deref() == Some(cluster));
    its.filter_map(|item| text(item, "name")).collect()
}

/// What is asked of the cluster: identity, and bytes of an object.
fn asked(p: &Create, pool: Pool) -> Result<(Uuid, u64), Error> {
    match (p.uuid, p.object_size) {
        (Some(uuid), Some(object_size)) => Ok((uuid.0, object_size)),
        _ => pool.call(LIST_TIMEOUT, |pool| Ok((pool.uuid(), pool.object_size()))),
    }
}

/// Refuses a name that a new pool cannot have.
pub fn check_new(app: &App, name: &str) -> Result<(), Error> {
    check_name_of("pool", name)?;
    if app.lvstores.lvstore(name).is_ok() {
        let why = format!("there is an lvstore {name}: choose another name");
        return Err(Error::os(Errno::Exist, why));
    }
    Ok(())
}

fn create(app: &App, mut p: Create) -> Result<String, Error> {
    check_new(app, &p.name)?;
    let block_size = p.block_size.unwrap_or(BLOCK_SIZE);
    Geometry::checked(block_size, 0, 1)
        .map_err(|why| Error::os(Errno::Inval, format_args!("pool {}: {why}", p.name)))?;
    let cluster = app.clusters.get(&p.cluster_name).map_err(errors::rbd)?;
    let pool = |(uuid, object_size): (Uuid, u64)| {
        let (cluster, path) = (Arc::clone(&cluster), p.pool_name.clone());
        let backend = Backend::Ceph { cluster, path, block_size, object_size };
        Pool::new(p.name.clone(), backend, uuid)
    };
    let _wait = app.waits.begin(format!("pool {}", p.name), "its cluster to answer".into());
    let known = asked(&p, pool((Uuid::nil(), 1)))?;
    app.pools.add(pool(known))?;
    complete(app, &p.name);
    (p.uuid, p.object_size) = (Some(UuidText(known.0)), Some(known.1));
    p.block_size = Some(block_size);
    app.config().record(CREATE, &p);
    Ok(known.0.to_string())
}

/// Completes what was cut off in a pool: deletions, rollbacks, and snapshots taken together; on a thread that may wait.
fn complete(app: &App, name: &str) {
    let Some(pool) = app.pools.get(name) else { return };
    let complete = move || {
        let done = pool.call(DATA_TIMEOUT, |pool| pool.complete(|_, _| true));
        let settled = pool.call(DATA_TIMEOUT, rbd::Pool::settle);
        // The next call of that kind with such a volume tries again.
        for why in [done.map(drop), settled].into_iter().filter_map(Result::err) {
            tracing::warn!("what was cut off in pool {}: {}", pool.name, why.message);
        }
    };
    if let Err(why) = thread::Builder::new().name("rbd complete".to_owned()).spawn(complete) {
        tracing::warn!("no thread completes what was cut off in pool {name}: {why}");
    }
}

/// Adds the pool of `item`, one of [`is_pool`], again, if it is not there; without asking its cluster.
///
/// # Errors
/// It cannot be added at all.
pub fn restore(app: &App, item: &Item) -> Result<(), Error> {
    if arraypool::is_pool(item) {
        return arraypool::restore(app, item);
    }
    let p = serde_json::from_value::<Create>(Value::Object(item.call.params.clone()));
    let p = p.map_err(|e| Error::params(format!("wrong parameters of {CREATE}: {e}")))?;
    match app.pools.get(&p.name) {
        Some(_) => Ok(()),
        None => create(app, p).map(drop),
    }
}

/// Forgets a pool of the kind whose methods begin so; refused while a volume of it is in use.
///
/// # Errors
/// One is; there is no such pool.
pub fn delete(app: &App, name: &str, kind: &str) -> Result<bool, Error> {
    if let Some(pool) = app.pools.get(name).filter(|pool| pool.backend.kind() != kind) {
        let (is, what) = (pool.backend.kind(), pool.backend.what());
        let why = format!("{name} is a pool {what}: virtlun_{is}_pool_delete lets go of it");
        return Err(Error::os(Errno::NoDev, why));
    }
    app.close_unused_volumes();
    let key = state::pool_key(name);
    // Else a disk of an array that is being opened is recorded as one of a pool that is gone.
    let _making = app.guest_disks.making.lock();
    let of_it = |item: &Item| item.call.params.get("pool").and_then(Value::as_str) == Some(name);
    if let Some(item) = app.config().items().find(|item| of_it(item)) {
        let text = |name: &str| Some(item.call.params.get(name)?.as_str()?.to_owned());
        let lun = || lun_name(iscsi::Address::parse(&text("url")?).ok()?.lun()).into();
        // Of a namespace the record has what its bdev is called.
        let namespace = || {
            let bdev = text("name")?;
            Some(app.pools.known(&bdev).map_or(bdev, |(_, volume)| volume.name()))
        };
        let image = text("rbd_name").or_else(lun).or_else(namespace).unwrap_or_default();
        let why = format!("pool {name} stays, as its volume {image} is in use: release that first");
        return Err(Error::os(Errno::Busy, why));
    }
    let gone = app.pools.remove(name).is_some();
    let forgotten = app.config().forget(|item| item.key == key);
    match gone || forgotten {
        true => Ok(true),
        false => Err(Error::os(
            Errno::NoDev,
            format_args!("there is no pool {name}; bdev_lvol_get_lvstores lists those there are"),
        )),
    }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Have the images of a pool of Ceph as volumes, which the methods on lvols work on as on those of an \
             lvstore; return its UUID, the same on every host.",
            Flags::LONG_WRITE,
            move |p: Create| create(&a, p),
        )
        .errors(&[
            Errno::NoEnt,
            Errno::NoDev,
            Errno::Exist,
            Errno::Access,
            Errno::Perm,
            Errno::Inval,
            Errno::Io,
            Errno::TimedOut,
        ]);
    let a = app.clone();
    methods
        .add(
            "virtlun_rbd_pool_delete",
            "Have the images of a pool as volumes no more; refused while one is in use. The images stay.",
            Flags::LONG_WRITE,
            move |p: Name| delete(&a, &p.name, "rbd"),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
