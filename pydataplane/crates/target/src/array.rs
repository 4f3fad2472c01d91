//! Arrays whose disks are volumes of pools: the LUNs of an iSCSI target, the namespaces of an NVMe subsystem.

use crate::volume::Volume;
use bdev::Medium;
use rpc::{Errno, Error};
use serde_json::{Value, json};
use uuid::Uuid;

/// Bytes of a cluster of a pool of an array, which has none: the unit in which SPDK's methods count.
pub const CLUSTER: u64 = 1 << 20;
/// Bytes of a block where nothing is known of it.
const BLOCK_SIZE: u32 = 512;
/// What the names of LUNs begin with, before their numbers.
const LUN_PREFIX: &str = "lun-";

/// An array.
#[derive(Clone)]
pub enum Array {
    /// An iSCSI target.
    Iscsi {
        /// Its LUN 0, with the login.
        address: iscsi::Address,
        /// Name of the initiator.
        initiator: String,
    },
    /// A subsystem over TCP.
    Nvme {
        /// What is asked for of its controllers.
        options: Box<nvme::Options>,
        /// Its paths.
        paths: Vec<nvme::Address>,
    },
}

/// A disk of an array.
pub struct Found {
    /// What the volume is called.
    pub name: String,
    /// Number of the LUN or namespace.
    pub number: u32,
    /// What it is; a clause: it does not say, or is none that a bdev can be on.
    pub is: Result<Medium, String>,
}

impl From<iscsi::Found> for Found {
    fn from(iscsi::Found { lun, is }: iscsi::Found) -> Found {
        Found { name: lun_name(lun), number: lun.into(), is }
    }
}

impl From<nvme::Found> for Found {
    fn from(nvme::Found { name, nsid, is }: nvme::Found) -> Found {
        Found { name, number: nsid, is }
    }
}

/// What the volume of a LUN is called.
pub fn lun_name(lun: u16) -> String {
    format!("{LUN_PREFIX}{lun}")
}

/// The LUN whose volume has that name.
pub fn lun_number(name: &str) -> Option<u16> {
    let lun = name.strip_prefix(LUN_PREFIX)?.parse().ok()?;
    (lun_name(lun) == name).then_some(lun)
}

/// Of the LUNs of the iSCSI target that is the pool `pool`.
pub fn luns(pool: &str, e: &iscsi::ListError) -> Error {
    let errno = match iscsi::Library::loaded() {
        Err(_) => Errno::NotSup,
        Ok(_) if e.silent => Errno::TimedOut,
        Ok(_) => Errno::Io,
    };
    Error::os(errno, format_args!("pool {pool}: {e}"))
}

