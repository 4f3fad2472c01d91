//! What tells a namespace from all others, and what it is called by that.

use std::fmt;

use uuid::{Uuid, Variant};

use crate::command::IDENTIFY_LEN;

/// Places in Identify Namespace (NVM command set specification 1.1, 4.1.5.1).
const NGUID: usize = 104;
const EUI64: usize = 120;

/// A name that nobody gives to another namespace; it is shown as Linux does (`wwid`, `/dev/disk/by-id/nvme-*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Uuid(Uuid),
    Nguid([u8; 16]),
    Eui64([u8; 8]),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            f.write_str("eui.")?;
            bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        };
        match self {
            Name::Uuid(uuid) => write!(f, "uuid.{uuid}"),
            Name::Nguid(bytes) => hex(f, bytes),
            Name::Eui64(bytes) => hex(f, bytes),
        }
    }
}

impl Name {
    /// Of the list of descriptors or, of older controllers, of Identify Namespace: the UUID, else the NGUID, else
    /// the EUI-64. `None`: it has none.
    pub(crate) fn parse(
        descriptors: Option<&[u8; IDENTIFY_LEN]>,
        namespace: &[u8; IDENTIFY_LEN],
    ) -> Option<Name> {
        let (mut uuid, mut nguid, mut eui) = (None, None, None);
        let mut left = descriptors.map_or(&[][..], |data| &data[..]);
        while let [kind, len, _, _, rest @ ..] = left
            && *len != 0
        {
            let Some((value, rest)) = rest.split_at_checked(usize::from(*len)) else { break };
            let known = value.iter().any(|byte| *byte != 0);
            match (kind, known) {
                (1, true) => eui = value.try_into().ok().or(eui),
                (2, true) => nguid = value.try_into().ok().or(nguid),
                (3, true) => uuid = Uuid::from_slice(value).ok().or(uuid),
                _ => {}
            }
            left = rest;
        }
        let is_known = |value: &[u8]| value.iter().any(|byte| *byte != 0);
        let field = |at: usize, len: usize| Some(&namespace[at..at + len]).filter(|v| is_known(v));
        let nguid = nguid.or_else(|| field(NGUID, 16)?.try_into().ok());
        let eui = eui.or_else(|| field(EUI64, 8)?.try_into().ok());
        uuid.map(Name::Uuid).or(nguid.map(Name::Nguid)).or(eui.map(Name::Eui64))
    }

    /// UUID of the volume of the subsystem that is the namespace: another subsystem may say the same name, of a disk of
    /// its own.
    pub(crate) fn volume(&self, subnqn: &str) -> Uuid {
        bdev::identity_in(subnqn, self.to_string().as_bytes())
    }

    /// UUID of the bdev that is the namespace by itself: its UUID or NGUID, or one that is made of its EUI-64. What its
    /// controller may have made up to stand for another array's disk, whose UUIDs are made of names here (version 5), is
    /// one that is made of the subsystem's name, too; not where it was `recorded` before that was so.
    fn bdev(&self, subnqn: &str, recorded: Option<Uuid>) -> Uuid {
        let told = match self {
            Name::Uuid(uuid) => *uuid,
            Name::Nguid(bytes) => Uuid::from_bytes(*bytes),
            Name::Eui64(bytes) => return Uuid::new_v5(&Uuid::NAMESPACE_OID, bytes),
        };
        let is_made = told.get_variant() == Variant::RFC4122 && told.get_version_num() == 5;
        match is_made && recorded != Some(told) {
            true => bdev::identity_in(subnqn, format!("bdev.{self}").as_bytes()),
            false => told,
        }
    }
}

/// What a namespace is used as.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    /// A pool's volume.
    Volume,
    /// A bdev by itself; what is recorded of the one of its number.
    Bdev(Option<Uuid>),
}

/// What a namespace is told by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identified {
    /// Of a pool's volume, [`Name::volume`], else [`Name::bdev`]; without a name, made of its number in the subsystem.
    pub identity: Uuid,
    /// `None`: it has no name of its own, so another one may have its number, and so its identity, later.
    pub name: Option<Name>,
}

