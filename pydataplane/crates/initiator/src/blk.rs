//! virtio-blk framing (virtio 1.2, 5.2.6).

/// Bytes of a request before its data (`virtio_blk_req`).
pub const HEADER_LEN: usize = 16;
/// Bytes of a sector, the unit of addresses whatever the block size.
pub const SECTOR: u64 = 512;
/// Bytes of the configuration space up to the fields for secure erase: what every device has.
pub const CONFIG_LEN: u32 = 60;

/// Read.
pub const T_IN: u32 = 0;
/// Write.
pub const T_OUT: u32 = 1;
/// Ask for the 20-byte serial.
pub const T_GET_ID: u32 = 8;

/// A request's header.
pub fn header(kind: u32, sector: u64) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

/// Bytes of the device, from its configuration space; 0 if that is too short.
pub fn capacity(config: &[u8]) -> u64 {
    let sectors = config.get(..8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    sectors.saturating_mul(SECTOR)
}
