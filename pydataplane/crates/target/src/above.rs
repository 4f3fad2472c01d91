//! What lies on a bdev: the lvols of the lvstore on it, an encrypted bdev or one with checksums, and what lies
//! on those. It goes first.

use crate::app::App;
use crate::errors;
use crate::methods::crypto::is_crypto;
use crate::state::{BDEV_KEY, Item};
use bdev::Bdev;
use crypto::Crypto;
use faults::{Delaying, Failing};
use integrity::Integrity;
use lvol::LvstoreInfo;
use rpc::Error;
use serde_json::Value;

/// The lvstore on the bdev of that name.
fn lvstore_on(app: &App, bdev: &str) -> Option<LvstoreInfo> {
    app.lvstores.lvstores().into_iter().find(|lvs| lvs.base_bdev == bdev)
}

/// Names of encrypted bdevs on `base` that wait for their keys.
fn awaiting(app: &App, base: &str) -> Vec<String> {
    let config = app.config();
    let on_it = |item: &&Item| {
        let its = item.call.params.get("base_bdev_name").and_then(Value::as_str);
        is_crypto(item) && item.problem.is_some() && its == Some(base)
    };
    let name = |item: &Item| item.key.strip_prefix(BDEV_KEY).map(str::to_owned);
    config.items().filter(on_it).filter_map(name).collect()
}

/// Names of `bdev` and of all that lies on it, each before what lies on that.
///
/// # Errors
/// Of an lvstore.
pub fn with_what_is_on(app: &App, bdev: &str) -> Result<Vec<String>, Error> {
    let mut all = vec![bdev.to_owned()];
    let mut next = 0;
    while let Some(base) = all.get(next).cloned() {
        next += 1;
        if let Some(lvs) = lvstore_on(app, &base) {
            let lvols = app.lvstores.lvols(Some(&lvs.uuid.to_string())).map_err(errors::lvol)?;
            all.extend(lvols.into_iter().map(|lvol| lvol.uuid.to_string()));
        }
        all.extend(Crypto::on(&app.registry, &base).map(|crypto| crypto.name().to_owned()));
        all.extend(Integrity::on(&app.registry, &base).map(|each| each.name().to_owned()));
        all.extend(faults::on(&app.registry, &base));
        all.extend(awaiting(app, &base));
    }
    Ok(all)
}

/// Takes away what lies on the first of `all`, which [`with_what_is_on`] returned, and not that one.
/// Returns the names of the keys that were used there.
///
/// # Errors
/// Of an lvstore, or of somebody who does not let go; then what is below is left.
pub fn take_away(app: &App, all: &[String]) -> Result<Vec<String>, Error> {
    let mut keys = Vec::new();
    for (nth, bdev) in all.iter().enumerate().rev() {
        if let Some(lvs) = lvstore_on(app, bdev) {
            app.lvstores.unload(&lvs.uuid.to_string()).map_err(errors::lvol)?;
        }
        // Lvols go with their lvstore.
        let crypto = app.registry.get_as::<Crypto>(bdev).filter(|_| nth > 0);
        if let Some(crypto) = crypto {
            keys.push(crypto.key().name().to_owned());
            drop(crypto);
            app.registry.unregister(bdev).map_err(errors::registry)?;
        }
        if nth > 0 && is_of_tests(app, bdev) {
            app.registry.unregister(bdev).map_err(errors::registry)?;
        }
        let checked = app.registry.get_as::<Integrity>(bdev).filter(|_| nth > 0);
        if let Some(checked) = checked {
            app.registry.unregister(bdev).map_err(errors::registry)?;
            // What still has it, as a queue pair that ends late, does not keep it from that.
            checked.close();
        }
    }
    Ok(keys)
}

/// Whether it is a bdev of crate `faults`, whose pending I/Os go on now.
fn is_of_tests(app: &App, bdev: &str) -> bool {
    let failing = app.registry.get_as::<Failing>(bdev);
    failing.as_ref().inspect(|failing| failing.resume_pending()).is_some()
        || app.registry.get_as::<Delaying>(bdev).is_some()
}

/// Closes all bdevs that lie on others, with what lies on them; those that lie on others first.
///
/// # Errors
/// In one sentence: what is on one of them does not come to its end.
pub fn close_layers(app: &App) -> Result<(), String> {
    const LAYERS: [&str; 4] =
        [crypto::PRODUCT, integrity::PRODUCT, Failing::PRODUCT, Delaying::PRODUCT];
    let layers =
        app.registry.list().into_iter().filter(|bdev| LAYERS.contains(&bdev.product_name()));
    let names: Vec<String> = layers.map(|bdev| bdev.name().to_owned()).collect();
    for name in names.into_iter().rev() {
        let all = with_what_is_on(app, &name);
        if let Err(e) = all.and_then(|all| take_away(app, &all)) {
            return Err(format!("what is on bdev {name} is not closed: {e}"));
        }
        let checked = app.registry.get_as::<Integrity>(&name);
        if let Err(e) = app.registry.unregister(&name) {
            tracing::error!("not closed in order: {e}");
        }
        if let Some(checked) = checked {
            checked.close();
        }
    }
    Ok(())
}
