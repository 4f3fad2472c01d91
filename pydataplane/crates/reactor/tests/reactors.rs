//! Reactors as their users see them: messages, pollers, sleep and wake-up, shutdown.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use reactor::{Handle, IoContext, Poller, Reactors};
use rustix::event::{EventfdFlags, eventfd};

use reactor::Idle;

/// Sleeps as soon as it may: the most chances to lose a wake-up.
const SLEEPY: Idle = Idle::Adaptive { spin_us: 0 };

fn start(n: usize, idle: Idle) -> Reactors {
    Reactors::start(&vec![None; n], idle).unwrap()
}

/// Waits until `h` sleeps.
fn until_asleep(h: &Handle) {
    let before = h.stats().sleeps;
    while h.stats().sleeps == before && h.stats().busy_ns > 0 {
        thread::yield_now();
        if h.stats().sleep_ns > 0 && h.stats().sleeps > 0 {
            break;
        }
    }
}

#[test]
fn messages_run_in_order_on_the_named_and_pinned_thread() {
    let cpu = rustix::thread::sched_getcpu();
    let r = Reactors::start(&[Some(cpu), None], SLEEPY).unwrap();
    let h = r.handles()[0].clone();
    let (name, index, here) = h.call(|cx| {
        let name = thread::current().name().unwrap().to_owned();
        (name, cx.index(), rustix::thread::sched_getcpu())
    });
    assert_eq!((name.as_str(), index, here), ("reactor_0", 0, cpu));
    assert_eq!(r.handles()[1].call(|cx| cx.index()), 1);
    assert_eq!(r.stats()[0].cpu, Some(cpu));
    let seen = Arc::new(AtomicU64::new(0));
    for i in 0..5000 {
        let seen = seen.clone();
        h.send(move |_| assert_eq!(seen.swap(i + 1, SeqCst), i));
    }
    assert_eq!(h.call(|_| ()), ());
    assert_eq!(seen.load(SeqCst), 5000);
    r.stop();
}

#[test]
fn a_cpu_that_is_not_there_is_one_clear_error() {
    let e = Reactors::start(&[None, Some(1000)], SLEEPY).err().unwrap();
    assert_eq!(
        e.to_string(),
        "cannot start reactor 1 on CPU 1000: this process may not use that CPU: \
         choose one of its cpuset"
    );
    assert!(Reactors::start(&[], SLEEPY).is_err());
}

#[test]
fn no_message_is_lost_while_reactors_sleep_and_wake_all_the_time() {
    const SENDERS: usize = 3;
    const EACH: usize = 4000;
    let r = start(2, SLEEPY);
    let count = Arc::new(AtomicUsize::new(0));
    thread::scope(|s| {
        for t in 0..SENDERS {
            let (r, count) = (&r, count.clone());
            s.spawn(move || {
                for i in 0..EACH {
                    let h = &r.handles()[(i + t) % 2];
                    let count = count.clone();
                    if i % 3 == 0 {
                        h.call(move |_| count.fetch_add(1, SeqCst));
                    } else {
                        h.send(move |_| {
                            count.fetch_add(1, SeqCst);
                        });
                    }
                }
            });
        }
    });
    for h in r.handles() {
        h.call(|_| ());
    }
    assert_eq!(count.load(SeqCst), SENDERS * EACH);
    let sleeps: u64 = r.stats().iter().map(|s| s.sleeps).sum();
    assert!(sleeps > 0, "the reactors slept in between");
    r.stop();
}

/// A queue as a guest has it: items, a flag that asks for kicks, and a kick.
struct Queue {
    produced: AtomicU64,
    wants_kick: AtomicBool,
    kick: OwnedFd,
    kicks: AtomicU64,
}

