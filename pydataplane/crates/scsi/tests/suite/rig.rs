//! What the tests share: a disk, memory for data buffers, and a unit to send commands to.

use bdev::{
    Bdev, Channel, Completion, Features, Geometry, Io, IoError, Op, OpenError, Run, Sparse, Submit,
};
use guestmem::{IoVec, Sg};
use reactor::IoContext;
use scsi::{CDB_LEN, Lun, LunOptions, LunShared, Outcome, Response, SENSE_LEN, Status, Task};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

pub const BLOCKS: u64 = 4096;

/// Everything that a disk can have.
pub const ALL_FEATURES: Features = Features {
    read_only: false,
    volatile_cache: true,
    fua: true,
    unmap: true,
    unmap_zeroes: true,
    unmap_skips: false,
    write_zeroes: true,
    thin: true,
    unmap_granularity: 8,
    optimal_blocks: 0,
    max_blocks: 0,
    boot: None,
    remote: false,
};

/// A bdev's face; its channel is a [`DiskChannel`].
pub struct Disk {
    /// Each disk has one of its own: units of one UUID share their reservations, also across tests.
    pub uuid: Uuid,
    pub features: Features,
    pub block_size: u32,
    pub physical_block_size: u32,
    pub num_blocks: AtomicU64,
    /// What it has, and what there is besides, in bytes, where it tells.
    pub room: Option<(u64, u64)>,
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        "disk"
    }
    fn aliases(&self) -> Vec<String> {
        Vec::new()
    }
    fn uuid(&self) -> Uuid {
        self.uuid
    }
    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }
    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            physical_block_size: self.physical_block_size,
            num_blocks: self.num_blocks.load(Ordering::Relaxed),
        }
    }
    fn features(&self) -> Features {
        self.features
    }
    fn open(&self, _io: &IoContext) -> Result<Box<dyn Channel>, OpenError> {
        // The tests make their channel themselves; what opens one on a thread of its own cannot.
        Err(OpenError { name: "disk".to_owned(), why: "there is one channel".to_owned() })
    }
    fn driver_specific(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
    fn sparse(&self) -> Option<&dyn Sparse> {
        self.room.map(|_| self as &dyn Sparse)
    }
}

impl Sparse for Disk {
    fn run(&self, lba: u64) -> Run {
        Run { hole: false, blocks: self.num_blocks.load(Ordering::Relaxed).saturating_sub(lba) }
    }
    fn allocated_bytes(&self) -> u64 {
        self.room.map_or(0, |(used, _)| used)
    }
    fn free_bytes(&self) -> Option<u64> {
        self.room.map(|(_, free)| free)
    }
}

/// How the disk takes I/Os.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    AtOnce,
    Later,
    Full,
}

/// What the disk was asked: operation, first block, blocks, FUA.
pub type Asked = (Op, u64, u64, bool);

pub struct State {
    pub medium: Vec<u8>,
    pub mode: Mode,
    pub log: Vec<Asked>,
    /// The nth I/O from now (0: the next) fails.
    pub fail: Option<(usize, IoError)>,
    pub errors_given: usize,
    /// What [`Channel::same_at_once`] says.
    pub same_at_once: u64,
    /// Another host writes that byte into a block, before the next write that looks what is there.
    pub other_host: Option<(u64, u8)>,
    done: VecDeque<Completion>,
}

pub struct DiskChannel {
    disk: Arc<Disk>,
    state: Rc<RefCell<State>>,
}

impl Channel for DiskChannel {
    fn submit(&mut self, io: &Io) -> Submit {
        let mut state = self.state.borrow_mut();
        if state.mode == Mode::Full {
            return Submit::Full;
        }
        state.log.push((io.op, io.lba, io.blocks, io.fua));
        let result = state.run(&self.disk, io);
        state.errors_given += usize::from(result.is_err());
        if state.mode == Mode::AtOnce {
            return Submit::Done(result);
        }
        state.done.push_back(Completion { tag: io.tag, result, ticks: 0, ended: 0 });
        Submit::Pending
    }

    fn same_at_once(&self) -> u64 {
        self.state.borrow().same_at_once
    }

