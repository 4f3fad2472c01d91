//! The server over a real socket.

use rpc::{Errno, Error, Flags, Methods, NoParams, Phase, Server, SocketOptions};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Echo {
    /// Text to give back.
    text: String,
    /// How often.
    #[serde(default)]
    times: Option<u32>,
}

struct Fixture {
    dir: PathBuf,
    server: Option<Server>,
    methods: Arc<Methods>,
    commits: Arc<AtomicU32>,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Fixture {
    fn new() -> Fixture {
        Fixture::with(|_| {})
    }

    fn with(more: impl FnOnce(&mut Methods)) -> Fixture {
        let dir = std::env::temp_dir().join(format!(
            "rpc-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        std::fs::create_dir_all(&dir).unwrap();
        let mut methods = Methods::new();
        methods.add("echo", "Gives text back.", Flags::READ, |p: Echo| {
            Ok(p.text.repeat(p.times.unwrap_or(1) as usize))
        });
        methods
            .add("fail", "Fails.", Flags::WRITE, |_: NoParams| {
                Err::<bool, _>(Error::os(Errno::NoDev, "there is nothing"))
            })
            .errors(&[Errno::NoDev]);
        methods.add("change", "Succeeds.", Flags::WRITE, |_: NoParams| Ok(true));
        methods.add("early", "Before.", Flags::STARTUP, |_: NoParams| Ok(true));
        let commits = Arc::new(AtomicU32::new(0));
        let counted = commits.clone();
        methods.on_commit(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        more(&mut methods);
        let methods = methods.finish();
        methods.set_phase(Phase::Runtime);
        let server =
            Server::start(&dir.join("s"), SocketOptions::default(), methods.clone()).unwrap();
        Fixture { dir, server: Some(server), methods, commits }
    }

    fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.dir.join("s")).unwrap();
        Client { replies: BufReader::new(stream.try_clone().unwrap()), stream }
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        drop(self.server.take());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

struct Client {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
}

impl Client {
    fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    fn reply(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.replies.read_line(&mut line).unwrap() > 0, "the connection was closed");
        serde_json::from_str(&line).unwrap()
    }

    fn call(&mut self, request: Value) -> Value {
        self.send(&request.to_string());
        self.reply()
    }

    /// Whether the server has closed the connection by now; nothing else is to come.
    fn was_cut_off(&self) -> bool {
        let mut stream = self.replies.get_ref();
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]);
        stream.set_nonblocking(false).unwrap();
        matches!(read, Ok(0))
    }

    /// Waits until the server closes the connection.
    fn is_closed(&mut self) -> bool {
        self.replies.read_line(&mut String::new()).unwrap() == 0
    }
}

#[test]
fn pretty_printed_requests_without_delimiters_are_answered_in_order() {
    let f = Fixture::new();
    let mut c = f.connect();
    let requests: Vec<_> = (0..20)
        .map(|i| {
            json!({"jsonrpc": "2.0", "id": i, "method": "echo",
                        "params": {"text": format!("{i}é")}})
        })
        .map(|r| serde_json::to_string_pretty(&r).unwrap())
        .collect();
    c.send(&requests.concat());
    for i in 0..20 {
        assert_eq!(c.reply(), json!({"jsonrpc": "2.0", "id": i, "result": format!("{i}é")}));
    }
}

#[test]
fn ids_come_back_as_they_were() {
    let f = Fixture::new();
    let mut c = f.connect();
    for id in [json!("a"), json!(18446744073709551615u64), json!(-1), json!(1.5)] {
        let reply = c.call(json!({"id": id, "method": "change"}));
        assert_eq!(reply, json!({"jsonrpc": "2.0", "id": id, "result": true}));
    }
    let reply = c.call(json!({"id": [1], "method": "change"}));
    assert_eq!((&reply["id"], &reply["error"]["code"]), (&Value::Null, &json!(-32600)));
}

#[test]
fn a_success_without_id_is_not_answered_but_a_failure_is() {
    let f = Fixture::new();
    let mut c = f.connect();
    c.send(r#"{"method":"change"}{"method":"fail"}"#);
    assert_eq!(c.reply()["error"]["code"], -19);
    assert_eq!(f.commits.load(Ordering::Relaxed), 2);
}

#[test]
fn the_replies_to_a_batch_have_a_bound() {
    let f = Fixture::new();
    let echo = json!({"text": "x".repeat(1024), "times": 4096});
    let mut batch: Vec<_> = (0..8)
        .map(|id| json!({"jsonrpc": "2.0", "id": id, "method": "echo", "params": echo}))
        .collect();
    batch.push(json!({"jsonrpc": "2.0", "id": 8, "method": "change"}));
    let replies = f.methods.answer(batch.into()).unwrap();
    let replies: Vec<Value> = serde_json::from_slice(&replies).unwrap();
    let (done, refused) = replies.split_at(4);
    assert!(done.iter().all(|r| r["result"].as_str().is_some_and(|text| text.len() == 4 << 20)));
    for (reply, id) in refused.iter().zip(4..) {
        assert_eq!((&reply["id"], &reply["error"]["code"]), (&json!(id), &json!(-32600)));
        assert!(reply["error"]["message"].as_str().unwrap().contains("ask for less at a time"));
    }
    assert_eq!((replies.len(), f.commits.load(Ordering::Relaxed)), (9, 0));
}

#[test]
fn a_batch_is_answered_with_an_array() {
    let f = Fixture::new();
    let mut c = f.connect();
    let reply = c.call(json!([
        {"id": 1, "method": "echo", "params": {"text": "a", "times": 2}},
        {"method": "change"},
        7,
        {"id": 2, "method": "nope"},
    ]));
    assert_eq!(reply.as_array().unwrap().len(), 3);
    assert_eq!(reply[0], json!({"jsonrpc": "2.0", "id": 1, "result": "aa"}));
    assert_eq!(reply[1]["error"]["code"], -32600);
    assert_eq!(reply[2]["error"]["code"], -32601);
    assert_eq!(c.call(json!([]))["error"]["code"], -32600);
}

#[test]
fn faults_of_a_request_have_their_codes_and_keep_the_connection() {
    let f = Fixture::new();
    let mut c = f.connect();
    for (request, code) in [
        (json!({"id": 1, "method": "nope"}), -32601),
        (json!({"id": 1}), -32600),
        (json!({"id": 1, "method": "echo", "jsonrpc": "1.0"}), -32600),
        (json!({"id": 1, "method": "echo", "params": 3}), -32600),
        (json!({"id": 1, "method": "echo", "more": 3}), -32600),
        (json!({"id": 1, "method": "echo"}), -32602),
        (json!({"id": 1, "method": "echo", "params": ["a"]}), -32602),
        (json!({"id": 1, "method": "echo", "params": {"text": "a", "time": 1}}), -32602),
        (json!({"id": 1, "method": "early"}), -1),
        (json!({"id": 1, "method": "fail"}), -19),
    ] {
        let reply = c.call(request.clone());
        assert_eq!(reply["error"]["code"], code, "{request} -> {reply}");
        assert_eq!(reply["id"], 1, "{request}");
    }
    assert_eq!(f.commits.load(Ordering::Relaxed), 1, "only the mutating method commits");
}

#[test]
fn malformed_json_is_answered_and_the_connection_closed() {
    let f = Fixture::new();
    for text in ["{\"a\": 1]", "hello", "{\"id\": 1, \"method\": oops", "{\"id\":1,}"] {
        let mut c = f.connect();
        c.send(text);
        assert_eq!(c.reply()["error"]["code"], -32700, "{text}");
        assert!(c.is_closed(), "{text}");
    }
    assert_eq!(f.connect().call(json!({"id": 1, "method": "change"}))["result"], true);
}

#[test]
fn methods_are_listed_and_those_of_now_alone_if_asked() {
    let f = Fixture::new();
    let mut c = f.connect();
    let all = c.call(json!({"id": 1, "method": "rpc_get_methods",
                            "params": {"current": false, "include_aliases": false}}));
    assert_eq!(all["result"], json!(["change", "early", "echo", "fail", "rpc_get_methods"]));
    let now = c.call(json!({"id": 1, "method": "rpc_get_methods", "params": {"current": true}}));
    assert_eq!(now["result"], json!(["change", "echo", "fail", "rpc_get_methods"]));
}

#[test]
fn a_client_that_waits_for_a_method_holds_up_nobody() {
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let f = Fixture::with(|m| {
        m.add("wait", "Waits.", Flags::READ, move |_: NoParams| {
            blocked.lock().unwrap().recv().unwrap();
            Ok(true)
        });
    });
    let mut slow = f.connect();
    slow.send(r#"{"id":1,"method":"wait"}"#);
    let mut half = f.connect();
    half.send("{\"id\"");
    let mut quick = f.connect();
    assert_eq!(quick.call(json!({"id": 1, "method": "change"}))["result"], true);
    release.send(()).unwrap();
    assert_eq!(slow.reply()["result"], true);
}

#[test]
fn a_change_that_takes_long_holds_up_no_other_and_is_recorded_in_turn() {
    let (go, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let f = Fixture::with(|methods| {
        methods.add("long", "Waits.", Flags::LONG_WRITE, move |_: NoParams| {
            wait.lock().unwrap().recv().map_err(|e| Error::internal(e.to_string()))
        });
    });
    let (mut one, mut other) = (f.connect(), f.connect());
    one.send(r#"{"method":"long","id":1}"#);
    assert_eq!(other.call(json!({"method":"change","id":2}))["result"], json!(true));
    assert_eq!(f.commits.load(Ordering::SeqCst), 1);
    go.send(()).unwrap();
    assert_eq!(one.reply()["result"], Value::Null);
    assert_eq!(f.commits.load(Ordering::SeqCst), 2);
}

#[test]
fn of_as_many_clients_as_can_be_idle_ones_give_way_to_the_next() {
    let f = Fixture::new();
    let mut clients: Vec<_> = (0..rpc::clients::MAX_CONNECTIONS).map(|_| f.connect()).collect();
    for c in &mut clients {
        assert_eq!(c.call(json!({"id": 1, "method": "change"}))["result"], true);
    }
    let mut more: Vec<_> = (0..10).map(|_| f.connect()).collect();
    for c in &mut more {
        assert_eq!(c.call(json!({"id": 1, "method": "change"}))["result"], true);
    }
    // Which were the idlest is what their threads noted, a moment after the reply was taken.
    let (gone, mut left): (Vec<_>, Vec<_>) = clients.into_iter().partition(Client::was_cut_off);
    assert_eq!(gone.len(), more.len(), "no more give way than must");
    for c in left.iter_mut().chain(&mut more) {
        assert_eq!(c.call(json!({"id": 2, "method": "change"}))["result"], true);
    }
}

/// A reply that fits into no socket's buffers.
const LONG: u32 = 4 << 20;

fn ask_for_much(client: &mut Client) {
    client.send(
        &json!({"id": 1, "method": "echo", "params": {"text": "x", "times": LONG}}).to_string(),
    );
}

#[test]
fn clients_that_take_no_reply_keep_nobody_out_and_only_as_many_go_as_must() {
    let f = Fixture::new();
    let mut deaf: Vec<_> = (0..rpc::clients::MAX_CONNECTIONS).map(|_| f.connect()).collect();
    deaf.iter_mut().for_each(ask_for_much);
    // Refused as long as all requests still run: told so, and closed, perhaps before it has asked.
    let served = |_| {
        let mut next = f.connect();
        let request = json!({"id": 2, "method": "change"}).to_string();
        let mut line = String::new();
        let asked = next.stream.write_all(request.as_bytes());
        match asked.and_then(|()| next.replies.read_line(&mut line)) {
            Ok(_) => {
                let reply: Value = serde_json::from_str(&line).unwrap();
                (reply["result"] == true).then_some(next)
            }
            Err(e) => {
                assert!(
                    matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
                    "{e}"
                );
                None
            }
        }
    };
    let mut next = (0..).find_map(served).unwrap();
    let mut cut_off = 0;
    for client in &mut deaf {
        let mut line = String::new();
        let read = client.replies.read_line(&mut line).unwrap_or(0);
        cut_off += usize::from(read < LONG as usize);
    }
    assert_eq!(cut_off, 1, "the others had their replies when they wanted them");
    assert_eq!(next.call(json!({"id": 3, "method": "change"}))["result"], true);
}

#[test]
fn a_client_that_takes_no_reply_does_not_hold_up_an_upgrade() {
    let mut f = Fixture::new();
    let mut idle = f.connect();
    assert_eq!(idle.call(echo("a"))["result"], "a");
    let mut deaf = f.connect();
    ask_for_much(&mut deaf);
    let mut byte = [0];
    // Its reply has begun.
    rustix::net::recv(&deaf.stream, &mut byte, rustix::net::RecvFlags::PEEK).unwrap();
    let server = f.server.take().unwrap();
    let parked = server.park(std::time::Duration::from_millis(100)).map_err(|(_, e)| e).unwrap();
    assert_eq!(parked.clients.len(), 1, "the one that waits for nothing goes along");
}

#[test]
fn one_client_too_many_is_told_so_where_all_have_requests_that_run() {
    let (go, wait) = mpsc::channel::<()>();
    let (began, begun) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let f = Fixture::with(move |methods| {
        methods.add("wait", "Waits.", Flags::READ, move |_: NoParams| {
            began.send(()).unwrap();
            let _ = wait.lock().unwrap().recv();
            Ok(true)
        });
    });
    let mut clients: Vec<_> = (0..rpc::clients::MAX_CONNECTIONS).map(|_| f.connect()).collect();
    for c in &mut clients {
        c.send(&json!({"id": 1, "method": "wait"}).to_string());
        begun.recv().unwrap();
    }
    let mut extra = f.connect();
    let reply = extra.reply();
    assert_eq!(reply["error"]["code"], -11);
    assert!(reply["error"]["message"].as_str().unwrap().contains("64 RPC clients"));
    assert!(extra.is_closed());
    drop(go);
    for c in &mut clients {
        assert_eq!(c.reply()["result"], true);
    }
}

#[test]
fn the_socket_has_its_mode_and_goes_away() {
    let mut f = Fixture::new();
    let path = f.dir.join("s");
    let mode = std::fs::symlink_metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    f.server.take().unwrap().stop();
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_one_in_use_is_not() {
    let f = Fixture::new();
    let start = |name: &str| {
        Server::start(&f.dir.join(name), SocketOptions::default(), f.methods.clone())
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let in_use = start("s").unwrap_err();
    assert!(in_use.contains("is in use by another process"), "{in_use}");
    drop(UnixListener::bind(f.dir.join("stale")).unwrap());
    start("stale").unwrap();
    std::fs::write(f.dir.join("file"), "").unwrap();
    let file = start("file").unwrap_err();
    assert!(file.contains("is no socket"), "{file}");
    let long = start(&"x".repeat(120)).unwrap_err();
    assert!(long.contains("too long") && long.contains("at most 106"), "{long}");
    let missing = start("no/such/dir").unwrap_err();
    assert!(missing.contains("No such file or directory"), "{missing}");
}

#[test]
fn a_socket_of_a_busy_program_or_of_another_type_is_in_use() {
    let f = Fixture::new();
    let start = |name: &str| {
        let path = f.dir.join(name);
        let started = Server::start(&path, SocketOptions::default(), f.methods.clone());
        started.map(drop).unwrap_err().to_string()
    };
    let _datagrams = UnixDatagram::bind(f.dir.join("datagrams")).unwrap();
    let text = start("datagrams");
    assert!(text.contains("is in use by another process"), "{text}");

    // Somebody who accepts nothing (stopped, or hung): its queue is full, and nobody waits for it.
    let busy = UnixListener::bind(f.dir.join("busy")).unwrap();
    rustix::net::listen(&busy, 0).unwrap();
    let try_connect = || {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let fd = socket_with(family, kind, SocketFlags::NONBLOCK, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(f.dir.join("busy")).unwrap();
        connect(&fd, &address).map(|()| fd)
    };
    let _waiting: Vec<_> = std::iter::from_fn(|| try_connect().ok()).take(100).collect();
    let text = start("busy");
    assert!(text.contains("is in use by another process"), "{text}");
}

#[test]
fn schemas_name_parameters_results_and_errors() {
    let f = Fixture::new();
    let schemas = f.methods.schemas();
    let echo = &schemas["echo"];
    assert_eq!(echo["params"]["required"], json!(["text"]));
    assert_eq!(echo["params"]["additionalProperties"], false);
    assert_eq!(echo["params"]["properties"]["text"]["description"], "Text to give back.");
    assert_eq!(echo["result"]["type"], "string");
    assert_eq!(
        schemas["fail"]["errors"],
        json!([{"code": -32602, "name": "invalid params"}, {"code": -19, "name": "ENODEV"}])
    );
}

fn echo(text: &str) -> Value {
    json!({"id": 1, "method": "echo", "params": {"text": text}})
}

#[test]
fn a_parked_server_goes_on_with_its_clients_and_what_they_sent() {
    let mut f = Fixture::new();
    let (mut idle, mut half) = (f.connect(), f.connect());
    assert_eq!(idle.call(echo("a"))["result"], "a");
    assert_eq!(half.call(echo("b"))["result"], "b");
    let text = echo("c").to_string();
    let (begin, rest) = text.split_at(20);
    half.send(begin);
    // Read by the server: what is still in the socket would go along with it anyway.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let server = f.server.take().unwrap();
    let parked = server.park(std::time::Duration::from_secs(20)).map_err(|(_, e)| e).unwrap();
    assert_eq!(parked.clients.len(), 2);
    // Connects, and waits.
    let mut late = f.connect();
    late.send(&text);
    let path = f.dir.join("s");
    let listener = parked.listener.socket().try_clone().unwrap();
    parked.listener.leave();
    let listener = rpc::Listener::adopt(listener.into(), &path).unwrap();
    let parked = rpc::Parked { listener, clients: parked.clients };
    f.server = Some(Server::resume(parked, f.methods.clone()).unwrap());
    half.send(rest);
    assert_eq!(half.reply()["result"], "c");
    assert_eq!(late.reply()["result"], "c");
    assert_eq!(idle.call(echo("d"))["result"], "d");
    drop(f.server.take());
    assert!(!path.exists());
}

#[test]
fn a_request_that_runs_keeps_the_server_from_being_parked() {
    let (begun, runs) = mpsc::channel();
    let (go, may_end) = mpsc::channel::<()>();
    let (begun, may_end) = (Mutex::new(begun), Mutex::new(may_end));
    let mut f = Fixture::with(move |methods| {
        methods.add("wait", "Waits.", Flags::READ, move |_: NoParams| {
            begun.lock().unwrap().send(()).unwrap();
            may_end.lock().unwrap().recv().unwrap();
            Ok(true)
        });
    });
    let (mut waits, mut other) = (f.connect(), f.connect());
    waits.send(r#"{"id": 1, "method": "wait"}"#);
    runs.recv().unwrap();
    let server = f.server.take().unwrap();
    let Err((server, why)) = server.park(std::time::Duration::from_millis(20)) else {
        panic!("a request runs");
    };
    assert!(why.contains("1 RPC requests still run"), "{why}");
    f.server = Some(server);
    assert_eq!(other.call(echo("a"))["result"], "a");
    go.send(()).unwrap();
    assert_eq!(waits.reply()["result"], true);
    assert_eq!(waits.call(echo("b"))["result"], "b");
}

#[test]
fn nobody_waits_for_the_record_of_anothers_change() {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(Some(held));
    let entered = Arc::new(AtomicU32::new(0));
    let count = entered.clone();
    let f = Fixture::with(|methods| {
        methods.on_commit(move || {
            count.fetch_add(1, Ordering::SeqCst);
            // The disk of the first one's record does not answer.
            let first = held.lock().unwrap().take();
            if let Some(held) = first {
                held.recv().unwrap();
            }
            Ok(())
        });
    });
    let (mut slow, mut other) = (f.connect(), f.connect());
    slow.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "change"}).to_string());
    while entered.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    for id in 2..5 {
        let reply = other.call(json!({"jsonrpc": "2.0", "id": id, "method": "change"}));
        assert_eq!((&reply["id"], &reply["result"]), (&json!(id), &json!(true)));
    }
    release.send(()).unwrap();
    assert_eq!(slow.reply()["id"], 1, "its answer comes with its record");
}
