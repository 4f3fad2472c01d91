//! Who is connected, what each client's thread does, and who gives way where there is no room.
//!
//! A client is never cut off while a request of it runs, nor where one has come that nobody has read
//! yet: it would not know whether it was carried out. Before one that waits is let go, the kernel takes
//! nothing more from it, and only then it is seen whether something came after all; so each request is
//! answered that could be sent as a whole.
//!
//! One that asks nothing gives way to the next, and so does one that does not take its reply, each after
//! [`GRACE`]. Where none is idle for that long, as all ask again and again or send a request byte by
//! byte, the one that has been connected for the longest time gives way between two requests, or in the
//! middle of what it sends. So who holds all connections keeps the next client waiting for that long,
//! and nobody out.

use parking_lot::{Condvar, Mutex};
use rustix::net::{RecvFlags, recv};
use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Clients connected at the same time (SPDK's limit too).
pub const MAX_CONNECTIONS: usize = 64;

/// How long a client may ask nothing, or leave its reply, before it gives way to the next. On a busy
/// machine there is time between the connection and the first request.
pub const GRACE: Duration = Duration::from_millis(250);

/// A client that is not served for now.
pub struct ParkedClient {
    /// The connection.
    pub stream: UnixStream,
    /// What came of its next request, if it has begun.
    pub received: Vec<u8>,
}

/// What the thread of a client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Doing {
    /// It waits for a request, or for the rest of one.
    Nothing,
    /// It reads one, or carries it out.
    Request,
    /// It hands the reply over.
    Reply,
}

/// Whether one more client may be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Room {
    /// Yes.
    Is,
    /// No: all have requests that run.
    None,
    /// Somebody will give way soon.
    Later,
}

/// The clients of a server.
#[derive(Default)]
pub(crate) struct Clients {
    connected: Mutex<Connected>,
    parked: Mutex<Vec<ParkedClient>>,
    changed: Condvar,
}

#[derive(Default)]
struct Connected {
    clients: HashMap<u64, Client>,
    next_id: u64,
}

/// A connected client.
struct Client {
    stream: UnixStream,
    doing: Doing,
    /// When it began to do that; of nothing, when the last bytes came, of a reply, when some of it was
    /// taken.
    since: Instant,
    /// It was told to go, and its thread ends.
    evicted: bool,
}

impl Client {
    fn evict(&mut self) {
        self.evicted = true;
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Has a client go that asks nothing, or does not take its reply; whether it does at once. `false`:
    /// it has just asked, is answered, and goes then, for it cannot ask more.
    fn give_way(&mut self, why: &str) -> bool {
        if self.doing != Doing::Reply {
            // In this order: after it the kernel takes nothing more for this connection.
            let _ = self.stream.shutdown(Shutdown::Read);
            if self.has_unread() {
                return false;
            }
        }
        tracing::info!(
            idle_s = self.since.elapsed().as_secs(),
            "an RPC client that {why} gives way: {MAX_CONNECTIONS} are connected"
        );
        self.evict();
        true
    }

    /// Whether something came that its thread has not read yet.
    fn has_unread(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (read, _) = match recv(&self.stream, &mut [0; 1], flags) {
            Ok(read) => read,
            Err(_) => return false,
        };
        read > 0
    }
}

impl Clients {
    /// Adds a client of which there is room; returns its number.
    pub(crate) fn add(&self, stream: UnixStream) -> u64 {
        let mut connected = self.connected.lock();
        let id = connected.next_id;
        connected.next_id += 1;
        let client =
            Client { stream, doing: Doing::Nothing, since: Instant::now(), evicted: false };
        connected.clients.insert(id, client);
        id
    }

    /// Forgets a client, whose thread ends; returns its connection.
    pub(crate) fn remove(&self, id: u64) -> Option<UnixStream> {
        let removed = self.connected.lock().clients.remove(&id);
        self.changed.notify_all();
        removed.map(|client| client.stream)
    }

    /// What the thread of client `id` does from now on. `false`: too late, the client was told to go.
    pub(crate) fn set(&self, id: u64, doing: Doing) -> bool {
        self.connected.lock().clients.get_mut(&id).is_some_and(|client| {
            client.doing = doing;
            client.since = Instant::now();
            !client.evicted
        })
    }

    /// Tells a client to go where there are as many as can be, of those that may be told the one that
    /// has kept its connection idle for the longest time. Where it is none yet, but will be, waits for
    /// at most `pause`. `waited`: how long the client for which there is to be room has waited.
    pub(crate) fn make_room(&self, pause: Duration, waited: Duration) -> Room {
        let mut connected = self.connected.lock();
        let clients = &mut connected.clients;
        if clients.values().filter(|client| !client.evicted).count() < MAX_CONNECTIONS {
            return Room::Is;
        }
        let waits = |client: &Client| client.doing != Doing::Request && !client.evicted;
        let mut waiting: Vec<_> =
            clients.iter().filter(|(_, client)| waits(client)).map(|(id, _)| *id).collect();
        if waiting.is_empty() {
            return Room::None;
        }
        waiting.sort_by_key(|id| (clients[id].since, *id));
        for id in &waiting {
            let client = &clients[id];
            let is_idle = client.since.elapsed() >= GRACE
                && (client.doing == Doing::Reply || !client.has_unread());
            let why = match client.doing {
                Doing::Reply => "does not take its reply",
                _ => "asks nothing",
            };
            if is_idle && clients.get_mut(id).is_some_and(|client| client.give_way(why)) {
                return Room::Is;
            }
        }
        waiting.sort_unstable();
        for id in waiting.iter().filter(|_| waited >= GRACE) {
            let client = &clients[id];
            let may_go = client.doing == Doing::Nothing && !client.has_unread();
            let why = "has been connected longest";
            if may_go && clients.get_mut(id).is_some_and(|client| client.give_way(why)) {
                return Room::Is;
            }
        }
        self.changed.wait_for(&mut connected, pause);
        Room::Later
    }

