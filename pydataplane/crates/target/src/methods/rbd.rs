//! Clusters of Ceph, and bdevs on their images, by SPDK's methods. A key that is given is recorded, as the
//! target needs it after a restart, in a file that only its user and root can read; it is neither logged nor
//! shown.

use super::pool::pools_on;
use super::{BdevName, MIB, UuidText, check_name, check_name_of, mib_to_bytes};
use crate::app::App;
use crate::cpumask::CpuMask;
use crate::errors;
use crate::guestdisks;
use crate::pools::{Backend, Pool};
use crate::privilege;
use crate::state::Item;
use crate::volume::Volume;
use bdev::Bdev;
use rbd::{Cluster, ClusterOptions, ConfigFile, Disk, OpenedImage, Source};
use rpc::{Errno, Error, Flags, Methods};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The method that makes a bdev on an image.
const CREATE: &str = "bdev_rbd_create";
/// The method that registers a cluster.
pub const REGISTER: &str = "bdev_rbd_register_cluster";

/// Parameters that may have a key in them.
const SECRETS: &[&str] = &["config", "config_param"];
/// Options of Ceph's that are secrets.
const SECRET_OPTIONS: &[&str] = &["key"];

/// How long a client of a cluster may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long an image may take to be opened and locked: longer than the half a minute after which the cluster
/// gives up a client that was killed.
const OPEN_TIMEOUT: Duration = Duration::from_secs(45);
/// How long an image may take to be resized.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long after an attempt to restore an image that another host has alone the next one is made.
pub const RETRY: Duration = Duration::from_secs(2);
/// How long an image may take to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of Ceph's, by name.
type CephOptions = BTreeMap<String, String>;

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RegisterCluster {
    /// Name.
    name: String,
    /// Name of the user, without `client.`. Default: admin
    #[serde(default)]
    user_id: Option<String>,
    /// Options of Ceph's, such as mon_host, and key; they go before those of the file.
    #[serde(default)]
    config_param: Option<CephOptions>,
    /// Path of the configuration. Default: /etc/ceph/ceph.conf, if it is there
    #[serde(default)]
    config_file: Option<String>,
    /// Path of the keyring.
    #[serde(default)]
    key_file: Option<String>,
    /// CPUs of Ceph's threads. Default: those that no reactor is bound to
    #[serde(default)]
    core_mask: Option<String>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ClusterName {
    /// Name of the cluster.
    name: String,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetClusters {
    /// Name of one cluster. Default: all
    #[serde(default)]
    name: Option<String>,
}

/// A cluster, with SPDK's fields.
#[derive(Serialize, JsonSchema)]
struct ClusterInfo {
    cluster_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    /// Without keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    config_param: Option<CephOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config_file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core_mask: Option<String>,
    /// Whether the target is connected to it (ours).
    connected: bool,
    /// Why it is not; where it is, what has not been answered (ours).
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// Bdevs on its images (ours).
    bdevs: Vec<String>,
}

/// One cluster, or all.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum ClusterInfos {
    One(Box<ClusterInfo>),
    All(Vec<ClusterInfo>),
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name. Default: Ceph0 or the next number that is free
    #[serde(default)]
    name: Option<String>,
    /// Name of the user, without `client.`, where there is no cluster_name. Default: admin
    #[serde(default)]
    user_id: Option<String>,
    /// Pool, or POOL/NAMESPACE.
    pool_name: String,
    /// Image, or IMAGE@SNAPSHOT, which is read-only.
    rbd_name: String,
    /// Bytes of a block: 512 or 4096.
    block_size: u32,
    /// Options of Ceph's, in place of its file, where there is no cluster_name. Default: /etc/ceph/ceph.conf
    #[serde(default)]
    config: Option<CephOptions>,
    /// Name of a cluster that is registered. Default: a client of its own, which bdevs with the same user and
    /// options share
    #[serde(default)]
    cluster_name: Option<String>,
    /// UUID. Default: one that the image has on every host
    #[serde(default)]
    uuid: Option<UuidText>,
    /// Refuse writes. Default: false
    #[serde(default)]
    read_only: Option<bool>,
    /// Let other clients write to the image, too; else it is locked for this target (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<bool>,
    /// It is for a VM that comes from another host, which has it locked until the VM runs here: only then it is
    /// locked for this target, and what is written before waits (ours). Default: false
    #[serde(default, skip_serializing)]
    incoming: Option<bool>,
    /// What is recorded of the bdev: by what the image shows that it is had by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    generation: Option<String>,
    /// Name of the pool whose volume the image is: it is also called POOL/IMAGE, what it holds is not looked at,
    /// and it goes when nobody uses it any more (ours). Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<String>,
    /// Path of a configuration, whose options those of `config` go before, where there is no cluster_name (ours).
    /// Default: none where there is a config
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config_file: Option<String>,
    /// It is a guest's disk: what it holds is not looked at, it goes when nobody uses it any more, or has within a
    /// minute, and /etc/ceph/ceph.conf is read beside `config`, if it is there (ours). Default: false
    #[serde(default, skip_serializing_if = "Option::is_none")]
    guest_disk: Option<bool>,
}

impl Create {
    fn is_guest_disk(&self) -> bool {
        self.guest_disk.unwrap_or(false)
    }

    /// The configuration of a client of its own.
    fn file(&self) -> ConfigFile {
        match &self.config_file {
            Some(path) => ConfigFile::Path(path.clone()),
            None if self.is_guest_disk() => ConfigFile::DefaultIfAny,
            None if self.config.is_some() => ConfigFile::None,
            None => ConfigFile::Default,
        }
    }

    /// Its other name, if it has one.
    fn alias(&self) -> Option<String> {
        self.pool.as_ref().map(|pool| format!("{pool}/{}", self.rbd_name))
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Name of the bdev.
    name: String,
    /// New size in MiB, no less than now.
    new_size: u64,
}

/// Without what is a secret.
fn shown(options: &CephOptions) -> CephOptions {
    let shown = options.iter().filter(|(name, _)| !SECRET_OPTIONS.contains(&name.as_str()));
    shown.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Takes what is a secret out of the parameters of a recorded call.
pub fn hide_secrets(params: &mut Map<String, Value>) {
    for options in SECRETS {
        if let Some(Value::Object(options)) = params.get_mut(*options) {
            options.retain(|name, _| !SECRET_OPTIONS.contains(&name.as_str()));
        }
    }
}

/// Who has a key is in no core dump.
fn keep_secrets(options: Option<&CephOptions>) {
    let has_secret =
        |options: &CephOptions| options.keys().any(|name| SECRET_OPTIONS.contains(&name.as_str()));
    if options.is_some_and(has_secret) {
        privilege::keep_out_of_dumps();
    }
}

fn wrong(item: &Item, e: &serde_json::Error) -> Error {
    Error::params(format!("wrong parameters of {}: {e}", item.call.method))
}

/// The parameters of a recorded call.
fn params_of<P: serde::de::DeserializeOwned>(item: &Item) -> Result<P, Error> {
    serde_json::from_value(Value::Object(item.call.params.clone())).map_err(|e| wrong(item, &e))
}

fn cluster_options(p: &RegisterCluster) -> Result<ClusterOptions, Error> {
    keep_secrets(p.config_param.as_ref());
    let cpus = match &p.core_mask {
        None => Vec::new(),
        Some(mask) => {
            let mask: CpuMask = mask.parse().map_err(|e| Error::os(Errno::Inval, e))?;
            mask.cpus().to_vec()
        }
    };
    Ok(ClusterOptions {
        user: p.user_id.clone(),
        config_file: p.config_file.clone().map_or(ConfigFile::DefaultIfAny, ConfigFile::Path),
        config: p.config_param.clone().unwrap_or_default(),
        key_file: p.key_file.clone(),
        cpus,
    })
}

fn register(app: &App, p: &RegisterCluster) -> Result<String, Error> {
    check_name_of("cluster", &p.name)?;
    let cluster = app.clusters.register(&p.name, cluster_options(p)?).map_err(errors::rbd)?;
    let wait = app.waits.begin(format!("cluster {}", p.name), "its monitors to answer".into());
    let connected = cluster.wait(CONNECT_TIMEOUT);
    drop(wait);
    drop(cluster);
    if let Err(why) = connected {
        _ = app.clusters.unregister(&p.name, &[]);
        return Err(errors::rbd(why));
    }
    app.config().record(REGISTER, p);
    Ok(p.name.clone())
}

/// Names of the bdevs on a cluster that has a name, also of those that are not restored.
fn bdevs_on(app: &App, cluster: &str) -> Vec<String> {
    let config = app.config();
    let of_it = |item: &&Item| {
        is_image(item)
            && item.call.params.get("cluster_name").and_then(Value::as_str) == Some(cluster)
    };
    let name = |item: &Item| Some(item.call.params.get("name")?.as_str()?.to_owned());
    config.items().filter(of_it).filter_map(name).collect()
}

fn unregister(app: &App, name: &str) -> Result<bool, Error> {
    if let Some(pool) = pools_on(app, name).first() {
        let why = format!("cluster {name} is in use by the pool {pool}: delete that first");
        return Err(Error::os(Errno::Busy, why));
    }
    app.clusters.unregister(name, &bdevs_on(app, name)).map_err(errors::rbd)?;
    app.config().forget(|item| is_cluster(item) && item.key == crate::state::cluster_key(name));
    Ok(true)
}

fn info(app: &App, cluster: &Cluster) -> ClusterInfo {
    let name = cluster.name().to_owned();
    let recorded = app.config().get(&crate::state::cluster_key(&name)).cloned();
    let recorded = recorded.and_then(|item| params_of::<RegisterCluster>(&item).ok());
    let problem = cluster.wait(Duration::ZERO).err();
    let unanswered = cluster.unanswered();
    let options = cluster.options();
    ClusterInfo {
        user_id: options.user.clone(),
        config_param: Some(shown(&options.config)).filter(|options| !options.is_empty()),
        config_file: match &options.config_file {
            ConfigFile::Path(path) => Some(path.clone()),
            ConfigFile::Default | ConfigFile::DefaultIfAny | ConfigFile::None => None,
        },
        key_file: options.key_file.clone(),
        core_mask: recorded.and_then(|p| p.core_mask),
        connected: problem.is_none(),
        problem: problem.map(|why| why.to_string()).or(unanswered),
        bdevs: bdevs_on(app, &name),
        cluster_name: name,
    }
}

fn get_clusters(app: &App, p: &GetClusters) -> Result<ClusterInfos, Error> {
    if let Some(name) = &p.name {
        let cluster = app.clusters.get(name).map_err(errors::rbd)?;
        return Ok(ClusterInfos::One(Box::new(info(app, &cluster))));
    }
    let all = app.clusters.list();
    if all.is_empty() {
        // As SPDK.
        let why = "no cluster is registered: bdev_rbd_register_cluster registers one";
        return Err(Error::os(Errno::NoEnt, why));
    }
    Ok(ClusterInfos::All(all.iter().map(|cluster| info(app, cluster)).collect()))
}

/// Whether `item` registers a cluster.
pub fn is_cluster(item: &Item) -> bool {
    item.call.method == REGISTER
}

/// Whether `item` makes a bdev on an image.
pub fn is_image(item: &Item) -> bool {
    item.call.method == CREATE
}

/// Registers the cluster of `item`, one of [`is_cluster`], again, if it is not registered; it connects when it
/// answers.
///
/// # Errors
/// It cannot be registered at all.
pub fn restore_cluster(app: &App, item: &Item) -> Result<(), Error> {
    let p: RegisterCluster = params_of(item)?;
    match app.clusters.register(&p.name, cluster_options(&p)?) {
        Ok(_) | Err(rbd::Error::Exists(_)) => Ok(()),
        Err(e) => Err(errors::rbd(e)),
    }
}

/// The cluster of an image.
fn cluster_of(app: &App, p: &Create) -> Result<Arc<Cluster>, Error> {
    if let Some(name) = &p.cluster_name {
        return app.clusters.get(name).map_err(errors::rbd);
    }
    keep_secrets(p.config.as_ref());
    let options = ClusterOptions {
        user: p.user_id.clone(),
        config_file: p.file(),
        config: p.config.clone().unwrap_or_default(),
        key_file: None,
        cpus: Vec::new(),
    };
    app.clusters.unnamed(options).map_err(errors::rbd)
}

fn source(p: &Create) -> Source {
    Source {
        pool: p.pool_name.clone(),
        image: p.rbd_name.clone(),
        read_only: p.read_only.unwrap_or(false),
        shared: p.shared.unwrap_or(false),
        incoming: p.incoming.unwrap_or(false),
        for_guests: p.is_guest_disk() || p.pool.is_some(),
        generation: p.generation.clone(),
        boot: peer::boot_id().to_owned(),
    }
}

/// The name that a new bdev is to have.
fn name_of(app: &App, p: &mut Create) -> Result<String, Error> {
    let name = match p.name.take() {
        Some(name) => name,
        None => (0u64..)
            .map(|i| format!("Ceph{i}"))
            .find(|name| app.registry.get(name).is_none())
            .ok_or_else(|| Error::internal("no name is free"))?,
    };
    check_name(&name)?;
    p.name = Some(name.clone());
    Ok(name)
}

/// How a volume is opened.
#[derive(Clone, Copy)]
pub struct Way {
    /// Other hosts may write to it, too.
    pub shared: bool,
    /// For a VM that comes from another host.
    pub incoming: bool,
}

/// Opens a volume of a pool and makes it a bdev.
///
/// # Errors
/// As those of the method.
pub fn open_volume(app: &App, pool: &Pool, volume: &Volume, way: Way) -> Result<(), Error> {
    let Backend::Ceph { cluster, path, block_size, .. } = &pool.backend else {
        return Err(Error::internal(format!("{} is no image of Ceph", pool.alias(volume))));
    };
    let p = Create {
        name: Some(volume.uuid.to_string()),
        user_id: None,
        pool_name: path.clone(),
        rbd_name: volume.name(),
        block_size: *block_size,
        config: None,
        cluster_name: Some(cluster.name().to_owned()),
        uuid: Some(UuidText(volume.uuid)),
        read_only: None,
        shared: way.shared.then_some(true),
        incoming: way.incoming.then_some(true),
        generation: None,
        pool: Some(pool.name.clone()),
        config_file: None,
        guest_disk: None,
    };
    create(app, p).map(drop)
}

/// Opens the image of `item`, one of [`is_image`], for another guest than that which it was opened for.
///
/// # Errors
/// As those of the method.
pub fn open_again(app: &App, item: &Item) -> Result<(), Error> {
    let p = Create { generation: None, ..params_of(item)? };
    create(app, p).map(drop)
}

/// Makes the bdev of `item`, one of [`is_image`], again in the process that made it.
///
/// # Errors
/// As those of the method.
pub fn again(app: &App, item: &Item) -> Result<(), Error> {
    create(app, params_of(item)?).map(drop)
}

fn create(app: &App, mut p: Create) -> Result<String, Error> {
    let name = name_of(app, &mut p)?;
    if p.is_guest_disk() {
        app.ask_for_guest_disk(&name, p.incoming == Some(true))?;
    }
    if app.registry.get(&name).is_some() {
        // Before the image is locked.
        let why = format!("the name {name} is taken by another bdev: choose another");
        return Err(Error::os(Errno::Exist, why));
    }
    let cluster = cluster_of(app, &p)?;
    let source = source(&p);
    let _wait =
        app.waits.begin(format!("bdev {name}"), format!("image {} to be opened", source.path()));
    cluster.wait(CONNECT_TIMEOUT).map_err(errors::rbd)?;
    let what = format!("image {}", source.path());
    let (registry, block_size, alias) = (app.registry.clone(), p.block_size, p.alias());
    let (uuid, of) = (p.uuid.map(|uuid| uuid.0), name.clone());
    let disk = rbd::within(OPEN_TIMEOUT, (what, "been opened"), move || {
        let opened = OpenedImage::open(&cluster, source)?;
        Disk::create(&registry, (&of, alias), opened, block_size, uuid)
    });
    let disk = disk.map_err(errors::rbd)?;
    p.generation = Some(disk.generation().to_owned());
    let disk: Arc<dyn Bdev> = disk;
    p.uuid = Some(UuidText(disk.uuid()));
    match p.pool.is_some() {
        true => {
            // Before anybody can look for it.
            app.pools.open().insert(name.clone());
            app.register(Arc::clone(&disk))?;
        }
        false if p.is_guest_disk() => {
            app.guest_disks.add(&name);
            app.register(Arc::clone(&disk))?;
        }
        false => app.add_bdev(Arc::clone(&disk))?,
    }
    app.record_bdev(&disk, CREATE, &p);
    Ok(name)
}

/// Opens the image of `item`, one of [`is_image`], which another process may have locked meanwhile, for
/// [`restore`]. When it returns the cluster has answered. `None`: `restore` has to say why it cannot be opened.
pub fn ahead(app: &App, item: &Item) -> Option<OpenedImage> {
    let p: Create = params_of(item).ok()?;
    let cluster = cluster_of(app, &p).ok()?;
    if p.cluster_name.is_none() {
        app.clusters.keep(Arc::clone(&cluster));
    }
    OpenedImage::open(&cluster, source(&p)).ok()
}

/// Makes the bdev of `item`, one of [`is_image`], again, of the image that was opened `ahead` for it, if it was;
/// not if the item is deleted or replaced while its cluster does not answer.
///
/// # Errors
/// As those of the method; or it is not wanted any more. Whether it may be had later: it is to be shared, and another
/// host has it alone.
pub fn restore(app: &App, item: &Item, ahead: Option<OpenedImage>) -> Result<(), (Error, bool)> {
    let never = |error| (error, false);
    let mut p: Create = params_of(item).map_err(never)?;
    let name = name_of(app, &mut p).map_err(never)?;
    let what = format!("image {} to be opened", source(&p).path());
    let wait = app.waits.begin(format!("bdev {name}"), what);
    let opened = match ahead {
        Some(opened) => opened,
        None => {
            let cluster = cluster_of(app, &p).map_err(never)?;
            OpenedImage::open(&cluster, source(&p)).map_err(errors::rbd).map_err(never)?
        }
    };
    let uuid = p.uuid.map(|uuid| uuid.0);
    let disk = Disk::create(&app.registry, (&name, p.alias()), opened, p.block_size, uuid);
    let disk = disk.map_err(|why| {
        let passes = matches!(why, rbd::Error::Unshared { .. });
        (errors::rbd(why), passes)
    })?;
    p.generation = Some(disk.generation().to_owned());
    let disk: Arc<dyn Bdev> = disk;
    drop(wait);
    p.uuid = Some(UuidText(disk.uuid()));
    if p.pool.is_some() {
        app.pools.open().insert(name);
    } else if p.is_guest_disk() {
        app.guest_disks.add_used(&name);
    }
    app.add_restored(Arc::clone(&disk), item).map_err(never)?;
    app.record_bdev(&disk, CREATE, &p);
    Ok(())
}

fn disk(app: &App, name: &str) -> Result<Arc<Disk>, Error> {
    let bdev = super::of_kind(app, name, Disk::PRODUCT)?;
    let disk = app.registry.get_as::<Disk>(bdev.name());
    disk.ok_or_else(|| Error::internal("an image of Ceph is of another type"))
}

fn resize(app: &App, p: &Resize) -> Result<bool, Error> {
    let disk = disk(app, &p.name)?;
    let bytes = mib_to_bytes(p.new_size)?;
    if bytes < disk.geometry().bytes() {
        let now = disk.geometry().bytes().div_ceil(MIB);
        let why = format!("bdev {} has {now} MiB, and does not become smaller", p.name);
        return Err(Error::os(Errno::Inval, why));
    }
    let what = format!("image {}", disk.source().path());
    let _wait = app.waits.begin(format!("bdev {}", p.name), format!("{what} to be resized"));
    let resized = rbd::within(RESIZE_TIMEOUT, (what, "been resized"), move || disk.resize(bytes));
    resized.map_err(errors::rbd)?;
    Ok(true)
}

fn delete(app: &App, name: &str) -> Result<bool, Error> {
    let closing = app.closing(name);
    super::delete(app, name, Disk::PRODUCT)?;
    // Then it is free for others.
    if closing.is_some_and(|closing| !closing.wait(CLOSE_TIMEOUT)) {
        tracing::warn!("bdev {name} is deleted, but its cluster has not let go of the image yet");
    }
    Ok(true)
}

/// Adds the methods.
pub fn add(methods: &mut Methods, app: &Arc<App>) {
    let a = app.clone();
    methods
        .add(
            REGISTER,
            "Connect to a cluster of Ceph, whose images bdevs can be on then. Needs the option --rbd and \
             Debian's package librbd1.",
            Flags::LONG_WRITE,
            move |p: RegisterCluster| register(&a, &p),
        )
        .secrets(&["config_param"])
        .errors(&[
            Errno::Exist,
            Errno::NoEnt,
            Errno::Access,
            Errno::Perm,
            Errno::Inval,
            Errno::Io,
            Errno::NotSup,
            Errno::TimedOut,
        ]);
    let a = app.clone();
    methods
        .add(
            "bdev_rbd_unregister_cluster",
            "End the connection to a cluster; refused while there are bdevs on its images.",
            Flags::WRITE,
            move |p: ClusterName| unregister(&a, &p.name),
        )
        .errors(&[Errno::NoEnt, Errno::Busy]);
    let a = app.clone();
    methods
        .add(
            "bdev_rbd_get_clusters_info",
            "Get all clusters that are registered, or one; an error where there is none, as SPDK.",
            Flags::READ,
            move |p: GetClusters| get_clusters(&a, &p),
        )
        .errors(&[Errno::NoEnt]);
    let a = app.clone();
    methods
        .add(
            CREATE,
            "Create a bdev on an image of Ceph, which is locked for this target unless it is shared or \
             read-only. An lvstore on it is loaded.",
            Flags::LONG_WRITE,
            move |p: Create| {
                let is_guest_disk = p.is_guest_disk();
                // What was recorded of another bdev says nothing of this one.
                let made = create(&a, Create { generation: None, ..p });
                if is_guest_disk {
                    guestdisks::watch(&a);
                }
                made
            },
        )
        .secrets(&["config"])
        .errors(&[
            Errno::NoEnt,
            Errno::Exist,
            Errno::Busy,
            Errno::Access,
            Errno::Perm,
            Errno::Inval,
            Errno::Io,
            Errno::NotSup,
            Errno::TimedOut,
        ]);
    let a = app.clone();
    methods
        .add(
            "bdev_rbd_resize",
            "Make an image larger, in use or not. One that another client resizes is noticed without.",
            Flags::LONG_WRITE,
            move |p: Resize| resize(&a, &p),
        )
        .errors(&[Errno::NoDev, Errno::Inval, Errno::Io, Errno::TimedOut]);
    let a = app.clone();
    methods
        .add(
            "bdev_rbd_delete",
            "Delete a bdev on an image; an lvstore on it is unloaded first. The image stays.",
            Flags::LONG_WRITE,
            move |p: BdevName| delete(&a, &p.name),
        )
        .errors(&[Errno::NoDev, Errno::Busy]);
}
