//! What is sent: commands, 64 bytes each, without what the conversation fills in (NVMe base specification 2.1, NVM
//! command set specification 1.1).

use uuid::Uuid;

use crate::wire::COMMAND;

pub(crate) type Command = [u8; COMMAND];

/// Bytes of the data of Connect.
pub(crate) const CONNECT_LEN: usize = 1024;
/// Bytes of what Identify tells.
pub(crate) const IDENTIFY_LEN: usize = 4096;
/// Bytes of a range that is deallocated.
pub(crate) const RANGE_LEN: usize = 16;
/// Any controller of the subsystem.
const ANY_CONTROLLER: u16 = 0xFFFF;

/// Opcodes.
mod opcode {
    pub(super) const FLUSH: u8 = 0x00;
    pub(super) const WRITE: u8 = 0x01;
    pub(super) const READ: u8 = 0x02;
    pub(super) const COMPARE: u8 = 0x05;
    pub(super) const WRITE_ZEROES: u8 = 0x08;
    pub(super) const DATASET_MANAGEMENT: u8 = 0x09;
    pub(super) const GET_LOG_PAGE: u8 = 0x02;
    pub(super) const IDENTIFY: u8 = 0x06;
    pub(super) const SET_FEATURES: u8 = 0x09;
    pub(super) const ASYNC_EVENT: u8 = 0x0C;
    pub(super) const KEEP_ALIVE: u8 = 0x18;
    pub(super) const FABRICS: u8 = 0x7F;
}

/// Which structure Identify tells (CNS).
pub(crate) mod identify {
    pub const NAMESPACE: u8 = 0x00;
    pub const CONTROLLER: u8 = 0x01;
    pub const ACTIVE: u8 = 0x02;
    pub const DESCRIPTORS: u8 = 0x03;
    /// Of the NVM command set: limits of commands.
    pub const LIMITS: u8 = 0x06;
}

/// Log pages.
mod log {
    pub(super) const CHANGED_NAMESPACES: u8 = 0x04;
    pub(super) const ANA: u8 = 0x0C;
}

/// Features.
pub(crate) mod feature {
    pub const QUEUES: u8 = 0x07;
    pub const EVENTS: u8 = 0x0B;
}

/// Properties of a controller.
pub(crate) mod property {
    pub const CAPABILITIES: u32 = 0x00;
    pub const CONFIGURATION: u32 = 0x14;
    pub const STATUS: u32 = 0x1C;
    /// Configuration: commands of 64 bytes, completions of 16, the NVM command set.
    pub const ENABLE: u32 = 6 << 16 | 4 << 20 | 1;
    pub const SHUTDOWN: u32 = ENABLE | 1 << 14;
}

/// First and second fused command.
pub(crate) const FIRST: u8 = 1;
pub(crate) const SECOND: u8 = 2;

fn of(opcode: u8, nsid: u32) -> Command {
    let mut bytes = [0; COMMAND];
    bytes[0] = opcode;
    put(&mut bytes, 4, nsid);
    bytes
}

