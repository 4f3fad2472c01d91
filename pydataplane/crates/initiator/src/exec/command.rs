//! The commands of the script.

use serde::Deserialize;

use super::hex::Hex;
use crate::session::Options;

/// A SCSI command.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cdb {
    /// Target number.
    #[serde(default)]
    pub target: u8,
    /// LUN.
    #[serde(default)]
    pub lun: u16,
    /// The 8 bytes of the LUN field, instead of `target` and `lun`.
    #[serde(default)]
    pub lun_field: Option<Hex>,
    /// LUN field with 0x40 in its third byte, as Linux sends it (default true).
    #[serde(default = "yes")]
    pub flat: bool,
    /// The CDB.
    pub cdb: Hex,
    /// Data to the target.
    #[serde(default)]
    pub data_out: Hex,
    /// Bytes of space for data from the target.
    #[serde(default)]
    pub data_in_len: u32,
    /// Tag of the command.
    #[serde(default)]
    pub tag: u64,
    /// Request queue, from 0.
    #[serde(default)]
    pub queue: usize,
    /// Cuts header and data out into descriptors of these lengths (the rest is one more).
    #[serde(default)]
    pub cut_out: Vec<usize>,
    /// Cuts response and data in into descriptors of these lengths (the rest is one more).
    #[serde(default)]
    pub cut_in: Vec<u32>,
    /// Milliseconds to wait.
    #[serde(default = "ten_seconds")]
    pub timeout_ms: u64,
    /// Looks for the answer all the time instead of sleeping until it is called.
    #[serde(default)]
    pub poll: bool,
}

/// A virtio-blk request.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blk {
    /// 0 in, 1 out, 4 flush, 8 get id, 11 discard, 13 write zeroes.
    pub kind: u32,
    /// Sector of 512 bytes.
    #[serde(default)]
    pub sector: u64,
    /// Data to the target.
    #[serde(default)]
    pub data_out: Hex,
    /// Bytes of space for data from the target.
    #[serde(default)]
    pub data_in_len: u32,
    /// Queue, from 0.
    #[serde(default)]
    pub queue: usize,
    /// Milliseconds to wait.
    #[serde(default = "ten_seconds")]
    pub timeout_ms: u64,
}

/// A descriptor as it is written into a table.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDesc {
    /// Index in the table.
    pub index: u16,
    /// Guest address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// 1 NEXT, 2 WRITE, 4 INDIRECT.
    #[serde(default)]
    pub flags: u16,
    /// Next index.
    #[serde(default)]
    pub next: u16,
}