    fn submit_same(&mut self, io: &Io) -> Submit {
        let mut state = self.state.borrow_mut();
        assert!(io.blocks <= state.same_at_once, "longer than same_at_once");
        let bytes = io.blocks as usize * self.disk.block_size as usize;
        let (at, one) = (io.lba as usize * self.disk.block_size as usize, io.sg.len());
        state.log.push((io.op, io.lba, io.blocks, io.fua));
        for place in (at..at + bytes).step_by(one) {
            io.sg.copy_to_slice(0, &mut state.medium[place..place + one]);
        }
        Submit::Done(Ok(()))
    }

    fn submit_if(&mut self, io: &Io, expected: &Sg) -> Submit {
        let mut found = vec![0; io.blocks as usize * self.disk.block_size as usize];
        expected.copy_to_slice(0, &mut found);
        {
            let mut state = self.state.borrow_mut();
            if let Some((lba, byte)) = state.other_host.take() {
                state.medium[lba as usize * self.disk.block_size as usize] = byte;
            }
            let at = io.lba as usize * self.disk.block_size as usize;
            if state.medium[at..at + found.len()] != found[..] {
                return Submit::Done(Err(IoError::Miscompare));
            }
        }
        self.submit(io)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> u32 {
        let mut state = self.state.borrow_mut();
        let mut count = 0;
        while done.len() < done.capacity()
            && let Some(completion) = state.done.pop_front()
        {
            done.push(completion);
            count += 1;
        }
        count
    }
}

impl State {
    fn run(&mut self, disk: &Disk, io: &Io) -> Result<(), IoError> {
        // The contract of a channel, whose breach would be our bug.
        let limit = disk.features.max_blocks;
        assert!(limit == 0 || io.blocks <= u64::from(limit), "longer than max_blocks");
        assert!(!io.fua || disk.features.fua, "FUA that the disk does not have");
        match &mut self.fail {
            Some((0, error)) => {
                let error = *error;
                self.fail = None;
                return Err(error);
            }
            Some((skip, _)) => *skip -= 1,
            None => {}
        }
        io.check(&disk.geometry(), &disk.features)?;
        let block = disk.block_size as usize;
        let range = io.lba as usize * block..(io.lba + io.blocks) as usize * block;
        match io.op {
            Op::Read => assert_eq!(io.sg.copy_from_slice(0, &self.medium[range]), io.sg.len()),
            Op::Write => {
                assert_eq!(io.sg.copy_to_slice(0, &mut self.medium[range]), io.sg.len());
            }
            Op::Unmap | Op::WriteZeroes => self.medium[range].fill(0),
            Op::Flush => {}
        }
        Ok(())
    }
}

/// Memory as a guest gives it: runs with gaps of canaries around them.
pub struct Buffer {
    memory: Vec<u8>,
    runs: Vec<(usize, usize)>,
    iov: Vec<IoVec>,
}

const CANARY: u8 = 0xC5;
const GAP: usize = 16;

impl Buffer {
    /// `data` in runs of at most `run` bytes.
    pub fn new(data: &[u8], run: usize) -> Self {
        let runs = data.len().div_ceil(run);
        let mut memory = vec![CANARY; data.len() + GAP * (runs + 1)];
        let mut places = Vec::new();
        for (i, part) in data.chunks(run).enumerate() {
            let at = GAP + i * (run + GAP);
            memory[at..at + part.len()].copy_from_slice(part);
            places.push((at, part.len()));
        }
        let base = memory.as_mut_ptr();
        let iov = places
            .iter()
            // SAFETY: each run lies within `memory`, whose heap block does not move; it is only
            // read here again after the I/O.
            .map(|(at, len)| unsafe { IoVec::new(base.add(*at), *len) })
            .collect();
        Buffer { memory, runs: places, iov }
    }

    pub fn sg(&self) -> Sg {
        // SAFETY: the list and its memory live as long as this buffer, which the tests keep until
        // the task is done.
        unsafe { Sg::new(&self.iov) }
    }

