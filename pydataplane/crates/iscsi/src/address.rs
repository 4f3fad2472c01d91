//! Where a LUN is, as an iSCSI URL.

use std::fmt;
use std::net::IpAddr;

/// Longest part of a URL, in bytes: libiscsi's `MAX_STRING_SIZE`, and of names RFC 7143 6.1's 223.
const PART_MAX: usize = 223;
/// Highest LUN of the flat address space (SAM-5 4.7.7.2).
pub const LUN_MAX: u16 = 0x3fff;
/// The port of iSCSI (IANA).
const PORT: u16 = 3260;

/// Whom somebody says to be, and how that is proved (CHAP).
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for Login {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.user)
    }
}

/// A LUN of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or IP address.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The target's name.
    pub(crate) target: String,
    pub(crate) lun: u16,
    /// As whom this initiator logs in.
    pub(crate) login: Option<Login>,
    /// Whom the target has to prove to be.
    pub(crate) target_login: Option<Login>,
}

impl Address {
    /// Reads a URL as libiscsi and SPDK have it: `iscsi://[USER%PASSWORD@]HOST[:PORT]/TARGET/LUN`, where `%` and
    /// two hexadecimal digits are a byte of TARGET. `?target_user=` and `&target_password=` are what the target
    /// has to prove (mutual CHAP).
    ///
    /// # Errors
    /// A clause that says what is wrong, without a password.
    pub fn parse(url: &str) -> Result<Address, String> {
        const FORM: &str = "iscsi://[USER%PASSWORD@]HOST[:PORT]/TARGET/LUN";
        let rest = match url.split_once("://") {
            Some(("iscsi", rest)) => rest,
            Some(("iser", _)) => {
                return Err("iSER is not served: give an address of iscsi://".to_owned());
            }
            _ => return Err(format!("its URL is not of the form {FORM}")),
        };
        if url.contains('\0') {
            return Err("its URL has a zero byte".to_owned());
        }
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(a, b)| (a, Some(b)));
        // A password may have an @ or a slash; a host has neither.
        let (login, rest) = match rest.rsplit_once('@') {
            Some((login, rest)) => (Some(Login::parse(login)?), rest),
            None => (None, rest),
        };
        let parts: Vec<_> = rest.split('/').collect();
        let [portal, target, lun] = parts[..] else {
            return Err(format!("its URL is not of the form {FORM}"));
        };
        let (host, port) = portal_of(portal)?;
        let target = decoded(target)?;
        check_target(&target)?;
        let lun = lun.parse().ok().filter(|lun| *lun <= LUN_MAX);
        let lun = lun.ok_or_else(|| format!("a LUN is a number of 0 to {LUN_MAX}"))?;
        let target_login = query.map(query_of).transpose()?;
        if target_login.is_some() && login.is_none() {
            return Err("a target that proves who it is wants that of the initiator, too: give USER%PASSWORD@"
                .to_owned());
        }
        Ok(Address { host, port, target, lun, login, target_login })
    }

    /// A LUN of the target `target` at `portal`, which is HOST[:PORT].
    ///
    /// # Errors
    /// A clause that says what is wrong.
    pub fn new(portal: &str, target: &str, lun: u16) -> Result<Address, String> {
        let (host, port) = portal_of(portal)?;
        check_target(target)?;
        Ok(Address { host, port, target: target.to_owned(), lun, login: None, target_login: None })
    }

    /// The same, where the initiator logs in as `user` (CHAP).
    ///
    /// # Errors
    /// A clause that says what is wrong, without the password.
    pub fn with_login(self, user: &str, password: &str) -> Result<Address, String> {
        Ok(Address { login: Some(Login::new(user, password)?), ..self })
    }

    /// The same, where nobody has to prove who he is.
    pub fn without_login(&self) -> Address {
        Address { login: None, target_login: None, ..self.clone() }
    }

    /// Another LUN of the same target.
    pub fn at(&self, lun: u16) -> Address {
        Address { lun, ..self.clone() }
    }

    /// `HOST:PORT/TARGET`, for people.
    pub fn shown_target(&self) -> String {
        format!("{}/{}", self.portal(), self.target)
    }

    /// Number of the LUN.
    pub fn lun(&self) -> u16 {
        self.lun
    }

    /// The target's name.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Whether a password is in it.
    pub fn has_secret(&self) -> bool {
        self.login.is_some()
    }

    /// Host and port, as libiscsi takes them.
    pub(crate) fn portal(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// The first two bytes of the LUN's structure (SAM-5 4.7.7): peripheral, or flat where that is too large.
    pub(crate) fn lun_field(&self) -> i32 {
        let lun = i32::from(self.lun);
        if lun < 256 { lun } else { 0x4000 | lun }
    }

    /// Whether the target is one of this host.
    pub fn is_local(&self) -> bool {
        let ip = self.host.parse::<IpAddr>();
        self.host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    }
}

