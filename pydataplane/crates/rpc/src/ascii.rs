//! Writes JSON in ASCII.

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};
use std::io::{self, Write};

/// Escapes what is not ASCII as `\u`, in UTF-16 as RFC 8259 section 7 wants it. SPDK's Python
/// client decodes each piece it receives on its own and drops one that ends within a character.
struct AsciiFormatter(CompactFormatter);

impl Formatter for AsciiFormatter {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, w: &mut W, s: &str) -> io::Result<()> {
        if s.is_ascii() {
            return self.0.write_string_fragment(w, s);
        }
        for c in s.chars() {
            if c.is_ascii() {
                w.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(w, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

/// `value` as JSON text of ASCII characters only.
pub fn to_vec(value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    let mut serializer = Serializer::with_formatter(&mut out, AsciiFormatter(CompactFormatter));
    value.serialize(&mut serializer).expect("a JSON value serialises into memory");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_outside_ascii_is_escaped_and_comes_back() {
        let v = json!({"näme": "größe 𝄞 \u{7f} \"quoted\" \n"});
        let bytes = to_vec(&v);
        assert!(bytes.is_ascii());
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains("n\\u00e4me") && text.contains("\\ud834\\udd1e"));
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), v);
    }
}
