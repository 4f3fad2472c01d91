//! Volumes of an lvstore that shares clusters.

use super::{PER_CLUSTER, Rig, options, read_tags, tagged};
use bdev::{IoError, Shared};
use lvol::LvstoreOptions;

pub fn sharing(clusters: u64) -> Rig {
    let rig = Rig::new(clusters);
    let options = LvstoreOptions { share_clusters: true, ..options() };
    rig.lvstores.create_lvstore("disk0", "lvs0", &options).unwrap();
    rig
}

/// Shares what can be of clusters; how many clusters that were.
pub fn share(rig: &Rig, from: (&str, u64), to: (&str, u64), count: u64) -> Result<Shared, IoError> {
    share_if(rig, from, to, count, || true)
}

pub fn share_if(
    rig: &Rig,
    (from, first): (&str, u64),
    (to, at): (&str, u64),
    count: u64,
    still: impl FnOnce() -> bool + Send + 'static,
) -> Result<Shared, IoError> {
    let (from, to) = (rig.bdev(&format!("lvs0/{from}")), rig.bdev(&format!("lvs0/{to}")));
    let [first, at, blocks] = [first, at, count].map(|clusters| clusters * PER_CLUSTER);
    let sharing = to.sharing().unwrap();
    let Some((0, part)) = sharing.part(&from, first, at, blocks) else { return Ok(Shared::Not) };
    assert_eq!(part, blocks);
    sharing.share(&from, first, at, blocks, Box::new(still))
}

pub fn done(clusters: u64) -> Result<Shared, IoError> {
    Ok(Shared::Done(clusters * PER_CLUSTER))
}

pub fn write(rig: &Rig, name: &str, cluster: u64, count: u64, tag: u64) {
    let blocks = count * PER_CLUSTER;
    rig.open(&format!("lvs0/{name}")).write(cluster * PER_CLUSTER, &tagged(tag, blocks)).unwrap();
}

/// The tag of each cluster.
pub fn read(rig: &Rig, name: &str, clusters: u64) -> Vec<u64> {
    let all = read_tags(&mut rig.open(&format!("lvs0/{name}")), 0, clusters * PER_CLUSTER);
    let one = |cluster: &[u64]| {
        assert!(cluster.iter().all(|tag| *tag == cluster[0]), "a cluster is a mixture");
        cluster[0]
    };
    all.chunks(PER_CLUSTER as usize).map(one).collect()
}

pub fn free(rig: &Rig) -> u64 {
    rig.lvstores.lvstore("lvs0").unwrap().free_clusters
}
