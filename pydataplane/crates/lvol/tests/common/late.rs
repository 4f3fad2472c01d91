//! I/O that reaches the disk below as late as the test likes.

use super::{BLOCK, Rig};
use bdev::{Channel, Completion, Io, Op, Submit};
use guestmem::Bounce;
use reactor::IoContext;

/// An I/O of a volume's first block that ends when the disk below is told to go on.
pub struct Late {
    channel: Box<dyn Channel>,
    _buf: Bounce,
    _io: IoContext,
}

impl Late {
    pub fn read(rig: &Rig, name: &str) -> Late {
        Late::begin(rig, name, Op::Read)
    }

    pub fn begin(rig: &Rig, name: &str, op: Op) -> Late {
        rig.disk.defer(Some(1));
        let io = IoContext::new().unwrap();
        let mut channel = rig.bdev(&format!("lvs0/{name}")).open(&io).unwrap();
        rig.disk.defer(None);
        let buf = Bounce::new();
        let sg = buf.sg(BLOCK as usize).unwrap();
        let late = Io { op, fua: false, lba: 0, blocks: 1, sg, tag: 1 };
        assert_eq!(channel.submit(&late), Submit::Pending);
        Late { channel, _buf: buf, _io: io }
    }

    pub fn end(mut self) {
        let mut done: Vec<Completion> = Vec::with_capacity(8);
        for _ in 0..8 {
            self.channel.poll(&mut done);
        }
        assert_eq!(done.len(), 1);
    }
}
