//! virtio-scsi framing (virtio 1.2, 5.6.6) and the CDBs that tests and benchmarks use.

/// Bytes of a request before its data (`virtio_scsi_req_cmd`, cdb_size 32).
pub const REQUEST_LEN: usize = 51;
/// Bytes of a response before its data (`virtio_scsi_req_cmd`, sense_size 96).
pub const RESPONSE_LEN: usize = 108;
/// Byte of the response with the SCSI status.
pub const STATUS_AT: usize = 10;
/// Byte of the response with the transport's response code.
pub const RESPONSE_AT: usize = 11;
/// Bytes of an event (`virtio_scsi_event`).
pub const EVENT_LEN: usize = 16;

/// Index of the control queue.
pub const CONTROL: usize = 0;
/// Index of the event queue.
pub const EVENTS: usize = 1;
/// Index of the first request queue.
pub const REQUESTS: usize = 2;

/// The 8-byte LUN field: the format for a single-level LUN structure (5.6.6.1). Linux sets 0x40
/// (flat space) in the third byte, SPDK's initiator does not.
pub fn lun_field(target: u8, lun: u16, flat: bool) -> [u8; 8] {
    let high = (lun >> 8) as u8 & 0x3f | if flat { 0x40 } else { 0 };
    [1, target, high, lun as u8, 0, 0, 0, 0]
}

/// A command's header.
pub fn request(lun: [u8; 8], tag: u64, cdb: &[u8]) -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[..8].copy_from_slice(&lun);
    bytes[8..16].copy_from_slice(&tag.to_le_bytes());
    let len = cdb.len().min(32);
    bytes[19..19 + len].copy_from_slice(&cdb[..len]);
    bytes
}

/// A task management request of the control queue (5.6.6.2): 24 bytes, 1 byte comes back.
pub fn task_management(lun: [u8; 8], subtype: u32, tag: u64) -> Vec<u8> {
    let mut bytes = 0u32.to_le_bytes().to_vec();
    bytes.extend(subtype.to_le_bytes());
    bytes.extend(lun);
    bytes.extend(tag.to_le_bytes());
    bytes
}

/// An asynchronous notification query or subscription (types 1 and 2): 5 bytes come back.
pub fn notification(lun: [u8; 8], kind: u32, events: u32) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(lun);
    bytes.extend(events.to_le_bytes());
    bytes
}

/// A response as the target wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Bytes of `sense` that count.
    pub sense: Vec<u8>,
    /// Bytes not moved.
    pub residual: u32,
    /// SCSI status.
    pub status: u8,
    /// The transport's response: 0 is OK.
    pub response: u8,
}

impl Response {
    /// Takes a response apart; `None` if it is shorter than one.
    pub fn parse(bytes: &[u8]) -> Option<Response> {
        let head = bytes.get(..RESPONSE_LEN)?;
        let u32_at = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or([0; 4]));
        let sense_len = (u32_at(0) as usize).min(RESPONSE_LEN - 12);
        Some(Response {
            sense: head[12..12 + sense_len].to_vec(),
            residual: u32_at(4),
            status: head[STATUS_AT],
            response: head[RESPONSE_AT],
        })
    }
}

/// An event as the target wrote it (5.6.6.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Event code; bit 31 says that events were missed.
    pub event: u32,
    /// Which LUN.
    pub lun: [u8; 8],
    /// Reason, or ASC and ASCQ.
    pub reason: u32,
}

impl Event {
    /// Takes an event apart; `None` if it is shorter than one.
    pub fn parse(bytes: &[u8]) -> Option<Event> {
        let bytes: [u8; EVENT_LEN] = bytes.get(..EVENT_LEN)?.try_into().ok()?;
        let [e0, e1, e2, e3, l0, l1, l2, l3, l4, l5, l6, l7, r0, r1, r2, r3] = bytes;
        Some(Event {
            event: u32::from_le_bytes([e0, e1, e2, e3]),
            lun: [l0, l1, l2, l3, l4, l5, l6, l7],
            reason: u32::from_le_bytes([r0, r1, r2, r3]),
        })
    }
}

/// INQUIRY, of a VPD page if given (SPC-4 6.4).
pub fn inquiry(page: Option<u8>, len: u16) -> Vec<u8> {
    let [high, low] = len.to_be_bytes();
    vec![0x12, u8::from(page.is_some()), page.unwrap_or(0), high, low, 0]
}

/// REPORT LUNS (SPC-4 6.33).
pub fn report_luns(len: u32) -> Vec<u8> {
    let mut cdb = vec![0xa0, 0, 0, 0, 0, 0];
    cdb.extend(len.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

/// READ CAPACITY(16) (SBC-3 5.16).
pub fn read_capacity_16() -> Vec<u8> {
    let mut cdb = vec![0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0];
    cdb.extend(32u32.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

/// READ(16) or WRITE(16) (SBC-3 5.15, 5.38).
pub fn read_write_16(write: bool, fua: bool, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = if write { 0x8a } else { 0x88 };
    cdb[1] = if fua { 8 } else { 0 };
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_virtio_lays_them_out() {
        assert_eq!(lun_field(7, 0x123, true), [1, 7, 0x41, 0x23, 0, 0, 0, 0]);
        assert_eq!(lun_field(254, 0, false), [1, 254, 0, 0, 0, 0, 0, 0]);
        let header = request(lun_field(1, 0, true), 0x0102, &[0x12, 0, 0, 0, 36, 0]);
        assert_eq!(header[8..16], [2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(header[16..19], [0; 3]);
        assert_eq!(header[19..25], [0x12, 0, 0, 0, 36, 0]);
        assert_eq!(task_management([9; 8], 5, 1).len(), 24);
        assert_eq!(notification([9; 8], 1, 2).len(), 16);
        assert_eq!(
            read_write_16(true, true, 0x1_0000_0001, 8)[..10],
            [0x8a, 8, 0, 0, 0, 1, 0, 0, 0, 1]
        );
    }

    #[test]
    fn responses_and_events_are_taken_apart_whatever_their_length() {
        let mut bytes = vec![0; RESPONSE_LEN];
        bytes[..12].copy_from_slice(&[3, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0]);
        bytes[12..15].copy_from_slice(&[0x70, 0, 5]);
        let response = Response::parse(&bytes).expect("whole");
        assert_eq!((response.residual, response.status, response.response), (513, 2, 0));
        assert_eq!(response.sense, [0x70, 0, 5]);
        bytes[..4].copy_from_slice(&[0xff; 4]);
        assert_eq!(Response::parse(&bytes).expect("whole").sense.len(), 96);
        assert_eq!(Response::parse(&bytes[..107]), None);
        assert_eq!(Event::parse(&[0; 15]), None);
        let event = Event::parse(&[1, 0, 0, 0x80, 1, 5, 0x40, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        let event = event.expect("whole");
        assert_eq!((event.event, event.lun[1], event.reason), (0x8000_0001, 5, 1));
    }
}
