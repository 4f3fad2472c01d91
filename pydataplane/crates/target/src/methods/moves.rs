//! Which volume of a move counts.

use crate::app::App;
use crate::moves::{self, Counts, Moving, State};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Check {
    /// The new volume, which another one moves to: UUID or LVSTORE/LVOL.
    name: String,
}

#[derive(Serialize, JsonSchema)]
struct Found {
    /// UUID of the volume that moves.
    of: String,
    /// LVSTORE/LVOL of that.
    path: String,
    /// What is noted at the new volume: copying, mirrored, pivoted or whole.
    #[schemars(with = "String")]
    state: State,
    /// old; new; neither: the old volume is gone, and the new one has not all of it; unknown: none of them is
    /// shown to a VM, nor to be deleted.
    #[schemars(with = "String")]
    counts: Counts,
    /// Microseconds for which the guest's requests waited when it went on with the new one; null: that is not
    /// known.
    pause_us: Option<u64>,
}

impl From<Moving> for Found {
    fn from(Moving { of, path, state, counts, pause_us }: Moving) -> Found {
        Found { of, path, state, counts, pause_us }
    }
}

/// Adds the method.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "virtlun_lvol_move_check",
            "Get which of the two volumes of a move counts, by what is noted at both, and recorded of the disks \
             on them.",
            Flags::READ,
            move |p: Check| {
                let found = moves::check(&a, &p.name)?.map(Found::from);
                let none = || {
                    let why = format!("no volume is being moved to lvol {}", p.name);
                    Error::os(Errno::NoData, why)
                };
                found.ok_or_else(none)
            },
        )
        .errors(&[Errno::NoDev, Errno::NoData, Errno::Busy, Errno::Io]);
}
