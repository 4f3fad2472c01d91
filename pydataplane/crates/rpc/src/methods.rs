//! The method table: typed handlers, their schemas, and the dispatch of one message.

use crate::ascii;
use crate::check;
use crate::code::{Code, Errno, Error};
use parking_lot::Mutex;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

/// Requests in one batch.
pub const MAX_BATCH: usize = 1024;

/// Bytes of the replies to one batch from which on its further requests are refused: each may list
/// everything there is.
pub const MAX_BATCH_REPLY: usize = 16 << 20;

/// What kind of method it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// Changes the configuration: one at a time, and recorded.
    pub mutating: bool,
    /// May take as long as a disk takes to be written: the others do not wait for it, and it has its
    /// turn when its change is recorded. It keeps its own order with what it must not meet.
    pub long: bool,
    /// Can be called before initialisation.
    pub startup: bool,
    /// Can be called after initialisation.
    pub runtime: bool,
}

impl Flags {
    /// Looks only; after initialisation.
    pub const READ: Flags = Flags { mutating: false, long: false, startup: false, runtime: true };
    /// Changes the configuration; after initialisation.
    pub const WRITE: Flags = Flags { mutating: true, ..Flags::READ };
    /// As [`Flags::WRITE`], but others do not wait for it.
    pub const LONG_WRITE: Flags = Flags { long: true, ..Flags::WRITE };
    /// Changes no configuration; at any time.
    pub const ALWAYS: Flags = Flags { startup: true, ..Flags::READ };
    /// Only before initialisation.
    pub const STARTUP: Flags = Flags { startup: true, runtime: false, ..Flags::READ };
}

/// Where the daemon is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Before initialisation (`--wait-for-rpc`).
    Startup = 0,
    /// Initialised.
    Runtime = 1,
}

/// Parameters of a method that takes none.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

type Run = Box<dyn Fn(Map<String, Value>) -> Result<Value, Error> + Send + Sync>;

/// A method: what it is and what it does.
pub struct Method {
    doc: &'static str,
    flags: Flags,
    params: Value,
    result: Value,
    errors: Vec<Code>,
    /// Parameters that nobody is shown.
    secrets: &'static [&'static str],
    run: Run,
}

/// What is shown instead of a secret.
const HIDDEN: &str = "(not shown)";

impl Method {
    /// Says which parameters are secrets: neither the log nor an error shows them.
    pub fn secrets(&mut self, names: &'static [&'static str]) -> &mut Self {
        debug_assert!(names.iter().all(|name| self.params["properties"].get(name).is_some()));
        self.secrets = names;
        self
    }

    /// The parameters as the log has them. Of a method with secrets what it does not know is not shown
    /// either: it may be one of them with its name mistyped.
    fn shown(&self, params: &Value) -> String {
        if self.secrets.is_empty() {
            return params.to_string();
        }
        let Value::Object(params) = params else { return HIDDEN.to_owned() };
        let known = |name: &String| self.params["properties"].get(name).is_some();
        let shown = params.iter().map(|(name, value)| {
            let shows = known(name) && !self.secrets.contains(&name.as_str());
            (name.clone(), if shows { value.clone() } else { json!(HIDDEN) })
        });
        Value::Object(shown.collect()).to_string()
    }

    /// Adds the errnos that the operation itself can fail with, for the schema.
    pub fn errors(&mut self, errnos: &[Errno]) -> &mut Self {
        self.errors.extend(errnos.iter().map(|e| Code::Os(*e)));
        self
    }
}

/// Parameters of `rpc_get_methods`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetMethods {
    /// Return only methods that can be called in the current state. Default: false
    #[serde(default)]
    current: Option<bool>,
    /// Include deprecated aliases. There are none. Default: false
    #[serde(default)]
    #[allow(dead_code)]
    include_aliases: Option<bool>,
}

type Before = Box<dyn Fn(&str, &Value) -> Result<Held, Error> + Send + Sync>;
type Follow = Box<dyn Fn() + Send + Sync>;
type Commit = Box<dyn Fn() -> Result<(), Error> + Send + Sync>;

/// What a call needs until it has ended.
pub type Held = Option<Box<dyn Any>>;

