//! What is agreed on before the first request, without I/O: fixed newstyle, NBD_OPT_GO.

use bdev::{Features, Geometry};

use crate::wire::flag;

const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// NBD_FLAG_FIXED_NEWSTYLE, of the server and of the client.
const FIXED_NEWSTYLE: u32 = 1;
/// NBD_FLAG_NO_ZEROES, of both.
const NO_ZEROES: u32 = 2;
/// NBD_OPT_GO.
const GO: u32 = 7;
/// NBD_REP_ACK and NBD_REP_INFO.
const ACK: u32 = 1;
const INFO: u32 = 3;
/// NBD_INFO_EXPORT, NBD_INFO_NAME, NBD_INFO_BLOCK_SIZE.
const INFO_EXPORT: u16 = 0;
const INFO_NAME: u16 = 1;
const INFO_BLOCK_SIZE: u16 = 3;
/// What a reply is that says no.
const ERROR: u32 = 1 << 31;

const GREETING: usize = 18;
const REPLY_HEAD: usize = 20;

/// Bytes of a reply to an option, and replies to it, at most: a name has 4096, and few are sent.
const REPLY_MAX: u32 = 8192;
const REPLIES_MAX: u32 = 32;

/// Bytes of a request at most where the server says nothing of it.
const PAYLOAD_DEFAULT: u32 = 32 << 20;

/// Bytes of data of a request at most, whatever the server takes.
const PAYLOAD_MAX: u32 = 32 << 20;

/// Bytes of a physical block at most that is believed.
const PHYSICAL_MAX: u32 = 1 << 20;

/// Characters of a server's words that are passed on.
const WORDS_MAX: usize = 200;

/// Why there is no agreement: a clause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// What a server said of its export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the export.
    pub size: u64,
    /// Its flags.
    pub(crate) flags: u16,
    /// Bytes that offsets and lengths are multiples of at least; a power of two.
    pub(crate) least: u32,
    /// Bytes of what is best.
    pub(crate) preferred: u32,
    /// Bytes of data of a request at most.
    pub(crate) payload_max: u32,
    /// Its canonical name, where the server tells.
    pub(crate) name: Option<Vec<u8>>,
}

impl Terms {
    /// Whether the server serves several connections as one.
    pub fn multi_conn(&self) -> bool {
        self.flags & flag::CAN_MULTI_CONN != 0
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The device's blocks, of `block_size` bytes if that is given.
    ///
    /// # Errors
    /// A clause: the server takes no such blocks.
    pub fn geometry(&self, block_size: Option<u32>) -> Result<Geometry, String> {
        let block_size = block_size.unwrap_or(if self.least <= 512 { 512 } else { 4096 });
        if matches!(block_size, 512 | 4096) && block_size < self.least {
            return Err(format!(
                "the server takes no requests of less than {} bytes, so blocks of {block_size} are too small",
                self.least
            ));
        }
        let physical = self.preferred.clamp(block_size, PHYSICAL_MAX);
        Geometry::checked(block_size, physical, self.size / u64::from(block_size.max(1)))
    }

    /// What the device can do. `write_through`: each write is durable when it is answered.
    pub fn features(&self, geometry: &Geometry, read_only: bool, write_through: bool) -> Features {
        let read_only = read_only || self.has(flag::READ_ONLY);
        let unmap = !read_only && self.has(flag::SEND_TRIM);
        let granularity = geometry.physical_block_size / geometry.block_size;
        Features {
            read_only,
            // Without a flush, what is answered is as durable as it gets.
            volatile_cache: self.has(flag::SEND_FLUSH) && !write_through,
            fua: self.has(flag::SEND_FUA),
            unmap,
            // NBD_CMD_TRIM promises nothing.
            unmap_zeroes: false,
            unmap_skips: true,
            write_zeroes: !read_only && self.has(flag::SEND_WRITE_ZEROES),
            thin: unmap,
            unmap_granularity: if unmap { granularity } else { 0 },
            optimal_blocks: 0,
            max_blocks: 0,
            boot: None,
            remote: true,
        }
    }

    /// Whether an export of these terms can take the place of one of those, with `num_blocks` of
    /// `block_size` bytes that guests know of.
    ///
    /// # Errors
    /// A clause that says what is missing.
    pub fn can_replace(
        &self,
        before: &Terms,
        block_size: u32,
        num_blocks: u64,
    ) -> Result<(), String> {
        let bytes = num_blocks.saturating_mul(u64::from(block_size));
        if self.size < bytes {
            return Err(format!("the export shrank from {bytes} to {} bytes", self.size));
        }
        if let (Some(now), Some(then)) = (&self.name, &before.name)
            && now != then
        {
            return Err(format!(
                "the server has another export now: {}, and not {}",
                words(now),
                words(then)
            ));
        }
        let abilities = [
            (flag::SEND_FLUSH, "flushes"),
            (flag::SEND_FUA, "durable writes (FUA)"),
            (flag::SEND_TRIM, "trims"),
            (flag::SEND_WRITE_ZEROES, "zeroing"),
        ];
        for (flag, what) in abilities {
            if before.has(flag) && !self.has(flag) {
                return Err(format!("the export takes no {what} any more"));
            }
        }
        if self.has(flag::READ_ONLY) && !before.has(flag::READ_ONLY) {
            return Err("the export is read-only now".into());
        }
        if before.multi_conn() && !self.multi_conn() {
            return Err("the server does not serve several connections as one any more".into());
        }
        if self.least > block_size || self.payload_max < before.payload_max {
            return Err("the server's requests have to be of other lengths now".into());
        }
        Ok(())
    }
}

/// What a server said, for people: without what is not printable, and not too long.
fn words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let printable = text.chars().filter(|c| !c.is_control());
    format!("{:?}", printable.take(WORDS_MAX).collect::<String>())
}

