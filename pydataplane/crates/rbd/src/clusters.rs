//! The clusters of a process: those that have a name, and those that bdevs name by their options.

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::clients::ClientsFile;
use crate::{Cluster, ClusterOptions, Error};

/// What the options of a cluster without a name are called.
const UNNAMED: &str = "(no name)";

#[derive(Default)]
struct There {
    /// In the order in which they were registered.
    named: Vec<Arc<Cluster>>,
    unnamed: Vec<Weak<Cluster>>,
    /// Of those: kept, as bdevs will ask for them.
    kept: Vec<Arc<Cluster>>,
}

/// The clusters of a process.
pub struct Clusters {
    clients: Arc<ClientsFile>,
    there: Mutex<There>,
}

impl Clusters {
    /// None yet; `record`: the file where the addresses of this target's clients are kept for its next
    /// process.
    pub fn new(record: Option<PathBuf>) -> Clusters {
        Clusters { clients: Arc::new(ClientsFile::open(record)), there: Mutex::default() }
    }

    /// Begins to connect to a cluster, which has that name from now on.
    ///
    /// # Errors
    /// The name is taken; there is no library.
    pub fn register(&self, name: &str, options: ClusterOptions) -> Result<Arc<Cluster>, Error> {
        let mut there = self.there.lock();
        if there.named.iter().any(|cluster| cluster.name() == name) {
            return Err(Error::Exists(name.to_owned()));
        }
        let cluster = Cluster::connect(name.to_owned(), options, Arc::clone(&self.clients))?;
        there.named.push(Arc::clone(&cluster));
        Ok(cluster)
    }

    /// Forgets a cluster, and ends its client; `bdevs` are those on it.
    ///
    /// # Errors
    /// There is none of that name, or it has bdevs.
    pub fn unregister(&self, name: &str, bdevs: &[String]) -> Result<(), Error> {
        let mut there = self.there.lock();
        let at = there.named.iter().position(|cluster| cluster.name() == name);
        let at = at.ok_or_else(|| Error::NoCluster(name.to_owned()))?;
        if !bdevs.is_empty() {
            let (cluster, bdevs) = (name.to_owned(), bdevs.join(", "));
            return Err(Error::InUse { cluster, bdevs });
        }
        let gone = there.named.remove(at);
        drop(there);
        drop(gone);
        Ok(())
    }

    /// The cluster of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<Arc<Cluster>, Error> {
        let there = self.there.lock();
        let found = there.named.iter().find(|cluster| cluster.name() == name);
        found.cloned().ok_or_else(|| Error::NoCluster(name.to_owned()))
    }

    /// All that have a name, in the order in which they were registered.
    pub fn list(&self) -> Vec<Arc<Cluster>> {
        self.there.lock().named.clone()
    }

    /// The cluster with these options, without a name: bdevs with the same ones share its client.
    ///
    /// # Errors
    /// There is no library.
    pub fn unnamed(&self, options: ClusterOptions) -> Result<Arc<Cluster>, Error> {
        let mut there = self.there.lock();
        there.unnamed.retain(|cluster| cluster.strong_count() > 0);
        let mut found = there.unnamed.iter().filter_map(Weak::upgrade);
        if let Some(cluster) = found.find(|cluster| *cluster.options() == options) {
            return Ok(cluster);
        }
        drop(found);
        let cluster = Cluster::connect(UNNAMED.to_owned(), options, Arc::clone(&self.clients))?;
        there.unnamed.push(Arc::downgrade(&cluster));
        Ok(cluster)
    }

    /// Keeps a cluster without a name until [`Clusters::keep_none`], as bdevs will ask for it.
    pub fn keep(&self, cluster: Arc<Cluster>) {
        self.there.lock().kept.push(cluster);
    }

    /// Keeps no more clusters than those that are registered or have bdevs.
    pub fn keep_none(&self) {
        let kept = std::mem::take(&mut self.there.lock().kept);
        drop(kept);
    }

    /// Lets go of all, which end when the last of their images is closed.
    pub fn clear(&self) {
        let there = std::mem::take(&mut *self.there.lock());
        drop(there);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConfigFile, LibraryError};
    use std::collections::BTreeMap;

    #[test]
    fn without_the_library_there_are_no_clusters_and_it_is_said_why() {
        let clusters = Clusters::new(None);
        let options = ClusterOptions {
            user: None,
            config_file: ConfigFile::None,
            config: BTreeMap::new(),
            key_file: None,
            cpus: Vec::new(),
        };
        let not_loaded = |error| matches!(error, Some(Error::Library(LibraryError::NotLoaded)));
        assert!(not_loaded(clusters.register("ceph0", options.clone()).err()));
        assert!(not_loaded(clusters.unnamed(options).err()));
        assert!(clusters.list().is_empty());
        let none = clusters.get("ceph0").err().unwrap().to_string();
        assert!(none.starts_with("there is no cluster ceph0; "), "{none}");
        assert!(matches!(clusters.unregister("ceph0", &[]), Err(Error::NoCluster(_))));
    }
}
