//! Cuts a byte stream into JSON values.
//!
//! The stream has no delimiters, so the end of a value is found by following its brackets and
//! strings, once per byte. Only objects and arrays can be requests; a stream that starts with
//! something else is refused at its first byte.

use crate::code::Error;
use serde_json::Value;
use zeroize::Zeroize;

/// Bytes of one request or batch; more is refused and the connection closed.
pub const MAX_REQUEST_BYTES: usize = 1024 * 1024;

/// Nesting of one request, in brackets.
pub const MAX_DEPTH: u32 = 64;

/// Finds where values end in what arrived so far.
#[derive(Default)]
pub struct Framer {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were followed already.
    scanned: usize,
    /// One bit per open bracket, the innermost lowest: 1 for `{`, 0 for `[`.
    kinds: u64,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

// One bit per level.
const _: () = assert!(MAX_DEPTH == u64::BITS);

impl Framer {
    /// Takes bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The bytes of the value that has begun, for another framer.
    pub fn into_rest(self) -> Vec<u8> {
        self.buffer
    }

    /// Whether a value has begun and not ended.
    pub fn is_incomplete(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// The next whole value, or `None` when more bytes are needed. After an error the stream is
    /// out of step for good.
    pub fn next_value(&mut self) -> Result<Option<Value>, Error> {
        if self.scanned == 0 {
            let blank = self.buffer.iter().take_while(|b| is_blank(**b)).count();
            self.buffer.drain(..blank);
        }
        let Some(end) = self.scan()? else {
            if self.buffer.len() >= MAX_REQUEST_BYTES {
                return Err(too_large());
            }
            return Ok(None);
        };
        if end > MAX_REQUEST_BYTES {
            return Err(too_large());
        }
        let value = serde_json::from_slice(&self.buffer[..end]).map_err(|e| parse_error(&e))?;
        // It may have had a secret in it.
        self.buffer[..end].zeroize();
        self.buffer.drain(..end);
        self.scanned = 0;
        Ok(Some(value))
    }

    /// Looks whether the incomplete value can still become JSON; for when the client pauses.
    pub fn check_syntax(&self) -> Result<(), Error> {
        match serde_json::from_slice::<serde::de::IgnoredAny>(&self.buffer) {
            Err(e) if !e.is_eof() => Err(parse_error(&e)),
            _ => Ok(()),
        }
    }

    /// Follows new bytes; returns the length of the first value if it ended.
    fn scan(&mut self) -> Result<Option<usize>, Error> {
        while let Some(&byte) = self.buffer.get(self.scanned) {
            if self.scanned == 0 && byte != b'{' && byte != b'[' {
                return Err(not_a_request(byte));
            }
            self.scanned += 1;
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => {
                    if self.depth == MAX_DEPTH {
                        return Err(Error {
                            code: crate::Code::Parse,
                            message: format!(
                                "the request is nested deeper than {MAX_DEPTH} levels"
                            ),
                        });
                    }
                    self.kinds = self.kinds << 1 | u64::from(byte == b'{');
                    self.depth += 1;
                }
                b'}' | b']' => {
                    if self.kinds & 1 != u64::from(byte == b'}') {
                        return Err(Error {
                            code: crate::Code::Parse,
                            message: format!(
                                "the request is no JSON: unexpected '{}' at byte {}",
                                byte as char, self.scanned
                            ),
                        });
                    }
                    self.kinds >>= 1;
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Ok(Some(self.scanned));
                    }
                }
                _ => {}
            }
        }
        Ok(None)
    }
}

/// What may stand between values (RFC 8259, 2); ASCII's form feed may not.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

fn too_large() -> Error {
    Error {
        code: crate::Code::Parse,
        message: format!("the request is larger than {MAX_REQUEST_BYTES} bytes"),
    }
}

fn parse_error(e: &serde_json::Error) -> Error {
    Error { code: crate::Code::Parse, message: format!("the request is no JSON: {e}") }
}

fn not_a_request(first: u8) -> Error {
    let scalar = matches!(first, b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n');
    Error {
        code: if scalar { crate::Code::InvalidRequest } else { crate::Code::Parse },
        message: "a request is a JSON object, a batch an array of them".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn all(framer: &mut Framer) -> Vec<Value> {
        std::iter::from_fn(|| framer.next_value().unwrap()).collect()
    }

    #[test]
    fn values_without_delimiters_come_out_one_by_one() {
        let mut f = Framer::default();
        f.push(b"{\"a\":1}{\"b\":[2]}[{}]\n {\n \"c\" : \"}\\\"{\" }");
        let expected = [json!({"a":1}), json!({"b":[2]}), json!([{}]), json!({"c":"}\"{"})];
        assert_eq!(all(&mut f), expected);
        assert!(!f.is_incomplete());
    }

    #[test]
    fn values_split_anywhere_come_out_whole() {
        let text = "{\"näme\":\"\\\\\", \"x\":[1,{\"y\":null}]}".as_bytes();
        let expected: Value = serde_json::from_slice(text).unwrap();
        for cut in 0..=text.len() {
            let mut f = Framer::default();
            f.push(&text[..cut]);
            let early = f.next_value().unwrap();
            f.push(&text[cut..]);
            let value = early.or_else(|| f.next_value().unwrap());
            assert_eq!(value.as_ref(), Some(&expected), "cut at {cut}");
        }
    }

    #[test]
    fn a_bracket_of_the_wrong_kind_is_found_at_once() {
        let mut f = Framer::default();
        f.push(b"{\"a\":[1}");
        assert_eq!(f.next_value().unwrap_err().code.number(), -32700);
    }

    #[test]
    fn depth_is_bounded() {
        let mut f = Framer::default();
        f.push(&[b'['; MAX_DEPTH as usize]);
        assert_eq!(f.next_value().unwrap(), None);
        f.push(b"[");
        assert!(f.next_value().unwrap_err().message.contains("64 levels"));
    }

    #[test]
    fn size_is_bounded() {
        let mut f = Framer::default();
        f.push(b"{\"a\":\"");
        f.push(&vec![b'x'; MAX_REQUEST_BYTES]);
        assert!(f.next_value().unwrap_err().message.contains("1048576 bytes"));
    }

    #[test]
    fn syntax_errors_show_before_the_value_ends() {
        let mut f = Framer::default();
        f.push(b"{\"a\": oops");
        assert_eq!(f.next_value().unwrap(), None);
        assert_eq!(f.check_syntax().unwrap_err().code.number(), -32700);
        let mut f = Framer::default();
        f.push(b"{\"a\": \"b");
        assert_eq!(f.next_value().unwrap(), None);
        f.check_syntax().unwrap();
    }

    #[test]
    fn a_scalar_is_no_request_and_text_is_no_json() {
        let texts = [("17 ", -32600), ("\"a\"", -32600), ("hello", -32700), ("\x0c{}", -32700)];
        for (text, code) in texts {
            let mut f = Framer::default();
            f.push(text.as_bytes());
            assert_eq!(f.next_value().unwrap_err().code.number(), code, "{text}");
        }
    }
}
