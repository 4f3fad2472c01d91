//! Bdevs on files and block devices. SPDK has two kinds, `aio` and `uring`; here both are the same
//! io_uring backend under the name that was asked for.

use super::protected::{self, Asked};
use super::{BdevName, UuidText, unsupported};
use crate::app::App;
use crate::errors;
use crate::state::Item;
use bdev::{AlignedBuf, BUF_ALIGN, Bdev, FileBdev, FileKind, FileOptions, OpenedFile, TUPLE_LEN};
use rpc::{Errno, Error, Flags, Methods};
use rustix::fs::OFlags;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// The methods that make one.
const AIO: &str = "bdev_aio_create";
const URING: &str = "bdev_uring_create";

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
    /// Type of the T10 protection information that lies behind each block in the file, 8 bytes that come on
    /// top of block_size, which is 512 by default then: 1 or 3, or 0 for none (ours). Default: 0
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dif_type: Option<i32>,
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
    /// As that of bdev_aio_create (ours). Default: 0
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dif_type: Option<i32>,
}

/// The path from the root: where the target is started does not matter at the next start.
fn absolute(filename: &str) -> Result<String, Error> {
    let path = std::path::absolute(filename)
        .map_err(|e| Error::io(format_args!("{filename:?} is no path"), &e))?;
    // It came as text, and so did the working directory unless somebody is very creative.
    let path = path.into_os_string().into_string();
    path.map_err(|_| Error::os(Errno::Inval, format_args!("the path of {filename} is not text")))
}

/// What brings back a bdev that is recorded.
struct Restore<'a> {
    item: &'a Item,
    /// Its file, if that was opened ahead.
    ahead: Option<OpenedFile>,
}

/// Opens the file of a bdev, makes it known and records the call `method` that made it. `dif_type`: of the
/// protection information in its blocks; `params`: the call's parameters with that UUID.
fn create<P: Serialize>(
    app: &App,
    (options, dif_type): (FileOptions, Option<i32>),
    method: &str,
    params: impl FnOnce(UuidText) -> P,
    restore: Option<Restore<'_>>,
) -> Result<String, Error> {
    super::check_name(&options.name)?;
    let md_size = dif_type.filter(|kind| *kind != 0).map(|_| TUPLE_LEN as u32);
    let asked =
        Asked { md_size, md_interleave: md_size.map(|_| true), dif_type, ..Asked::default() };
    let protection = asked.checked(method)?;
    let (name, path) = (options.name.clone(), options.path.clone());
    let wait = app.waits.begin(format!("bdev {name}"), format!("{} to be opened", path.display()));
    let (item, ahead) = restore.map_or((None, None), |r| (Some(r.item), r.ahead));
    let file = FileBdev::with_metadata(options, protected::bytes_of(protection), ahead)
        .map_err(|e| errors::open_file(&path, e))?;
    drop(wait);
    app.flush_errors.attach(&*file, &path);
    let uuid = UuidText(file.uuid());
    let file = protected::shown(file, protection);
    match item {
        Some(item) => app.add_restored(file.clone(), item)?,
        None => app.add_bdev(file.clone())?,
    }
    app.record_bdev(&file, method, &params(uuid));
    Ok(name)
}

fn create_aio(app: &App, mut p: CreateAio, restore: Option<Restore<'_>>) -> Result<String, Error> {
    unsupported(AIO, &[("nowait", p.nowait.unwrap_or(false))])?;
    p.filename = absolute(&p.filename)?;
    let options = FileOptions {
        name: p.name.clone(),
        path: (&p.filename).into(),
        block_size: p.block_size,
        read_only: p.readonly.unwrap_or(false),
        uuid: p.uuid.map(|u| u.0),
        kind: FileKind::Aio,
    };
    create(app, (options, p.dif_type), AIO, |uuid| CreateAio { uuid: Some(uuid), ..p }, restore)
}

fn create_uring(
    app: &App,
    mut p: CreateUring,
    restore: Option<Restore<'_>>,
) -> Result<String, Error> {
    p.filename = absolute(&p.filename)?;
    let options = FileOptions {
        name: p.name.clone(),
        path: (&p.filename).into(),
        block_size: p.block_size,
        read_only: false,
        uuid: p.uuid.map(|u| u.0),
        kind: FileKind::Uring,
    };
    create(app, (options, p.dif_type), URING, |uuid| CreateUring { uuid: Some(uuid), ..p }, restore)
}

/// Whether `item` makes a bdev on a file or block device.
pub fn is_disk(item: &Item) -> bool {
    [AIO, URING].contains(&item.call.method.as_str())
}

/// Opens the file of `item`, one of [`is_disk`], which another process may use meanwhile, for [`restore`], and
/// reads a block of it. When it returns the disk has answered, if only that it cannot be read. `None`:
/// `restore` has to open it, as only one process may have it open, or to say why it cannot be.
pub fn ahead(item: &Item) -> Option<OpenedFile> {
    let params = &item.call.params;
    let path = params.get("filename").and_then(Value::as_str)?;
    let read_only = params.get("readonly").and_then(Value::as_bool) == Some(true);
    match OpenedFile::ahead(Path::new(path), read_only) {
        Ok(Some(file)) => {
            _ = file.ask();
            Some(file)
        }
        _ => {
            ask(path);
            None
        }
    }
}

/// Reads a block of a disk.
fn ask(path: &str) {
    let open = |flags| File::options().read(true).custom_flags(flags).open(path);
    // Opening something else, such as a tape, may have effects.
    let is_disk = |m: Metadata| m.is_file() || m.file_type().is_block_device();
    if !fs::metadata(path).is_ok_and(is_disk) {
        return;
    }
    // What the page cache has says nothing of the disk.
    let direct = OFlags::DIRECT.bits().cast_signed();
    if let Ok(file) = open(direct).or_else(|_| open(0)) {
        _ = file.read_at(&mut AlignedBuf::zeroed(BUF_ALIGN), 0);
    }
}

/// Makes the bdev of `item`, one of [`is_disk`], again, of the file that was opened `ahead` for it, if it was;
/// not if the item is deleted or replaced while its disk does not answer.
///
/// # Errors
/// As those of the method; or it is not wanted any more.
pub fn restore(app: &App, item: &Item, ahead: Option<OpenedFile>) -> Result<(), Error> {
    let params = Value::Object(item.call.params.clone());
    let wrong = |e| Error::params(format!("wrong parameters of {}: {e}", item.call.method));
    let restore = Some(Restore { item, ahead });
    match item.call.method.as_str() {
        AIO => create_aio(app, CreateAio::deserialize(params).map_err(wrong)?, restore),
        _ => create_uring(app, CreateUring::deserialize(params).map_err(wrong)?, restore),
    }
    .map(drop)
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
            AIO,
            "Create a bdev on a file or block device. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: CreateAio| create_aio(&a, p, None),
        )
        .errors(CREATE_ERRORS)
        .errors(&[Errno::NotSup]);
    let a = app.clone();
    methods
        .add(
            URING,
            "Create a bdev on a file or block device. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: CreateUring| create_uring(&a, p, None),
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