impl Array {
    /// Which kind of pool it is, as the methods call it.
    pub fn kind(&self) -> &'static str {
        match self {
            Array::Iscsi { .. } => "iscsi",
            Array::Nvme { .. } => "nvme",
        }
    }

    /// As that, for people.
    pub fn what(&self) -> &'static str {
        match self {
            Array::Iscsi { .. } => "of LUNs of an iSCSI target",
            Array::Nvme { .. } => "of namespaces of an NVMe subsystem",
        }
    }

    /// What its disks are.
    pub fn disks(&self) -> &'static str {
        match self {
            Array::Iscsi { .. } => "LUNs",
            Array::Nvme { .. } => "namespaces",
        }
    }

    /// What the volumes are called by, which the array gives to its disks.
    pub fn called_by(&self) -> &'static str {
        match self {
            Array::Iscsi { .. } => "numbers",
            Array::Nvme { .. } => "identifications",
        }
    }

    /// What [`bdev::Bdev::product_name`] says of its disks.
    pub fn product(&self) -> &'static str {
        match self {
            Array::Iscsi { .. } => iscsi::Disk::PRODUCT,
            Array::Nvme { .. } => nvme::Disk::PRODUCT,
        }
    }

    /// Its name, the same on every host and by whatever path.
    pub fn name(&self) -> &str {
        match self {
            Array::Iscsi { address, .. } => address.target(),
            Array::Nvme { options, .. } => &options.subnqn,
        }
    }

    /// Its name and where it is, without passwords.
    pub fn path(&self) -> String {
        match self {
            Array::Iscsi { address, .. } => address.shown_target(),
            Array::Nvme { options, paths } => {
                let paths: Vec<_> = paths.iter().map(ToString::to_string).collect();
                format!("{}/{}", paths.join(","), options.subnqn)
            }
        }
    }

    /// What a disk is called that cannot be told from others.
    fn unnamed(&self, number: u32) -> String {
        match self {
            Array::Iscsi { .. } => format!("{LUN_PREFIX}{number}"),
            Array::Nvme { .. } => nvme::unnamed(number),
        }
    }

    /// Asks for its disks, of the pool of that name; takes some seconds, and a minute at most.
    ///
    /// # Errors
    /// It is not there, lets nobody in, or does not tell them.
    pub fn list(&self, pool: &str) -> Result<Vec<Found>, Error> {
        match self {
            Array::Iscsi { address, initiator } => {
                let listed = iscsi::list(address, initiator).map_err(|e| luns(pool, &e))?;
                Ok(listed.into_iter().map(Found::from).collect())
            }
            Array::Nvme { options, paths } => {
                let listed = nvme::list(options, paths);
                let listed = listed
                    .map_err(|why| Error::os(Errno::Io, format_args!("pool {pool}: {why}")))?;
                Ok(listed.into_iter().map(Found::from).collect())
            }
        }
    }

    /// What one listing tells: a disk that does not say what it is for now goes by what was `known` of it, and those
    /// that have one identification cannot be used.
    pub fn volumes(&self, found: Vec<Found>, known: &[Volume]) -> Vec<Volume> {
        let mut all: Vec<_> = found.into_iter().map(|found| self.volume(found)).collect();
        let told: Vec<_> = all.iter().filter(|v| v.problem.is_none()).map(|v| v.uuid).collect();
        for volume in all.iter_mut().filter(|volume| volume.problem.is_some()) {
            let was =
                known.iter().find(|was| was.image == volume.image && !told.contains(&was.uuid));
            if let Some(was) = was {
                let (problem, number) = (volume.problem.take(), volume.number);
                *volume = Volume { problem, number, ..was.clone() };
            }
        }
        let each = |volume: &Volume| (volume.uuid, volume.image.clone(), volume.number);
        let numbers: Vec<_> = all.iter().map(each).collect();
        for volume in &mut all {
            let is_other = |(uuid, image, number): &&(Uuid, String, u32)| {
                (*uuid == volume.uuid || *image == volume.image) && *number != volume.number
            };
            if let Some((.., other)) = numbers.iter().find(is_other) {
                let why = format!(
                    "it has the same identification as {}, so that it could not be told from it: give each one of \
                     its own at the array",
                    self.unnamed(*other)
                );
                volume.image = self.unnamed(volume.number);
                (volume.uuid, volume.problem) = (self.nobodys(&volume.image), Some(why));
            }
        }
        all
    }

    /// Identity of a disk that cannot be told from others: it is nobody's, but is shown.
    fn nobodys(&self, image: &str) -> Uuid {
        bdev::identity_in(self.name(), image.as_bytes())
    }

    /// A disk as a volume.
    pub fn volume(&self, found: Found) -> Volume {
        let Found { name, number, is } = found;
        let (problem, is) = match is {
            Ok(is) => (None, Some(is)),
            Err(why) => (Some(why), None),
        };
        let size = is.map_or(0, |is| is.size);
        Volume {
            snapshot: None,
            uuid: is.map_or_else(|| self.nobodys(&name), |is| is.identity),
            size,
            block_size: is.map_or(BLOCK_SIZE, |is| is.block_size),
            object_size: CLUSTER,
            allocated: size,
            thin: is.is_some_and(|is| is.thin),
            read_only: is.is_some_and(|is| is.read_only),
            parent: None,
            is_clone: false,
            clones: Vec::new(),
            problem,
            image: name,
            number,
        }
    }

    /// What `bdev_get_bdevs` says of a volume that is not open, as of one that is.
    pub fn specific(&self, volume: &Volume) -> Value {
        let with_problem = |mut shown: Value| {
            if let Some(problem) = &volume.problem {
                shown["problem"] = json!(problem);
            }
            shown
        };
        match self {
            Array::Iscsi { address, initiator } => {
                let lun = lun_number(&volume.image).unwrap_or_default();
                let url = address.at(lun).to_string();
                with_problem(json!({"url": url, "initiator_iqn": initiator}))
            }
            Array::Nvme { options, paths } => {
                let path = |path: &nvme::Address| {
                    with_problem(json!({
                        "trid": path.trid(&options.subnqn),
                        "ns_data": {"id": volume.number},
                    }))
                };
                paths.iter().map(path).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iscsi() -> Array {
        let address = iscsi::Address::new("localhost", "iqn.a", 0).unwrap();
        Array::Iscsi { address, initiator: "iqn.b".to_owned() }
    }

    #[test]
    fn a_lun_is_called_by_its_number() {
        assert_eq!((lun_name(3).as_str(), lun_number("lun-3")), ("lun-3", Some(3)));
        for wrong in ["3", "lun-", "lun-03", "lun-+3", "lun-70000", "lun-3@x", "LUN-3"] {
            assert_eq!(lun_number(wrong), None, "{wrong}");
        }
    }

    fn medium(identity: u128) -> Medium {
        Medium {
            identity: Uuid::from_u128(identity),
            block_size: 512,
            size: 1 << 20,
            read_only: false,
            thin: false,
        }
    }

    fn lun(lun: u16, identity: Option<u128>) -> Found {
        let is = identity.map(medium).ok_or_else(|| "it is busy".to_owned());
        iscsi::Found { lun, is }.into()
    }

    #[test]
    fn luns_of_one_identification_cannot_be_used() {
        let all = vec![lun(1, Some(7)), lun(2, Some(8)), lun(5, Some(7)), lun(9, Some(7))];
        let all = iscsi().volumes(all, &[]);
        let said: Vec<_> = all.iter().map(|lun| lun.problem.as_deref().unwrap_or("")).collect();
        assert!(said[0].contains("the same identification as lun-5"), "{said:?}");
        assert!(said[2].contains("as lun-1") && said[3].contains("as lun-1"), "{said:?}");
        assert_eq!((said[1], all[1].uuid), ("", Uuid::from_u128(8)));
        let mut uuids: Vec<_> = all.iter().map(|lun| lun.uuid).collect();
        uuids.sort_unstable();
        uuids.dedup();
        assert_eq!(uuids.len(), 4);
        assert!(!uuids.contains(&Uuid::from_u128(7)));
    }

    #[test]
    fn a_lun_that_does_not_answer_for_now_stays_who_it_is() {
        let known = iscsi().volumes(vec![lun(1, Some(7)), lun(2, Some(8))], &[]);
        let all = iscsi().volumes(vec![lun(1, None), lun(2, Some(8))], &known);
        assert_eq!((all[0].uuid, all[0].size), (Uuid::from_u128(7), 1 << 20));
        assert_eq!(all[0].problem.as_deref(), Some("it is busy"));
        assert_eq!(all[1], known[1]);
        // Its number is another LUN's place now.
        let moved = iscsi().volumes(vec![lun(1, None), lun(2, Some(7))], &known);
        assert_ne!(moved[0].uuid, Uuid::from_u128(7));
        assert_eq!((moved[1].uuid, &moved[1].problem), (Uuid::from_u128(7), &None));
    }

    #[test]
    fn a_namespace_that_cannot_be_used_goes_by_the_number_that_it_has_now() {
        let second = std::time::Duration::from_secs(1);
        let options = nvme::Options {
            name: "nv0".to_owned(),
            subnqn: "nqn.a".to_owned(),
            hostnqn: "nqn.b".to_owned(),
            header_digest: false,
            data_digest: false,
            queues: 1,
            keep_alive: second,
            connect_within: second,
            reconnect_delay: second,
            give_up: None,
            timeout: None,
            write_through: None,
            expected: Vec::new(),
            only: None,
        };
        let array = Array::Nvme { options: Box::new(options), paths: Vec::new() };
        let space = |number, is: Result<Medium, &str>| Found {
            name: "uuid.7".to_owned(),
            number,
            is: is.map_err(str::to_owned),
        };
        let known = array.volumes(vec![space(1, Ok(medium(7)))], &[]);
        let moved = array.volumes(vec![space(4, Err("it has metadata"))], &known);
        assert_eq!((moved[0].uuid, moved[0].number), (Uuid::from_u128(7), 4));
        // Two of them are told apart by it.
        let twice = vec![space(4, Err("it has metadata")), space(5, Err("it has metadata"))];
        let twice = array.volumes(twice, &known);
        assert_eq!((twice[0].image.as_str(), twice[1].image.as_str()), ("nsid.4", "nsid.5"));
        // Nor is one of them used while the other cannot be.
        let one =
            array.volumes(vec![space(4, Ok(medium(7))), space(5, Err("it has metadata"))], &[]);
        assert!(one.iter().all(|volume| volume.problem.is_some()), "{:?}", one[0]);
    }

    #[test]
    fn a_lun_that_does_not_say_what_it_is_is_shown_without_size() {
        let found = |is| iscsi().volume(iscsi::Found { lun: 3, is }.into());
        let broken = found(Err("it tells no capacity".to_owned()));
        assert_eq!((broken.name().as_str(), broken.size), ("lun-3", 0));
        assert_eq!(broken.problem.as_deref(), Some("it tells no capacity"));
        let is =
            Medium { block_size: 4096, size: 8 << 20, read_only: true, thin: true, ..medium(7) };
        let lun = found(Ok(is));
        assert_eq!((lun.uuid, lun.size, lun.block_size), (is.identity, 8 << 20, 4096));
        assert!(lun.read_only && lun.thin && lun.problem.is_none());
        assert_ne!(lun.uuid, broken.uuid);
    }
}
