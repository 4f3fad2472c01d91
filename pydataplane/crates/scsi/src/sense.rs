//! Sense data: what the initiator is told when a command fails (SPC-4 4.5).
//!
//! [`of_io_error`] is the one place that answers "what does the guest see if the backend returns
//! X?": an exhaustive match without a wildcard.

use bdev::IoError;

/// Fixed-format sense data with 18 bytes (SPC-4 4.5.3).
pub const SENSE_LEN: usize = 18;

/// Bytes for sense data in either format.
pub(crate) const SENSE_ROOM: usize = 20;

/// Fixed format: there is INFORMATION.
const VALID: u8 = 0x80;

/// Sense keys (SPC-4 4.5.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Key {
    NoSense = 0x0,
    NotReady = 0x2,
    MediumError = 0x3,
    HardwareError = 0x4,
    IllegalRequest = 0x5,
    UnitAttention = 0x6,
    DataProtect = 0x7,
    CopyAborted = 0xA,
    AbortedCommand = 0xB,
    Miscompare = 0xE,
}

/// An additional sense code and its qualifier (SPC-4 annex F), as `asc << 8 | ascq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u16);

impl Code {
    pub(crate) const NO_ADDITIONAL_SENSE: Code = Code(0x0000);
    pub(crate) const IO_PROCESS_TERMINATED: Code = Code(0x0006);
    pub(crate) const OPERATION_IN_PROGRESS: Code = Code(0x0016);
    pub(crate) const PERIPHERAL_DEVICE_WRITE_FAULT: Code = Code(0x0300);
    pub(crate) const BECOMING_READY: Code = Code(0x0401);
    pub(crate) const FORMAT_IN_PROGRESS: Code = Code(0x0404);
    pub(crate) const SANITIZE_IN_PROGRESS: Code = Code(0x041B);
    pub(crate) const WRITE_ERROR: Code = Code(0x0C00);
    pub(crate) const COPY_TARGET_NOT_REACHABLE: Code = Code(0x0D02);
    pub(crate) const GUARD_CHECK_FAILED: Code = Code(0x1001);
    pub(crate) const APPLICATION_TAG_CHECK_FAILED: Code = Code(0x1002);
    pub(crate) const REFERENCE_TAG_CHECK_FAILED: Code = Code(0x1003);
    pub(crate) const UNRECOVERED_READ_ERROR: Code = Code(0x1100);
    pub(crate) const PARAMETER_LIST_LENGTH_ERROR: Code = Code(0x1A00);
    pub(crate) const MISCOMPARE_DURING_VERIFY: Code = Code(0x1D00);
    pub(crate) const INVALID_COMMAND_OPERATION_CODE: Code = Code(0x2000);
    pub(crate) const LBA_OUT_OF_RANGE: Code = Code(0x2100);
    pub(crate) const UNSUPPORTED_TOKEN_TYPE: Code = Code(0x2301);
    pub(crate) const TOKEN_UNKNOWN: Code = Code(0x2304);
    pub(crate) const TOKEN_REVOKED: Code = Code(0x2306);
    pub(crate) const TOKEN_EXPIRED: Code = Code(0x2307);
    pub(crate) const TOKEN_DELETED: Code = Code(0x2309);
    pub(crate) const INVALID_TOKEN_LENGTH: Code = Code(0x230A);
    pub(crate) const INVALID_FIELD_IN_CDB: Code = Code(0x2400);
    pub(crate) const LOGICAL_UNIT_NOT_SUPPORTED: Code = Code(0x2500);
    pub(crate) const INVALID_FIELD_IN_PARAMETER_LIST: Code = Code(0x2600);
    pub(crate) const INVALID_RELEASE_OF_PERSISTENT_RESERVATION: Code = Code(0x2604);
    pub(crate) const TOO_MANY_CSCD_DESCRIPTORS: Code = Code(0x2606);
    pub(crate) const UNSUPPORTED_CSCD_DESCRIPTOR: Code = Code(0x2607);
    pub(crate) const TOO_MANY_SEGMENT_DESCRIPTORS: Code = Code(0x2608);
    pub(crate) const UNSUPPORTED_SEGMENT_DESCRIPTOR: Code = Code(0x2609);
    pub(crate) const WRITE_PROTECTED: Code = Code(0x2700);
    pub(crate) const SOFTWARE_WRITE_PROTECTED: Code = Code(0x2702);
    pub(crate) const SPACE_ALLOCATION_FAILED: Code = Code(0x2707);
    pub(crate) const MEDIUM_MAY_HAVE_CHANGED: Code = Code(0x2800);
    pub(crate) const POWER_ON_OR_RESET: Code = Code(0x2900);
    pub(crate) const MODE_PARAMETERS_CHANGED: Code = Code(0x2A01);
    pub(crate) const RESERVATIONS_PREEMPTED: Code = Code(0x2A03);
    pub(crate) const RESERVATIONS_RELEASED: Code = Code(0x2A04);
    pub(crate) const REGISTRATIONS_PREEMPTED: Code = Code(0x2A05);
    pub(crate) const CAPACITY_DATA_HAS_CHANGED: Code = Code(0x2A09);
    pub(crate) const MEDIUM_FORMAT_CORRUPTED: Code = Code(0x3100);
    pub(crate) const FORMAT_COMMAND_FAILED: Code = Code(0x3101);
    pub(crate) const SANITIZE_COMMAND_FAILED: Code = Code(0x3103);
    pub(crate) const SAVING_PARAMETERS_NOT_SUPPORTED: Code = Code(0x3900);
    pub(crate) const MEDIUM_NOT_PRESENT: Code = Code(0x3A00);
    pub(crate) const INQUIRY_DATA_HAS_CHANGED: Code = Code(0x3F03);
    pub(crate) const REPORTED_LUNS_DATA_HAS_CHANGED: Code = Code(0x3F0E);
    pub(crate) const INTERNAL_TARGET_FAILURE: Code = Code(0x4400);
    pub(crate) const PERSISTENT_RESERVATION_INFORMATION_LOST: Code = Code(0x4401);
    pub(crate) const INVALID_MESSAGE_ERROR: Code = Code(0x4900);
    pub(crate) const MEDIUM_REMOVAL_PREVENTED: Code = Code(0x5302);
    pub(crate) const INSUFFICIENT_RESOURCES: Code = Code(0x5503);
    pub(crate) const INSUFFICIENT_REGISTRATION_RESOURCES: Code = Code(0x5504);
    pub(crate) const INSUFFICIENT_RESOURCES_FOR_TOKEN: Code = Code(0x550D);

