//! The vhost-user socket. The only importer of the `vhost` crate.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use guestmem::RegionSpec;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;
use crate::inflight::{Extent, Inflight};

/// Virtio and vhost-user feature bits that the front end knows.
pub mod feature {
    /// virtio-scsi: LUNs come and go by events (virtio 1.2, 5.6.3).
    pub const SCSI_HOTPLUG: u64 = 1 << 1;
    /// virtio-scsi: parameters change by events.
    pub const SCSI_CHANGE: u64 = 1 << 2;
    /// virtio-scsi: requests say how much protection information they carry (5.6.3).
    pub const SCSI_T10_PI: u64 = 1 << 3;
    /// vhost: log writes to guest memory.
    pub const LOG_ALL: u64 = 1 << 26;
    /// Indirect descriptors (2.7.5.3).
    pub const INDIRECT: u64 = 1 << 28;
    /// Event indexes (2.7.7).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user: protocol features can be negotiated.
    pub const PROTOCOL: u64 = 1 << 30;
    /// virtio 1.x.
    pub const VERSION_1: u64 = 1 << 32;
    /// virtio-blk: flush (5.2.3).
    pub const BLK_FLUSH: u64 = 1 << 9;
    /// virtio-blk: more than one queue.
    pub const BLK_MQ: u64 = 1 << 12;
    /// virtio-blk: discard.
    pub const BLK_DISCARD: u64 = 1 << 13;
    /// virtio-blk: write zeroes.
    pub const BLK_WRITE_ZEROES: u64 = 1 << 14;
}

/// A vring as the target is told of it; addresses are our own ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vring {
    /// Descriptors.
    pub size: u16,
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
    /// Guest address under which the used ring is logged, if it is.
    pub log: Option<u64>,
}

/// More queues than any device has; the `vhost` crate checks indexes against it.
const QUEUE_LIMIT: u64 = 256;

/// One connection to a target. Replies are waited for as long as they take, as QEMU does.
pub struct Connection {
    front: Frontend,
    /// What the target offered.
    pub offered: u64,
    /// What was acknowledged of it.
    pub features: u64,
    protocol: VhostUserProtocolFeatures,
}

fn fail<E: std::fmt::Display>(message: &'static str) -> impl Fn(E) -> Error {
    move |why| Error::Protocol { message, why: why.to_string() }
}

impl Connection {
    /// Connects and negotiates: acknowledges what is in `wanted` and offered, takes ownership.
    pub fn open(path: &Path, wanted: u64) -> Result<Connection, Error> {
        let stream = UnixStream::connect(path)
            .map_err(|why| Error::Connect { path: path.to_owned(), why })?;
        let mut front = Frontend::from_stream(stream, QUEUE_LIMIT);
        let offered = front.get_features().map_err(fail("GET_FEATURES"))?;
        let features = offered & (wanted | feature::PROTOCOL);
        let mut protocol = VhostUserProtocolFeatures::empty();
        if features & feature::PROTOCOL != 0 {
            let has = front.get_protocol_features().map_err(fail("GET_PROTOCOL_FEATURES"))?;
            protocol = has
                & (VhostUserProtocolFeatures::MQ
                    | VhostUserProtocolFeatures::LOG_SHMFD
                    | VhostUserProtocolFeatures::REPLY_ACK
                    | VhostUserProtocolFeatures::CONFIG
                    | VhostUserProtocolFeatures::INFLIGHT_SHMFD
                    | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
            front.set_protocol_features(protocol).map_err(fail("SET_PROTOCOL_FEATURES"))?;
            if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        let connection = Connection { front, offered, features, protocol };
        connection.front.set_owner().map_err(fail("SET_OWNER"))?;
        connection.front.set_features(features).map_err(fail("SET_FEATURES"))?;
        Ok(connection)
    }

    /// Asks for the features again: whether the target answers.
    pub fn probe(&self) -> Result<u64, Error> {
        self.front.get_features().map_err(fail("GET_FEATURES"))
    }

    /// Bits of the protocol features in use.
    pub fn protocol(&self) -> u64 {
        self.protocol.bits()
    }

    /// Queues that the target has (GET_QUEUE_NUM), or `None` without MQ.
    pub fn queue_num(&mut self) -> Result<Option<u64>, Error> {
        if !self.protocol.contains(VhostUserProtocolFeatures::MQ) {
            return Ok(None);
        }
        self.front.get_queue_num().map(Some).map_err(fail("GET_QUEUE_NUM"))
    }

    /// Memory slots that the target has, or `None` without CONFIGURE_MEM_SLOTS.
    pub fn max_mem_slots(&mut self) -> Result<Option<u64>, Error> {
        if !self.protocol.contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS) {
            return Ok(None);
        }
        self.front.get_max_mem_slots().map(Some).map_err(fail("GET_MAX_MEM_SLOTS"))
    }

    /// Acknowledges other features, as QEMU does when migration starts and ends.
    pub fn set_features(&mut self, features: u64) -> Result<(), Error> {
        self.features = features;
        self.front.set_features(features).map_err(fail("SET_FEATURES"))
    }

    /// Asks for an in-flight region for `queues` queues of `queue_size` descriptors (GET_INFLIGHT_FD);
    /// `None`: the target has none.
    pub fn get_inflight(
        &mut self,
        queues: u16,
        queue_size: u16,
    ) -> Result<Option<Inflight>, Error> {
        if !self.protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            return Ok(None);
        }
        let wanted = VhostUserInflight::new(0, 0, queues, queue_size);
        let (got, file) = self.front.get_inflight_fd(&wanted).map_err(fail("GET_INFLIGHT_FD"))?;
        let (bytes, offset) = (got.mmap_size, got.mmap_offset);
        Inflight::new(Extent { bytes, offset, queues, queue_size }, file.into()).map(Some)
    }