impl Identified {
    pub(crate) fn new(
        name: Option<Name>,
        subnqn: &str,
        serial: &str,
        nsid: u32,
        used: Use,
    ) -> Identified {
        let identity = match (name, used) {
            (Some(name), Use::Volume) => name.volume(subnqn),
            (Some(name), Use::Bdev(recorded)) => name.bdev(subnqn, recorded),
            (None, _) => bdev::identity_in(subnqn, format!("{serial}\0{nsid}").as_bytes()),
        };
        Identified { identity, name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::tests::namespace_data;

    #[test]
    fn an_identity_is_the_uuid_and_what_stands_in_for_it() {
        let plain = namespace_data(8, 9);
        let of = |descriptors: Option<&[u8]>, data: &[u8; IDENTIFY_LEN]| {
            let mut list = [0; IDENTIFY_LEN];
            descriptors.inspect(|bytes| list[..bytes.len()].copy_from_slice(bytes));
            let name = Name::parse(descriptors.map(|_| &list), data);
            Identified::new(name, "nqn.x", "s", 1, Use::Bdev(None))
        };
        let shown = |is: Identified| is.name.map(|name| name.to_string()).unwrap_or_default();
        let uuid = [&[1, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 16, 0, 0][..], &[9; 16]].concat();
        assert_eq!(of(Some(&uuid), &plain).identity, Uuid::from_bytes([9; 16]));
        let hex = "09090909-0909-0909-0909-090909090909";
        assert_eq!(shown(of(Some(&uuid), &plain)), format!("uuid.{hex}"));
        let mut nguid = plain;
        nguid[104..120].fill(5);
        assert_eq!(of(None, &nguid).identity, Uuid::from_bytes([5; 16]));
        assert_eq!(shown(of(None, &nguid)), format!("eui.{}", "05".repeat(16)));
        assert_eq!(shown(of(Some(&uuid[..12]), &plain)), "eui.0102030405060708");
        assert_ne!(of(Some(&uuid[..12]), &plain).identity, of(None, &plain).identity);
        assert_eq!(of(None, &plain).name, None);
        assert_eq!(of(Some(&[3, 16, 0, 0]), &plain), of(None, &plain));
        // One that is longer than the list, and one that is too short.
        let mut list = [1; IDENTIFY_LEN];
        list[1] = 255;
        assert_eq!(Name::parse(Some(&list), &plain), None);
        assert_eq!(of(Some(&[3, 8, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]), &plain).name, None);
        let number = |nsid| Identified::new(None, "nqn.x", "s", nsid, Use::Bdev(None)).identity;
        assert_ne!(number(1), number(2));
    }

    #[test]
    fn a_volume_of_one_subsystem_is_none_of_another() {
        let all =
            [Name::Uuid(Uuid::from_bytes([5; 16])), Name::Nguid([5; 16]), Name::Eui64([5; 8])];
        let of = |name, subnqn| Identified::new(Some(name), subnqn, "s", 1, Use::Volume).identity;
        for name in all {
            let called = format!("nqn.x\0{name}");
            assert_eq!(of(name, "nqn.x"), Uuid::new_v5(&Uuid::NAMESPACE_OID, called.as_bytes()));
            assert_ne!(of(name, "nqn.x"), of(name, "nqn.y"));
            assert_ne!(
                of(name, "nqn.x"),
                Identified::new(Some(name), "nqn.x", "s", 1, Use::Bdev(None)).identity
            );
        }
        assert_ne!(of(all[0], "nqn.x"), of(all[1], "nqn.x"));
        // By whatever number and serial number.
        let other = Identified::new(Some(all[0]), "nqn.x", "t", 9, Use::Volume);
        assert_eq!(other.identity, of(all[0], "nqn.x"));
    }

    #[test]
    fn a_bdev_has_no_uuid_that_stands_for_a_volume_whatever_its_namespace_says() {
        let volume = Name::Uuid(Uuid::from_bytes([7; 16])).volume("nqn.x");
        let of = |name, recorded| {
            Identified::new(Some(name), "nqn.y", "s", 1, Use::Bdev(recorded)).identity
        };
        for says in [Name::Uuid(volume), Name::Nguid(*volume.as_bytes())] {
            let other =
                Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("nqn.y\0bdev.{says}").as_bytes());
            assert_eq!(of(says, None), other);
            assert_eq!(of(says, Some(other)), other);
            assert_ne!(other, says.volume("nqn.y"));
            assert_eq!(of(says, Some(volume)), volume);
        }
        // Random ones, and an NGUID that is no UUID.
        let random = Uuid::from_u128(0x0f3a2b64_6a52_4a0c_9d55_30c7e1f0d8aa);
        let mut nguid = *volume.as_bytes();
        nguid[8] |= 0xC0;
        assert_eq!(of(Name::Uuid(random), None), random);
        assert_eq!(of(Name::Nguid(nguid), None), Uuid::from_bytes(nguid));
    }
}
