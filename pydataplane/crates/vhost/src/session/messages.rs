//! Messages of a peer become calls of the [`Device`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use guestmem::{MAX_REGIONS, RegionSpec};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
// Two items of the crate are named by its trait but not re-exported with the messages.
use vhost::VhostUserMemoryRegionBase;
use virtqueue::InflightRegion;

use super::end::End;
use crate::defs::{Config, MAX_REQUEST_QUEUES};
use crate::device::{Addresses, Device, DeviceError};
use crate::front::Front;

/// What messages act on.
pub(crate) struct Handler {
    pub(crate) device: Device,
    /// The session must end: an error that could not be answered.
    pub(super) fatal: Option<End>,
    /// Protocol features that the peer acknowledged.
    pub(super) protocol: u64,
}

impl Handler {
    /// For a peer that has said nothing yet.
    pub(super) fn new(device: Device) -> Self {
        Handler { device, fatal: None, protocol: 0 }
    }

    /// An error of a message whose sender waits for a reply that will not come.
    fn fatal<T>(&mut self, why: impl ToString) -> Result<T> {
        self.fatal = Some(End::Broken(why.to_string()));
        Err(Error::BackendInternalError)
    }

    /// What the device says to a message. The session does not survive a wait that did not end: the
    /// message was half done.
    fn did<T>(&mut self, outcome: std::result::Result<T, DeviceError>) -> Result<T> {
        match outcome {
            Ok(done) => Ok(done),
            Err(why @ DeviceError::Stuck { .. }) => {
                self.fatal = Some(End::Stuck(why.to_string()));
                Err(Error::BackendInternalError)
            }
            Err(why) => Err(refuse(why)),
        }
    }
}

/// A refusal that the session survives.
fn refuse(why: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::ReqHandlerError(io::Error::other(why))
}

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

fn region(of: &VhostUserMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_addr: of.guest_phys_addr,
        size: of.memory_size,
        user_addr: of.user_addr,
        mmap_offset: of.mmap_offset,
    }
}

