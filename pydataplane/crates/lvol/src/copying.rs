//! Copies of what a read-only lvol itself has to a bdev, each by a thread of its own: what its snapshots
//! have is left out (shallow copy).

use crate::error::Error;
use bdev::{AlignedBuf, Checks, Claim, ClaimMode, Registry, RegistryError, SyncChannel, TUPLE_LEN};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Bytes that are read and written at once.
const STEP: u64 = 1 << 20;

/// How far a copy has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyInfo {
    /// Clusters that are copied.
    pub copied: u64,
    /// Clusters that there are to copy.
    pub total: u64,
    /// How it ended, durably or with a sentence; `None`: it has not yet.
    pub ended: Option<Result<(), String>>,
}

struct Copying {
    copied: AtomicU64,
    total: u64,
    ended: Mutex<Option<Result<(), String>>>,
}

/// All copies that go on, and those that ended and nobody asked for since.
#[derive(Default)]
pub(crate) struct Copies {
    all: Mutex<BTreeMap<u32, Arc<Copying>>>,
    begun: Mutex<u32>,
}

/// What is to be copied, and where to.
pub(crate) struct Plan {
    pub registry: Registry,
    /// UUID of the lvol.
    pub lvol: String,
    /// Name, alias or UUID of the bdev.
    pub to: String,
    /// Clusters of the lvol, in order.
    pub clusters: Vec<u64>,
    pub cluster_size: u64,
}

impl Copies {
    /// Begins a copy and returns its number.
    pub fn begin(&self, op: &str, plan: Plan) -> Result<u32, Error> {
        let claim = |bdev: &str, mode| {
            plan.registry.claim_as(bdev, "a shallow copy", mode).map_err(|e| match e {
                RegistryError::NotFound(bdev) => Error::NoBdev { bdev },
                RegistryError::Claimed { owner: by, .. } => Error::InUse { op: op.to_owned(), by },
                e => Error::InUse { op: op.to_owned(), by: e.to_string() },
            })
        };
        // It stays until all is copied; others may read it.
        let (from, to) =
            (claim(&plan.lvol, ClaimMode::Reader)?, claim(&plan.to, ClaimMode::Exclusive)?);
        check(op, &from, &to)?;
        let copying = Arc::new(Copying {
            copied: AtomicU64::new(0),
            total: plan.clusters.len() as u64,
            ended: Mutex::new(None),
        });
        let number = {
            let mut begun = self.begun.lock();
            *begun += 1;
            *begun
        };
        let its = copying.clone();
        let work = move || {
            let ended = copy(&plan, &from, &to, &its.copied);
            drop((from, to));
            *its.ended.lock() = Some(ended);
        };
        let started = thread::Builder::new().name("shallow-copy".into()).spawn(work);
        started.map_err(|e| Error::Io { op: op.to_owned(), cause: e.to_string() })?;
        self.all.lock().insert(number, copying);
        Ok(number)
    }

    /// How far a copy has come; one that has ended is told once.
    pub fn info(&self, number: u32) -> Option<CopyInfo> {
        let mut all = self.all.lock();
        let copying = all.get(&number)?;
        let ended = copying.ended.lock().clone();
        let copied = copying.copied.load(Ordering::Relaxed);
        let info = CopyInfo { copied, total: copying.total, ended };
        if info.ended.is_some() {
            all.remove(&number);
        }
        Some(info)
    }
}

fn check(op: &str, from: &Claim, to: &Claim) -> Result<(), Error> {
    let (lvol, bdev) = (from.bdev(), to.bdev());
    let op_of = || op.to_owned();
    if !lvol.features().read_only {
        return Err(Error::NotReadOnly { op: op_of() });
    }
    if bdev.features().read_only {
        return Err(Error::ReadOnlyBdev { op: op_of(), bdev: bdev.name().to_owned() });
    }
    let bytes =
        |bdev: &dyn bdev::Bdev| bdev.geometry().num_blocks * u64::from(bdev.geometry().block_size);
    let (have, need) = (bytes(&**bdev), bytes(&**lvol));
    let why = if have < need {
        format!("bdev {} has {have} bytes, and {need} are needed; use a larger one", bdev.name())
    } else if !lvol.geometry().block_size.is_multiple_of(bdev.geometry().block_size) {
        let (its, ours) = (bdev.geometry().block_size, lvol.geometry().block_size);
        format!("bdev {} has blocks of {its} bytes, and the lvol of {ours}", bdev.name())
    } else {
        return Ok(());
    };
    Err(Error::BadParameter { op: op.to_owned(), why })
}

/// Copies, and makes it durable. Protection information comes along where the bdev has the same.
fn copy(plan: &Plan, from: &Claim, to: &Claim, copied: &AtomicU64) -> Result<(), String> {
    let mut source = SyncChannel::open(&**from.bdev()).map_err(|e| e.to_string())?;
    let mut target = SyncChannel::open(&**to.bdev()).map_err(|e| e.to_string())?;
    let (read, written) = (u64::from(source.block_size()), u64::from(target.block_size()));
    let kinds = [from, to].map(|claim| claim.bdev().protection().map(|its| its.kind));
    let carries = kinds[0].is_some() && kinds[0] == kinds[1] && read == written;
    let step = plan.cluster_size.min(STEP);
    let tuples = if carries { (step / read) as usize * TUPLE_LEN } else { 0 };
    let mut buf = AlignedBuf::zeroed(step as usize + tuples);
    for cluster in &plan.clusters {
        // Who removes one of them waits for this.
        for bdev in [from.bdev(), to.bdev()] {
            if plan.registry.get(bdev.name()).is_none() {
                return Err(format!("bdev {} was removed", bdev.name()));
            }
        }
        for within in (0..plan.cluster_size).step_by(step as usize) {
            let at = cluster * plan.cluster_size + within;
            let copied = match carries {
                true => source
                    .read_protected(at / read, &mut buf, Checks::ALL)
                    .and_then(|()| target.write_protected(at / written, &buf, Checks::ALL)),
                false => {
                    source.read(at / read, &mut buf).and_then(|()| target.write(at / written, &buf))
                }
            };
            copied.map_err(|e| e.to_string())?;
        }
        copied.fetch_add(1, Ordering::Relaxed);
    }
    target.flush().map_err(|e| e.to_string())
}