impl Queue {
    fn new() -> Arc<Self> {
        Arc::new(Queue {
            produced: AtomicU64::new(0),
            wants_kick: AtomicBool::new(false),
            kick: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            kicks: AtomicU64::new(0),
        })
    }
    fn produce(&self) {
        self.produced.fetch_add(1, SeqCst);
        if self.wants_kick.load(SeqCst) {
            self.kicks.fetch_add(1, SeqCst);
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

struct Consumer {
    queue: Arc<Queue>,
    taken: Arc<AtomicU64>,
}

impl Consumer {
    fn waiting(&self) -> u64 {
        self.queue.produced.load(SeqCst) - self.taken.load(SeqCst)
    }
}

impl Poller for Consumer {
    fn name(&self) -> &str {
        "consumer"
    }
    fn poll(&mut self) -> u32 {
        let n = self.waiting();
        self.taken.fetch_add(n, SeqCst);
        n as u32
    }
    fn arm(&mut self) -> bool {
        self.queue.wants_kick.store(true, SeqCst);
        self.waiting() == 0
    }
    fn disarm(&mut self) {
        self.queue.wants_kick.store(false, SeqCst);
    }
}

#[test]
fn no_kick_is_lost_between_arming_and_sleeping() {
    const ITEMS: u64 = 20_000;
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let (queue, taken) = (Queue::new(), Arc::new(AtomicU64::new(0)));
    let (q, t) = (queue.clone(), taken.clone());
    let id = h.call(move |cx| {
        let kick = q.kick.as_raw_fd();
        let id = cx.add_poller(Box::new(Consumer { queue: q, taken: t }));
        cx.watch(kick, id).unwrap();
        id
    });
    for i in 0..ITEMS {
        queue.produce();
        // Every item is awaited, so each one finds the reactor falling asleep or just awake.
        while taken.load(SeqCst) <= i {
            thread::yield_now();
        }
    }
    assert!(queue.kicks.load(SeqCst) > 0, "it did sleep");
    let info = h.call(|cx| cx.pollers());
    assert_eq!(info.len(), 1);
    assert_eq!((info[0].id, info[0].name.as_str(), info[0].busy), (id, "consumer", ITEMS));
    assert!(info[0].runs >= ITEMS);
    let fd = queue.kick.as_raw_fd();
    h.call(move |cx| {
        assert!(cx.watch(fd, id).is_err(), "watched already");
        cx.unwatch(fd);
        assert!(cx.poller_mut::<Consumer>(id).is_some());
        assert!(cx.poller_mut::<Spinner>(id).is_none());
        assert!(cx.remove_poller(id).is_some());
        assert!(cx.remove_poller(id).is_none());
    });
    queue.produce();
    h.call(|_| ());
    assert_eq!(taken.load(SeqCst), ITEMS);
    r.stop();
}

/// Notes when it has its turn, once there is something to note, and whether it was told of others then.
struct Noted {
    place: usize,
    order: Arc<Mutex<Vec<(usize, bool)>>>,
    notes: Arc<AtomicBool>,
    contended: bool,
}

impl Poller for Noted {
    fn name(&self) -> &str {
        "noted"
    }
    fn poll(&mut self) -> u32 {
        let notes = self.notes.load(SeqCst);
        if notes {
            self.order.lock().unwrap().push((self.place, self.contended));
        }
        // Those that had events have the turns that follow.
        notes.into()
    }
    fn set_contended(&mut self, contended: bool) {
        self.contended = contended;
    }
}

#[test]
fn who_is_called_has_the_first_turn_of_a_reactor_that_slept() {
    const POLLERS: usize = 6;
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let (order, notes) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let kicks: Vec<_> = (0..POLLERS)
        .map(|place| {
            let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            let (order, notes, fd) = (order.clone(), notes.clone(), kick.as_raw_fd());
            h.call(move |cx| {
                let id = cx.add_poller(Box::new(Noted { place, order, notes, contended: false }));
                cx.watch(fd, id).unwrap();
            });
            kick
        })
        .collect();
    for called in [4, 1, POLLERS - 1, 0, 3] {
        // Nothing but a kick wakes it: it sleeps once it has done nothing else for a while.
        loop {
            let before = r.stats()[0];
            thread::sleep(Duration::from_millis(2));
            let now = r.stats()[0];
            if (before.busy_ns, before.idle_ns) == (now.busy_ns, now.idle_ns) {
                break;
            }
        }
        order.lock().unwrap().clear();
        notes.store(true, SeqCst);
        rustix::io::write(&kicks[called], &1u64.to_ne_bytes()).unwrap();
        while order.lock().unwrap().len() < POLLERS {
            thread::yield_now();
        }
        notes.store(false, SeqCst);
        // Then each of the others, which may have been called as well, before it has another.
        let order = order.lock().unwrap();
        assert_eq!(order[0], (called, true));
        let all = &order[..POLLERS];
        assert!((0..POLLERS).all(|place| all.contains(&(place, true))), "{order:?}");
    }
    r.stop();
}

/// Has work while `works`; keeps what it was told of others.
#[derive(Clone, Default)]
struct Worker {
    works: Arc<AtomicBool>,
    contended: Arc<AtomicBool>,
}

impl Poller for Worker {
    fn name(&self) -> &str {
        "worker"
    }
    fn poll(&mut self) -> u32 {
        self.works.load(SeqCst).into()
    }
    fn set_contended(&mut self, contended: bool) {
        self.contended.store(contended, SeqCst);
    }
}

#[test]
fn pollers_know_whether_others_have_work() {
    let r = start(1, Idle::Poll);
    let workers = [Worker::default(), Worker::default(), Worker::default()];
    for worker in workers.clone() {
        _ = r.handles()[0].call(move |cx| cx.add_poller(Box::new(worker)));
    }
    for (works, contended) in [
        ([false; 3], [false; 3]),
        ([true, false, false], [false, true, true]),
        ([true, false, true], [true; 3]),
        ([false, false, true], [true, true, false]),
        ([true; 3], [true; 3]),
        ([false; 3], [false; 3]),
    ] {
        workers.iter().zip(works).for_each(|(worker, works)| worker.works.store(works, SeqCst));
        // Who had work lately counts for some turns; a test that hangs here fails.
        while workers.each_ref().map(|worker| worker.contended.load(SeqCst)) != contended {
            thread::yield_now();
        }
    }
    r.stop();
}

/// How often each poller had its turn since it was as `before` says, once the one at `place` had more than
/// `most` of them; a test that hangs here fails.
fn turns_since(h: &Handle, before: &[u64], place: usize, most: u64) -> Vec<u64> {
    loop {
        // For each message all are looked at.
        thread::sleep(Duration::from_millis(2));
        let since: Vec<_> = turns(h).iter().zip(before).map(|(now, before)| now - before).collect();
        if since[place] > most {
            return since;
        }
    }
}

/// How often each poller had its turn.
fn turns(h: &Handle) -> Vec<u64> {
    h.call(|cx| cx.pollers()).iter().map(|poller| poller.runs).collect()
}

#[test]
fn who_has_work_has_each_turn_and_the_others_have_theirs() {
    const IDLE: usize = 100;
    let r = start(1, Idle::Poll);
    let h = &r.handles()[0];
    let workers: Vec<_> = (0..=IDLE).map(|_| Worker::default()).collect();
    for worker in workers.clone() {
        _ = h.call(move |cx| cx.add_poller(Box::new(worker)));
    }
    for busy in [IDLE / 2, IDLE, 0] {
        workers[busy].works.store(true, SeqCst);
        let mut others = turns_since(h, &turns(h), busy, 10_000);
        workers[busy].works.store(false, SeqCst);
        let polled = others.remove(busy);
        let (least, most) = (others.iter().min().unwrap(), others.iter().max().unwrap());
        assert!(*least > polled / 100, "{least} of {polled}");
        assert!(*most < polled, "{most} of {polled}");
    }
    // One that is gone leaves the others theirs.
    let id = h.call(|cx| cx.pollers())[7].id;
    assert!(h.call(move |cx| cx.remove_poller(id).is_some()));
    workers[IDLE].works.store(true, SeqCst);
    assert!(!turns_since(h, &turns(h), IDLE - 1, 1000).contains(&0));
    r.stop();
}

#[test]
fn one_of_many_without_work_has_each_turn() {
    const BUSY: usize = 98;
    let r = start(1, Idle::Poll);
    let h = &r.handles()[0];
    for n in 0..BUSY + 2 {
        let worker = Worker::default();
        worker.works.store(n != 40 && n != 70, SeqCst);
        _ = h.call(move |cx| cx.add_poller(Box::new(worker)));
    }
    let since = turns_since(h, &turns(h), 0, 100);
    assert!(since.iter().all(|n| n.abs_diff(since[0]) <= 2), "{since:?}");
    r.stop();
}

/// Takes its time for each turn.
struct Slow;

impl Poller for Slow {
    fn name(&self) -> &str {
        "slow"
    }
    fn poll(&mut self) -> u32 {
        thread::sleep(Duration::from_micros(100));
        1
    }
}

#[test]
fn nobody_waits_for_more_than_a_turn_of_one_that_takes_its_time() {
    let r = start(1, Idle::Poll);
    let h = &r.handles()[0];
    for _ in 0..100 {
        _ = h.call(|cx| cx.add_poller(Box::new(Worker::default())));
    }
    _ = h.call(|cx| cx.add_poller(Box::new(Slow)));
    let mut since = turns_since(h, &turns(h), 100, 10);
    let slow = since.pop().unwrap();
    assert!(since.iter().all(|idle| idle.abs_diff(slow) <= 2), "{slow}: {since:?}");
    r.stop();
}

/// Hands something to another poller of its reactor, which nobody wakes for it.
struct Giver {
    from: Arc<AtomicBool>,
    to: Arc<AtomicBool>,
}

impl Poller for Giver {
    fn name(&self) -> &str {
        "giver"
    }
    fn poll(&mut self) -> u32 {
        let has = self.from.swap(false, SeqCst);
        if has {
            self.to.store(true, SeqCst);
        }
        u32::from(has)
    }
}

#[test]
fn no_reactor_sleeps_before_all_were_looked_at() {
    const POLLERS: usize = 50;
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let flags: Vec<Arc<AtomicBool>> = (0..=POLLERS).map(|_| Arc::default()).collect();
    for n in 0..POLLERS {
        // Each gives to the one that has its turn long after it, and most before.
        let from = flags[n * 31 % POLLERS].clone();
        let last = n * 31 % POLLERS + 1 == POLLERS;
        let to = flags[if last { POLLERS } else { n * 31 % POLLERS + 1 }].clone();
        _ = h.call(move |cx| cx.add_poller(Box::new(Giver { from, to })));
    }
    for _ in 0..200 {
        let first = flags[0].clone();
        h.call(move |_| first.store(true, SeqCst));
        // A test that hangs here fails.
        while !flags[POLLERS].swap(false, SeqCst) {
            thread::yield_now();
        }
    }
    r.stop();
}

struct Spinner {
    polls: Arc<AtomicU64>,
    quiet: bool,
    dropped_on: Arc<std::sync::Mutex<Option<String>>>,
    not_send: Cell<u8>,
}

impl Poller for Spinner {
    fn name(&self) -> &str {
        "spinner"
    }
    fn poll(&mut self) -> u32 {
        self.not_send.set(self.not_send.get().wrapping_add(1));
        self.polls.fetch_add(1, SeqCst);
        0
    }
    fn arm(&mut self) -> bool {
        self.quiet
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        *self.dropped_on.lock().unwrap() = thread::current().name().map(str::to_owned);
    }
}

fn add_spinner(h: &Handle, quiet: bool) -> (Arc<AtomicU64>, Arc<std::sync::Mutex<Option<String>>>) {
    let (polls, dropped_on) = (Arc::new(AtomicU64::new(0)), Arc::default());
    let (p, d) = (polls.clone(), Arc::clone(&dropped_on));
    h.call(move |cx| {
        cx.add_poller(Box::new(Spinner { polls: p, quiet, dropped_on: d, not_send: Cell::new(0) }));
    });
    (polls, dropped_on)
}

fn until_more(polls: &AtomicU64, by: u64) {
    let from = polls.load(SeqCst);
    while polls.load(SeqCst) < from + by {
        thread::yield_now();
    }
}

#[test]
fn a_poller_that_refuses_to_arm_and_poll_mode_keep_the_reactor_awake() {
    for (idle, quiet) in [(SLEEPY, false), (Idle::Poll, true)] {
        let r = start(1, idle);
        let h = &r.handles()[0];
        let (polls, _) = add_spinner(h, quiet);
        h.call(|_| ());
        let sleeps = h.stats().sleeps;
        until_more(&polls, 2000);
        assert_eq!(h.stats().sleeps, sleeps, "{idle:?}");
        let s = h.stats();
        assert!(s.idle_ns > 0);
        r.stop();
    }
}

#[test]
fn an_idle_reactor_sleeps_and_does_not_poll() {
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let (polls, _) = add_spinner(h, true);
    until_asleep(h);
    while h.stats().sleeps == 0 {
        thread::yield_now();
    }
    // Two looks at the accounting with the reactor asleep: only the sleep grows. One that the kernel keeps
    // from a processor on its way to sleep still accounts for that, once.
    for look in 0.. {
        let (a, n) = (h.stats(), polls.load(SeqCst));
        thread::sleep(std::time::Duration::from_millis(2));
        let (b, m) = (h.stats(), polls.load(SeqCst));
        if a.sleeps == b.sleeps && n == m {
            if (a.busy_ns, a.idle_ns) != (b.busy_ns, b.idle_ns) {
                assert!(look < 100, "{a:?}, then {b:?}");
                continue;
            }
            assert!(b.sleep_ns > a.sleep_ns);
            break;
        }
    }
    r.stop();
}

/// Wants to be polled at some moment, though nothing happens, and that long after it again.
struct Alarm {
    at: u64,
    every: u64,
    rings: Arc<AtomicU64>,
}

impl Poller for Alarm {
    fn name(&self) -> &str {
        "alarm"
    }
    fn poll(&mut self) -> u32 {
        if reactor::ticks::now() < self.at {
            return 0;
        }
        self.at = self.at.saturating_add(self.every);
        self.rings.fetch_add(1, SeqCst);
        1
    }
    fn wake_at(&self) -> u64 {
        self.at
    }
}

#[test]
fn a_sleeping_reactor_wakes_when_the_first_of_its_pollers_wants_it_to() {
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let rings: Vec<_> = (0..4).map(|_| Arc::new(AtomicU64::new(0))).collect();
    let all = rings.clone();
    h.call(move |cx| {
        let now = reactor::ticks::now();
        // The last one: never.
        for (us, rings) in [3000, 1000, 2000, u64::MAX].into_iter().zip(all) {
            let every = reactor::ticks::from_us(us);
            cx.add_poller(Box::new(Alarm { at: now.saturating_add(every), every, rings }));
        }
    });
    // Nothing else wakes it: a sleep without end would show as a hang.
    while rings[..3].iter().any(|rings| rings.load(SeqCst) < 20) {
        thread::yield_now();
    }
    assert!(h.stats().sleeps > 0);
    assert_eq!(rings[3].load(SeqCst), 0);
    r.stop();
}

#[test]
fn stopping_drops_pollers_on_their_thread_and_ends_all_waits() {
    let r = start(2, SLEEPY);
    let handles = r.handles().to_vec();
    let (_, dropped_on) = add_spinner(&handles[1], true);
    let callers: Vec<_> = (0..4)
        .map(|i| {
            let h = handles[i % 2].clone();
            thread::spawn(move || while h.try_call(|_| ()).is_ok() {})
        })
        .collect();
    r.stop();
    for c in callers {
        c.join().unwrap();
    }
    assert_eq!(dropped_on.lock().unwrap().as_deref(), Some("reactor_1"));
    assert_eq!(handles[0].try_call(|_| ()).unwrap_err().to_string(), "reactor 0 has stopped");
    handles[0].send(|_| panic!("never runs"));
}

/// Reads a pipe through the reactor's io_uring.
struct PipeReader {
    client: reactor::UringClient,
    pipe: OwnedFd,
    byte: Box<[u8; 1]>,
    sum: Arc<AtomicU64>,
}

impl PipeReader {
    fn read(&mut self) {
        let fd = io_uring::types::Fd(self.pipe.as_raw_fd());
        let e = io_uring::opcode::Read::new(fd, self.byte.as_mut_ptr(), 1).build();
        // SAFETY: the byte and the pipe live as long as the client, which waits when dropped;
        // it is the first field.
        unsafe { self.client.push(e, 0, 0) }.unwrap();
    }
}

impl Poller for PipeReader {
    fn name(&self) -> &str {
        "pipe reader"
    }
    fn poll(&mut self) -> u32 {
        let Some((_, n)) = self.client.next_completion() else { return 0 };
        if n == 1 {
            self.sum.fetch_add(u64::from(self.byte[0]), SeqCst);
            self.read();
        }
        1
    }
}

#[test]
fn a_sleeping_reactor_wakes_for_its_io_uring() {
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let (rx, tx) = rustix::pipe::pipe().unwrap();
    let sum = Arc::new(AtomicU64::new(0));
    let s = sum.clone();
    h.call(move |cx| {
        let client = cx.io().uring().unwrap().client(4);
        let mut p = PipeReader { client, pipe: rx, byte: Box::new([0]), sum: s };
        p.read();
        cx.add_poller(Box::new(p));
    });
    for i in 1..=500u64 {
        if i % 100 == 0 {
            thread::sleep(std::time::Duration::from_millis(1));
        }
        rustix::io::write(&tx, &[2]).unwrap();
        while sum.load(SeqCst) < 2 * i {
            thread::yield_now();
        }
    }
    assert!(h.stats().sleeps > 0);
    // The end of the pipe completes the last read, so that the poller can be dropped.
    drop(tx);
    r.stop();
}

#[test]
fn the_waker_of_a_reactors_context_makes_it_look() {
    let r = start(1, SLEEPY);
    let h = &r.handles()[0];
    let (polls, _) = add_spinner(h, true);
    let waker = h.call(|cx| cx.io().waker());
    for _ in 0..1000 {
        let before = polls.load(SeqCst);
        waker.wake();
        while polls.load(SeqCst) == before {
            thread::yield_now();
        }
    }
    r.stop();
}

#[test]
fn a_control_thread_is_woken_from_a_helper_without_loss() {
    let io = IoContext::new().unwrap();
    let waker = io.waker();
    let posted = Arc::new(AtomicU64::new(0));
    let p = posted.clone();
    let (ask, asked) = std::sync::mpsc::channel::<()>();
    let helper = thread::spawn(move || {
        while asked.recv().is_ok() {
            p.fetch_add(1, SeqCst);
            waker.wake();
        }
    });
    for i in 1..=5000 {
        ask.send(()).unwrap();
        while posted.load(SeqCst) < i {
            // Ten minutes: a lost wake-up would show as a hang.
            io.wait(600_000_000).unwrap();
        }
    }
    drop(ask);
    helper.join().unwrap();
}
