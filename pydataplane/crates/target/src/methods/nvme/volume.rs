//! Volumes of a pool of namespaces: each has a controller of its own while it is open, which is called as it is.

use super::attach;
use super::call::{Attach, Expected, PathParams};
use super::found::Turn;
use crate::app::App;
use crate::methods::UuidText;
use crate::volume::Volume;
use bdev::Bdev;
use nvme::{Address, Disk, Options};
use rpc::{Errno, Error};

/// Refuses a namespace as a volume that is a bdev by itself, and the other way: their UUIDs differ. Nobody else makes a
/// bdev of it before what is returned is dropped.
///
/// # Errors
/// It is one already, or is being made one.
pub(super) fn only_one<'a>(app: &'a App, disk: &Disk) -> Result<Option<Turn<'a>>, Error> {
    let is_volume = |of: &Disk| of.controller().options().only.is_some();
    let Some(volume) = disk.volume() else { return Ok(None) };
    let own = is_volume(disk);
    let twice = |other: &str| {
        let why = format!("bdev {}: its namespace is the bdev {other} already", disk.name());
        Error::os(Errno::Exist, why)
    };
    // A volume's controller is called so, and has that turn.
    let turn = (!own).then(|| {
        let name = volume.to_string();
        app.namespaces.try_turn(&name).ok_or_else(|| twice(&name))
    });
    let turn = turn.transpose()?;
    let all = app.registry.list().into_iter();
    let mut disks = all.filter_map(|bdev| app.registry.get_as::<Disk>(bdev.name()));
    match disks.find(|other| is_volume(other) != own && other.volume() == Some(volume)) {
        Some(other) => Err(twice(other.name())),
        None => Ok(turn),
    }
}

/// Opens a volume of the pool of namespaces `pool`, of a subsystem by those paths, and makes it a bdev.
///
/// # Errors
/// As those of the method; or it is not there any more.
pub fn open_volume(
    app: &App,
    pool: &str,
    (options, paths): (&Options, &[Address]),
    volume: &Volume,
) -> Result<(), Error> {
    let Some((first, others)) = paths.split_first() else {
        return Err(Error::internal(format!("pool {pool} has no path")));
    };
    let p = Attach {
        name: volume.uuid.to_string(),
        trtype: "tcp".to_owned(),
        traddr: first.traddr(),
        trsvcid: Some(first.trsvcid()),
        subnqn: Some(options.subnqn.clone()),
        hostnqn: Some(options.hostnqn.clone()),
        hdgst: options.header_digest.then_some(true),
        ddgst: options.data_digest.then_some(true),
        num_io_queues: Some(options.queues.into()),
        paths: others.iter().copied().map(PathParams::from).collect(),
        namespaces: vec![Expected {
            nsid: volume.number,
            uuid: UuidText(volume.uuid),
            block_size: volume.block_size,
        }],
        pool: Some(pool.to_owned()),
        ..Attach::default()
    };
    attach(app, p, None).map(drop).map_err(|e| e.error)
}
