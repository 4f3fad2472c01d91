//! Where a controller is.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};

/// The port of NVMe over TCP (IANA).
const PORT: u16 = 4420;

/// Longest name of a subsystem or host, in bytes (base specification 2.1, 4.7).
pub const NQN_MAX: usize = 223;

/// An address of a subsystem's port: one path to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(pub(crate) SocketAddr);

impl Address {
    /// Of an IP address, of the family `adrfam` if that is given, and a port, 4420 by default.
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub fn parse(
        traddr: &str,
        trsvcid: Option<&str>,
        adrfam: Option<&str>,
    ) -> Result<Address, String> {
        let ip: IpAddr = traddr
            .parse()
            .map_err(|_| format!("traddr {traddr:?} is no IP address: names are not looked up"))?;
        let family = adrfam.unwrap_or_default().to_ascii_lowercase();
        match (family.as_str(), ip) {
            ("", _) | ("ipv4", IpAddr::V4(_)) | ("ipv6", IpAddr::V6(_)) => {}
            ("ipv4" | "ipv6", _) => return Err(format!("traddr {traddr} is none of {family}")),
            _ => return Err(format!("adrfam is ipv4 or ipv6, not {family}")),
        }
        let port = match trsvcid {
            None => PORT,
            Some(text) => text
                .parse()
                .ok()
                .filter(|port| *port != 0)
                .ok_or_else(|| format!("trsvcid {text:?} is no port of TCP"))?,
        };
        Ok(Address(SocketAddr::new(ip, port)))
    }

    /// Whether it is what is given of it, the IP address in any way of writing it.
    pub fn is(&self, traddr: Option<&str>, trsvcid: Option<&str>) -> bool {
        traddr.is_none_or(|text| text.parse() == Ok(self.0.ip()))
            && trsvcid.is_none_or(|text| text.parse() == Ok(self.0.port()))
    }

    /// Whether it is on this host.
    pub fn is_local(&self) -> bool {
        self.0.ip().is_loopback()
    }

    /// The IP address.
    pub fn traddr(&self) -> String {
        self.0.ip().to_string()
    }

    /// The port.
    pub fn trsvcid(&self) -> String {
        self.0.port().to_string()
    }

    /// How SPDK shows it, of the subsystem of that name.
    pub fn trid(&self, subnqn: &str) -> Value {
        json!({
            "trtype": "TCP",
            "adrfam": self.adrfam(),
            "traddr": self.traddr(),
            "trsvcid": self.trsvcid(),
            "subnqn": subnqn,
        })
    }

    /// The family as SPDK shows it.
    pub fn adrfam(&self) -> &'static str {
        if self.0.is_ipv4() { "IPv4" } else { "IPv6" }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether it can be the name of a subsystem or host.
///
/// # Errors
/// A clause.
pub fn check_nqn(what: &str, name: &str) -> Result<(), String> {
    let plain = name.bytes().all(|byte| byte.is_ascii_graphic());
    if name.starts_with("nqn.") && name.len() <= NQN_MAX && plain {
        return Ok(());
    }
    Err(format!(
        "{what} {name:?} is no NVMe qualified name: nqn.YYYY-MM.DOMAIN:NAME, or nqn.2014-08.org.nvmexpress:uuid:UUID, \
         of up to {NQN_MAX} characters"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_an_ip_address_and_a_port() {
        let parse = |traddr, trsvcid, adrfam| Address::parse(traddr, trsvcid, adrfam);
        let four = parse("127.0.0.1", Some("4421"), Some("IPv4")).unwrap();
        assert_eq!((four.to_string().as_str(), four.is_local()), ("127.0.0.1:4421", true));
        assert_eq!(parse("10.0.0.1", None, None).unwrap().to_string(), "10.0.0.1:4420");
        let six = parse("fd00::1", None, Some("ipv6")).unwrap();
        assert_eq!((six.to_string().as_str(), six.adrfam()), ("[fd00::1]:4420", "IPv6"));
        assert!(six.is(Some("fd00:0::1"), Some("4420")) && six.is(None, None));
        assert!(
            !six.is(Some("fd00::2"), None) && !six.is(None, Some("1")) && !six.is(Some(""), None)
        );
        for (given, words) in [
            (parse("storage", None, None), "names are not looked up"),
            (parse("10.0.0.1", Some("0"), None), "no port"),
            (parse("10.0.0.1", Some("x"), None), "no port"),
            (parse("10.0.0.1", None, Some("ipv6")), "is none of ipv6"),
            (parse("10.0.0.1", None, Some("ib")), "ipv4 or ipv6, not ib"),
        ] {
            let why = given.unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        assert!(check_nqn("subnqn", "nqn.2026-11.org.example:a").is_ok());
        for wrong in
            ["", "iqn.2026-11.org.example:a", "nqn.a b", &format!("nqn.{}", "a".repeat(220))]
        {
            assert!(check_nqn("subnqn", wrong).is_err(), "{wrong}");
        }
    }
}
