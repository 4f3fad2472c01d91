//! A client of a cluster: how it connects, and what every image of it shares.
//!
//! A client costs a dozen threads, so images share one. It is made, and connects, on a thread of its own
//! and is waited for; one that nobody wants any more is shut down on a thread, too. A cluster that does
//! not answer is asked again and again as long as somebody wants it.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use libc::c_char;
use parking_lot::{Condvar, Mutex};
use rustix::thread::{CpuSet, sched_setaffinity};
use uuid::Uuid;

use crate::Error;
use crate::answers::Answers;
use crate::calls::{check, spawn, text};
use crate::clients::ClientsFile;
use crate::ffi::{Library, Rados};
use crate::hold;
use crate::image::Image;

/// How long a client waits for a monitor before it begins anew, in seconds, unless the configuration says
/// otherwise: Ceph's own five minutes are too long to learn that nobody wants it any more.
const MOUNT_TIMEOUT_S: &str = "10";
/// After how long a cluster that did not answer is asked again.
const RETRY: Duration = Duration::from_secs(2);
/// How often the end of clients is looked for.
const LOOK: Duration = Duration::from_millis(2);
/// Longest value of the configuration that is read, in bytes.
const VALUE_MAX: usize = 256;

/// Clients of the process that are not shut down.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Whether no thread of Ceph's is left in the process.
pub fn is_quiet() -> bool {
    LIVE.load(Ordering::Acquire) == 0
}

/// Waits until [`is_quiet`], `timeout` at most.
pub fn wait_until_quiet(timeout: Duration) {
    let end = Instant::now() + timeout;
    while !is_quiet() && Instant::now() < end {
        thread::sleep(LOOK);
    }
}

/// Which file says where the cluster is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigFile {
    /// `/etc/ceph/ceph.conf`, or where else Ceph looks for it, which has to be there.
    Default,
    /// As that, if it is there.
    DefaultIfAny,
    /// This one.
    Path(String),
    /// None.
    None,
}

/// What a client is made of. Not to be shown as it is: `config` may have a key in it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterOptions {
    /// Name of the user, without `client.`; `None`: admin.
    pub user: Option<String>,
    /// Where the cluster is.
    pub config_file: ConfigFile,
    /// Options of Ceph's, which go before those of the file.
    pub config: BTreeMap<String, String>,
    /// Path of a keyring.
    pub key_file: Option<String>,
    /// CPUs of the client's threads; none: any.
    pub cpus: Vec<usize>,
}

/// A client that is connected; shut down on a thread of its own with the last who uses it.
pub(crate) struct Client {
    pub(crate) library: &'static Library,
    pub(crate) rados: Rados,
    /// The cluster's identity.
    pub(crate) fsid: Uuid,
    /// Smallest discard that frees anything, in bytes.
    pub(crate) discard_granularity: u64,
    clients: Arc<ClientsFile>,
}

// SAFETY: librados is thread-safe.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Client {
    /// Waits until a monitor answers.
    pub(crate) fn ask_monitors(&self) {
        // SAFETY: a connected client. What it says does not matter: an error is an answer.
        _ = unsafe { (self.library.rados_wait_for_latest_osdmap)(self.rados) };
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let (client, clients) = (Making(self.library, self.rados), Arc::clone(&self.clients));
        if let Err(why) = spawn("rbd shutdown", move || shut_down(client, &clients)) {
            tracing::error!("a client of Ceph is not shut down in order: {why}");
        }
    }
}

enum State {
    /// Not yet; and why not, as far as was seen.
    Connecting(Option<Error>),
    Up(Arc<Client>),
    Failed(Error),
    /// Nobody wants it.
    Unwanted,
}

struct Link {
    state: Mutex<State>,
    changed: Condvar,
}

/// What happened to an image.
pub(crate) enum News {
    /// Its header changed.
    Changed(Weak<Image>),
    /// The cluster has fenced this client.
    Fenced(Weak<Image>),
}

