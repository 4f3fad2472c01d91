//! Notes on lvols: who owns one, what it is for. They are kept on the medium.

use crate::app::App;
use crate::errors;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;
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

fn get(app: &App, lvol: &str) -> Result<BTreeMap<String, String>, Error> {
    let names = app.lvstores.xattrs(lvol).map_err(errors::lvol)?;
    names
        .into_iter()
        .map(|name| {
            let value = app.lvstores.xattr(lvol, &name).map_err(errors::lvol)?;
            let value = String::from_utf8(value).map_err(|_| {
                Error::os(
                    Errno::IlSeq,
                    format_args!("the value of xattr {name} of lvol {lvol} is not text"),
                )
            })?;
            Ok((name, value))
        })
        .collect()
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
                let value = p.xattr_value.as_bytes();
                let set = a.lvstores.set_xattr(&p.name, &p.xattr_name, value);
                set.map(|()| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::Inval, Errno::NoSpc, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_get_xattrs",
            "Get all xattrs of an lvol, name to value.",
            Flags::READ,
            move |p: Get| get(&a, &p.name),
        )
        .errors(&[Errno::NoDev, Errno::IlSeq, Errno::Io]);
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_remove_xattr",
            "Remove an xattr of an lvol.",
            Flags::LONG_WRITE,
            move |p: Remove| {
                let removed = a.lvstores.remove_xattr(&p.name, &p.xattr_name);
                removed.map(|()| true).map_err(errors::lvol)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoData, Errno::Io]);
}
