//! Why something about a cluster or an image cannot be done.

use std::io;

use crate::LibraryError;

/// Why something about a cluster or an image cannot be done. One sentence each.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The libraries cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A cluster of that name is registered.
    #[error("cluster {0} is registered already: choose another name, or unregister that one first")]
    Exists(String),
    /// No cluster of that name is registered.
    #[error("there is no cluster {0}; bdev_rbd_get_clusters_info lists those that are registered")]
    NoCluster(String),
    /// Images of the cluster are open.
    #[error("cluster {cluster} is in use by bdev {bdevs}: delete that first")]
    InUse {
        /// Name of the cluster.
        cluster: String,
        /// Names of bdevs.
        bdevs: String,
    },
    /// It did not end in time, and may still.
    #[error(
        "{what} has not {done} for {seconds} s: look at `ceph -s` and the network, and try again"
    )]
    TimedOut {
        /// What was waited for, such as `cluster ceph0`.
        what: String,
        /// What it was to do, as a participle.
        done: &'static str,
        /// How long was waited, in seconds.
        seconds: u64,
    },
    /// Another client writes to the image, or may.
    #[error(
        "image {image} is locked by the client at {owner}: only one host at a time may write to it; \
         close it there, or open it everywhere with \"shared\" if its users share it"
    )]
    Locked {
        /// Pool and name.
        image: String,
        /// Addresses of clients.
        owner: String,
    },
    /// Another client shares the image that is to be had alone.
    #[error(
        "image {image} is shared with other hosts by the client at {owner}, so it cannot be had by this one \
         alone: close it there, or open it with \"shared\" (<shareable/>) here, too"
    )]
    Shared {
        /// Pool and name.
        image: String,
        /// Addresses of clients.
        owner: String,
    },
    /// Another client has the image alone that is to be shared.
    #[error(
        "image {image} is in use by the client at {owner} alone, so it cannot be shared: close it there, or \
         open it with \"shared\" (<shareable/>) there, too"
    )]
    Unshared {
        /// Pool and name.
        image: String,
        /// Addresses of clients.
        owner: String,
    },
    /// Another client had the image locked while its guest was to have it here.
    #[error(
        "image {image} was locked by another host since its guest had it here or began to come, so it is \
         not served any more: stop that guest, whose idea of the disk is out of date"
    )]
    Overtaken {
        /// Pool and name.
        image: String,
    },
    /// The image is being rolled back, or was when its host ended.
    #[error(
        "image {image} is being rolled back to a snapshot, or was when a host ended, and is half of each: \
         `virtlun volume rollback` does it again, and a target that has its pool does the rest when it starts"
    )]
    RollingBack {
        /// Pool and name.
        image: String,
    },
    /// The image cannot be had by one host alone.
    #[error(
        "image {image} lacks the feature exclusive-lock, so other hosts cannot be kept from writing to \
         it: enable it with `rbd feature enable {image} exclusive-lock`, or open it with \"shared\""
    )]
    NoLock {
        /// Pool and name.
        image: String,
    },
    /// A name or value has a byte that is zero.
    #[error("{0} has a zero byte in it")]
    ZeroByte(String),
    /// Something is wrong with what was asked for.
    #[error("{0}")]
    Invalid(String),
    /// Ceph or the operating system says no.
    #[error("{what}: {}", io::Error::from_raw_os_error(*.errno))]
    Failed {
        /// What cannot be done, and to what; with what to do, where that is known.
        what: String,
        /// Errno, positive.
        errno: i32,
    },
}

impl Error {
    /// Errno, positive, that says best what it is.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Library(_) => libc::EOPNOTSUPP,
            Error::Exists(_) => libc::EEXIST,
            Error::NoCluster(_) => libc::ENOENT,
            Error::InUse { .. }
            | Error::Locked { .. }
            | Error::Shared { .. }
            | Error::Unshared { .. }
            | Error::Overtaken { .. }
            | Error::RollingBack { .. } => libc::EBUSY,
            Error::TimedOut { .. } => libc::ETIMEDOUT,
            Error::NoLock { .. } | Error::ZeroByte(_) | Error::Invalid(_) => libc::EINVAL,
            Error::Failed { errno, .. } => *errno,
        }
    }

    /// Whether the same may succeed later by itself, as the cluster does not answer.
    pub(crate) fn passes(&self) -> bool {
        matches!(
            self,
            Error::TimedOut { .. }
                | Error::Failed {
                    errno: libc::ETIMEDOUT
                        | libc::ECONNREFUSED
                        | libc::EHOSTUNREACH
                        | libc::ENETUNREACH
                        | libc::EAGAIN,
                    ..
                }
        )
    }
}