    /// The bytes, after a check that nothing around them was touched.
    pub fn bytes(&self) -> Vec<u8> {
        let mut inside = vec![false; self.memory.len()];
        let mut out = Vec::new();
        for (at, len) in &self.runs {
            inside[*at..at + len].fill(true);
            out.extend_from_slice(&self.memory[*at..at + len]);
        }
        for (i, inside) in inside.iter().enumerate() {
            assert!(*inside || self.memory[i] == CANARY, "byte {i} outside the buffer was written");
        }
        out
    }
}

/// A logical unit with its disk.
pub struct Rig {
    pub disk: Arc<Disk>,
    pub state: Rc<RefCell<State>>,
    pub shared: Arc<LunShared>,
    pub lun: Lun,
}

/// What came of a command.
#[derive(Debug)]
pub struct Answer {
    pub outcome: Outcome,
    pub data: Vec<u8>,
}

impl Answer {
    #[track_caller]
    pub fn response(&self) -> Response {
        match self.outcome {
            Outcome::Done(response) => response,
            other => panic!("{other:?}"),
        }
    }

    /// The data of a command that ended GOOD, as long as was transferred.
    #[track_caller]
    pub fn good(&self) -> &[u8] {
        let response = self.response();
        assert_eq!(response.status, Status::Good, "{response:x?}");
        assert_eq!(response.sense_len, 0);
        self.data.get(..response.transferred as usize).unwrap_or(&[])
    }

    /// Sense key, and code with qualifier, of a command that ended with CHECK CONDITION.
    #[track_caller]
    pub fn sense(&self) -> (u8, u16) {
        let response = self.response();
        assert_eq!(response.status, Status::CheckCondition);
        assert_eq!(response.transferred, 0);
        assert_eq!(usize::from(response.sense_len), SENSE_LEN);
        assert_eq!(response.sense[0] & 0x7F, 0x70);
        assert_eq!(response.sense[7], 10);
        key_code(&response.sense)
    }

    /// The command was refused because of this byte of the CDB (and its left-most bit).
    #[track_caller]
    pub fn invalid_cdb(&self, byte: u8, bit: Option<u8>) {
        assert_eq!(self.sense(), ILLEGAL_CDB);
        let flags = bit.map_or(0xC0, |b| 0xC8 | b);
        assert_eq!(self.response().sense[15..SENSE_LEN], [flags, 0, byte]);
    }
}

pub const ILLEGAL_CDB: (u8, u16) = (0x5, 0x2400);
pub const ILLEGAL_OPCODE: (u8, u16) = (0x5, 0x2000);
pub const OUT_OF_RANGE: (u8, u16) = (0x5, 0x2100);
pub const WRITE_PROTECTED: (u8, u16) = (0x7, 0x2700);

/// Sense key and code of fixed-format sense data.
pub fn key_code(sense: &[u8]) -> (u8, u16) {
    (sense[2] & 0xF, u16::from_be_bytes([sense[12], sense[13]]))
}

/// Options of a rig.
pub struct Setup {
    pub uuid: Uuid,
    pub features: Features,
    pub block_size: u32,
    pub physical_block_size: u32,
    pub num_blocks: u64,
    pub options: LunOptions,
    pub mode: Mode,
    pub room: Option<(u64, u64)>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            uuid: Uuid::new_v4(),
            features: ALL_FEATURES,
            block_size: 512,
            physical_block_size: 4096,
            num_blocks: BLOCKS,
            options: LunOptions::default(),
            mode: Mode::AtOnce,
            room: None,
        }
    }
}

impl Setup {
    /// The unit, past its first unit attention. A medium that is too big for a test stays empty.
    pub fn build(self) -> Rig {
        Setup::ready(self.fresh())
    }

    /// As [`Setup::build`], of a disk that there is, with another medium.
    pub fn of(self, disk: Arc<Disk>) -> Rig {
        Setup::ready(self.fresh_of(disk))
    }

    fn ready(mut rig: Rig) -> Rig {
        assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
        rig
    }

    /// The unit, with POWER ON pending.
    pub fn fresh(self) -> Rig {
        let disk = Arc::new(Disk {
            uuid: self.uuid,
            features: self.features,
            block_size: self.block_size,
            physical_block_size: self.physical_block_size,
            num_blocks: AtomicU64::new(self.num_blocks),
            room: self.room,
        });
        self.fresh_of(disk)
    }

    /// As [`Setup::of`], with POWER ON pending.
    pub fn fresh_of(self, disk: Arc<Disk>) -> Rig {
        let bytes = self.num_blocks.saturating_mul(u64::from(self.block_size));
        let medium = if bytes <= 64 << 20 { vec![0; bytes as usize] } else { Vec::new() };
        let state = Rc::new(RefCell::new(State {
            medium,
            mode: self.mode,
            log: Vec::new(),
            fail: None,
            errors_given: 0,
            other_host: None,
            same_at_once: 0,
            done: VecDeque::new(),
        }));
        let shared = LunShared::new(disk.clone(), self.options).unwrap();
        let nexus = shared.connect();
        let channel = DiskChannel { disk: disk.clone(), state: state.clone() };
        let lun = Lun::new(shared.clone(), nexus, Box::new(channel));
        Rig { disk, state, shared, lun }
    }
}