enum State {
    Greeting,
    Head,
    Body { kind: u32, len: usize },
    Over,
}

/// The client's side of it: reads what the server says in the lengths that [`Handshake::wants`] asks for.
pub struct Handshake {
    state: State,
    export: String,
    replies: u32,
    size_and_flags: Option<(u64, u16)>,
    /// Least, preferred and largest bytes of a request.
    lengths: Option<[u32; 3]>,
    name: Option<Vec<u8>>,
}

impl Handshake {
    /// With a server that was just connected to, about `export`.
    pub fn new(export: &str) -> Self {
        Handshake {
            state: State::Greeting,
            export: export.to_owned(),
            replies: 0,
            size_and_flags: None,
            lengths: None,
            name: None,
        }
    }

    /// Bytes that are to be read next; 0: nothing more is.
    pub fn wants(&self) -> usize {
        match self.state {
            State::Greeting => GREETING,
            State::Head => REPLY_HEAD,
            State::Body { len, .. } => len,
            State::Over => 0,
        }
    }

    /// Takes the bytes that [`Handshake::wants`] asked for, and appends what is to be answered to `answer`. The
    /// terms, when all is said.
    ///
    /// # Errors
    /// [`Refused`]; the connection is of no use then.
    pub fn take(&mut self, bytes: &[u8], answer: &mut Vec<u8>) -> Result<Option<Terms>, Refused> {
        debug_assert_eq!(bytes.len(), self.wants());
        match std::mem::replace(&mut self.state, State::Over) {
            State::Greeting => self.greeting(bytes, answer)?,
            State::Head => self.head(bytes)?,
            State::Body { kind, .. } => self.body(kind, bytes)?,
            State::Over => return Err(Refused("it was over already".into())),
        }
        // Of no length: there is nothing to wait for.
        if let State::Body { kind, len: 0 } = self.state {
            self.body(kind, &[])?;
        }
        match self.state {
            State::Over => self.terms().map(Some),
            _ => Ok(None),
        }
    }

