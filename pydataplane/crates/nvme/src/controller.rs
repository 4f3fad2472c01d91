//! A controller, which is a subsystem by one or more paths.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Instant;

use bdev::{Closed, Registry};
use uuid::Uuid;

use crate::address::Address;
use crate::connect::{Identity, establish};
use crate::identify::Namespace;
use crate::options::{CreateError, Options, PATHS_MAX, PathInfo};
use crate::shared::{Order, Shared};
use crate::silent::{self, Known};
use crate::units::Unit;
use crate::worker::Worker;

/// Why nothing is reached by none.
pub(crate) const NO_PATH: &str = "it has no path";

/// Ends the controller's thread with its last user.
pub(crate) struct StopOnDrop(pub Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A subsystem, by one or more of its controllers. It ends with the last of its bdevs and of those who have it.
#[derive(Clone)]
pub struct Controller {
    pub(crate) shared: Arc<Shared>,
    pub(crate) stop: Arc<StopOnDrop>,
}

impl Controller {
    /// Connects by the first of `paths` that can be, those last that did not answer before, and by the others later;
    /// takes some seconds at most. `registry` is
    /// told when the size of a namespace changes, and `found` the name of the controller when namespaces come later.
    ///
    /// # Errors
    /// None is there or lets this host in; or none has a namespace that a bdev can be on, and that is expected.
    pub fn create(
        registry: &Registry,
        options: Options,
        paths: &[Address],
        found: Sender<String>,
    ) -> Result<Controller, CreateError> {
        let name = options.name.clone();
        let failed = |why: String, passes| CreateError { name: name.clone(), why, passes };
        let identity = identity_of(&options);
        let expected = options.expected.iter().map(|(nsid, ..)| *nsid);
        let known: Vec<u32> = expected.chain(options.only.iter().map(|only| only.nsid)).collect();
        let first = first_of(&identity, paths, |address| {
            establish(address, &identity, &known, Instant::now() + options.connect_within)
        });
        let (address, association) = first.map_err(|why| failed(why, true))?;
        let namespaces = &association.namespaces;
        if let (Some(only), [is]) = (&options.only, namespaces.as_slice())
            && is.geometry.block_size != only.block_size
        {
            let (nsid, is, was) = (is.nsid, is.geometry.block_size, only.block_size);
            let why =
                format!("{address}: blocks of namespace {nsid} are {is} bytes now, not {was}");
            return Err(failed(why, true));
        }
        let is_there = |(nsid, uuid, block_size): &(u32, Uuid, u32)| {
            namespaces.iter().any(|is| {
                (is.nsid, is.identity, is.geometry.block_size) == (*nsid, *uuid, *block_size)
            })
        };
        let missing = options.expected.iter().find(|each| !is_there(each));
        if let Some((nsid, ..)) = missing {
            let why = format!(
                "{address}: namespace {nsid} is not there, or another one than before: detach the controller to \
                 use what is there"
            );
            // The others are used all the same.
            if !options.expected.iter().any(is_there) {
                return Err(failed(why, true));
            }
        }
        let shared = Arc::new(Shared::new(options, identity, paths, &association, found));
        let mut association = Some(Box::new(association));
        for path in paths {
            // I/O goes by the first of the best ones, whichever has answered first.
            let made = association.take_if(|_| *path == address);
            shared.give(Order::Add(*path, made));
        }
        let stop = Arc::new(StopOnDrop(Arc::clone(&shared)));
        let (tell, told) = mpsc::channel();
        let (for_thread, registry) = (Arc::clone(&shared), registry.clone());
        let work = move || match Worker::new(for_thread, registry) {
            Ok(worker) => worker.run(|| _ = tell.send(Ok(()))),
            Err(e) => _ = tell.send(Err(e)),
        };
        let os = |e: std::io::Error| failed(e.to_string(), false);
        thread::Builder::new().name("nvme".into()).spawn(work).map_err(os)?;
        told.recv().map_err(std::io::Error::other).and_then(|started| started).map_err(os)?;
        Ok(Controller { shared, stop })
    }

    /// Connects by another path to the same subsystem; takes some seconds at most.
    ///
    /// # Errors
    /// It is not there, or leads elsewhere.
    pub fn add_path(&self, address: Address) -> Result<(), CreateError> {
        let shared = &self.shared;
        let failed = |why: String, passes| CreateError {
            name: shared.name().to_owned(),
            why: format!("{address}: {why}"),
            passes,
        };
        if self.addresses().len() >= PATHS_MAX {
            return Err(failed(format!("it has {PATHS_MAX} paths already"), false));
        }
        let end = Instant::now() + shared.options.connect_within;
        let association = establish(&address, &shared.identity, &shared.known(), end)
            .map_err(|why| failed(why, true))?;
        if shared.usable(&association).map_err(|why| failed(why, false))? == 0 {
            return Err(failed("none of its namespaces is there".to_owned(), false));
        }
        if self.paths().iter().any(|path| path.connected && path.cntlid == association.id) {
            return Err(failed("it leads to the same controller".to_owned(), false));
        }
        let mut wanted = shared.paths.lock();
        if wanted.len() >= PATHS_MAX {
            return Err(failed(format!("it has {PATHS_MAX} paths already"), false));
        }
        if wanted.contains(&address) {
            return Err(failed("it has this path already".to_owned(), false));
        }
        wanted.push(address);
        shared.give(Order::Add(address, Some(Box::new(association))));
        shared.wake();
        Ok(())
    }

    /// Uses paths no more, once what is in flight there is over. `false`: it would have none left, and nothing
    /// changed.
    #[must_use]
    pub fn remove_paths(&self, gone: &[Address]) -> bool {
        let shared = &self.shared;
        let mut wanted = shared.paths.lock();
        if wanted.iter().all(|path| gone.contains(path)) {
            return false;
        }
        wanted.retain(|path| !gone.contains(path));
        for address in gone {
            shared.give(Order::Remove(*address));
        }
        shared.wake();
        true
    }

    /// The paths that it is to have, in the order in which they came.
    pub fn addresses(&self) -> Vec<Address> {
        self.shared.paths.lock().clone()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// What was asked for.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Its paths, in the order in which they came.
    pub fn paths(&self) -> Vec<PathInfo> {
        self.shared.shown()
    }

    /// By number: its namespaces, with their identification and bytes of a block; also those that are expected and
    /// are not there.
    pub fn namespaces(&self) -> Vec<(u32, Uuid, u32)> {
        let of = |unit: &Unit| {
            let Namespace { nsid, identity, geometry, .. } = unit.namespace;
            (nsid, identity, geometry.block_size)
        };
        let mut all: Vec<_> = self.shared.units.iter().map(of).collect();
        all.extend(self.missing());
        all.sort_unstable_by_key(|(nsid, ..)| *nsid);
        all
    }

    /// As [`Controller::namespaces`]: those that are expected and have not been there.
    pub fn missing(&self) -> Vec<(u32, Uuid, u32)> {
        let Shared { options, units, .. } = &*self.shared;
        let missing = options.expected.iter().filter(|(nsid, ..)| units.position(*nsid).is_none());
        missing.copied().collect()
    }

    /// Tells when its connections are closed.
    pub fn closing(&self) -> Closed {
        self.shared.closing()
    }
}

/// What asks the first of some paths that answers, those last that did not before, and which that is.
///
/// # Errors
/// In one clause: none does.
fn first_of<T>(
    identity: &Identity,
    paths: &[Address],
    mut ask: impl FnMut(&Address) -> Result<T, String>,
) -> Result<(Address, T), String> {
    let mut why = NO_PATH.to_owned();
    for Known { address, .. } in silent::last(&identity.subnqn, paths) {
        match ask(&address) {
            Ok(answer) => return Ok((address, answer)),
            Err(e) => why = format!("{address}: {e}"),
        }
    }
    Err(why)
}

/// Who connects, by what is asked for. The host's identifier is made of its name, so it is the same each time.
pub(crate) fn identity_of(options: &Options) -> Identity {
    let hostnqn = &options.hostnqn;
    let own = hostnqn.rsplit_once("uuid:").and_then(|(_, uuid)| Uuid::parse_str(uuid).ok());
    Identity {
        subnqn: options.subnqn.clone(),
        hostnqn: hostnqn.clone(),
        host: own.unwrap_or_else(|| Uuid::new_v5(&Uuid::NAMESPACE_OID, hostnqn.as_bytes())),
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        queues: options.queues,
        keep_alive: options.keep_alive,
        only: options.only.as_ref().map(|only| only.identity),
        recorded: options.expected.iter().map(|(nsid, uuid, _)| (*nsid, *uuid)).collect(),
    }
}

/// Connects, as no device, and finds out whether there are namespaces.
///
/// # Errors
/// In one clause: none of the paths leads to such a controller.
pub fn reach(options: &Options, paths: &[Address]) -> Result<(), String> {
    let identity = identity_of(options);
    let reached = first_of(&identity, paths, |address| {
        establish(address, &identity, &[], Instant::now() + options.connect_within)
    });
    reached.map(drop)
}
