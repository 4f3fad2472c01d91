//! The system calls of the target.
//!
//! Made by tracing every test of the target (`strace -f`), and from what the C library and the
//! kernel's interfaces may call in their place on another version.

use super::{Argument, Calls, NOT_EXECUTABLE, UNIX};
use libc::c_long;

/// What the target may call.
pub const TARGET: Calls =
    Calls { always: ALLOWED, also: &[], with: CONDITIONAL, threads: true, network: false };

/// What a target may call that mounts its exports itself, as no holder does it, and mounts one again
/// that somebody has unmounted (open_tree, move_mount); useless without CAP_SYS_ADMIN.
pub const TARGET_THAT_MOUNTS: Calls = Calls { also: MOUNTING, ..TARGET };

const MOUNTING: &[c_long] =
    &[libc::SYS_mount, libc::SYS_umount2, libc::SYS_open_tree, libc::SYS_move_mount];

/// Always needed: memory, time, threads, files, sockets.
const ALLOWED: &[&[c_long]] = &[
    MEMORY,
    THREADS,
    SIGNALS,
    TIME,
    WAITING,
    DESCRIPTORS,
    FILES,
    SOCKETS,
    IO_URING,
    IDENTITY,
    PEERS,
    OLDER_FORMS,
];

/// Memory of the process, guests' memory and the rings. Never executable: see [`CONDITIONAL`].
const MEMORY: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_msync,
    libc::SYS_memfd_create,
];

/// Threads: reactors, one for each vhost-user socket, JSON-RPC client, lvstore and export. Those that
/// make them are those of [`Calls`]`::threads`.
const THREADS: &[c_long] = &[
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
];

/// Stopping in order, SIGBUS of guests' memory, SIGSYS of this crate, abort(3). The process signals
/// itself only: see [`CONDITIONAL`].
const SIGNALS: &[c_long] = &[
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
];

/// Clocks; mostly the vDSO answers.
const TIME: &[c_long] = &[
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
];

/// Sleeping reactors and threads that wait for a peer.
const WAITING: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
];

/// On open descriptors of any kind.
const DESCRIPTORS: &[c_long] = &[
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Files and block devices of bdevs, the state folder, /proc and /sys. Which of them the user's
/// rights decide.
const FILES: &[c_long] = &[
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    // A socket is given to a group that the user is in, which takes no capability.
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_sync_file_range,
    libc::SYS_umask,
    libc::SYS_unlinkat,
];

/// JSON-RPC, vhost-user, the service manager, NBD servers: `socket` itself makes UNIX sockets only, see
/// [`CONDITIONAL`], unless the program has a network.
const SOCKETS: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// I/O of bdevs.
const IO_URING: &[c_long] =
    &[libc::SYS_io_uring_enter, libc::SYS_io_uring_register, libc::SYS_io_uring_setup];

/// Who and where we are: log lines, the FUSE server, start-up of the C library's threads.
const IDENTITY: &[c_long] = &[
    libc::SYS_capget,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getuid,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// Whether the process at the other end of a socket still runs.
const PEERS: &[c_long] = &[libc::SYS_pidfd_open];

/// What C libraries call where there is no newer form, or out of habit.
#[cfg(target_arch = "x86_64")]
const OLDER_FORMS: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_lchown,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_FORMS: &[c_long] = &[];

/// With some arguments only.
const CONDITIONAL: &[(c_long, Argument)] = &[
    (libc::SYS_mmap, NOT_EXECUTABLE),
    (libc::SYS_mprotect, NOT_EXECUTABLE),
    (libc::SYS_socket, Argument::OneOf(0, UNIX)),
    (libc::SYS_socketpair, Argument::OneOf(0, UNIX)),
    (libc::SYS_kill, Argument::OwnPid),
    (libc::SYS_tgkill, Argument::OwnPid),
    // A new program that does not come up is ended, through a descriptor of its process: of the same
    // user, or the kernel says no.
    (libc::SYS_pidfd_send_signal, Argument::OneOf(1, &[libc::SIGKILL as u32])),
    (libc::SYS_ioctl, Argument::OneOf(1, IOCTLS)),
    (libc::SYS_prctl, Argument::OneOf(0, PRCTLS)),
];

/// `ioctl` requests; the argument is 32 bits wide.
const IOCTLS: &[u32] = &[
    libc::FIONBIO as u32,
    libc::FIONREAD as u32,
    // Whether standard error is a terminal.
    libc::TCGETS as u32,
    BLKSSZGET,
    BLKPBSZGET,
    BLKGETSIZE64,
    FUSE_DEV_IOC_CLONE,
];
/// linux/fs.h: `_IO(0x12, 104)`.
const BLKSSZGET: u32 = 0x1268;
/// linux/fs.h: `_IO(0x12, 123)`.
const BLKPBSZGET: u32 = 0x127b;
/// linux/fs.h: `_IOR(0x12, 114, size_t)`.
const BLKGETSIZE64: u32 = 0x8008_1272;
/// linux/fuse.h: `_IOR(229, 0, uint32_t)`: one more channel of a FUSE session.
const FUSE_DEV_IOC_CLONE: u32 = 0x8004_e500;

/// `prctl` operations.
const PRCTLS: &[u32] = &[
    // Threads have names; a refused call is logged with its thread's.
    libc::PR_SET_NAME as u32,
    libc::PR_GET_NAME as u32,
    // Export threads write back for the kernel (needs CAP_SYS_RESOURCE, and goes without).
    PR_SET_IO_FLUSHER,
    // The C library and allocators name mappings.
    PR_SET_VMA,
    // Where the kernel's clock is found without a call (rustix).
    PR_GET_AUXV,
    libc::PR_GET_DUMPABLE as u32,
    // Who has keys is in no core dump.
    libc::PR_SET_DUMPABLE as u32,
    libc::PR_GET_NO_NEW_PRIVS as u32,
    libc::PR_GET_SECCOMP as u32,
    libc::PR_CAPBSET_READ as u32,
];
/// linux/prctl.h.
const PR_SET_IO_FLUSHER: u32 = 57;
/// linux/prctl.h.
const PR_SET_VMA: u32 = 0x5356_4d41;
/// linux/prctl.h.
const PR_GET_AUXV: u32 = 0x4155_5856;