    /// Gives an in-flight region to the target (SET_INFLIGHT_FD).
    pub fn set_inflight(&mut self, region: &Inflight) -> Result<(), Error> {
        let at = region.extent();
        let given = VhostUserInflight::new(at.bytes, at.offset, at.queues, at.queue_size);
        let fd = region.fd().as_raw_fd();
        self.front.set_inflight_fd(&given, fd).map_err(fail("SET_INFLIGHT_FD"))
    }

    /// Sets the whole memory table.
    pub fn set_mem_table<'a>(
        &self,
        table: impl Iterator<Item = (RegionSpec, BorrowedFd<'a>)>,
    ) -> Result<(), Error> {
        let regions: Vec<_> = table.map(|(spec, fd)| region(&spec, Some(fd))).collect();
        self.front.set_mem_table(&regions).map(drop).map_err(fail("SET_MEM_TABLE"))
    }

    /// Adds one region.
    pub fn add_mem_region(&mut self, spec: &RegionSpec, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let region = region(spec, Some(fd));
        self.front.add_mem_region(&region).map(drop).map_err(fail("ADD_MEM_REG"))
    }

    /// Removes one region.
    pub fn remove_mem_region(&mut self, spec: &RegionSpec) -> Result<(), Error> {
        self.front.remove_mem_region(&region(spec, None)).map_err(fail("REM_MEM_REG"))
    }

    /// Gives the dirty log to the target.
    pub fn set_log(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<(), Error> {
        let region = VhostUserDirtyLogRegion {
            mmap_size: bytes,
            mmap_offset: 0,
            mmap_handle: fd.as_raw_fd(),
        };
        self.front.set_log_base(0, Some(region)).map_err(fail("SET_LOG_BASE"))
    }

    /// Sets size, base and addresses of a vring.
    pub fn set_vring(&self, index: usize, vring: &Vring, base: u16) -> Result<(), Error> {
        self.front.set_vring_num(index, vring.size).map_err(fail("SET_VRING_NUM"))?;
        self.front.set_vring_base(index, base).map_err(fail("SET_VRING_BASE"))?;
        self.set_vring_addr(index, vring)
    }

    /// Sets the addresses of a vring.
    pub fn set_vring_addr(&self, index: usize, vring: &Vring) -> Result<(), Error> {
        let data = VringConfigData {
            queue_max_size: vring.size,
            queue_size: vring.size,
            flags: u32::from(vring.log.is_some()),
            desc_table_addr: vring.desc,
            used_ring_addr: vring.used,
            avail_ring_addr: vring.avail,
            log_addr: vring.log,
        };
        self.front.set_vring_addr(index, &data).map_err(fail("SET_VRING_ADDR"))
    }

    /// Gives the call and kick descriptors of a vring; the kick starts it.
    pub fn set_vring_fds(&self, index: usize, kick: &EventFd, call: &EventFd) -> Result<(), Error> {
        self.front.set_vring_call(index, call).map_err(fail("SET_VRING_CALL"))?;
        self.front.set_vring_kick(index, kick).map_err(fail("SET_VRING_KICK"))
    }

    /// Enables or disables a vring; nothing to do where protocol features are not in use.
    pub fn enable(&mut self, index: usize, on: bool) -> Result<(), Error> {
        if self.features & feature::PROTOCOL == 0 {
            return Ok(());
        }
        self.front.set_vring_enable(index, on).map_err(fail("SET_VRING_ENABLE"))
    }

    /// Stops a vring: the target has drained it when this returns. Where it got to.
    pub fn get_vring_base(&self, index: usize) -> Result<u16, Error> {
        let base = self.front.get_vring_base(index).map_err(fail("GET_VRING_BASE"))?;
        Ok(base as u16)
    }

    /// `size` bytes of the configuration space from `offset`.
    pub fn get_config(&mut self, offset: u32, size: u32) -> Result<Vec<u8>, Error> {
        let buffer = vec![0; size as usize];
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) =
            self.front.get_config(offset, size, flags, &buffer).map_err(fail("GET_CONFIG"))?;
        Ok(bytes)
    }

    /// Writes the configuration space.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.front.set_config(offset, flags, bytes).map_err(fail("SET_CONFIG"))
    }
}

fn region(spec: &RegionSpec, fd: Option<BorrowedFd<'_>>) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: spec.guest_addr,
        memory_size: spec.size,
        userspace_addr: spec.user_addr,
        mmap_offset: spec.mmap_offset,
        mmap_handle: fd.map_or(-1, |fd| fd.as_raw_fd()),
    }
}