impl Login {
    fn parse(text: &str) -> Result<Login, String> {
        let Some((user, password)) = text.split_once('%') else {
            return Err("its URL names a user without a password: give USER%PASSWORD@".to_owned());
        };
        Login::new(user, password)
    }

    fn new(user: &str, password: &str) -> Result<Login, String> {
        let fits = |text: &str| (1..=PART_MAX).contains(&text.len());
        let ends = |text: &str| text.contains('\0');
        if !fits(user) || !fits(password) || ends(user) || ends(password) {
            return Err(format!("a user and a password have 1 to {PART_MAX} bytes each"));
        }
        Ok(Login { user: user.to_owned(), password: password.to_owned() })
    }
}

fn check_target(name: &str) -> Result<(), String> {
    match name.is_empty() || name.len() > PART_MAX || name.contains('\0') {
        true => Err(format!("a target's name has 1 to {PART_MAX} bytes")),
        false => Ok(()),
    }
}

fn portal_of(portal: &str) -> Result<(String, u16), String> {
    // It is not quoted: where an @ is missing, it is a password.
    let wrong = || "its URL has no host, or one with a wrong port".to_owned();
    let (host, port) = match portal.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(wrong)?;
            if host.parse::<std::net::Ipv6Addr>().is_err() {
                return Err(wrong());
            }
            (host, port.strip_prefix(':').or((port.is_empty()).then_some("")).ok_or_else(wrong)?)
        }
        None => portal.split_once(':').unwrap_or((portal, "")),
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':');
    if host.is_empty() || host.len() > PART_MAX || !host.bytes().all(plain) {
        return Err(wrong());
    }
    let port = if port.is_empty() { PORT } else { port.parse().map_err(|_| wrong())? };
    Ok((host.to_owned(), port))
}

fn query_of(query: &str) -> Result<Login, String> {
    let (mut user, mut password) = ("", "");
    for part in query.split('&') {
        match part.split_once('=') {
            Some(("target_user", value)) => user = value,
            Some(("target_password", value)) => password = value,
            _ => {
                return Err(
                    "its URL has a parameter that is neither target_user nor target_password"
                        .into(),
                );
            }
        }
    }
    Login::new(user, password)
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
            (Some(high), Some(low)) if high + low > 0 => bytes.push((high * 16 + low) as u8),
            _ => return Err("its target's name has a % without two hexadecimal digits".to_owned()),
        }
    }
    String::from_utf8(bytes).map_err(|_| "its target's name is not UTF-8".to_owned())
}

