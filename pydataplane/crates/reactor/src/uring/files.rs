//! Files that a ring knows by a number of its own (IORING_REGISTER_FILES2). An entry that names one by
//! it saves the kernel a look-up in the process's descriptors, and counting there and back, in a word that
//! all threads have in common. Seen on Linux 6.18 with channels of a file bdev, 32 in flight, a loop device: 1240 ns
//! of the thread for a READ of 4 KiB where it was 1310, 1176 for a WRITE where it was 1246; of two threads on
//! the same disk, 1279 and 1236 where it was 1368 and 1309. On ext4 on virtio-blk, at 3 to 4 us, it is within
//! what varies.
//!
//! The ring keeps a registered file open, wherever else it is closed. So a file is registered as long as a
//! client of the ring uses it ([`UringClient::use_file`](super::UringClient::use_file)), once however many
//! do, and only where the kernel lets go of it when it is told to: since Linux 6.13, and 6.15 is what can be
//! told. Before, it does so up to a second later, and not before all I/O of registered files that the ring
//! had begun earlier has ended, of other disks too: a file system could not be unmounted, nor a block device
//! given away. There, where a ring has [`FILES`] files already, and where the kernel refuses, entries name
//! descriptors. A process that is killed leaves its files open until the kernel has ended its rings: some
//! 30 ms.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, squeue, types};

/// Files that a ring knows at most.
pub(super) const FILES: u32 = 256;

/// How the entries of a client name its file.
#[derive(Clone, Copy, Debug)]
pub struct FileName {
    number: i32,
    registered: bool,
}

impl FileName {
    /// By its descriptor `fd`.
    pub fn of(fd: BorrowedFd<'_>) -> Self {
        FileName { number: fd.as_raw_fd(), registered: false }
    }

    /// What to make the entry with, which goes through [`FileName::mark`] then.
    #[inline]
    pub fn number(self) -> types::Fd {
        types::Fd(self.number)
    }

    /// The entry, made with [`FileName::number`], with what the kernel is told of that.
    #[inline]
    #[must_use]
    pub fn mark(self, entry: squeue::Entry) -> squeue::Entry {
        match self.registered {
            true => entry.flags(squeue::Flags::FIXED_FILE),
            false => entry,
        }
    }

    /// Whether the ring knows the file by a number of its own.
    pub fn is_registered(self) -> bool {
        self.registered
    }
}

/// A ring's registered files.
pub(super) struct Files {
    /// The kernel has a table; `None`: it has not been asked.
    table: Option<bool>,
    /// For each number, the descriptor that the file was registered by, and clients that use it; 0: it is
    /// free. The first of them has the descriptor open, and so has each that follows.
    places: Vec<(RawFd, u32)>,
}

impl Files {
    pub(super) const fn new() -> Self {
        Files { table: None, places: Vec::new() }
    }

    /// A client uses the file of `fd`, which stays open until it has [let go](Files::release) of it.
    pub(super) fn take(&mut self, ring: &IoUring, fd: BorrowedFd<'_>) -> FileName {
        let (plain, fd) = (FileName::of(fd), fd.as_raw_fd());
        // What came with 6.15 says that it is later than 6.13, too.
        let table = || {
            ring.params().is_feature_no_iowait()
                && ring.submitter().register_files_sparse(FILES).is_ok()
        };
        if !*self.table.get_or_insert_with(table) {
            return plain;
        }
        let used = self.places.iter().position(|(of, users)| *users > 0 && *of == fd);
        if let Some(number) = used {
            self.places[number].1 += 1;
            return FileName { number: number as i32, registered: true };
        }
        let free = self.places.iter().position(|(_, users)| *users == 0);
        let number = free.unwrap_or(self.places.len());
        if number == FILES as usize
            || !matches!(ring.submitter().register_files_update(number as u32, &[fd]), Ok(1))
        {
            return plain;
        }
        if free.is_none() {
            self.places.push((fd, 0));
        }
        self.places[number] = (fd, 1);
        FileName { number: number as i32, registered: true }
    }

