//! Bdevs on files and block devices. SPDK has two kinds, `aio` and `uring`; here both are the same
//! io_uring backend under the name that was asked for.

use super::{BdevName, UuidText, unsupported};
use crate::app::App;
use crate::errors;
use bdev::{Bdev, FileBdev, FileKind, FileOptions};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateAio {
    /// Name.
    name: String,
    /// Path of the file or block device.
    filename: String,
    /// Bytes of a block: 512 or 4096. Default: the least that direct I/O takes there
    #[serde(default)]
    block_size: Option<u32>,
    /// Refuse writes. Default: false
    #[serde(default)]
    readonly: Option<bool>,
    /// No effect: unmap and write zeroes work wherever the file system has them. Default: false
    #[serde(default)]
    fallocate: Option<bool>,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Not supported but for false: I/O never waits in the reactor anyway.
    #[serde(default)]
    nowait: Option<bool>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateUring {
    /// Path of the file or block device.
    filename: String,
    /// Name.
    name: String,
    /// Bytes of a block: 512 or 4096. Default: the least that direct I/O takes there
    #[serde(default)]
    block_size: Option<u32>,
    /// UUID. Default: a random one
    #[serde(default)]
    uuid: Option<UuidText>,
}

/// The path from the root: where the target is started does not matter at the next start.
fn absolute(filename: &str) -> Result<String, Error> {
    let path = std::path::absolute(filename)
        .map_err(|e| Error::io(format_args!("{filename:?} is no path"), &e))?;
    // It came as text, and so did the working directory unless somebody is very creative.
    let path = path.into_os_string().into_string();
    path.map_err(|_| Error::os(Errno::Inval, format_args!("the path of {filename} is not text")))
}

fn open(app: &App, options: FileOptions) -> Result<UuidText, Error> {
    super::check_name(&options.name)?;
    let path = options.path.clone();
    let wait = app
        .waits
        .begin(format!("bdev {}", options.name), format!("{} to be opened", path.display()));
    let file = FileBdev::create(options).map_err(|e| errors::open_file(&path, e))?;
    drop(wait);
    let uuid = UuidText(file.uuid());
    app.add_bdev(file)?;
    Ok(uuid)
}

fn create_aio(app: &App, mut p: CreateAio) -> Result<String, Error> {
    unsupported("bdev_aio_create", &[("nowait", p.nowait.unwrap_or(false))])?;
    p.filename = absolute(&p.filename)?;
    p.uuid = Some(open(
        app,
        FileOptions {
            name: p.name.clone(),
            path: (&p.filename).into(),
            block_size: p.block_size,
            read_only: p.readonly.unwrap_or(false),
            uuid: p.uuid.map(|u| u.0),
            kind: FileKind::Aio,
        },
    )?);
    app.config().record("bdev_aio_create", &p);
    Ok(p.name)
}

fn create_uring(app: &App, mut p: CreateUring) -> Result<String, Error> {
    p.filename = absolute(&p.filename)?;
    p.uuid = Some(open(
        app,
        FileOptions {
            name: p.name.clone(),
            path: (&p.filename).into(),
            block_size: p.block_size,
            read_only: false,
            uuid: p.uuid.map(|u| u.0),
            kind: FileKind::Uring,
        },
    )?);
    app.config().record("bdev_uring_create", &p);
    Ok(p.name)
}

fn rescan(app: &App, name: &str, kind: &str) -> Result<bool, Error> {
    let bdev = super::of_kind(app, name, kind)?;
    let file = app.registry.get_as::<FileBdev>(bdev.name());
    let file = file.ok_or_else(|| Error::internal("a file bdev is of another type"))?;
    let path: &Path = file.path();
    file.rescan(&app.registry).map_err(|e| errors::open_file(path, e))?;
    Ok(true)
}

/// What creating one can fail with.
const CREATE_ERRORS: &[Errno] =
    &[Errno::NoEnt, Errno::Exist, Errno::Busy, Errno::Access, Errno::Inval];

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            "bdev_aio_create",
            "Create a bdev on a file or block device. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: CreateAio| create_aio(&a, p),
        )
        .errors(CREATE_ERRORS)
        .errors(&[Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            "bdev_uring_create",
            "Create a bdev on a file or block device. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: CreateUring| create_uring(&a, p),
        )
        .errors(CREATE_ERRORS);
    for (delete, rescan_, kind) in [
        ("bdev_aio_delete", "bdev_aio_rescan", "AIO disk"),
        ("bdev_uring_delete", "bdev_uring_rescan", "URING bdev"),
    ] {
        let doc = "Delete a bdev; an lvstore on it is unloaded first. The file stays.";
        super::add_delete(methods, app, delete, doc, kind);
        let a = app.clone();
        methods
            .add(
                rescan_,
                "Take over the size that the file or block device has now.",
                Flags::READ,
                move |p: BdevName| rescan(&a, &p.name, kind),
            )
            .errors(&[Errno::NoDev, Errno::Inval]);
    }
}
