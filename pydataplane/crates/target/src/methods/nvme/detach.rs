//! A controller, or one of its paths, is used no more.

use super::call::PathParams;
use super::{CLOSE_TIMEOUT, controller, disks, is_nvme, names_of, no_controller};
use crate::app::App;
use crate::state::bdev_key;
use bdev::Bdev;
use nvme::{Address, Controller};
use rpc::{Errno, Error};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// Which paths a call is about.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some are taken and have no effect")]
pub(super) struct Detach {
    /// Name of the controller.
    name: String,
    /// Of one path: its transport, tcp.
    #[serde(default)]
    trtype: Option<String>,
    /// Of one path: its IP address. Default: all paths, and with the last one the bdevs
    #[serde(default)]
    traddr: Option<String>,
    /// Of one path: the family of its address.
    #[serde(default)]
    adrfam: Option<String>,
    /// Of one path: its port.
    #[serde(default)]
    trsvcid: Option<String>,
    /// Of one path: the name of its subsystem.
    #[serde(default)]
    subnqn: Option<String>,
    /// Without effect.
    #[serde(default)]
    hostaddr: Option<String>,
    /// Without effect.
    #[serde(default)]
    hostsvcid: Option<String>,
}

pub(super) fn detach(app: &App, p: &Detach) -> Result<bool, Error> {
    let Some(controller) = controller(app, &p.name) else {
        // One that could not be restored is forgotten.
        let is_known = app.config().get(&bdev_key(&p.name)).is_some_and(is_nvme);
        return match is_known {
            true => app.remove_bdev(&p.name).map(|()| true),
            false => Err(no_controller(&p.name)),
        };
    };
    let is = |given: &Option<String>, has: &str| {
        given.as_ref().is_none_or(|given| given.eq_ignore_ascii_case(has))
    };
    let is_here = is(&p.trtype, "tcp") && is(&p.subnqn, &controller.options().subnqn);
    let is_meant = |address: &Address| {
        is_here
            && address.is(p.traddr.as_deref(), p.trsvcid.as_deref())
            && is(&p.adrfam, address.adrfam())
    };
    let (gone, left): (Vec<_>, Vec<_>) = controller.addresses().into_iter().partition(is_meant);
    if gone.is_empty() {
        let why = format!("controller {} has no such path", p.name);
        return Err(Error::os(Errno::NoDev, why));
    }
    if !left.is_empty() && controller.remove_paths(&gone) {
        record_paths(app, &controller);
        return Ok(true);
    }
    drop(controller);
    detach_whole(app, &p.name)
}

/// Takes all bdevs of a controller away, or none: where one of them stays, those that were taken away before come
/// back, without what they were used for.
///
/// # Errors
/// One stays; or somebody still has one, which goes when he lets go.
fn detach_whole(app: &App, name: &str) -> Result<bool, Error> {
    let turn = app.namespaces.turn(name);
    let all = disks(&app.registry, name);
    let Some(first) = all.first() else { return Err(no_controller(name)) };
    all.iter().try_for_each(|disk| app.check_removable(disk.name()))?;
    let (closing, bdevs) = (first.controller().closing(), names_of(&all));
    drop(all);
    let mut failed = None;
    for bdev in bdevs {
        let Err(e) = app.remove_bdev(&bdev) else { continue };
        failed.get_or_insert(e);
        if app.registry.get(&bdev).is_some() {
            break;
        }
    }
    let stays = !disks(&app.registry, name).is_empty();
    if !stays {
        let key = bdev_key(name);
        app.restoring().remove(&key);
        app.config().forget(|item| item.key == key);
    }
    drop(turn);
    if stays {
        app.namespaces.look(name);
    }
    if let Some(e) = failed {
        return Err(e);
    }
    if !closing.wait(CLOSE_TIMEOUT) {
        tracing::warn!("controller {name} is detached, but still in use, or not closed yet");
    }
    Ok(true)
}

/// Records which paths a controller has now.
pub(super) fn record_paths(app: &App, of: &Controller) {
    let key = bdev_key(of.name());
    let mut config = app.config();
    // The record is held meanwhile, so that whoever comes last tells what is so then.
    let mut paths = of.addresses().into_iter();
    let Some(first) = paths.next() else { return };
    let others: Vec<_> = paths.map(PathParams::from).collect();
    config.set_param(&key, "traddr", json!(first.traddr()));
    config.set_param(&key, "trsvcid", json!(first.trsvcid()));
    config.set_param(&key, "adrfam", json!(first.adrfam()));
    config.set_param(&key, "paths", if others.is_empty() { Value::Null } else { json!(others) });
}