/// The table. Filled first, then shared.
pub struct Methods {
    table: BTreeMap<&'static str, Method>,
    phase: Arc<AtomicU8>,
    /// Held by the mutating method that runs.
    serial: Mutex<()>,
    before: Before,
    follow: Follow,
    after: Follow,
    commit: Commit,
}

impl Methods {
    /// An empty table in the phase [`Phase::Startup`].
    pub fn new() -> Methods {
        Methods {
            table: BTreeMap::new(),
            phase: Arc::new(AtomicU8::new(Phase::Startup as u8)),
            serial: Mutex::new(()),
            before: Box::new(|_, _| Ok(None)),
            follow: Box::new(|| ()),
            after: Box::new(|| ()),
            commit: Box::new(|| Ok(())),
        }
    }

    /// Calls `before` with the name and the parameters of each call of a client's, while other calls go on. What it
    /// returns is dropped when the method has run; an error is the call's.
    pub fn on_call(
        &mut self,
        before: impl Fn(&str, &Value) -> Result<Held, Error> + Send + Sync + 'static,
    ) {
        self.before = Box::new(before);
    }

    /// Calls `after` after each mutating method, while other calls go on, and before it is recorded.
    pub fn on_end(&mut self, after: impl Fn() + Send + Sync + 'static) {
        self.after = Box::new(after);
    }

    /// Calls `follow` after each mutating method, before the next one starts; also after one that failed,
    /// as it may have changed something on the way.
    pub fn on_change(&mut self, follow: impl Fn() + Send + Sync + 'static) {
        self.follow = Box::new(follow);
    }

    /// Calls `commit` after that, before the reply. Others may change something at the same time: when it
    /// returns, what was changed before it was called is recorded.
    pub fn on_commit(&mut self, commit: impl Fn() -> Result<(), Error> + Send + Sync + 'static) {
        self.commit = Box::new(commit);
    }

    /// Adds a method. `P` denies unknown fields; its schema is what callers are checked against.
    pub fn add<P, R>(
        &mut self,
        name: &'static str,
        doc: &'static str,
        flags: Flags,
        handler: impl Fn(P) -> Result<R, Error> + Send + Sync + 'static,
    ) -> &mut Method
    where
        P: DeserializeOwned + JsonSchema,
        R: Serialize + JsonSchema,
    {
        let run = move |params: Map<String, Value>| {
            let params = P::deserialize(Value::Object(params))
                .map_err(|e| Error::params(format!("wrong parameters of {name}: {e}")))?;
            serde_json::to_value(handler(params)?)
                .map_err(|e| Error::internal(format!("the result of {name} is no JSON: {e}")))
        };
        let method = Method {
            doc,
            flags,
            params: schema::<P>(true),
            result: schema::<R>(false),
            errors: vec![Code::InvalidParams],
            secrets: &[],
            run: Box::new(run),
        };
        let replaced = self.table.insert(name, method);
        assert!(replaced.is_none(), "method {name} was added twice");
        self.table.get_mut(name).expect("just added")
    }

    /// Closes the table: adds `rpc_get_methods`, which lists it.
    pub fn finish(mut self) -> Arc<Methods> {
        let mut names: Vec<_> = self.table.iter().map(|(n, m)| (*n, m.flags)).collect();
        names.push(("rpc_get_methods", Flags::ALWAYS));
        names.sort_by_key(|(name, _)| *name);
        let phase = self.phase.clone();
        self.add(
            "rpc_get_methods",
            "Get an array of supported RPC methods.",
            Flags::ALWAYS,
            move |p: GetMethods| {
                let now = phase_of(&phase);
                let current = p.current.unwrap_or(false);
                Ok(names
                    .iter()
                    .filter(|(_, flags)| !current || callable(*flags, now))
                    .map(|(name, _)| name.to_string())
                    .collect::<Vec<_>>())
            },
        );
        Arc::new(self)
    }

    /// Where the daemon is in its life.
    pub fn phase(&self) -> Phase {
        phase_of(&self.phase)
    }

    /// Says where the daemon is in its life.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    /// Calls a method as a client would, apart from phase, lock and commit: for restoring.
    pub fn call(&self, name: &str, params: Value) -> Result<Value, Error> {
        let (name, method) = self.find(name)?;
        run(name, method, params)
    }