fn put(bytes: &mut Command, at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// A command on up to 65,536 blocks.
fn on_blocks(opcode: u8, nsid: u32, lba: u64, blocks: u32, flags: u32) -> Command {
    let mut bytes = of(opcode, nsid);
    bytes[40..48].copy_from_slice(&lba.to_le_bytes());
    put(&mut bytes, 48, blocks.saturating_sub(1) & 0xFFFF | flags);
    bytes
}

const FUA: u32 = 1 << 30;
/// Of Write Zeroes: the blocks may be deallocated.
const DEALLOCATE: u32 = 1 << 25;

fn fua(fua: bool) -> u32 {
    if fua { FUA } else { 0 }
}

pub(crate) fn read(nsid: u32, lba: u64, blocks: u32) -> Command {
    on_blocks(opcode::READ, nsid, lba, blocks, 0)
}

pub(crate) fn write(nsid: u32, lba: u64, blocks: u32, durable: bool) -> Command {
    on_blocks(opcode::WRITE, nsid, lba, blocks, fua(durable))
}

pub(crate) fn write_zeroes(
    nsid: u32,
    lba: u64,
    blocks: u32,
    durable: bool,
    deallocate: bool,
) -> Command {
    let deallocate = if deallocate { DEALLOCATE } else { 0 };
    on_blocks(opcode::WRITE_ZEROES, nsid, lba, blocks, fua(durable) | deallocate)
}

/// The first of two that are carried out as one.
pub(crate) fn compare(nsid: u32, lba: u64, blocks: u32) -> Command {
    let mut bytes = on_blocks(opcode::COMPARE, nsid, lba, blocks, 0);
    bytes[1] = FIRST;
    bytes
}

/// The second.
pub(crate) fn write_if(nsid: u32, lba: u64, blocks: u32, durable: bool) -> Command {
    let mut bytes = write(nsid, lba, blocks, durable);
    bytes[1] = SECOND;
    bytes
}

pub(crate) fn flush(nsid: u32) -> Command {
    of(opcode::FLUSH, nsid)
}

/// Deallocates the one range that is its data.
pub(crate) fn deallocate(nsid: u32) -> Command {
    let mut bytes = of(opcode::DATASET_MANAGEMENT, nsid);
    put(&mut bytes, 44, 1 << 2);
    bytes
}

/// The data of that.
pub(crate) fn range(lba: u64, blocks: u32) -> [u8; RANGE_LEN] {
    let mut bytes = [0; RANGE_LEN];
    bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
    bytes[8..16].copy_from_slice(&lba.to_le_bytes());
    bytes
}

pub(crate) fn identify(cns: u8, nsid: u32) -> Command {
    let mut bytes = of(opcode::IDENTIFY, nsid);
    put(&mut bytes, 40, u32::from(cns));
    bytes
}

/// So many bytes, a multiple of four, of a log page; `specific` is its own field (LSP).
fn get_log_page(page: u8, specific: u8, len: usize) -> Command {
    let mut bytes = of(opcode::GET_LOG_PAGE, 0xFFFF_FFFF);
    let dwords = (len / 4 - 1) as u32;
    put(&mut bytes, 40, u32::from(page) | u32::from(specific) << 8 | (dwords & 0xFFFF) << 16);
    put(&mut bytes, 44, dwords >> 16);
    bytes
}

/// Asymmetric access, of groups alone (RGO).
pub(crate) fn ana_log(len: usize) -> Command {
    get_log_page(log::ANA, 1, len)
}

/// Which namespaces have changed; it is read so that the controller tells of the next change.
pub(crate) fn changed_namespaces_log(len: usize) -> Command {
    get_log_page(log::CHANGED_NAMESPACES, 0, len)
}

pub(crate) fn set_features(feature: u8, value: u32) -> Command {
    let mut bytes = of(opcode::SET_FEATURES, 0);
    put(&mut bytes, 40, u32::from(feature));
    put(&mut bytes, 44, value);
    bytes
}

pub(crate) fn async_event() -> Command {
    of(opcode::ASYNC_EVENT, 0)
}

pub(crate) fn keep_alive() -> Command {
    of(opcode::KEEP_ALIVE, 0)
}

/// Of the fabrics' commands: its own type is in place of the namespace.
fn fabrics(kind: u8) -> Command {
    of(opcode::FABRICS, u32::from(kind))
}

/// Makes the connection be queue `queue`, the admin queue if 0, of `entries`.
pub(crate) fn connect(queue: u16, entries: u16, keep_alive_ms: u32) -> Command {
    let mut bytes = fabrics(0x01);
    bytes[42..44].copy_from_slice(&queue.to_le_bytes());
    bytes[44..46].copy_from_slice(&(entries - 1).to_le_bytes());
    put(&mut bytes, 48, keep_alive_ms);
    bytes
}

/// The data of that; `controller` is what the admin queue was told, none there.
pub(crate) fn connect_data(
    host: Uuid,
    controller: Option<u16>,
    subnqn: &str,
    hostnqn: &str,
) -> [u8; CONNECT_LEN] {
    let mut bytes = [0; CONNECT_LEN];
    bytes[..16].copy_from_slice(host.as_bytes());
    bytes[16..18].copy_from_slice(&controller.unwrap_or(ANY_CONTROLLER).to_le_bytes());
    for (at, name) in [(256, subnqn), (512, hostnqn)] {
        // One byte is left for the zero at its end.
        let name = &name.as_bytes()[..name.len().min(255)];
        bytes[at..at + name.len()].copy_from_slice(name);
    }
    bytes
}

/// Reads a property; of 8 bytes, or of 4.
pub(crate) fn property_get(property: u32, is_long: bool) -> Command {
    let mut bytes = fabrics(0x04);
    bytes[40] = u8::from(is_long);
    put(&mut bytes, 44, property);
    bytes
}

/// Writes a property of 4 bytes.
pub(crate) fn property_set(property: u32, value: u32) -> Command {
    let mut bytes = fabrics(0x00);
    put(&mut bytes, 44, property);
    put(&mut bytes, 48, value);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_as_the_specifications_say() {
        let bytes = write(7, 0x0102_0304_0506, 8, true);
        assert_eq!((bytes[0], bytes[4]), (1, 7));
        assert_eq!(bytes[40..48], [6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!(bytes[48..52], [7, 0, 0, 0x40]);
        assert_eq!(read(1, 0, 65536)[48..52], [0xFF, 0xFF, 0, 0]);
        assert_eq!(write_zeroes(1, 0, 1, false, true)[48..52], [0, 0, 0, 2]);
        assert_eq!(compare(1, 0, 1)[..2], [5, 1]);
        assert_eq!(write_if(1, 0, 1, false)[..2], [1, 2]);
        let page = get_log_page(log::ANA, 1, 0x4_0010);
        assert_eq!(page[40..48], [0x0C, 1, 3, 0, 1, 0, 0, 0]);
        assert_eq!(range(3, 5), [0, 0, 0, 0, 5, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        let bytes = connect(1, 128, 10_000);
        assert_eq!((bytes[0], bytes[4], bytes[42], bytes[44]), (0x7F, 1, 1, 127));
        assert_eq!(bytes[48..52], [0x10, 0x27, 0, 0]);
        let data = connect_data(Uuid::nil(), None, "nqn.a", "nqn.b");
        assert_eq!(data[16..18], [255, 255]);
        assert_eq!((&data[256..262], &data[512..517]), (&b"nqn.a\0"[..], &b"nqn.b"[..]));
        assert_eq!(
            property_set(property::CONFIGURATION, property::ENABLE)[44..52],
            [0x14, 0, 0, 0, 1, 0, 0x46, 0]
        );
    }
}
