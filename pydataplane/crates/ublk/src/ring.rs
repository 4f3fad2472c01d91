//! io_uring's commands to the driver (IORING_OP_URING_CMD).

use io_uring::register::Restriction;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use zerocopy::{IntoBytes, transmute};

use crate::abi::{CtrlCmd, IoCmd, io as io_command};
use bdev::AlignedBuf;

/// Name of the command that [`Commands::call`] waits for.
const CALL: u64 = u64::MAX;

/// The commands of a control device, on a ring that takes no others: who has this process in his hands
/// gets no way around its system call filter by it.
pub(crate) struct Commands {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// What ended while another command was waited for: name and result.
    ended: VecDeque<(u64, i32)>,
}

impl Commands {
    /// None yet; the system calls of io_uring but `io_uring_enter` are not needed after it.
    ///
    /// # Errors
    /// There is no ring to be had.
    pub fn new(depth: u32) -> io::Result<Commands> {
        let ring = IoUring::builder().setup_r_disabled().build(depth)?;
        let only = Restriction::sqe_op(opcode::UringCmd80::CODE);
        ring.submitter().register_restrictions(&mut [only])?;
        ring.submitter().register_enable_rings()?;
        Ok(Commands { ring, ended: VecDeque::new() })
    }

    /// Descriptor that becomes readable when [`Commands::next`] has something, unless that ended while
    /// [`Commands::call`] waited.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring has it open, and is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Sends a command and waits for its end; `data` is what its address is of.
    ///
    /// # Errors
    /// The driver's answer; BUSY: the queue is full.
    pub fn call(
        &mut self,
        device: BorrowedFd<'_>,
        number: u32,
        cmd: CtrlCmd,
        data: &mut [u8],
    ) -> Result<(), Errno> {
        let (addr, len) = match data.len() {
            0 => (0, 0),
            len => (data.as_mut_ptr().expose_provenance() as u64, len as u16),
        };
        let entry = entry(device, number, CtrlCmd { addr, len, ..cmd }, CALL);
        // SAFETY: the descriptor and `data`, which the entry names, are borrowed until this returns,
        // and it does not return before the command has ended.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::BUSY)?;
        loop {
            let entered = self.ring.submit_and_wait(1);
            let mut result = None;
            for done in self.ring.completion() {
                match done.user_data() {
                    CALL => result = Some(done.result()),
                    name => self.ended.push_back((name, done.result())),
                }
            }
            match result {
                Some(result) if result < 0 => return Err(Errno::from_raw_os_error(-result)),
                Some(_) => return Ok(()),
                None => {}
            }
            match entered.map_err(|e| Errno::from_io_error(&e)) {
                Ok(_) | Err(Some(Errno::INTR | Errno::AGAIN | Errno::BUSY)) => {}
                // The entry may have been taken: its memory must not go away.
                Err(_) => std::process::abort(),
            }
        }
    }

    /// Begins a command that names no memory; it is told by its `name`, not [`CALL`], when it has ended.
    ///
    /// # Errors
    /// The kernel takes none now; the command may be among the next ones all the same.
    pub fn begin(
        &mut self,
        device: BorrowedFd<'_>,
        number: u32,
        cmd: CtrlCmd,
        name: u64,
    ) -> Result<(), Errno> {
        let entry = entry(device, number, CtrlCmd { addr: 0, len: 0, ..cmd }, name);
        // SAFETY: the command names no memory, and the kernel takes a reference of the descriptor. If
        // that should be closed before, the command fails or is that of another device of its kind.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::BUSY)?;
        let submitted = self.ring.submit();
        submitted.map(drop).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// The next command that has ended: its name, and 0 or -errno.
    pub fn next(&mut self) -> Option<(u64, i32)> {
        let ended = self.ended.pop_front();
        let next = || self.ring.completion().next().map(|done| (done.user_data(), done.result()));
        ended.or_else(next)
    }
}

fn entry(device: BorrowedFd<'_>, number: u32, cmd: CtrlCmd, name: u64) -> squeue::Entry128 {
    let mut bytes = [0; 80];
    bytes[..size_of::<CtrlCmd>()].copy_from_slice(cmd.as_bytes());
    let device = types::Fd(device.as_raw_fd());
    opcode::UringCmd80::new(device, number).cmd(bytes).build().user_data(name)
}

/// The commands of a queue: for each tag there is one with the kernel, with the tag's buffer, or none.
pub(crate) struct Tags {
    ring: IoUring,
    device: i32,
    /// Buffers of the tags that are the kernel's.
    lent: Vec<Option<AlignedBuf>>,
    count: usize,
}

impl Tags {
    /// For `depth` tags of the device that `device` is the `/dev/ublkcN` of, none of them the kernel's.
    ///
    /// # Errors
    /// There is no ring to be had.
    pub fn new(device: BorrowedFd<'_>, depth: u16) -> io::Result<Tags> {
        // Without DEFER_TASKRUN: with that, its descriptor would not tell that something came.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(u32::from(depth))?;
        let lent = (0..depth).map(|_| None).collect();
        Ok(Tags { ring, device: device.as_raw_fd(), lent, count: 0 })
    }

