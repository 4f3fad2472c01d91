//! The protocol's numbers and headers: NVMe/TCP transport specification 1.1. All numbers are little-endian.

use crc_fast::{CrcAlgorithm, checksum};

/// Bytes of the header of all that a controller sends once a connection is initialised.
pub(crate) const HEAD: usize = 24;
/// Bytes of the header of a command capsule: the common header and the command.
pub(crate) const CAPSULE: usize = 72;
/// Bytes of the PDUs that initialise a connection.
pub(crate) const INIT: usize = 128;
/// Bytes of a digest.
pub(crate) const DIGEST: usize = 4;
/// Bytes before the data of a PDU at most: a header with its digest, up to the alignment of the data.
pub(crate) const HEAD_MAX: usize = 128;
/// Bytes of a command, and of its completion.
pub(crate) const COMMAND: usize = 64;
pub(crate) const COMPLETION: usize = 16;

/// Types of PDUs (3.6.1).
pub(crate) mod kind {
    pub const INIT_REQUEST: u8 = 0x00;
    pub const INIT_RESPONSE: u8 = 0x01;
    pub const C2H_TERMINATE: u8 = 0x03;
    pub const COMMAND: u8 = 0x04;
    pub const RESPONSE: u8 = 0x05;
    pub const H2C_DATA: u8 = 0x06;
    pub const C2H_DATA: u8 = 0x07;
    pub const R2T: u8 = 0x09;
}

/// Flags of PDUs.
pub(crate) mod flag {
    pub const HEADER_DIGEST: u8 = 1 << 0;
    pub const DATA_DIGEST: u8 = 1 << 1;
    pub const LAST: u8 = 1 << 2;
    pub const SUCCESS: u8 = 1 << 3;
}

