//! The call that attaches a controller, as it comes and is recorded.

use super::options::{self, SetOptions};
use super::{ATTACH, wrong};
use crate::app::App;
use crate::array::Array;
use crate::methods::{UuidText, check_name, unsupported};
use crate::pools::Backend;
use crate::state::Call;
use nvme::{Address, Only, Options, check_nqn};
use rpc::{Errno, Error};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::Duration;
use uuid::Uuid;

/// Queues for I/O at most: one thread serves them all.
const QUEUES_MAX: u32 = 8;
/// What a name of this host is made in.
const HOST_SPACE: Uuid = Uuid::from_u128(0x6fa1_2d1b_8a5c_4c5e_9a3e_77a5_6f0c_3d11);

/// A path.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PathParams {
    /// IP address.
    pub traddr: String,
    /// Port. Default: 4420
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trsvcid: Option<String>,
}

/// What a namespace has to be.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    /// Number.
    pub nsid: u32,
    /// Identity.
    pub uuid: UuidText,
    /// Bytes of a block.
    pub block_size: u32,
}

/// See [`ATTACH`].
#[derive(Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// Name of the controller; its bdevs are NAMEn1, NAMEn2 and so on, by the numbers of its namespaces.
    pub name: String,
    /// Transport: tcp.
    pub trtype: String,
    /// IP address.
    pub traddr: String,
    /// Family of the address: ipv4 or ipv6. Default: as it is
    #[serde(default)]
    pub adrfam: Option<String>,
    /// Port. Default: 4420
    #[serde(default)]
    pub trsvcid: Option<String>,
    /// Name of the subsystem (NQN).
    #[serde(default)]
    pub subnqn: Option<String>,
    /// Name of this host (NQN). Default: one made of its machine-id
    #[serde(default)]
    pub hostnqn: Option<String>,
    /// Headers have a digest, CRC32C. Default: false
    #[serde(default)]
    pub hdgst: Option<bool>,
    /// Data has a digest, CRC32C; what is sent is copied for it. Default: false
    #[serde(default)]
    pub ddgst: Option<bool>,
    /// Of a controller that is attached already: "failover" or "multipath" adds this path to it, where I/O goes when
    /// the others are lost or not optimized; "disable" refuses it. Default: failover
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipath: Option<String>,
    /// Queues for I/O of each path, 8 at most. Default: 1
    #[serde(default)]
    pub num_io_queues: Option<u32>,
    /// Seconds without an answer after which I/O fails; -1: never. The bdevs stay, and connections are tried for all the
    /// same. Default, and what 0 means: what bdev_nvme_set_options has set, or 60
    #[serde(default)]
    pub ctrlr_loss_timeout_sec: Option<i64>,
    /// Seconds between two attempts to connect. Default, and what 0 means: what bdev_nvme_set_options has set, or 1
    #[serde(default)]
    pub reconnect_delay_sec: Option<i64>,
    /// Seconds without an answer after which I/O fails, in place of ctrlr_loss_timeout_sec. Default, and what 0 means:
    /// what bdev_nvme_set_options has set, or that
    #[serde(default)]
    pub fast_io_fail_timeout_sec: Option<i64>,
    /// Have each write made durable (FUA), so that nothing that was answered is lost where the target goes down and
    /// comes back (ours). Default: true where that is another host and has a volatile cache
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_through: Option<bool>,
    /// Further paths to the subsystem (ours), as calls with multipath add them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathParams>,
    /// What namespaces of these numbers have to be (ours): one that is missing, or another one, is no bdev and keeps no
    /// other away, others are bdevs as well; where none is there, it is an error. Default: what they are, which is
    /// recorded
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<Expected>,
    /// Name of the pool whose volume the one of `namespaces` is (ours): no other is used, by whatever number it is there;
    /// its bdev is called by its UUID, as the controller, and by POOL/NAME; what it holds is not looked at, and it goes
    /// when nobody uses it any more. Default: none
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub psk: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_key: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhchap_ctrlr_key: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostaddr: Option<String>,
    /// Not supported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostsvcid: Option<String>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub priority: Option<String>,
    /// Without effect: namespaces with metadata are refused.
    #[serde(default, skip_serializing)]
    pub prchk_reftag: Option<bool>,
    /// Without effect: namespaces with metadata are refused.
    #[serde(default, skip_serializing)]
    pub prchk_guard: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub fabrics_connect_timeout_us: Option<u64>,
    /// Without effect: all that are made are told.
    #[serde(default, skip_serializing)]
    pub max_bdevs: Option<u32>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub allow_unrecognized_csi: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub disable_sq_flow_control: Option<bool>,
    /// Without effect.
    #[serde(default, skip_serializing)]
    pub multipath_opts: Option<Value>,
}

/// This host's name: the same each time.
pub fn own_nqn() -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let uuid = match id.trim().is_empty() {
        true => Uuid::new_v4(),
        false => Uuid::new_v5(&HOST_SPACE, id.trim().as_bytes()),
    };
    format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
}

impl From<Address> for PathParams {
    fn from(address: Address) -> PathParams {
        PathParams { traddr: address.traddr(), trsvcid: Some(address.trsvcid()) }
    }
}

