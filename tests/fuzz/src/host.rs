//! A controller of this process, for targets that connect to its socket.

use std::path::PathBuf;
use std::sync::OnceLock;

use bdev::{Malloc, MallocOptions, Protection, ProtectionType, Registry};
use protection::ProtectedDisk;
use reactor::{Idle, Reactors};
use vhost_scsi::{ControllerOptions, Controllers, Settings, TargetOptions, Timeouts};

/// Name of the controller.
pub(crate) const NAME: &str = "vm";
/// Name of one with a disk that has protection information as target 0, and one without as 1.
pub(crate) const PROTECTED_NAME: &str = "pi";
/// Name of one with a virtio-blk disk.
pub(crate) const BLK_NAME: &str = "blk";
/// Blocks of its disks.
pub(crate) const BLOCKS: u64 = 64;

/// Reactors and the controller, until the process ends. Target 0 is a disk, 1 one that cannot be
/// written.
pub(crate) struct Host {
    pub(crate) controllers: Controllers,
    pub(crate) socket: PathBuf,
    _reactors: Reactors,
    directory: tempfile::TempDir,
}

impl Host {
    /// The socket of the controller of that name.
    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// The one that there is.
pub(crate) fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let directory = tempfile::tempdir().expect("a folder");
        let idle = Idle::Adaptive { spin_us: 1 };
        let reactors = Reactors::start(&[None], idle).expect("a reactor");
        let registry = Registry::new();
        let settings = Settings {
            directory: directory.path().into(),
            mode: 0o600,
            uid: None,
            gid: None,
            timeouts: Timeouts::default(),
            marks: None,
        };
        let controllers = Controllers::new(registry.clone(), reactors.handles(), settings);
        controllers.create(NAME, ControllerOptions::default()).expect("a controller");
        let disk = |name: &str| {
            let options = MallocOptions {
                name: name.into(),
                block_size: 512,
                physical_block_size: 0,
                num_blocks: BLOCKS,
                uuid: None,
            };
            registry.register(Malloc::create(options).expect("a disk")).expect("a free name");
        };
        disk("blk");
        let blk = (ControllerOptions::default(), TargetOptions::default());
        controllers.create_blk(BLK_NAME, blk.0, "blk", blk.1).expect("a controller");
        let options = MallocOptions {
            name: "protected".into(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: BLOCKS,
            uuid: None,
        };
        let below = Malloc::with_metadata(options, 8).expect("a disk");
        let shown = Protection { kind: ProtectionType::Type1, interleaved: true, at_head: false };
        registry.register(ProtectedDisk::new(below, shown)).expect("a free name");
        disk("beside");
        controllers.create(PROTECTED_NAME, ControllerOptions::default()).expect("a controller");
        for (number, name) in ["protected", "beside"].into_iter().enumerate() {
            let options = TargetOptions::default();
            controllers.add_target(PROTECTED_NAME, number as i64, name, options).expect("a target");
        }
        for (number, name) in ["disk", "fixed"].into_iter().enumerate() {
            disk(name);
            let options = TargetOptions { read_only: number == 1, ..TargetOptions::default() };
            controllers.add_target(NAME, number as i64, name, options).expect("a target");
        }
        let socket = directory.path().join(NAME);
        Host { controllers, socket, _reactors: reactors, directory }
    })
}
