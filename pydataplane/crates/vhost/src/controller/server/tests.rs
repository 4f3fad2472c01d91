//! A controller's thread, run by the tests in their own.

use std::io::Write;
use std::path::Path;
use std::thread::JoinHandle;

use super::*;
use crate::controller::{Records, Setup, Timeouts};
use crate::front::Front;
use crate::mailbox::{Mailbox, Order, mailbox};
use crate::socket::SocketOptions;

/// What task management took in one session, and more than a controller has in advance.
const TAKEN: u32 = 100;
const COST: Duration = Duration::from_millis(50);
/// A message: number 1, version 1, no body.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// A controller, and its thread's part in the test's own.
struct Own {
    controller: Arc<Controller>,
    thread: JoinHandle<()>,
    mailbox: Mailbox,
    server: Server,
}

impl Own {
    fn new(dir: &Path) -> Self {
        let listen = |name| {
            let options = SocketOptions::new(dir.join(name));
            let listener = Listener::bind(&options).unwrap();
            (options, listener)
        };
        let (options, listener) = listen("vm0");
        let setup = Setup {
            front: Front::default(),
            accepts: false,
            timeouts: Timeouts::default(),
            records: Records { journal: None, mark: None, keeper: None },
            inherits: false,
        };
        let (controller, thread, _) =
            Controller::start("vm0", options, listener, Vec::new(), setup).unwrap();
        let (mailbox, inbox) = mailbox().unwrap();
        let (_, listener) = listen("other");
        let begin =
            Begin { listener, accepts: false, inbox, mark: None, keeper: None, inherits: false };
        let server = Server::new(Arc::clone(&controller), begin);
        Own { controller, thread, mailbox, server }
    }

    fn connect(&mut self) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        let comer = Arc::new(Process::of_peer(&near).unwrap());
        self.server.begin(near, comer);
        far
    }

    fn disconnect(&mut self) {
        self.server.end(&End::Disconnected);
        self.server.ended();
    }

    fn stop(self) {
        self.controller.mailbox.send(Order::Stop);
        self.thread.join().unwrap();
    }
}

#[test]
fn task_management_has_one_budget_for_all_sessions_of_a_controller() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = Own::new(dir.path());
    let _peer = own.connect();
    assert_eq!(
        own.server.with_device(|d| d.control_budget.wait(Instant::now())),
        Some(Duration::ZERO)
    );
    own.server.with_device(|d| {
        (0..TAKEN).for_each(|_| d.control_budget.charge(COST, Instant::now()));
    });
    own.disconnect();
    let _peer = own.connect();
    let wait = own.server.with_device(|d| d.control_budget.wait(Instant::now())).unwrap();
    // It waits for 8 times what it had too much: this is 32 s later only on a machine that
    // stood still.
    assert!(wait > Duration::from_secs(1), "a new session begins anew: {wait:?}");
    own.disconnect();
    own.stop();
}

#[test]
fn messages_have_one_budget_for_all_sessions_and_who_has_used_it_up_is_not_heard() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = Own::new(dir.path());
    let mut far = own.connect();
    far.write_all(&GET_FEATURES).unwrap();
    assert!(own.server.wait().message);
    let before = own.server.budget;
    own.server.handle_message().unwrap();
    assert_ne!(own.server.budget, before, "what it took is charged");
    let before = own.server.budget;
    own.disconnect();
    let mut far = own.connect();
    assert_eq!(own.server.budget, before, "a new session begins anew");
    // Not heard for half an hour: nothing but an order ends the wait.
    (0..100 * TAKEN).for_each(|_| own.server.budget.charge(COST, Instant::now()));
    far.write_all(&GET_FEATURES).unwrap();
    own.mailbox.send(Order::Accept);
    assert!(!own.server.wait().message);
    own.disconnect();
    own.stop();
}

#[test]
fn one_that_stops_unless_connected_has_no_peer_from_its_answer_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = Own::new(dir.path());
    let unless_connected = |own: &mut Own| {
        let (call, caller) = reactor::call(());
        own.server.obey(Order::StopUnlessConnected(call));
        caller.wait(Duration::MAX).unwrap()
    };
    let _peer = own.connect();
    assert!(!unless_connected(&mut own));
    assert!(!own.server.stopping && own.server.listener.is_some());
    own.disconnect();
    assert!(unless_connected(&mut own));
    assert!(own.server.stopping && own.server.listener.is_none());
    own.stop();
}

#[test]
fn one_is_not_taken_apart_for_whoever_has_no_more_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = Own::new(dir.path());
    own.server.hold(Instant::now() + Duration::from_secs(60)).unwrap();
    let (call, caller) = reactor::call(());
    assert!(caller.wait_until(Instant::now()).is_err());
    own.server.obey(Order::HandOver(call));
    assert!(!own.server.left && own.server.listener.is_some());
    let (call, caller) = reactor::call(());
    own.server.obey(Order::HandOver(call));
    assert!(own.server.left && caller.wait_until(Instant::now()).unwrap().is_ok());
    own.stop();
}