/// A cluster, as images of it use it.
pub struct Cluster {
    name: String,
    options: ClusterOptions,
    link: Arc<Link>,
    clients: Arc<ClientsFile>,
    /// To the thread that looks after images, once there is one.
    news: Mutex<Option<mpsc::Sender<News>>>,
    /// To the thread that has locks of images seen to, once there is one.
    locks: Mutex<Option<mpsc::Sender<Weak<Image>>>>,
    answers: Arc<Answers>,
}

impl Cluster {
    /// A client that connects from now on. `name` is for people.
    ///
    /// # Errors
    /// There is no library, or no thread.
    pub(crate) fn connect(
        name: String,
        options: ClusterOptions,
        clients: Arc<ClientsFile>,
    ) -> Result<Arc<Cluster>, Error> {
        let library = Library::loaded()?;
        let state = Mutex::new(State::Connecting(None));
        let link = Arc::new(Link { state, changed: Condvar::new() });
        let cluster = Cluster {
            name: name.clone(),
            options: options.clone(),
            link: Arc::clone(&link),
            clients: Arc::clone(&clients),
            news: Mutex::default(),
            locks: Mutex::default(),
            answers: Arc::default(),
        };
        let connect = move || keep_connecting(library, (&name, &options), &link, &clients);
        spawn("rbd connect", connect)?;
        Ok(Arc::new(cluster))
    }

    /// Its name, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was made of.
    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }

    /// Waits until it is connected, `timeout` at most.
    ///
    /// # Errors
    /// Why it is not.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        self.client(timeout).map(drop)
    }

    /// The client, as soon as it is connected.
    pub(crate) fn client(&self, timeout: Duration) -> Result<Arc<Client>, Error> {
        let end = Instant::now().checked_add(timeout);
        let mut state = self.link.state.lock();
        loop {
            let seen = match &*state {
                State::Up(client) => return Ok(Arc::clone(client)),
                State::Failed(why) => return Err(why.clone()),
                State::Connecting(seen) => seen.clone(),
                State::Unwanted => None,
            };
            let timed_out = match end {
                None => {
                    self.link.changed.wait(&mut state);
                    false
                }
                Some(end) => self.link.changed.wait_until(&mut state, end).timed_out(),
            };
            if timed_out && matches!(*state, State::Connecting(_)) {
                return Err(seen.unwrap_or_else(|| Error::TimedOut {
                    what: format!("cluster {}", self.name),
                    done: "answered",
                    seconds: timeout.as_secs(),
                }));
            }
        }
    }

    /// The cluster has fenced a client: what is opened from now on has a new one. Images of the old one stay
    /// as they are, and it ends with them.
    pub(crate) fn renew(&self, fenced: &Arc<Client>) {
        let mut state = self.link.state.lock();
        if !matches!(&*state, State::Up(client) if Arc::ptr_eq(client, fenced)) {
            return;
        }
        let (link, clients) = (Arc::clone(&self.link), Arc::clone(&self.clients));
        let (name, options, library) = (self.name.clone(), self.options.clone(), fenced.library);
        let connect = move || keep_connecting(library, (&name, &options), &link, &clients);
        match spawn("rbd connect", connect) {
            Ok(()) => {
                *state = State::Connecting(None);
                tracing::warn!(
                    "cluster {} has fenced this target's client: what is opened from now on has a new one",
                    self.name
                );
            }
            Err(why) => tracing::error!("the fenced client of cluster {} stays: {why}", self.name),
        }
    }

    /// Whether an address is that of a client of an earlier process with the same record: what that has
    /// locked is nobody's any more.
    pub(crate) fn is_of_the_past(&self, address: &str) -> bool {
        self.clients.is_of_the_past(address)
    }

    /// What is wrong where it is connected and does not answer, as a clause; `None`: it answers, or is not
    /// connected, which [`Cluster::wait`] tells. Waits some seconds for its monitors.
    pub fn unanswered(&self) -> Option<String> {
        let client = self.client(Duration::ZERO).ok()?;
        self.answers.problem(&client)
    }

    /// Looks from now on whether I/O of an image is answered.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn look_after(&self, image: Weak<Image>) -> Result<(), Error> {
        self.answers.add(&self.name, image)
    }

    /// Where what happens to images is to be told. Each cluster has a thread for that: one that does not
    /// answer keeps nobody else's images waiting.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn news(&self) -> Result<mpsc::Sender<News>, Error> {
        let mut there = self.news.lock();
        if let Some(news) = &*there {
            return Ok(news.clone());
        }
        let (tell, told) = mpsc::channel();
        spawn("rbd watch", move || {
            // Ends with the cluster and the last image.
            for news in told {
                match news {
                    News::Changed(image) => _ = image.upgrade().map(|image| image.look_again()),
                    News::Fenced(image) => _ = image.upgrade().map(|image| image.leave_client()),
                }
            }
        })?;
        *there = Some(tell.clone());
        Ok(tell)
    }

    /// Where it is to be told that the lock of an image is to be taken, or let go: apart from other news,
    /// which may wait for the cluster.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn locks(&self) -> Result<mpsc::Sender<Weak<Image>>, Error> {
        let mut there = self.locks.lock();
        if let Some(locks) = &*there {
            return Ok(locks.clone());
        }
        let (tell, told) = mpsc::channel();
        let see_to = |image: &Weak<Image>| {
            let image = Weak::clone(image);
            spawn("rbd lock", move || hold::see_to(&image))
        };
        spawn("rbd locks", move || hand_out(&told, RETRY, see_to))?;
        *there = Some(tell.clone());
        Ok(tell)
    }
}