/// One line of the script.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "cmd", rename_all = "snake_case")]
pub enum Command {
    /// Opens a session with new guest memory; see [`Options`] for the keys. Answers `features`,
    /// `offered`, `protocol_features`, `queue_num`, `max_mem_slots`.
    Connect(Options),
    /// Hangs up; guest memory and rings stay.
    Disconnect,
    /// Connects again; with `keep` the rings go on where the used index stands.
    Reconnect {
        /// Go on with the rings.
        #[serde(default)]
        keep: bool,
    },
    /// Whether the target answers: `alive`.
    Alive,
    /// Reads the configuration space: `data`.
    GetConfig {
        /// First byte.
        #[serde(default)]
        offset: u32,
        /// Bytes.
        size: u32,
    },
    /// Writes the configuration space.
    SetConfig {
        /// First byte.
        #[serde(default)]
        offset: u32,
        /// The bytes.
        data: Hex,
    },
    /// Sends a command and waits: `response`, `status`, `residual`, `sense`, `data_in`, `len`,
    /// `us`, `called`.
    Cdb(Cdb),
    /// Sends a command and does not wait: `head`.
    Submit(Cdb),
    /// Waits for a command of `submit`; answers as `cdb`.
    Wait {
        /// What `submit` answered.
        head: u16,
        /// The queue it was given to.
        #[serde(default)]
        queue: usize,
        /// Milliseconds to wait.
        #[serde(default = "ten_seconds")]
        timeout_ms: u64,
    },
    /// Task management: `response`.
    Tmf {
        /// Target number.
        #[serde(default)]
        target: u8,
        /// LUN.
        #[serde(default)]
        lun: u16,
        /// virtio 1.2, 5.6.6.2: 0 abort task, 2 clear task set, 4 target reset, 5 LUN reset...
        subtype: u32,
        /// Tag of the task, where the subtype has one.
        #[serde(default)]
        tag: u64,
        /// Milliseconds to wait.
        #[serde(default = "ten_seconds")]
        timeout_ms: u64,
    },
    /// Asynchronous notification query (1) or subscription (2): `response`, `events`.
    Notification {
        /// Target number.
        #[serde(default)]
        target: u8,
        /// LUN.
        #[serde(default)]
        lun: u16,
        /// 1 or 2.
        kind: u32,
        /// Events asked for.
        events: u32,
    },
    /// Events that came, after waiting for the first: `events` (`event`, `lun`, `reason`).
    Events {
        /// Milliseconds to wait for the first.
        #[serde(default)]
        timeout_ms: u64,
        /// Give the buffers back to the target (default true).
        #[serde(default = "yes")]
        repost: bool,
    },
    /// A virtio-blk request: `status`, `data_in`, `len`, `us`, `called`.
    Blk(Blk),
    /// Sends one and does not wait: `head`.
    SubmitBlk(Blk),
    /// Waits for a request of `submit_blk`; answers as `blk`.
    WaitBlk {
        /// What `submit_blk` answered.
        head: u16,
        /// The queue it was given to.
        #[serde(default)]
        queue: usize,
        /// Milliseconds to wait.
        #[serde(default = "ten_seconds")]
        timeout_ms: u64,
    },
    /// Writes descriptors as they are, makes heads available and kicks: `used` (`head`, `len`)
    /// after `wait_ms`, or as soon as all heads came back. Queues count from 0 over all queues.
    Raw {
        /// Queue, control and event queue included.
        queue: usize,
        /// Descriptors of the queue's own table.
        #[serde(default)]
        descs: Vec<RawDesc>,
        /// Descriptors of a table elsewhere in guest memory.
        #[serde(default)]
        table: Vec<RawDesc>,
        /// Guest address of that table.
        #[serde(default)]
        table_at: u64,
        /// Heads to make available.
        #[serde(default)]
        heads: Vec<u16>,
        /// Writes this as the available index afterwards.
        #[serde(default)]
        avail_idx: Option<u16>,
        /// Milliseconds to wait for the heads to come back.
        #[serde(default)]
        wait_ms: u64,
    },
    /// `bytes` of guest memory for raw chains: `gpa`. Given back when a request is sent.
    Alloc {
        /// How many.
        bytes: u64,
    },
    /// Writes guest memory.
    WriteMem {
        /// Guest address.
        gpa: u64,
        /// The bytes.
        data: Hex,
    },
    /// Reads guest memory: `data`.
    ReadMem {
        /// Guest address.
        gpa: u64,
        /// Bytes.
        len: usize,
    },
    /// Kicks a queue (counted over all queues), asked for or not.
    Kick {
        /// Queue.
        queue: usize,
    },
    /// Stops a queue (counted over all queues), once it is drained: `base`.
    Stop {
        /// Queue.
        queue: usize,
    },
    /// Starts a queue (counted over all queues).
    Start {
        /// Queue.
        queue: usize,
        /// Where to go on in the available ring.
        base: u16,
    },
    /// Sends the memory table again.
    SetMemTable,
    /// Adds a region.
    AddRegion {
        /// Guest address.
        gpa: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Removes a region.
    RemoveRegion {
        /// Guest address.
        gpa: u64,
    },
    /// Truncates the memory file of a region.
    Truncate {
        /// Guest address of the region.
        gpa: u64,
        /// Bytes that stay.
        bytes: u64,
    },
    /// Starts or stops the dirty log.
    Log {
        /// Start.
        on: bool,
    },
    /// Guest addresses of dirty pages: `pages`.
    Dirty,
    /// Size of a disk: `blocks`, `block_size`.
    Capacity {
        /// Target number.
        #[serde(default)]
        target: u8,
        /// LUN.
        #[serde(default)]
        lun: u16,
    },
    /// Where the rings of a queue are: `desc`, `avail`, `used`, `size`, `next_avail`.
    Ring {
        /// Queue, over all queues.
        queue: usize,
    },
    /// What the in-flight region says of each queue, or null: `queues`.
    Inflight,
    /// Ends the script.
    Quit,
}

fn yes() -> bool {
    true
}

fn ten_seconds() -> u64 {
    10_000
}
