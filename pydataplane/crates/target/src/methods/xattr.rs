//! Notes on lvols: who owns one, what it is for. They are kept on the medium.

use super::lvol::OF_POOLS;
use crate::app::App;
use rpc::{Errno, Flags, Methods};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Set {
    /// UUID or LVSTORE/LVOL.
    name: String,
    /// Name of the xattr.
    xattr_name: String,
    /// Its value, text.
    xattr_value: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Get {
    /// UUID or LVSTORE/LVOL.
    name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Remove {
    /// UUID or LVSTORE/LVOL.
    name: String,
    /// Name of the xattr.
    xattr_name: String,
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_set_xattr",
            "Set an xattr of an lvol.",
            Flags::LONG_WRITE,
            move |p: Set| {
                let set = a.store_of(&p.name).set_xattr(&p.name, &p.xattr_name, &p.xattr_value);
                set.map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::Inval, Errno::NoSpc, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_get_xattrs",
            "Get all xattrs of an lvol, name to value.",
            Flags::READ,
            move |p: Get| a.store_of(&p.name).xattrs(&p.name),
        )
        .errors(&[Errno::NoDev, Errno::IlSeq, Errno::Io])
        .errors(OF_POOLS);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_remove_xattr",
            "Remove an xattr of an lvol.",
            Flags::LONG_WRITE,
            move |p: Remove| {
                let removed = a.store_of(&p.name).remove_xattr(&p.name, &p.xattr_name);
                removed.map(|()| true)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoData, Errno::Io])
        .errors(OF_POOLS);
}
