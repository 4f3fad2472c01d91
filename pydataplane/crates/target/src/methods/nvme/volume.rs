//! Volumes of a pool of namespaces: each has a controller of its own while it is open, which is called as it is.

use super::attach;
use super::call::{Attach, Expected, PathParams};
use crate::app::App;
use crate::methods::UuidText;
use crate::volume::Volume;
use nvme::{Address, Options};
use rpc::Error;

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
