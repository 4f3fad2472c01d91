//! The system calls of the holder of exports, which has one thread and CAP_SYS_ADMIN: it mounts, keeps
//! descriptors and talks to targets over a socket.
//!
//! Made by tracing its tests, and from what the C library may call in their place on another version.

use super::{Argument, Calls, NOT_EXECUTABLE, UNIX};
use libc::c_long;

/// What the holder may call.
pub const HOLDER: Calls =
    Calls { always: ALLOWED, also: &[], with: CONDITIONAL, threads: false, network: false };

const ALLOWED: &[&[c_long]] = &[PROCESS, DESCRIPTORS, FILES, SOCKETS, UBLK, OLDER_FORMS];

/// Memory, time, signals, its end; what a panic calls.
const PROCESS: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
];

/// On open descriptors: `/dev/fuse`, records, the log, and waiting for packets.
const DESCRIPTORS: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
];

/// The folder of the mounts, its own socket, the table of mounts.
const FILES: &[c_long] = &[
    // Its socket is given to the target's user.
    libc::SYS_fchownat,
    libc::SYS_getcwd,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    // Whose a device is.
    libc::SYS_symlinkat,
    libc::SYS_umask,
    libc::SYS_unlinkat,
];

/// Targets, and the service manager; `socket` itself makes UNIX sockets only.
const SOCKETS: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_setsockopt,
];

/// Commands of the ublk driver, the list of its devices, and the pause before one's file is there. The
/// io_uring of the commands is made before, and takes no other operations: none can be made that does.
const UBLK: &[c_long] = &[
    libc::SYS_clock_nanosleep,
    libc::SYS_getdents64,
    libc::SYS_io_uring_enter,
    libc::SYS_nanosleep,
];

/// What C libraries call where there is no newer form, or out of habit.
#[cfg(target_arch = "x86_64")]
const OLDER_FORMS: &[c_long] = &[
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_FORMS: &[c_long] = &[];

/// With some arguments only: of mounting, what its mounts need. It changes no mount, binds nothing and
/// opens no device of a file system that it mounts.
const CONDITIONAL: &[(c_long, Argument)] = &[
    (libc::SYS_mmap, NOT_EXECUTABLE),
    (libc::SYS_mprotect, NOT_EXECUTABLE),
    (libc::SYS_socket, Argument::OneOf(0, UNIX)),
    (libc::SYS_tgkill, Argument::OwnPid),
    (libc::SYS_prctl, Argument::OneOf(0, PRCTLS)),
    (libc::SYS_mount, Argument::OneOf(3, &[MOUNT_FLAGS])),
    (libc::SYS_umount2, Argument::OneOf(1, &[libc::MNT_DETACH as u32])),
    (libc::SYS_open_tree, Argument::OneOf(2, &[OPEN_TREE_FLAGS])),
    (libc::SYS_move_mount, Argument::OneOf(4, &[MOVE_MOUNT_F_EMPTY_PATH])),
];

/// A new file system, with no way to change a mount that is there (no MS_REMOUNT, MS_BIND, MS_MOVE).
const MOUNT_FLAGS: u32 =
    (libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_NOATIME) as u32;

/// linux/mount.h: OPEN_TREE_CLONE and OPEN_TREE_CLOEXEC: a second reference to a mount.
const OPEN_TREE_FLAGS: u32 = 1 | libc::O_CLOEXEC as u32;

/// linux/mount.h.
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;

/// `prctl` operations.
const PRCTLS: &[u32] = &[
    // A refused call is logged with its thread's name.
    libc::PR_GET_NAME as u32,
    // The C library and allocators name mappings (linux/prctl.h, PR_SET_VMA).
    0x5356_4d41,
];