/// Gives each that is told to `start`, and again after `pause` what could not be started. Ends with who tells.
fn hand_out<T>(
    told: &mpsc::Receiver<T>,
    pause: Duration,
    mut start: impl FnMut(&T) -> Result<(), Error>,
) {
    let mut late = Vec::new();
    loop {
        let next = match late.is_empty() {
            true => told.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            false => told.recv_timeout(pause),
        };
        match next {
            Ok(one) => late.push(one),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        late.retain(|one| {
            let started = start(one);
            let late = started.inspect_err(|why| tracing::error!("an image's lock waits: {why}"));
            late.is_err()
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.link.state.lock(), State::Unwanted);
        self.link.changed.notify_all();
        drop(state);
    }
}

/// Runs `f` on a thread of its own and waits `timeout` at most for what it returns. What comes later is
/// dropped there.
///
/// # Errors
/// As `f`; or `what` has not `done` it in time.
pub fn within<T: Send + 'static>(
    timeout: Duration,
    (what, done): (String, &'static str),
    f: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (tell, told) = mpsc::channel();
    spawn("rbd call", move || _ = tell.send(f()))?;
    told.recv_timeout(timeout)
        .unwrap_or_else(|_| Err(Error::TimedOut { what, done, seconds: timeout.as_secs() }))
}

fn keep_connecting(
    library: &'static Library,
    (name, options): (&str, &ClusterOptions),
    link: &Link,
    clients: &Arc<ClientsFile>,
) {
    if !options.cpus.is_empty() {
        let mut cpus = CpuSet::new();
        options.cpus.iter().for_each(|cpu| cpus.set(*cpu));
        if let Err(why) = sched_setaffinity(None, &cpus) {
            tracing::warn!("the threads of cluster {name} run on any CPU: {why}");
        }
    }
    loop {
        let connected = connect(library, name, options, clients);
        let mut state = link.state.lock();
        if matches!(*state, State::Unwanted) {
            return;
        }
        let passes = matches!(&connected, Err(why) if why.passes());
        *state = match connected {
            Ok(client) => State::Up(Arc::new(client)),
            Err(why) if passes => State::Connecting(Some(why)),
            Err(why) => State::Failed(why),
        };
        link.changed.notify_all();
        if !passes {
            return;
        }
        link.changed.wait_for(&mut state, RETRY);
        if matches!(*state, State::Unwanted) {
            return;
        }
    }
}

/// A client that is being made; shut down unless it comes to its end.
struct Making(&'static Library, Rados);

// SAFETY: librados is thread-safe.
unsafe impl Send for Making {}

impl Drop for Making {
    fn drop(&mut self) {
        // SAFETY: made by `rados_create`, and used by nobody else.
        unsafe { (self.0.rados_shutdown)(self.1) };
        LIVE.fetch_sub(1, Ordering::AcqRel);
    }
}

fn connect(
    library: &'static Library,
    name: &str,
    options: &ClusterOptions,
    clients: &Arc<ClientsFile>,
) -> Result<Client, Error> {
    let user = options.user.as_deref().map(|user| text("the user's name", user)).transpose()?;
    let mut rados: Rados = ptr::null_mut();
    let user = user.as_ref().map_or(ptr::null(), |user| user.as_ptr());
    // SAFETY: where the result is to be, and a zero-terminated text or null.
    let made = unsafe { (library.rados_create)(&mut rados, user) };
    check(made, || format!("no client of cluster {name} can be made"))?;
    LIVE.fetch_add(1, Ordering::AcqRel);
    let making = Making(library, rados);
    let set = |option: &str, value: &str| {
        let (option_, value) = (text("an option's name", option)?, text(option, value)?);
        // SAFETY: a client that is not connected, and zero-terminated texts.
        let set = unsafe { (library.rados_conf_set)(rados, option_.as_ptr(), value.as_ptr()) };
        // The value may be a key.
        check(set, || format!("cluster {name}: Ceph does not take that value of {option:?}"))
    };
    set("client_mount_timeout", MOUNT_TIMEOUT_S)?;
    // What the target has acknowledged is with the cluster, and guests have a cache of their own.
    set("rbd_cache", "false")?;
    read_file(library, rados, name, &options.config_file)?;
    for (option, value) in &options.config {
        set(option, value)?;
    }
    if let Some(path) = &options.key_file {
        set("keyring", path)?;
    }
    // SAFETY: a client that is configured, and not connected.
    check(unsafe { (library.rados_connect)(rados) }, || {
        let user = options.user.as_deref().unwrap_or("admin");
        format!(
            "cluster {name} cannot be reached as user {user}: see that its monitors run, that the \
             configuration names them, and that the target's user may read the key"
        )
    })?;
    let mut fsid = [0 as c_char; 40];
    // SAFETY: a connected client, and a buffer of that length, which takes a UUID with its zero.
    let told = unsafe { (library.rados_cluster_fsid)(rados, fsid.as_mut_ptr(), fsid.len()) };
    check(told, || format!("the identity of cluster {name} is not told"))?;
    // SAFETY: zero-terminated by the call.
    let fsid = unsafe { CStr::from_ptr(fsid.as_ptr()) }.to_string_lossy();
    let fsid = Uuid::parse_str(&fsid).unwrap_or_default();
    if let Some(address) = address(library, rados) {
        clients.add(&address);
    }
    let granularity = option(library, rados, "rbd_discard_granularity_bytes");
    let discard_granularity = granularity.and_then(|text| text.parse().ok()).unwrap_or(64 << 10);
    std::mem::forget(making);
    Ok(Client { library, rados, fsid, discard_granularity, clients: Arc::clone(clients) })
}

fn read_file(
    library: &'static Library,
    rados: Rados,
    name: &str,
    file: &ConfigFile,
) -> Result<(), Error> {
    let path = match file {
        ConfigFile::None => return Ok(()),
        ConfigFile::Path(path) => Some(text("the path", path)?),
        ConfigFile::Default | ConfigFile::DefaultIfAny => None,
    };
    let at = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
    // SAFETY: a client that is not connected, and a zero-terminated text or null.
    let read = unsafe { (library.rados_conf_read_file)(rados, at) };
    match file {
        ConfigFile::DefaultIfAny => Ok(()),
        _ => check(read, || {
            let shown = path.as_ref().map_or("/etc/ceph/ceph.conf".into(), |p| p.to_string_lossy());
            format!("cluster {name}: {shown} cannot be read as a configuration of Ceph")
        }),
    }
}

/// A value of the configuration.
pub(crate) fn option(library: &'static Library, rados: Rados, option: &str) -> Option<String> {
    let option = CString::new(option).ok()?;
    let mut value = [0 as c_char; VALUE_MAX];
    // SAFETY: a client, a zero-terminated text, and a buffer of that length.
    let got = unsafe {
        (library.rados_conf_get)(rados, option.as_ptr(), value.as_mut_ptr(), value.len())
    };
    // SAFETY: zero-terminated by the call where that went well.
    (got >= 0).then(|| unsafe { CStr::from_ptr(value.as_ptr()) }.to_string_lossy().into_owned())
}

/// The client's address, as it is with what it locks.
pub(crate) fn address(library: &'static Library, rados: Rados) -> Option<String> {
    let mut addresses: *mut c_char = ptr::null_mut();
    // SAFETY: a connected client, and where the result is to be.
    let got = unsafe { (library.rados_getaddrs)(rados, &mut addresses) };
    if got < 0 || addresses.is_null() {
        return None;
    }
    // SAFETY: a zero-terminated text, which is ours.
    let text = unsafe { CStr::from_ptr(addresses) }.to_string_lossy().into_owned();
    // SAFETY: as above, given back once.
    unsafe { (library.rados_buffer_free)(addresses) };
    Some(text)
}

fn shut_down(client: Making, clients: &ClientsFile) {
    let address = address(client.0, client.1);
    drop(client);
    if let Some(address) = address {
        clients.remove(&address);
    }
}

/// Ends the process. Where a thread of Ceph's is left, without exit handlers, which would take apart what
/// that thread still uses.
pub fn exit(status: u8) -> ! {
    let status = i32::from(status);
    if is_quiet() {
        std::process::exit(status);
    }
    // SAFETY: it does not return, and nothing of the process runs after it.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_not_end_is_given_up_and_what_it_returns_is_dropped() {
        let (go, gone) = mpsc::channel::<()>();
        let returned = Arc::new(());
        let kept = Arc::downgrade(&returned);
        let what = || ("image rbd/a".to_owned(), "been opened");
        let late = within(Duration::from_millis(1), what(), move || {
            _ = gone.recv();
            Ok(returned)
        });
        let said = late.unwrap_err().to_string();
        assert!(said.starts_with("image rbd/a has not been opened for 0 s: look at"), "{said}");
        assert!(kept.upgrade().is_some());
        drop(go);
        while kept.upgrade().is_some() {
            thread::sleep(LOOK);
        }
        assert_eq!(within(Duration::from_secs(600), what(), || Ok(7)).unwrap(), 7);
    }

    #[test]
    fn what_cannot_be_started_is_started_later() {
        let (tell, told) = mpsc::channel();
        let mut started = Vec::new();
        let mut tells = Some(tell);
        tells.as_ref().unwrap().send(7).unwrap();
        hand_out(&told, Duration::from_millis(1), |number| {
            started.push(*number);
            if started.len() < 3 {
                return Err(Error::Failed { what: "no thread".to_owned(), errno: libc::EAGAIN });
            }
            tells = None;
            Ok(())
        });
        assert_eq!(started, [7, 7, 7]);
    }

    #[test]
    fn only_what_a_cluster_does_not_answer_is_asked_again() {
        let failed = |errno| Error::Failed { what: "it".to_owned(), errno };
        assert!(failed(libc::ETIMEDOUT).passes() && failed(libc::EHOSTUNREACH).passes());
        for errno in [libc::EACCES, libc::ENOENT, libc::EINVAL, libc::EPERM] {
            assert!(!failed(errno).passes());
        }
    }

    #[test]
    fn a_text_with_a_zero_byte_is_not_for_ceph() {
        let why = text("the pool's name", "a\0b").unwrap_err();
        assert_eq!(
            (why.to_string().as_str(), why.errno()),
            ("the pool's name has a zero byte in it", libc::EINVAL)
        );
    }
}
