//! Where a server is, as an NBD URI.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// The port of NBD (IANA).
const PORT: u16 = 10809;

/// Longest name of an export, in bytes (NBD's "string" limit).
const EXPORT_MAX: usize = 4096;

/// Longest path of a socket, in bytes (unix(7), without the terminating zero).
const PATH_MAX: usize = 107;

/// How the server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// A UNIX socket.
    Unix(PathBuf),
    /// TCP.
    Tcp(SocketAddr),
}

/// A server and one of its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(crate) host: Host,
    pub(crate) export: String,
}

impl Address {
    /// Reads an NBD URI: `nbd+unix:///EXPORT?socket=PATH` or `nbd://ADDRESS:PORT/EXPORT`, where the address
    /// is one of IPv4 or, in brackets, of IPv6. `%` and two hexadecimal digits are a byte.
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub fn parse(uri: &str) -> Result<Address, String> {
        let (scheme, rest) = uri.split_once("://").ok_or_else(|| {
            format!("{uri:?} is no NBD URI such as nbd+unix:///?socket=/run/nbd.sock")
        })?;
        match scheme {
            "nbd+unix" => Self::parse_unix(rest),
            "nbd" => Self::parse_tcp(rest),
            "nbds" | "nbds+unix" => Err(format!("{uri}: TLS is not supported")),
            _ => Err(format!("{uri}: the scheme of an NBD URI is nbd or nbd+unix, not {scheme}")),
        }
    }

    fn parse_unix(rest: &str) -> Result<Address, String> {
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let Some(export) = path.strip_prefix('/') else {
            return Err(format!(
                "nbd+unix://{rest} names a host: a UNIX socket has none, so it begins with nbd+unix:///"
            ));
        };
        let socket = query.split('&').find_map(|part| part.strip_prefix("socket="));
        let socket = decoded(socket.unwrap_or_default())?;
        if !socket.starts_with('/') || socket.len() > PATH_MAX || socket.contains('\0') {
            return Err(format!(
                "nbd+unix://{rest}: its socket is no path from the root of at most {PATH_MAX} bytes: give \
                 nbd+unix:///EXPORT?socket=PATH"
            ));
        }
        Ok(Address { host: Host::Unix(socket.into()), export: export_of(export)? })
    }

    fn parse_tcp(rest: &str) -> Result<Address, String> {
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        let addr = if let Ok(addr) = host.parse::<SocketAddr>() {
            addr
        } else if let Ok(ip) = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>()
        {
            SocketAddr::new(ip, PORT)
        } else {
            return Err(format!(
                "nbd://{rest}: {host:?} is no IP address with a port: names are not looked up"
            ));
        };
        if export.contains('?') {
            return Err(format!("nbd://{rest}: parameters are only those of nbd+unix"));
        }
        Ok(Address { host: Host::Tcp(addr), export: export_of(export)? })
    }

    /// Whether it takes an IP socket to connect to it, be it on this host.
    pub fn is_ip(&self) -> bool {
        matches!(self.host, Host::Tcp(_))
    }

    /// Whether the server is one of this host.
    pub fn is_local(&self) -> bool {
        match &self.host {
            Host::Unix(_) => true,
            Host::Tcp(addr) => addr.ip().is_loopback(),
        }
    }
}

fn export_of(text: &str) -> Result<String, String> {
    let export = decoded(text)?;
    if export.len() > EXPORT_MAX {
        return Err(format!("the name of an export has at most {EXPORT_MAX} bytes"));
    }
    Ok(export)
}

fn decoded(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err(format!("{text:?} has a % without two hexadecimal digits")),
        }
    }
    String::from_utf8(bytes).map_err(|_| format!("{text:?} is not UTF-8"))
}

fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' | b':' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

impl fmt::Display for Address {
    /// The URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = encoded(&self.export);
        match &self.host {
            Host::Unix(path) => {
                write!(f, "nbd+unix:///{export}?socket={}", encoded(&path.to_string_lossy()))
            }
            Host::Tcp(addr) => write!(f, "nbd://{addr}/{export}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_is_read_and_written() {
        for (given, shown) in [
            ("nbd+unix:///?socket=/run/n.sock", "nbd+unix:///?socket=/run/n.sock"),
            ("nbd+unix:///a%20b?socket=/x%3fy", "nbd+unix:///a%20b?socket=/x%3Fy"),
            ("nbd://10.0.0.1", "nbd://10.0.0.1:10809/"),
            ("nbd://10.0.0.1:77/disk/1", "nbd://10.0.0.1:77/disk/1"),
            ("nbd://[::1]:5/", "nbd://[::1]:5/"),
            ("nbd://[fe80::1]/e", "nbd://[fe80::1]:10809/e"),
        ] {
            let address = Address::parse(given).unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(Address::parse(shown).unwrap(), address);
        }
        assert!(Address::parse("nbd://127.0.0.1").unwrap().is_local());
        assert!(!Address::parse("nbd://10.0.0.1").unwrap().is_local());
    }

    #[test]
    fn what_is_no_uri_of_ours_is_refused_in_a_clause() {
        for (given, words) in [
            ("/run/n.sock", "is no NBD URI"),
            ("http://10.0.0.1/", "not http"),
            ("nbds://10.0.0.1/", "TLS"),
            ("nbd://example.org/", "names are not looked up"),
            ("nbd://10.0.0.1:99999/", "is no IP address"),
            ("nbd+unix:///x", "no path from the root"),
            ("nbd+unix:///x?socket=n.sock", "no path from the root"),
            ("nbd+unix://host/x?socket=/n", "names a host"),
            ("nbd+unix:///%f?socket=/n", "two hexadecimal digits"),
            ("nbd+unix:///%ff?socket=/n", "not UTF-8"),
        ] {
            let why = Address::parse(given).unwrap_err();
            assert!(why.contains(words), "{given}: {why}");
        }
    }
}