impl fmt::Display for Address {
    /// The URL without passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("iscsi://")?;
        if let Some(login) = &self.login {
            write!(f, "{}@", login.user)?;
        }
        let target = self.target.replace('%', "%25").replace('/', "%2f").replace('?', "%3f");
        write!(f, "{}/{target}/{}", self.portal(), self.lun)?;
        match &self.target_login {
            Some(login) => write!(f, "?target_user={}", login.user),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_and_shown_without_its_passwords() {
        for (given, shown, portal) in [
            (
                "iscsi://10.0.0.1/iqn.2026-11.org.a:b/1",
                "iscsi://10.0.0.1:3260/iqn.2026-11.org.a:b/1",
                "10.0.0.1:3260",
            ),
            ("iscsi://san.lan:77/iqn.x%3Ay/0", "iscsi://san.lan:77/iqn.x:y/0", "san.lan:77"),
            ("iscsi://[fe80::1]/iqn.x/300", "iscsi://[fe80::1]:3260/iqn.x/300", "[fe80::1]:3260"),
            (
                "iscsi://me%s@c%r/et@10.0.0.1/iqn.x/2",
                "iscsi://me@10.0.0.1:3260/iqn.x/2",
                "10.0.0.1:3260",
            ),
            (
                "iscsi://me%a@h/t/1?target_user=it&target_password=secret",
                "iscsi://me@h:3260/t/1?target_user=it",
                "h:3260",
            ),
        ] {
            let address = Address::parse(given).unwrap();
            assert_eq!((address.to_string().as_str(), address.portal().as_str()), (shown, portal));
            assert!(!format!("{address:?}").contains("secret"));
        }
        let login = Address::parse("iscsi://me%s@c%r/et@h/t/1").unwrap().login.unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("me", "s@c%r/et"));
        assert!(Address::parse("iscsi://127.0.0.1/t/1").unwrap().is_local());
        assert!(!Address::parse("iscsi://10.0.0.1/t/1").unwrap().is_local());
    }

    #[test]
    fn an_address_is_made_of_its_parts() {
        let address = Address::new("[fe80::1]:77", "iqn.a", 3).unwrap();
        assert_eq!(address.to_string(), "iscsi://[fe80::1]:77/iqn.a/3");
        let other = address.clone().with_login("me", "a?b/c@d%").unwrap().at(4);
        assert_eq!(other.to_string(), "iscsi://me@[fe80::1]:77/iqn.a/4");
        assert_eq!((other.lun(), other.target()), (4, "iqn.a"));
        assert_eq!(other.shown_target(), "[fe80::1]:77/iqn.a");
        assert!(other.has_secret() && !other.without_login().has_secret());
        assert_eq!(other.login.unwrap().password, "a?b/c@d%");
        assert!(Address::new("a b", "iqn.a", 3).unwrap_err().contains("no host"));
        assert!(Address::new("h", "", 3).unwrap_err().contains("a target's name"));
        let why = address.with_login("me", "sec\0ret").unwrap_err();
        assert!(why.contains("a user and a password have") && !why.contains("ret"), "{why}");
    }

    #[test]
    fn a_lun_is_addressed_as_peripheral_or_flat() {
        let field = |lun| Address::parse(&format!("iscsi://h/t/{lun}")).unwrap().lun_field();
        assert_eq!([field(0), field(255), field(256), field(0x3fff)], [0, 255, 0x4100, 0x7fff]);
    }

    #[test]
    fn what_is_no_url_is_refused_in_a_clause_without_a_password() {
        for (given, words) in [
            ("10.0.0.1", "not of the form"),
            ("iser://10.0.0.1/t/1", "iSER is not served"),
            ("iscsi://10.0.0.1/t", "not of the form"),
            ("iscsi://10.0.0.1/t/1/2", "not of the form"),
            ("iscsi:///t/1", "no host"),
            ("iscsi://a b/t/1", "no host"),
            ("iscsi://h:99999/t/1", "no host"),
            ("iscsi://[::1/t/1", "no host"),
            ("iscsi://[::1]x/t/1", "no host"),
            ("iscsi://h//1", "a target's name"),
            ("iscsi://h/t%0/1", "two hexadecimal digits"),
            ("iscsi://h/t%00/1", "two hexadecimal digits"),
            ("iscsi://h/t/-1", "a LUN is a number"),
            ("iscsi://h/t/16384", "a LUN is a number"),
            ("iscsi://me@h/t/1", "a user without a password"),
            ("iscsi://me%@h/t/1", "a user and a password have"),
            ("iscsi://me%secret@h/t/x", "a LUN is a number"),
            ("iscsi://me%secret/t/1", "no host"),
            ("iscsi://me/%secret/1", "two hexadecimal digits"),
            ("iscsi://me/%73ecret%ff/1", "not UTF-8"),
            ("iscsi://me%secret@h/t/1?x=y", "a parameter"),
            ("iscsi://h/t/1?target_user=a&target_password=secret", "wants that of the initiator"),
        ] {
            let why = Address::parse(given).unwrap_err();
            assert!(why.contains(words), "{given}: {why}");
            assert!(!why.contains("secret"), "{why}");
        }
    }
}