impl Rig {
    pub fn new() -> Self {
        Setup::default().build()
    }

    /// Another session of the same unit.
    pub fn another(&self) -> Rig {
        let channel = DiskChannel { disk: self.disk.clone(), state: self.state.clone() };
        let lun = Lun::new(self.shared.clone(), self.shared.connect(), Box::new(channel));
        Rig { disk: self.disk.clone(), state: self.state.clone(), shared: self.shared.clone(), lun }
    }

    /// Another unit of the same disk, past its first unit attention.
    pub fn another_unit(&self, options: LunOptions) -> Rig {
        let shared = LunShared::new(self.disk.clone(), options).unwrap();
        let channel = DiskChannel { disk: self.disk.clone(), state: self.state.clone() };
        let lun = Lun::new(shared.clone(), shared.connect(), Box::new(channel));
        let mut rig = Rig { disk: self.disk.clone(), state: self.state.clone(), shared, lun };
        assert_eq!(rig.run(&[0; 6]).sense(), (0x6, 0x2900));
        rig
    }

    /// A command without data.
    pub fn run(&mut self, cdb: &[u8]) -> Answer {
        self.io(cdb, &[], 0)
    }

    /// A command that reads: room for `len` bytes.
    pub fn input(&mut self, cdb: &[u8], len: usize) -> Answer {
        self.io(cdb, &[], len)
    }

    /// A command that writes.
    pub fn output(&mut self, cdb: &[u8], data: &[u8]) -> Answer {
        self.io(cdb, data, 0)
    }

    /// A command with both buffers, in runs of odd length, until it is over.
    pub fn io(&mut self, cdb: &[u8], data: &[u8], len: usize) -> Answer {
        let out = Buffer::new(data, 700);
        let into = Buffer::new(&vec![0xEE; len], 900);
        let mut task = Task::new(7);
        task.prepare(&pad(cdb), out.sg(), into.sg());
        let mut outcome = self.lun.start(&mut task);
        let mut done = Vec::with_capacity(4);
        while outcome == Outcome::Pending {
            done.clear();
            assert_eq!(self.lun.poll(&mut done), 1, "one step of the task at a time");
            assert_eq!(done[0].tag, 7);
            outcome = self.lun.resume(&mut task, done[0].result);
        }
        assert_eq!(out.bytes(), data, "data from the initiator was changed");
        Answer { outcome, data: into.bytes() }
    }

    /// What the disk was asked since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.borrow_mut().log)
    }

    pub fn fail(&self, skip: usize, error: IoError) {
        self.state.borrow_mut().fail = Some((skip, error));
    }

    pub fn medium(&self) -> Vec<u8> {
        self.state.borrow().medium.clone()
    }

    /// Fills the medium with something that differs from block to block.
    pub fn scribble(&self) {
        let mut state = self.state.borrow_mut();
        for (i, byte) in state.medium.iter_mut().enumerate() {
            *byte = (i / 512 + i) as u8 | 1;
        }
    }
}

pub fn pad(cdb: &[u8]) -> [u8; CDB_LEN] {
    let mut all = [0; CDB_LEN];
    all[..cdb.len()].copy_from_slice(cdb);
    all
}

/// A 10-byte CDB: operation code, byte 1, LBA, length.
pub fn cdb10(opcode: u8, flags: u8, lba: u32, length: u16) -> [u8; 10] {
    let (l, n) = (lba.to_be_bytes(), length.to_be_bytes());
    [opcode, flags, l[0], l[1], l[2], l[3], 0, n[0], n[1], 0]
}

/// A 12-byte CDB.
pub fn cdb12(opcode: u8, flags: u8, lba: u32, length: u32) -> [u8; 12] {
    let mut cdb = [0; 12];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[6..10].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// A 16-byte CDB.
pub fn cdb16(opcode: u8, flags: u8, lba: u64, length: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&length.to_be_bytes());
    cdb
}