    /// A client that has nothing in flight uses `name` no more: the last one closes the file here.
    pub(super) fn release(&mut self, ring: &IoUring, name: FileName) {
        if !name.registered {
            return;
        }
        let place = &mut self.places[name.number as usize];
        place.1 -= 1;
        if place.1 == 0 {
            let closed = ring.submitter().register_files_update(name.number as u32, &[-1]);
            debug_assert!(matches!(closed, Ok(1)), "{closed:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;

    use io_uring::opcode;

    use super::*;
    use crate::{Uring, UringClient};

    /// A ring that registers files; `None`, and says so, on a kernel where rings do not.
    fn uring() -> Option<Uring> {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let uring = Uring::new(event.as_fd()).unwrap();
        let new = uring.ring.borrow().ring.params().is_feature_no_iowait();
        if !new {
            println!("skipped: rings register files since Linux 6.15");
        }
        new.then_some(uring)
    }

    /// A file that begins with `byte`.
    fn file(byte: u8) -> File {
        let memory = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = File::from(memory.unwrap());
        file.write_all(&[byte; 512]).unwrap();
        file
    }

    /// The first byte of what `client` uses, read by its name.
    fn first(uring: &Uring, client: &mut UringClient, name: FileName) -> u8 {
        let mut byte = [0u8];
        let read = opcode::Read::new(name.number(), byte.as_mut_ptr(), 1).build();
        // SAFETY: `byte` lives until the completion is there, and so does the file.
        unsafe { client.push(name.mark(read), 0, 1) }.unwrap();
        loop {
            uring.flush();
            if let Some((_, result)) = client.next_completion() {
                assert_eq!(result, 1);
                return byte[0];
            }
        }
    }

    /// Whether anybody but the caller has the write end of `pipe` open.
    fn is_open(read_end: &File) -> bool {
        let mut poll = [rustix::event::PollFd::new(read_end, rustix::event::PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).unwrap();
        !poll[0].revents().contains(rustix::event::PollFlags::HUP)
    }

    #[test]
    fn clients_read_their_own_files_by_number_and_share_that_of_one_file() {
        let Some(uring) = uring() else { return };
        let (a, b) = (file(b'a'), file(b'b'));
        let mut clients: Vec<_> = (0..3).map(|_| uring.client(1)).collect();
        let names: Vec<_> = [&a, &b, &a]
            .iter()
            .zip(&mut clients)
            .map(|(file, client)| client.use_file(file.as_fd()))
            .collect();
        assert!(names.iter().all(|name| name.is_registered()), "{names:?}");
        assert_eq!(names.iter().map(|n| n.number).collect::<Vec<_>>(), [0, 1, 0]);
        let mut read = Vec::new();
        for (client, name) in clients.iter_mut().zip(&names) {
            read.push(first(&uring, client, *name));
        }
        assert_eq!(read, *b"aba");
        // Who follows into a place has its own file there.
        drop(clients.remove(1));
        drop(b);
        let c = file(b'c');
        let mut client = uring.client(1);
        let name = client.use_file(c.as_fd());
        assert_eq!((name.number, first(&uring, &mut client, name)), (1, b'c'));
        assert_eq!(first(&uring, &mut clients[1], names[2]), b'a');
    }

    #[test]
    fn the_last_client_closes_a_file_at_once() {
        let Some(uring) = uring() else { return };
        let (reads, writes) = rustix::pipe::pipe().unwrap();
        let reads = File::from(reads);
        let mut clients: Vec<_> = (0..2).map(|_| uring.client(1)).collect();
        for client in &mut clients {
            assert!(client.use_file(writes.as_fd()).is_registered());
        }
        drop(writes);
        assert!(is_open(&reads), "the ring has it");
        clients.pop();
        assert!(is_open(&reads), "a client has it still");
        clients.pop();
        assert!(!is_open(&reads), "nobody uses it");
    }

    #[test]
    fn beyond_the_table_files_go_by_their_descriptors() {
        let Some(uring) = uring() else { return };
        let files: Vec<_> = (0..FILES + 1).map(|_| file(b'x')).collect();
        let mut clients: Vec<_> = files.iter().map(|_| uring.client(1)).collect();
        let names: Vec<_> =
            files.iter().zip(&mut clients).map(|(f, c)| c.use_file(f.as_fd())).collect();
        let (last, others) = names.split_last().unwrap();
        assert!(others.iter().all(|name| name.is_registered()));
        assert_eq!((last.registered, last.number), (false, files[FILES as usize].as_raw_fd()));
        assert_eq!(first(&uring, &mut clients[FILES as usize], *last), b'x');
        // And with a place again, the next one has a number.
        clients.remove(7);
        let mut next = uring.client(1);
        let name = next.use_file(files[FILES as usize].as_fd());
        assert_eq!((name.registered, name.number), (true, 7));
    }

    #[test]
    fn a_kernel_that_refuses_the_table_leaves_descriptors() {
        let Some(uring) = uring() else { return };
        uring.ring.borrow().ring.submitter().register_files_sparse(1).unwrap();
        let file = file(b'x');
        let mut client = uring.client(1);
        let name = client.use_file(file.as_fd());
        assert!(!name.is_registered(), "a ring has one table, and has one already");
        assert_eq!(first(&uring, &mut client, name), b'x');
    }
}