    /// Runs `f` while no method that changes the configuration does: for restoring.
    pub fn exclusively<R>(&self, f: impl FnOnce() -> R) -> R {
        let _serial = self.serial.lock();
        f()
    }

    /// Answers one message: a request or a batch. `None` when there is nothing to answer.
    pub fn answer(&self, message: Value) -> Option<Vec<u8>> {
        let reply = match message {
            Value::Array(requests) if requests.is_empty() => {
                Some(failure(Value::Null, &Error::request("the batch is empty")))
            }
            Value::Array(requests) if requests.len() > MAX_BATCH => Some(failure(
                Value::Null,
                &Error::request(format!(
                    "the batch has {} requests; at most {MAX_BATCH} are taken",
                    requests.len()
                )),
            )),
            Value::Array(requests) => return self.batch(requests),
            request => self.request(request),
        };
        reply.map(|reply| encode(&reply))
    }

    fn batch(&self, requests: Vec<Value>) -> Option<Vec<u8>> {
        let mut replies = Vec::new();
        for request in requests {
            let reply = match replies.len() {
                ..MAX_BATCH_REPLY => self.request(request),
                _ => {
                    let id = parse(request).map_or_else(|(id, _)| id, |request| request.id);
                    let why = format!(
                        "the replies to the batch have more than {MAX_BATCH_REPLY} bytes, and this \
                         request of it was not looked at; ask for less at a time"
                    );
                    Some(failure(id, &Error::request(why)))
                }
            };
            let Some(reply) = reply else { continue };
            replies.push(if replies.is_empty() { b'[' } else { b',' });
            replies.extend(ascii::to_vec(&reply));
        }
        if replies.is_empty() {
            return None;
        }
        replies.extend(b"]\n");
        Some(replies)
    }

    /// Answers one request. A success without an id is a notification and has no answer; a failure
    /// is always answered, as SPDK does.
    fn request(&self, request: Value) -> Option<Value> {
        let (id, result) = match parse(request) {
            Ok(request) => {
                let result = self.dispatch(&request.method, request.params);
                (request.id, result)
            }
            Err((id, e)) => (id, Err(e)),
        };
        match result {
            Ok(_) if id.is_null() => None,
            Ok(result) => Some(json!({"jsonrpc": "2.0", "id": id, "result": result})),
            Err(e) => Some(failure(id, &e)),
        }
    }

    fn dispatch(&self, name: &str, params: Value) -> Result<Value, Error> {
        let (name, method) = self.find(name)?;
        let phase = self.phase();
        if !callable(method.flags, phase) {
            return Err(Error::state(match phase {
                Phase::Startup => format!(
                    "{name} may only be called after initialisation; call framework_start_init \
                     first"
                ),
                Phase::Runtime => format!(
                    "{name} may only be called before initialisation; start the target with \
                     --wait-for-rpc for that"
                ),
            }));
        }
        let held = (self.before)(name, &params);
        if !method.flags.mutating {
            let _held = held?;
            return run(name, method, params);
        }
        let turn = || self.serial.lock();
        let serial = (!method.flags.long).then(turn);
        let started = Instant::now();
        let shown = method.shown(&params);
        let outcome = held.and_then(|_held| run(name, method, params));
        let serial = serial.unwrap_or_else(turn);
        (self.follow)();
        // Nobody else waits for the disk that the record is on.
        drop(serial);
        (self.after)();
        let committed = (self.commit)();
        let outcome = outcome.and_then(|result| committed.map(|()| result));
        let micros = started.elapsed().as_micros() as u64;
        match &outcome {
            Ok(_) => tracing::info!(method = name, params = shown, micros, "configuration changed"),
            Err(e) => {
                tracing::warn!(method = name, params = shown, micros, code = e.code.number(), "{e}")
            }
        }
        outcome
    }

    fn find(&self, name: &str) -> Result<(&'static str, &Method), Error> {
        self.table.get_key_value(name).map(|(name, method)| (*name, method)).ok_or_else(|| Error {
            code: Code::MethodNotFound,
            message: format!(
                "there is no method \"{name}\"; rpc_get_methods lists those there are"
            ),
        })
    }