    /// Ends the connection of each client that does not take its reply.
    pub(crate) fn cut_off_who_takes_no_reply(&self) {
        for client in self.connected.lock().clients.values_mut() {
            if client.doing == Doing::Reply {
                client.evict();
            }
        }
    }

    /// Waits until no thread serves a client; `false`: some do after `timeout`.
    pub(crate) fn wait_for_all(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut connected = self.connected.lock();
        while !connected.clients.is_empty() {
            if self.changed.wait_until(&mut connected, end).timed_out() {
                return connected.clients.is_empty();
            }
        }
        true
    }

    /// How many threads serve a client.
    pub(crate) fn count(&self) -> usize {
        self.connected.lock().clients.len()
    }

    /// Keeps a client that is not served for now.
    pub(crate) fn park(&self, client: ParkedClient) {
        self.parked.lock().push(client);
    }

    /// Returns those that were kept.
    pub(crate) fn take_parked(&self) -> Vec<ParkedClient> {
        std::mem::take(&mut *self.parked.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};

    /// As many clients as can be, all of which have done `doing` for longer than the grace, the first
    /// for the longest time; returns their ends of the connections.
    fn full(clients: &Clients, doing: Doing) -> Vec<UnixStream> {
        let ends = (0..MAX_CONNECTIONS as u32).map(|at| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let id = clients.add(ours);
            assert!(clients.set(id, doing));
            clients.age(id, GRACE * (2 * MAX_CONNECTIONS as u32 - at));
            theirs
        });
        ends.collect()
    }

    impl Clients {
        /// Has a client give way that was seen to ask nothing; whether it goes at once.
        pub(crate) fn give_way(&self, id: u64) -> bool {
            self.connected.lock().clients.get_mut(&id).unwrap().give_way("asks nothing")
        }

        fn age(&self, id: u64, by: Duration) {
            self.connected.lock().clients.get_mut(&id).unwrap().since -= by;
        }
    }

    fn is_closed(mut end: &UnixStream) -> bool {
        end.set_nonblocking(true).unwrap();
        matches!(end.read(&mut [0; 1]), Ok(0))
    }

    #[test]
    fn a_request_that_nobody_has_read_yet_is_not_cut_off() {
        let clients = Clients::default();
        let mut ends = full(&clients, Doing::Nothing);
        ends[0].write_all(b"{").unwrap();
        ends[1].write_all(b"{").unwrap();
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Is);
        let closed: Vec<_> = (0..ends.len()).filter(|&at| is_closed(&ends[at])).collect();
        assert_eq!(closed, [2], "the idlest of those that have not asked");
    }

    #[test]
    fn a_request_that_comes_as_its_client_gives_way_is_not_cut_off() {
        let clients = Clients::default();
        let mut ends = full(&clients, Doing::Nothing);
        ends[0].write_all(b"{").unwrap();
        assert!(!clients.give_way(0));
        assert!(clients.set(0, Doing::Request), "it is served");
        assert_eq!(ends[0].write(b"}").unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert!(!is_closed(&ends[0]), "its reply can still come");
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Is);
        assert!(is_closed(&ends[1]), "it counts until its thread ends");
    }

    #[test]
    fn who_has_just_connected_or_asked_has_time_for_more() {
        let clients = Clients::default();
        let _ends: Vec<_> = (0..MAX_CONNECTIONS)
            .map(|_| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                clients.add(ours);
                theirs
            })
            .collect();
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Later);
        clients.age(7, GRACE);
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Is);
        assert!(!clients.set(7, Doing::Request), "it was told to go");
        assert!(clients.set(8, Doing::Request));
    }

    #[test]
    fn of_those_that_ask_again_and_again_the_first_that_came_gives_way() {
        let clients = Clients::default();
        let mut ends: Vec<_> = (0..MAX_CONNECTIONS)
            .map(|_| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let id = clients.add(ours);
                assert!(clients.set(id, Doing::Nothing));
                theirs
            })
            .collect();
        ends[0].write_all(b"{").unwrap();
        clients.set(1, Doing::Request);
        clients.set(2, Doing::Reply);
        // As if all had been heard at this moment, however slow the machine is.
        let later = Instant::now() + GRACE * 1000;
        clients.connected.lock().clients.values_mut().for_each(|client| client.since = later);
        assert_eq!(clients.make_room(Duration::ZERO, GRACE / 2), Room::Later);
        assert_eq!(clients.make_room(Duration::ZERO, GRACE), Room::Is);
        let closed: Vec<_> = (0..ends.len()).filter(|&at| is_closed(&ends[at])).collect();
        assert_eq!(closed, [3]);
    }

    #[test]
    fn who_does_not_take_a_reply_gives_way_though_more_came_of_it() {
        let clients = Clients::default();
        let mut ends = full(&clients, Doing::Reply);
        ends[0].write_all(b"{").unwrap();
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Is);
        assert!(!clients.set(0, Doing::Nothing));
        assert!(clients.set(1, Doing::Nothing));
    }

    #[test]
    fn there_is_no_room_where_all_have_requests_that_run() {
        let clients = Clients::default();
        let ends = full(&clients, Doing::Request);
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::None);
        clients.cut_off_who_takes_no_reply();
        assert!(!ends.iter().any(is_closed));
        clients.remove(5);
        assert_eq!(clients.make_room(Duration::ZERO, Duration::ZERO), Room::Is);
    }
}
