//! What is the same of all arrays whose disks are volumes of a pool, beside those of lvstores.

use super::pool::check_new;
use super::{lunpool, nvmepool};
use crate::app::App;
use crate::array::Array;
use crate::pools::{Backend, LIST_TIMEOUT, Pool};
use crate::state::Item;
use rpc::Error;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use uuid::Uuid;

/// A call that adds such a pool, as it comes and is recorded.
pub trait Adding: DeserializeOwned + Serialize {
    /// The method.
    const METHOD: &'static str;
    /// Name of the pool.
    fn name(&self) -> &str;
    /// What the pool is of.
    ///
    /// # Errors
    /// There is no such array, whoever answers.
    fn array(&self, app: &App) -> Result<Array, Error>;
}

fn pool_of(app: &App, p: &impl Adding) -> Result<Pool, Error> {
    let array = p.array(app)?;
    // The same on every host, by whatever path.
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, array.name().as_bytes());
    Ok(Pool::new(p.name().to_owned(), Backend::Array(array), uuid))
}

/// Adds a pool, whose array has to answer; returns its UUID.
///
/// # Errors
/// It does not; there is another store of that name, or a pool of that array.
pub fn create(app: &App, p: &impl Adding) -> Result<String, Error> {
    check_new(app, p.name())?;
    let pool = pool_of(app, p)?;
    app.pools.check_new(&pool)?;
    let wait = app.waits.begin(format!("pool {}", p.name()), "its array to answer".into());
    pool.volumes(LIST_TIMEOUT)?;
    drop(wait);
    add(app, pool, p)
}

fn add<P: Adding>(app: &App, pool: Pool, p: &P) -> Result<String, Error> {
    let uuid = pool.uuid;
    app.pools.add(pool)?;
    app.config().record(P::METHOD, p);
    Ok(uuid.to_string())
}

/// Whether `item` adds such a pool.
pub fn is_pool(item: &Item) -> bool {
    [lunpool::CREATE, nvmepool::CREATE].contains(&item.call.method.as_str())
}

/// Adds the pool of `item`, one of [`is_pool`], again, if it is not there; without asking its array.
///
/// # Errors
/// It cannot be added at all.
pub fn restore(app: &App, item: &Item) -> Result<(), Error> {
    match item.call.method.as_str() {
        nvmepool::CREATE => restore_as::<nvmepool::Create>(app, item),
        _ => restore_as::<lunpool::Create>(app, item),
    }
}

fn restore_as<P: Adding>(app: &App, item: &Item) -> Result<(), Error> {
    let p = serde_json::from_value::<P>(Value::Object(item.call.params.clone()));
    let p = p.map_err(|e| Error::params(format!("wrong parameters of {}: {e}", P::METHOD)))?;
    match app.pools.get(p.name()) {
        Some(_) => Ok(()),
        None => add(app, pool_of(app, &p)?, &p).map(drop),
    }
}