impl Attach {
    /// Its paths, the first one first.
    ///
    /// # Errors
    /// One is none.
    pub fn addresses(&self) -> Result<Vec<Address>, Error> {
        let first = Address::parse(&self.traddr, self.trsvcid.as_deref(), self.adrfam.as_deref());
        let others =
            self.paths.iter().map(|p| Address::parse(&p.traddr, p.trsvcid.as_deref(), None));
        let all: Result<Vec<_>, _> = std::iter::once(first).chain(others).collect();
        all.map_err(|why| wrong(&self.name, why))
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// Says what is wrong.
    pub fn check(&self, app: &App) -> Result<(), Error> {
        check_name(&self.name)?;
        if !self.trtype.eq_ignore_ascii_case("tcp") {
            return Err(Error::os(
                Errno::NotSup,
                format_args!("controller {}: trtype is tcp, not {}", self.name, self.trtype),
            ));
        }
        unsupported(
            ATTACH,
            &[
                ("psk", self.psk.is_some()),
                ("dhchap_key", self.dhchap_key.is_some()),
                ("dhchap_ctrlr_key", self.dhchap_ctrlr_key.is_some()),
                ("hostaddr", self.hostaddr.is_some()),
                ("hostsvcid", self.hostsvcid.is_some()),
            ],
        )?;
        if !app.network {
            return Err(Error::os(
                Errno::NotSup,
                format_args!(
                    "controller {}: the target may make no network connections: start it with --network",
                    self.name
                ),
            ));
        }
        let subnqn = self.subnqn.as_deref().unwrap_or_default();
        let checked = check_nqn("subnqn", subnqn).and_then(|()| match &self.hostnqn {
            None => Ok(()),
            Some(name) => check_nqn("hostnqn", name),
        });
        checked.map_err(|why| wrong(&self.name, why))?;
        match self.multipath.as_deref() {
            None | Some("disable" | "failover" | "multipath") => {}
            Some(other) => {
                let why = format!("multipath is disable, failover or multipath, not {other}");
                return Err(wrong(&self.name, why));
            }
        }
        if self.num_io_queues == Some(0) {
            return Err(wrong(&self.name, "num_io_queues is 1 or more"));
        }
        let own = SetOptions {
            ctrlr_loss_timeout_sec: self.ctrlr_loss_timeout_sec,
            reconnect_delay_sec: self.reconnect_delay_sec,
            fast_io_fail_timeout_sec: self.fast_io_fail_timeout_sec,
            ..SetOptions::default()
        };
        own.check().map_err(|e| wrong(&self.name, e.message))?;
        self.pool.as_ref().map_or(Ok(()), |pool| self.check_pool(app, pool))
    }

    /// Refuses what is no volume of the pool of that name.
    fn check_pool(&self, app: &App, pool: &str) -> Result<(), Error> {
        // It is what its name says, so that it is known to be a volume's.
        if !matches!(self.namespaces.as_slice(), [one] if one.uuid.0.to_string() == self.name) {
            let why = "that of a pool has one namespace, and is called by the uuid of that";
            return Err(wrong(&self.name, why));
        }
        let its = app.pools.get(pool);
        let is_its = its.is_some_and(|its| match &its.backend {
            Backend::Array(Array::Nvme { options, .. }) => {
                self.subnqn.as_deref() == Some(options.subnqn.as_str())
            }
            _ => false,
        });
        match is_its {
            true => Ok(()),
            false => Err(wrong(&self.name, format!("its namespace is of no pool {pool}"))),
        }
    }

    /// The one namespace that is used, of a volume.
    fn only(&self) -> Option<Only> {
        let pool = self.pool.clone()?;
        let Expected { nsid, uuid, block_size } = self.namespaces.first()?;
        Some(Only { identity: uuid.0, block_size: *block_size, nsid: *nsid, pool })
    }

    /// What is asked for of the controller.
    pub fn options(&self, app: &App) -> Options {
        let (set, only) = (options::options(app), self.only());
        let given = |own: Option<i64>, set: Option<i64>| {
            own.filter(|n| *n != 0).or_else(|| set.filter(|n| *n != 0))
        };
        let seconds = |n: i64| Duration::from_secs(n.unsigned_abs());
        let loss = given(self.ctrlr_loss_timeout_sec, set.ctrlr_loss_timeout_sec);
        let fast = given(self.fast_io_fail_timeout_sec, set.fast_io_fail_timeout_sec);
        let give_up = fast.or(loss).unwrap_or(options::LOSS_S);
        let reconnect = given(self.reconnect_delay_sec, set.reconnect_delay_sec);
        let connect_ms = set.tcp_connect_timeout_ms.filter(|ms| *ms != 0);
        Options {
            name: self.name.clone(),
            subnqn: self.subnqn.clone().unwrap_or_default(),
            hostnqn: self.hostnqn.clone().unwrap_or_else(own_nqn),
            header_digest: self.hdgst.unwrap_or(false),
            data_digest: self.ddgst.unwrap_or(false),
            queues: self.num_io_queues.unwrap_or(1).min(QUEUES_MAX) as u16,
            keep_alive: Duration::from_millis(
                set.keep_alive_timeout_ms.unwrap_or(options::KEEP_ALIVE_MS),
            ),
            connect_within: Duration::from_millis(connect_ms.unwrap_or(options::CONNECT_MS)),
            reconnect_delay: seconds(reconnect.unwrap_or(options::RECONNECT_S)),
            give_up: (give_up > 0).then(|| seconds(give_up)),
            timeout: set.timeout(),
            write_through: self.write_through,
            expected: match only {
                Some(_) => Vec::new(),
                None => self.namespaces.iter().map(|e| (e.nsid, e.uuid.0, e.block_size)).collect(),
            },
            only,
        }
    }
}

/// What a call has.
///
/// # Errors
/// It has something else.
pub(super) fn params(call: &Call) -> Result<Attach, Error> {
    let params = Value::Object(call.params.clone());
    let wrong = |e| Error::params(format!("wrong parameters of {ATTACH}: {e}"));
    Attach::deserialize(params).map_err(wrong)
}