    fn greeting(&mut self, bytes: &[u8], answer: &mut Vec<u8>) -> Result<(), Refused> {
        if be64(bytes, 0) != Some(GREETING_MAGIC) {
            return Err(Refused("what answers there is no NBD server".into()));
        }
        let flags = u32::from(be16(bytes, 16).unwrap_or_default());
        if be64(bytes, 8) != Some(OPTION_MAGIC) || flags & FIXED_NEWSTYLE == 0 {
            return Err(Refused(
                "the server is too old: it does not know the fixed newstyle handshake".into(),
            ));
        }
        answer.extend((FIXED_NEWSTYLE | flags & NO_ZEROES).to_be_bytes());
        let name = self.export.as_bytes();
        let asked = [INFO_NAME, INFO_BLOCK_SIZE];
        let len = 4 + name.len() + 2 + 2 * asked.len();
        answer.extend(OPTION_MAGIC.to_be_bytes());
        answer.extend(GO.to_be_bytes());
        answer.extend((len as u32).to_be_bytes());
        answer.extend((name.len() as u32).to_be_bytes());
        answer.extend(name);
        answer.extend((asked.len() as u16).to_be_bytes());
        asked.iter().for_each(|info| answer.extend(info.to_be_bytes()));
        self.state = State::Head;
        Ok(())
    }

    fn head(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        let is_ours = be64(bytes, 0) == Some(OPTION_REPLY_MAGIC) && be32(bytes, 8) == Some(GO);
        let (Some(kind), Some(len), true) = (be32(bytes, 12), be32(bytes, 16), is_ours) else {
            return Err(broken("answers something else than it was asked"));
        };
        self.replies += 1;
        if len > REPLY_MAX || self.replies > REPLIES_MAX {
            return Err(broken("says too much"));
        }
        self.state = State::Body { kind, len: len as usize };
        Ok(())
    }

    fn body(&mut self, kind: u32, bytes: &[u8]) -> Result<(), Refused> {
        self.state = State::Head;
        match kind {
            ACK => self.state = State::Over,
            INFO => match be16(bytes, 0) {
                Some(INFO_EXPORT) => {
                    let known = be64(bytes, 2).zip(be16(bytes, 10)).filter(|_| bytes.len() == 12);
                    self.size_and_flags = Some(known.ok_or_else(bad_info)?);
                }
                Some(INFO_BLOCK_SIZE) => {
                    let [Some(least), Some(preferred), Some(most)] =
                        [2, 6, 10].map(|at| be32(bytes, at).filter(|_| bytes.len() == 14))
                    else {
                        return Err(bad_info());
                    };
                    self.lengths = Some([least, preferred, most]);
                }
                Some(INFO_NAME) => self.name = bytes.get(2..).map(<[u8]>::to_vec),
                Some(_) => {}
                None => return Err(bad_info()),
            },
            _ if kind & ERROR != 0 => {
                let said = match bytes.is_empty() {
                    true => String::new(),
                    false => format!(": the server says {}", words(bytes)),
                };
                let export = words(self.export.as_bytes());
                let why = match kind & !ERROR {
                    1 => "the server is too old: it does not know NBD_OPT_GO".to_owned(),
                    2 => format!("the server does not let us have the export {export}"),
                    5 => "the server wants TLS, which is not supported".to_owned(),
                    6 => format!("the server has no export {export}"),
                    7 => "the server is going away".to_owned(),
                    error => format!("the server refuses the export {export} with error {error}"),
                };
                return Err(Refused(why + &said));
            }
            _ => return Err(broken("answers in a way that is not known")),
        }
        Ok(())
    }

    fn terms(&mut self) -> Result<Terms, Refused> {
        let Some((size, flags)) = self.size_and_flags else {
            return Err(broken("does not say how large the export is"));
        };
        let [least, preferred, most] = self.lengths.unwrap_or([1, 4096, PAYLOAD_DEFAULT]);
        let fits = least.is_power_of_two() && preferred.is_power_of_two() && preferred >= least;
        if !fits || most < preferred || size > i64::MAX as u64 {
            return Err(broken("says sizes of its export that cannot be"));
        }
        if least > 4096 {
            return Err(Refused(format!(
                "the server takes no requests of less than {least} bytes; a block has 512 or 4096"
            )));
        }
        // Whole blocks, of either size.
        let payload_max = most.min(PAYLOAD_MAX) / 4096 * 4096;
        if payload_max == 0 {
            return Err(Refused(format!("the server takes no requests of more than {most} bytes")));
        }
        Ok(Terms { size, flags, least, preferred, payload_max, name: self.name.take() })
    }
}

fn broken(what: &str) -> Refused {
    Refused(format!("the server is broken: it {what}"))
}

fn bad_info() -> Refused {
    broken("sends information of a wrong length")
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