/// The descriptor of a ring, which must be an eventfd. Reactors write to it and wait for it, and
/// anything else may make them wait for whoever is behind it: a pipe, a file of a FUSE mount.
fn eventfd(file: Option<File>) -> Result<Option<OwnedFd>> {
    #[derive(Debug, thiserror::Error)]
    #[error("the descriptor of a ring is {0}; only an eventfd can be used")]
    struct NotAnEventfd(String);
    let Some(file) = file else { return Ok(None) };
    let fd = OwnedFd::from(file);
    match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
        Ok(name) if name.as_os_str() == "anon_inode:[eventfd]" => Ok(Some(fd)),
        Ok(name) => Err(refuse(NotAnEventfd(name.display().to_string()))),
        Err(why) => Err(Error::ReqHandlerError(why)),
    }
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        let outcome = self.device.reset();
        self.did(outcome)
    }

    fn reset_device(&mut self) -> Result<()> {
        let outcome = self.device.reset();
        self.did(outcome)
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.offered_features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let outcome = self.device.set_features(features);
        self.did(outcome)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let table: Vec<_> =
            regions.iter().map(region).zip(files.into_iter().map(OwnedFd::from)).collect();
        let outcome = self.device.change_memory(|old| old.replaced(table));
        self.did(outcome).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let outcome = self.device.set_size(index, num);
        self.did(outcome)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let addresses =
            Addresses { desc: descriptor, avail: available, used, log: logged.then_some(log) };
        let outcome = self.device.set_addresses(index, addresses);
        self.did(outcome)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let outcome = self.device.set_base(index, base);
        self.did(outcome)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        match self.device.take_base(index) {
            Ok(base) => Ok(VhostUserVringState::new(index, u32::from(base))),
            Err(why @ DeviceError::Stuck { .. }) => self.did(Err(why)),
            Err(why) => self.fatal(why),
        }
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_kick(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_call(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let outcome = self.device.set_err(u32::from(index), eventfd(fd)?);
        self.did(outcome)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        // The library adds REPLY_ACK. CONFIG is for front ends that ask what the device's limits are;
        // QEMU knows them itself, and since 7.1 says once that it ignores CONFIG for SCSI. Nothing
        // before this message tells who asks.
        let all = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        // What else there is to tell a driver of virtio-scsi is told in its event queue.
        Ok(match self.device.front() {
            Front::Scsi => all,
            Front::Blk => all | VhostUserProtocolFeatures::BACKEND_REQ,
        })
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        // The library looks at them; none changes the device.
        self.protocol = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.front().queues() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let outcome = self.device.set_enabled(index, enable);
        self.did(outcome)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let (offset, size) = (offset as usize, size as usize);
        let bytes = match self.device.front() {
            Front::Scsi => Config::new(MAX_REQUEST_QUEUES as u32).read(offset, size),
            Front::Blk => self.device.blk_config().read(offset, size),
        };
        // An error becomes an empty reply.
        bytes.ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        #[derive(Debug, thiserror::Error)]
        enum Fixed {
            #[error("configuration bytes at {0} are fixed: sense_size is 96 and cdb_size is 32")]
            Scsi(u32),
            #[error(
                "configuration bytes at {0} are fixed: no field can be written without CONFIG_WCE"
            )]
            Blk(u32),
        }
        let config = Config::new(MAX_REQUEST_QUEUES as u32);
        match self.device.front() {
            Front::Scsi if config.accepts(offset as usize, buf) => Ok(()),
            Front::Scsi => Err(refuse(Fixed::Scsi(offset))),
            Front::Blk => Err(refuse(Fixed::Blk(offset))),
        }
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        spec: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let (spec, fd) = (region(spec), OwnedFd::from(fd));
        let outcome = self.device.change_memory(|old| old.with_region(spec, &fd));
        self.did(outcome).map(|()| None)
    }

    fn remove_mem_region(&mut self, spec: &VhostUserSingleMemoryRegion) -> Result<()> {
        let spec = region(spec);
        let outcome = self.device.change_memory(|old| old.without_region(spec));
        self.did(outcome)
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let (offset, size) = (log.mmap_offset, log.mmap_size);
        let log = self.device.table().make_log(file.as_fd(), offset, size);
        match log {
            Ok(log) => {
                let outcome = self.device.set_log(log);
                self.did(outcome)
            }
            // QEMU waits for a reply that a failure does not get.
            Err(why) => self.fatal(why),
        }
    }

    fn get_inflight_fd(&mut self, of: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (of.num_queues, of.queue_size);
        match InflightRegion::make(queues, size) {
            Ok(fd) if usize::from(queues) <= self.device.front().queues() => {
                let bytes = InflightRegion::bytes(queues, size);
                Ok((VhostUserInflight::new(bytes, 0, queues, size), File::from(fd)))
            }
            // The peer waits for a reply that a failure does not get.
            Ok(_) => self.fatal(DeviceError::NoQueue(u32::from(queues) - 1)),
            Err(why) => self.fatal(why),
        }
    }

    fn set_inflight_fd(&mut self, of: &VhostUserInflight, file: File) -> Result<()> {
        let (offset, bytes) = (of.mmap_offset, of.mmap_size);
        let (queues, size) = (of.num_queues, of.queue_size);
        if usize::from(queues) > self.device.front().queues() {
            return Err(refuse(DeviceError::NoQueue(u32::from(queues) - 1)));
        }
        let fd = OwnedFd::from(file);
        let table = self.device.table();
        match InflightRegion::map(table, fd, offset, bytes, queues, size) {
            Ok(region) => {
                let outcome = self.device.set_inflight(region);
                self.did(outcome)
            }
            Err(why) => Err(refuse(why)),
        }
    }

    // Never offered, so never sent by a peer that keeps to the protocol.

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }
}