/// CRC32C.
pub(crate) fn digest(bytes: &[u8]) -> [u8; DIGEST] {
    (checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// What both ends of a connection have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Headers have a digest.
    pub header_digest: bool,
    /// Data has a digest.
    pub data_digest: bool,
    /// Data that is sent begins at a multiple of so many bytes of its PDU (CPDA).
    pub alignment: usize,
    /// Bytes of data of one PDU to the controller at most (MAXH2CDATA).
    pub h2c_max: u32,
}

/// The request that initialises a connection (3.6.2.2).
pub(crate) fn init_request(header_digest: bool, data_digest: bool) -> [u8; INIT] {
    let mut bytes = [0; INIT];
    bytes[0] = kind::INIT_REQUEST;
    bytes[2] = INIT as u8;
    bytes[4..8].copy_from_slice(&(INIT as u32).to_le_bytes());
    // Format 0, data aligned to 4 bytes, one R2T of a command at a time.
    bytes[11] = u8::from(header_digest) | u8::from(data_digest) << 1;
    bytes
}

impl Terms {
    /// Reads the answer to that (3.6.2.3).
    ///
    /// # Errors
    /// A clause: it is none, or something else than was asked for.
    pub fn parse(
        bytes: &[u8; INIT],
        header_digest: bool,
        data_digest: bool,
    ) -> Result<Terms, String> {
        let is_one = bytes[0] == kind::INIT_RESPONSE
            && usize::from(bytes[2]) == INIT
            && u32_at(bytes, 4) as usize == INIT;
        if !is_one {
            return Err("what answers there is no NVMe controller over TCP".to_owned());
        }
        if u16_at(bytes, 8) != 0 {
            return Err("the controller speaks another version of NVMe over TCP".to_owned());
        }
        let (alignment, h2c_max) = ((usize::from(bytes[10]) + 1) * 4, u32_at(bytes, 12));
        if alignment > HEAD_MAX {
            return Err("the controller asks for data at a place that cannot be".to_owned());
        }
        for (asked, has, what) in [
            (header_digest, bytes[11] & 1 != 0, "header"),
            (data_digest, bytes[11] & 2 != 0, "data"),
        ] {
            if asked != has {
                let how = if asked { "has no" } else { "wants" };
                return Err(format!(
                    "the controller {how} {what} digests: set {}dgst so",
                    &what[..1]
                ));
            }
        }
        // 3.6.2.3; whole blocks.
        if h2c_max < 4096 {
            return Err(format!("the controller takes only {h2c_max} bytes at once"));
        }
        Ok(Terms { header_digest, data_digest, alignment, h2c_max: h2c_max / 4096 * 4096 })
    }

    /// Bytes of a header with its digest.
    pub(crate) fn head(&self) -> usize {
        HEAD + if self.header_digest { DIGEST } else { 0 }
    }

    /// Completes the header of `header` bytes that stands in `pdu`, of a PDU with so many bytes of data: returns
    /// the bytes before these.
    pub(crate) fn complete(
        &self,
        pdu: &mut [u8; HEAD_MAX],
        kind: u8,
        mut flags: u8,
        header: usize,
        data: usize,
    ) -> usize {
        let mut begin = header + if self.header_digest { DIGEST } else { 0 };
        let mut len = begin;
        if data > 0 {
            begin = begin.next_multiple_of(self.alignment);
            len = begin + data;
            if self.data_digest {
                flags |= flag::DATA_DIGEST;
                len += DIGEST;
            }
        }
        if self.header_digest {
            flags |= flag::HEADER_DIGEST;
        }
        pdu[0] = kind;
        pdu[1] = flags;
        pdu[2] = header as u8;
        pdu[3] = if data > 0 { begin as u8 } else { 0 };
        pdu[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        pdu[header..begin].fill(0);
        if self.header_digest {
            let sum = digest(&pdu[..header]);
            pdu[header..header + DIGEST].copy_from_slice(&sum);
        }
        begin
    }
}

/// The end of a command, as the controller said it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// Of the command: the first eight bytes.
    pub result: u64,
    /// Status field, without the phase tag: code, type of code, and DNR in bit 14.
    pub status: u16,
}

impl Completion {
    /// Reads one.
    pub(crate) fn parse(bytes: &[u8]) -> (u16, Completion) {
        let completion = Completion { result: u64_at(bytes, 0), status: u16_at(bytes, 14) >> 1 };
        (u16_at(bytes, 12), completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Terms =
        Terms { header_digest: false, data_digest: false, alignment: 4, h2c_max: 8192 };

    fn answer(change: impl FnOnce(&mut [u8; INIT])) -> [u8; INIT] {
        let mut bytes = [0; INIT];
        (bytes[0], bytes[2], bytes[4]) = (1, 128, 128);
        bytes[13] = 0x20;
        change(&mut bytes);
        bytes
    }

    #[test]
    fn a_digest_is_crc32c_with_its_lowest_byte_first() {
        // RFC 7143, appendix A.4: 32 bytes of zeros.
        assert_eq!(digest(&[0; 32]), [0xAA, 0x36, 0x91, 0x8A]);
    }

    #[test]
    fn terms_are_those_of_the_controller() {
        assert_eq!(Terms::parse(&answer(|_| {}), false, false).unwrap(), PLAIN);
        let odd = answer(|bytes| (bytes[10], bytes[12]) = (31, 9));
        let told = Terms::parse(&odd, false, false).unwrap();
        assert_eq!((told.alignment, told.h2c_max), (128, 8192));
        let refuses = |bytes: [u8; INIT], words: &str| {
            let why = Terms::parse(&bytes, false, true).unwrap_err();
            assert!(why.contains(words), "{why}");
        };
        refuses(answer(|_| {}), "has no data digests: set ddgst");
        refuses(answer(|bytes| bytes[11] = 3), "wants header digests: set hdgst");
        refuses(answer(|bytes| bytes[0] = 0), "no NVMe controller");
        refuses(answer(|bytes| bytes[4] = 127), "no NVMe controller");
        refuses(answer(|bytes| bytes[8] = 1), "another version");
        refuses(answer(|bytes| bytes[10] = 32), "cannot be");
        refuses(answer(|bytes| (bytes[11], bytes[13]) = (2, 0xF)), "only 3840 bytes");
    }

    #[test]
    fn a_header_says_where_its_data_is_and_how_long_all_is() {
        let mut pdu = [0xFF; HEAD_MAX];
        assert_eq!(PLAIN.complete(&mut pdu, kind::COMMAND, 0, CAPSULE, 512), CAPSULE);
        assert_eq!(pdu[..8], [4, 0, 72, 72, 0x48, 2, 0, 0]);
        assert_eq!(PLAIN.complete(&mut pdu, kind::COMMAND, 0, CAPSULE, 0), CAPSULE);
        assert_eq!(pdu[..8], [4, 0, 72, 0, 72, 0, 0, 0]);
        let all = Terms { header_digest: true, data_digest: true, alignment: 64, ..PLAIN };
        assert_eq!(all.complete(&mut pdu, kind::H2C_DATA, flag::LAST, HEAD, 16), 64);
        assert_eq!(pdu[..8], [6, 7, 24, 64, 84, 0, 0, 0]);
        assert_eq!(pdu[24..28], digest(&pdu[..24]));
        assert!(pdu[28..64].iter().all(|byte| *byte == 0));
    }
}
