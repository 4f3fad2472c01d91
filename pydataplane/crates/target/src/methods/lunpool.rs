//! iSCSI targets whose LUNs are volumes, beside those of lvstores. A password that is given is recorded, as those of
//! `iscsi` are.

use super::arraypool::{self, Adding};
use super::iscsi::{check_initiator, logging_in};
use super::pool::{self, Name};
use crate::app::App;
use crate::array::Array;
use iscsi::Address;
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The method that adds such a pool.
pub const CREATE: &str = "virtlun_iscsi_pool_create";

/// See [`CREATE`].
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Create {
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

impl Adding for Create {
    const METHOD: &'static str = CREATE;

    fn name(&self) -> &str {
        &self.name
    }

    fn array(&self, _: &App) -> Result<Array, Error> {
        check_initiator(&format!("pool {}", self.name), &self.initiator_iqn)?;
        let address = Address::new(&self.portal, &self.target_iqn, 0);
        let address = logging_in(address, self.user.as_deref(), self.password.as_deref());
        let wrong = |why| Error::os(Errno::Inval, format!("pool {}: {why}", self.name));
        let address = address.map_err(wrong)?;
        Ok(Array::Iscsi { address, initiator: self.initiator_iqn.clone() })
    }
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Have the LUNs of an iSCSI target as volumes POOL/lun-NUMBER, which the methods on lvols list and those that \
             use bdevs open; return the pool's UUID, the same on every host. Needs the option --iscsi and Debian's \
             package libiscsi7.",
            Flags::LONG_WRITE,
            move |p: Create| arraypool::create(&a, &p),
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