    /// The contract of every method, by name: description, parameters, result and errors.
    pub fn schemas(&self) -> BTreeMap<String, Value> {
        self.table
            .iter()
            .map(|(name, m)| {
                let errors: Vec<_> = m
                    .errors
                    .iter()
                    .map(|code| json!({"code": code.number(), "name": code.name()}))
                    .collect();
                let schema = json!({
                    "method": name,
                    "description": m.doc,
                    "changes_configuration": m.flags.mutating,
                    "before_initialisation": m.flags.startup,
                    "after_initialisation": m.flags.runtime,
                    "params": m.params,
                    "result": m.result,
                    "errors": errors,
                });
                (name.to_string(), schema)
            })
            .collect()
    }
}

impl Default for Methods {
    fn default() -> Self {
        Methods::new()
    }
}

fn phase_of(phase: &AtomicU8) -> Phase {
    if phase.load(Ordering::Acquire) == Phase::Startup as u8 {
        Phase::Startup
    } else {
        Phase::Runtime
    }
}

fn callable(flags: Flags, phase: Phase) -> bool {
    match phase {
        Phase::Startup => flags.startup,
        Phase::Runtime => flags.runtime,
    }
}

fn run(name: &'static str, method: &Method, params: Value) -> Result<Value, Error> {
    let mut params = match params {
        Value::Object(params) => params,
        Value::Null => Map::new(),
        _ => {
            return Err(Error::params(format!(
                "the parameters of {name} must be an object with their names"
            )));
        }
    };
    check::params(name, &method.params, method.secrets, &mut params)?;
    (method.run)(params)
}

struct Request {
    id: Value,
    method: String,
    params: Value,
}

/// Takes a request apart (JSON-RPC 2.0 section 4); `jsonrpc` may be absent, as with SPDK.
fn parse(request: Value) -> Result<Request, (Value, Error)> {
    let invalid = |id: Value, message: &str| Err((id, Error::request(message)));
    let Value::Object(mut request) = request else {
        return invalid(Value::Null, "a request is a JSON object");
    };
    let id = request.remove("id").unwrap_or(Value::Null);
    if !(id.is_string() || id.is_number() || id.is_null()) {
        return invalid(Value::Null, "the id of a request is a string, a number or null");
    }
    if request.remove("jsonrpc").is_some_and(|v| v != "2.0") {
        return invalid(id, "the request's \"jsonrpc\" is not \"2.0\"");
    }
    let Some(Value::String(method)) = request.remove("method") else {
        return invalid(id, "the request has no \"method\", a string");
    };
    let params = request.remove("params").unwrap_or(Value::Null);
    if !(params.is_object() || params.is_array() || params.is_null()) {
        return invalid(id, "the request's \"params\" is not an object");
    }
    if let Some(unknown) = request.keys().next() {
        let message = format!("the request has an unknown member \"{unknown}\"");
        return Err((id, Error::request(message)));
    }
    Ok(Request { id, method, params })
}

fn failure(id: Value, e: &Error) -> Value {
    json!({
        "jsonrpc": "2.0",
        "id": id,
        "error": {"code": e.code.number(), "message": e.message},
    })
}

/// The reply to what could not even be read.
pub(crate) fn encode_failure(e: &Error) -> Vec<u8> {
    encode(&failure(Value::Null, e))
}

fn encode(reply: &Value) -> Vec<u8> {
    let mut bytes = ascii::to_vec(reply);
    bytes.push(b'\n');
    bytes
}

/// The JSON Schema of `T` without references, as it is read or as it is written.
fn schema<T: JsonSchema>(for_reading: bool) -> Value {
    let mut settings = SchemaSettings::draft2020_12().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    if !for_reading {
        settings = settings.for_serialize();
    }
    let schema: Schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    drop_null_defaults(&mut schema);
    if let Some(object) = schema.as_object_mut() {
        object.remove("title");
        if for_reading {
            // The doc comment of a parameter struct is for the source; the method has its own.
            object.remove("description");
        }
    }
    schema
}

/// Removes `"default": null`: what may be null may be left out, and nothing else is said by it.
fn drop_null_defaults(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            members.retain(|name, value| !(name == "default" && value.is_null()));
            members.values_mut().for_each(drop_null_defaults);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_null_defaults),
        _ => {}
    }
}