    const fn asc(self) -> u8 {
        (self.0 >> 8) as u8
    }

    const fn ascq(self) -> u8 {
        self.0 as u8
    }
}

/// Sense-key specific data: where an invalid field is (SPC-4 4.5.2.4.2), or how far something is (4.5.2.4.4);
/// or which block is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// Byte of the CDB, and its left-most bit where only some bits are wrong.
    Cdb(u16, Option<u8>),
    /// Byte of the parameter data.
    Data(u16),
    /// PROGRESS INDICATION, of 65,536.
    Progress(u16),
    /// INFORMATION: the block that is meant (SPC-4 4.5.2.2). Of a larger number than the fixed format has
    /// room for, it is not there.
    Block(u64),
}

/// Sense data before it is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sense {
    pub(crate) key: Key,
    pub(crate) code: Code,
    pub(crate) field: Option<Field>,
}

impl Sense {
    pub(crate) const fn new(key: Key, code: Code) -> Self {
        Sense { key, code, field: None }
    }

    /// ILLEGAL REQUEST with `code`.
    pub(crate) const fn illegal(code: Code) -> Self {
        Self::new(Key::IllegalRequest, code)
    }

    /// INVALID FIELD IN CDB: all of `byte`, or the field whose left-most bit is `bit`.
    pub(crate) const fn invalid_cdb(byte: u16, bit: Option<u8>) -> Self {
        Sense {
            key: Key::IllegalRequest,
            code: Code::INVALID_FIELD_IN_CDB,
            field: Some(Field::Cdb(byte, bit)),
        }
    }

    /// NOT READY with `code`, and how far it is.
    pub(crate) const fn not_ready(code: Code, progress: u16) -> Self {
        Sense { key: Key::NotReady, code, field: Some(Field::Progress(progress)) }
    }

    /// INVALID FIELD IN PARAMETER LIST at `byte`.
    pub(crate) const fn invalid_parameter(byte: u16) -> Self {
        Sense {
            key: Key::IllegalRequest,
            code: Code::INVALID_FIELD_IN_PARAMETER_LIST,
            field: Some(Field::Data(byte)),
        }
    }