    /// Descriptor that becomes readable when [`Tags::next`] has something.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring has it open, and is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// How many tags are the kernel's.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Gives a tag to the kernel with the next [`Tags::submit`]; `result` is that of the request that it
    /// had, or `None` if it had none yet. The device's descriptor is open.
    ///
    /// # Panics
    /// The tag is the kernel's already.
    pub fn lend(&mut self, tag: u16, result: Option<i32>, mut buf: AlignedBuf) {
        let place = &mut self.lent[usize::from(tag)];
        assert!(place.is_none(), "a tag is the kernel's once");
        let addr = buf.as_mut_ptr().expose_provenance() as u64;
        *place = Some(buf);
        self.count += 1;
        let number = match result {
            None => io_command::FETCH_REQ,
            Some(_) => io_command::COMMIT_AND_FETCH_REQ,
        };
        let cmd: [u8; 16] =
            transmute!(IoCmd { q_id: 0, tag, result: result.unwrap_or_default(), addr });
        let entry = opcode::UringCmd16::new(types::Fd(self.device), number)
            .cmd(cmd)
            .build()
            .user_data(u64::from(tag));
        // SAFETY: the buffer stays where it is until the kernel gives the tag back: in `lent`, and
        // where `self` is dropped before, for ever.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("there is an entry for each tag");
    }

    /// Tells the kernel what was lent, if something was, and has it complete what it can; sleeps until
    /// something comes if `wait`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn submit(&mut self, wait: bool) -> io::Result<()> {
        let queue = self.ring.submission();
        if !wait && queue.is_empty() && !queue.taskrun() {
            return Ok(());
        }
        drop(queue);
        match self.ring.submit_and_wait(usize::from(wait)) {
            Ok(_) => Ok(()),
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::INTR | Errno::AGAIN | Errno::BUSY) => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// The next tag that the kernel gives back, its buffer and what it says: 0, or -errno.
    pub fn next(&mut self) -> Option<(u16, AlignedBuf, i32)> {
        loop {
            let done = self.ring.completion().next()?;
            // What is not known here was not lent, and nothing is known of its memory.
            let Ok(tag) = u16::try_from(done.user_data()) else { continue };
            let lent = self.lent.get_mut(usize::from(tag)).and_then(Option::take);
            let Some(buf) = lent else { continue };
            self.count -= 1;
            return Some((tag, buf, done.result()));
        }
    }
}

impl Drop for Tags {
    fn drop(&mut self) {
        // The kernel ends the commands of a ring some time after it was closed, and until then, or
        // until the thread ends, may copy into their buffers.
        for buf in self.lent.iter_mut().filter_map(Option::take) {
            mem::forget(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_ring_of_commands_takes_no_others() {
        let mut commands = Commands::new(4).unwrap();
        let other = squeue::Entry128::from(opcode::Nop::new().build().user_data(7));
        // SAFETY: a no-op names no memory.
        unsafe { commands.ring.submission().push(&other) }.unwrap();
        commands.ring.submit_and_wait(1).unwrap();
        assert_eq!(commands.next(), Some((7, -Errno::ACCESS.raw_os_error())));
        // One that is no device takes no commands, and says so.
        let null = std::fs::File::open("/dev/zero").unwrap();
        commands.begin(null.as_fd(), 1, CtrlCmd::default(), 8).unwrap();
        let mut data = [0; 8];
        let called = commands.call(null.as_fd(), 1, CtrlCmd::default(), &mut data);
        assert_eq!(called, Err(Errno::OPNOTSUPP));
        assert_eq!(commands.next(), Some((8, -Errno::OPNOTSUPP.raw_os_error())));
        assert_eq!(commands.next(), None);
    }
}