    /// Fixed format, current error (SPC-4 4.5.3).
    pub(crate) fn fixed(&self) -> [u8; SENSE_LEN] {
        let mut out = [0u8; SENSE_LEN];
        out[0] = 0x70;
        out[2] = self.key as u8;
        out[7] = (SENSE_LEN - 8) as u8;
        out[12] = self.code.asc();
        out[13] = self.code.ascq();
        if let Some(field) = self.field {
            let (flags, byte) = match field {
                Field::Cdb(byte, None) => (0xC0, byte),
                Field::Cdb(byte, Some(bit)) => (0xC8 | (bit & 7), byte),
                Field::Data(byte) => (0x80, byte),
                Field::Progress(progress) => (0x80, progress),
                Field::Block(lba) => {
                    if let Ok(lba) = u32::try_from(lba) {
                        out[0] |= VALID;
                        out[3..7].copy_from_slice(&lba.to_be_bytes());
                    }
                    return out;
                }
            };
            out[15] = flags;
            out[16..18].copy_from_slice(&byte.to_be_bytes());
        }
        out
    }

    /// Descriptor format, current error, no descriptors (SPC-4 4.5.2), as parameter data.
    pub(crate) fn descriptor(&self) -> [u8; 8] {
        [0x72, self.key as u8, self.code.asc(), self.code.ascq(), 0, 0, 0, 0]
    }
}

/// Fixed-format sense data in the descriptor format (SPC-4 4.5.2), with its information or sense-key specific
/// data, of which no error here has both; and its length.
pub(crate) fn in_descriptors(fixed: &[u8; SENSE_ROOM]) -> ([u8; SENSE_ROOM], u8) {
    const SENSE_KEY_SPECIFIC: [u8; 4] = [0x02, 6, 0, 0];
    const INFORMATION: [u8; 4] = [0x00, 10, VALID, 0];
    let mut out = [0u8; SENSE_ROOM];
    out[..4].copy_from_slice(&[0x72, fixed[2] & 0x0F, fixed[12], fixed[13]]);
    if fixed[0] & VALID != 0 {
        out[7] = 12;
        out[8..12].copy_from_slice(&INFORMATION);
        out[16..20].copy_from_slice(&fixed[3..7]);
        return (out, 20);
    }
    if fixed[15] & 0x80 == 0 {
        return (out, 8);
    }
    out[7] = 8;
    out[8..12].copy_from_slice(&SENSE_KEY_SPECIFIC);
    out[12..15].copy_from_slice(&fixed[15..18]);
    (out, 16)
}

/// What the initiator is told when the bdev fails.
pub(crate) const fn of_io_error(error: IoError) -> Sense {
    match error {
        // The device shrank between our check and the I/O.
        IoError::OutOfRange => Sense::illegal(Code::LBA_OUT_OF_RANGE),
        // We gave the bdev a wrong length: our fault, not the initiator's.
        IoError::BadLength => Sense::new(Key::HardwareError, Code::INTERNAL_TARGET_FAILURE),
        IoError::ReadOnly => Sense::new(Key::DataProtect, Code::WRITE_PROTECTED),
        // SBC-3 4.7.3; Linux turns it into ENOSPC.
        IoError::NoSpace => Sense::new(Key::DataProtect, Code::SPACE_ALLOCATION_FAILED),
        IoError::ReadMedium => Sense::new(Key::MediumError, Code::UNRECOVERED_READ_ERROR),
        IoError::WriteMedium => Sense::new(Key::MediumError, Code::WRITE_ERROR),
        // HARDWARE ERROR, because Linux retries most MEDIUM ERRORs, and a flush that is retried
        // can succeed although what was to be flushed is lost.
        IoError::Flush => Sense::new(Key::HardwareError, Code::PERIPHERAL_DEVICE_WRITE_FAULT),
        IoError::Unsupported => Sense::illegal(Code::INVALID_COMMAND_OPERATION_CODE),
        IoError::Removed => Sense::illegal(Code::LOGICAL_UNIT_NOT_SUPPORTED),
        IoError::Aborted => Sense::new(Key::AbortedCommand, Code::IO_PROCESS_TERMINATED),
        IoError::Resources => Sense::new(Key::AbortedCommand, Code::INSUFFICIENT_RESOURCES),
        IoError::Guard => Sense::new(Key::AbortedCommand, Code::GUARD_CHECK_FAILED),
        IoError::AppTag => Sense::new(Key::AbortedCommand, Code::APPLICATION_TAG_CHECK_FAILED),
        IoError::RefTag => Sense::new(Key::AbortedCommand, Code::REFERENCE_TAG_CHECK_FAILED),
        IoError::Miscompare => Sense::new(Key::Miscompare, Code::MISCOMPARE_DURING_VERIFY),
        // A status of its own, which has no sense: this is for where only sense can be told.
        IoError::Reserved => Sense::new(Key::AbortedCommand, Code::IO_PROCESS_TERMINATED),
    }
}
