//! What each command does.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use virtqueue::Desc;

use super::command::{Blk, Cdb, Command, RawDesc};
use super::hex::encode;
use crate::error::Error;
use crate::ring::Used;
use crate::session::{Done, Kind, Session, Transfer};
use crate::{blk, scsi};

/// A script under way: at most one session.
pub struct Script {
    socket: PathBuf,
    session: Option<Session>,
}

impl Script {
    /// A script against the target at `socket`, not connected.
    pub fn new(socket: &Path) -> Script {
        Script { socket: socket.to_owned(), session: None }
    }

    fn session(&mut self) -> Result<&mut Session, Error> {
        self.session.as_mut().ok_or_else(|| Error::Usage("connect first".into()))
    }

    /// Does one command; what it answers, without `ok`.
    pub fn execute(&mut self, command: Command) -> Result<Value, Error> {
        match command {
            Command::Connect(mut options) => {
                self.session = None;
                if options.socket.as_os_str().is_empty() {
                    options.socket = self.socket.clone();
                }
                let mut session = Session::open(options)?;
                let connection = session.connection()?;
                let answer = json!({
                    "features": connection.features,
                    "offered": connection.offered,
                    "protocol_features": connection.protocol(),
                    "queue_num": connection.queue_num()?,
                    "max_mem_slots": connection.max_mem_slots()?,
                });
                self.session = Some(session);
                Ok(answer)
            }
            Command::Disconnect => {
                self.session()?.disconnect();
                Ok(json!({}))
            }
            Command::Reconnect { keep } => {
                self.session()?.reconnect(keep)?;
                Ok(json!({}))
            }
            Command::Alive => Ok(json!({"alive": self.session()?.is_alive()})),
            Command::GetConfig { offset, size } => {
                let bytes = self.session()?.connection()?.get_config(offset, size)?;
                Ok(json!({"data": encode(&bytes)}))
            }
            Command::SetConfig { offset, data } => {
                self.session()?.connection()?.set_config(offset, &data.0)?;
                Ok(json!({}))
            }
            Command::Cdb(cdb) => {
                let session = self.session()?;
                let queue = scsi::REQUESTS + cdb.queue;
                let timeout = Duration::from_millis(cdb.timeout_ms);
                let head = session.submit(queue, &frame(&cdb)?)?;
                if cdb.poll {
                    session.poll(queue, head, timeout)?;
                }
                scsi_answer(&session.wait(queue, head, timeout)?)
            }
            Command::Submit(cdb) => {
                let queue = scsi::REQUESTS + cdb.queue;
                let head = self.session()?.submit(queue, &frame(&cdb)?)?;
                Ok(json!({"head": head}))
            }
            Command::Wait { head, queue, timeout_ms } => {
                let timeout = Duration::from_millis(timeout_ms);
                scsi_answer(&self.session()?.wait(scsi::REQUESTS + queue, head, timeout)?)
            }
            Command::Tmf { target, lun, subtype, tag, timeout_ms } => {
                let lun = scsi::lun_field(target, lun, true);
                let request = scsi::task_management(lun, subtype, tag);
                let transfer = Transfer { readable: vec![request], writable: vec![1] };
                let timeout = Duration::from_millis(timeout_ms);
                let done = self.session()?.transact(scsi::CONTROL, &transfer, timeout)?;
                Ok(json!({"response": done.bytes[0], "len": done.len}))
            }
            Command::Notification { target, lun, kind, events } => {
                let lun = scsi::lun_field(target, lun, true);
                let request = scsi::notification(lun, kind, events);
                let transfer = Transfer { readable: vec![request], writable: vec![5] };
                let timeout = Duration::from_secs(10);
                let done = self.session()?.transact(scsi::CONTROL, &transfer, timeout)?;
                let actual = done.bytes[..4].try_into().map_or(0, u32::from_le_bytes);
                Ok(json!({"events": actual, "response": done.bytes[4], "len": done.len}))
            }
            Command::Events { timeout_ms, repost } => {
                let timeout = Duration::from_millis(timeout_ms);
                let events = self.session()?.events(timeout, repost)?;
                let events = events.iter().map(|e| {
                    json!({"event": e.event, "lun": encode(&e.lun), "target": e.lun[1], "reason": e.reason})
                });
                Ok(json!({"events": events.collect::<Vec<_>>()}))
            }
            Command::Blk(request) => {
                let (queue, timeout) = (request.queue, Duration::from_millis(request.timeout_ms));
                blk_answer(self.session()?.transact(queue, &blk_frame(request), timeout)?)
            }
            Command::SubmitBlk(request) => {
                let queue = request.queue;
                let head = self.session()?.submit(queue, &blk_frame(request))?;
                Ok(json!({"head": head}))
            }
            Command::WaitBlk { head, queue, timeout_ms } => {
                blk_answer(self.session()?.wait(queue, head, Duration::from_millis(timeout_ms))?)
            }
            Command::Raw { queue, descs, table, table_at, heads, avail_idx, wait_ms } => {
                let session = self.session()?;
                raw(session, queue, &descs, &table, table_at, &heads, avail_idx)?;
                let used = wait_raw(session, queue, heads.len(), wait_ms)?;
                let used = used.iter().map(|u| json!({"head": u.head, "len": u.len}));
                Ok(json!({"used": used.collect::<Vec<_>>()}))
            }
            Command::Alloc { bytes } => {
                Ok(json!({"gpa": self.session()?.arena.alloc(bytes, 4096)?}))
            }
            Command::WriteMem { gpa, data } => {
                self.session()?.arena.write(gpa, &data.0)?;
                Ok(json!({}))
            }
            Command::ReadMem { gpa, len } => {
                Ok(json!({"data": encode(&self.session()?.arena.read(gpa, len)?)}))
            }
            Command::Kick { queue } => {
                self.session()?.kick(queue)?;
                Ok(json!({}))
            }
            Command::Stop { queue } => Ok(json!({"base": self.session()?.stop(queue)?})),
            Command::Start { queue, base } => {
                let session = self.session()?;
                session.queue(queue)?;
                session.start(queue, base)?;
                Ok(json!({}))
            }
            Command::SetMemTable => {
                self.session()?.share_memory()?;
                Ok(json!({}))
            }
            Command::AddRegion { gpa, bytes } => {
                self.session()?.add_region(gpa, bytes)?;
                Ok(json!({}))
            }
            Command::RemoveRegion { gpa } => {
                self.session()?.remove_region(gpa)?;
                Ok(json!({}))
            }
            Command::Truncate { gpa, bytes } => {
                self.session()?.arena.truncate(gpa, bytes)?;
                Ok(json!({}))
            }
            Command::Log { on } => {
                self.session()?.set_logging(on)?;
                Ok(json!({}))
            }
            Command::Dirty => Ok(json!({"pages": self.session()?.dirty_pages()})),
            Command::Capacity { target, lun } => {
                let (blocks, block_size) = self.session()?.capacity(target, lun)?;
                Ok(json!({"blocks": blocks, "block_size": block_size}))
            }
            Command::Ring { queue } => {
                let ring = &self.session()?.queue(queue)?.ring;
                let at = ring.at();
                Ok(json!({
                    "desc": at.desc, "avail": at.avail, "used": at.used, "size": at.size,
                    "next_avail": ring.next_avail(),
                }))
            }
            Command::Inflight => Ok(json!({"queues": self.session()?.in_flight()?})),
            Command::Quit => Ok(json!({})),
        }
    }
}

/// The chain of a command: header and data out, response and data in, cut as asked.
fn frame(cdb: &Cdb) -> Result<Transfer, Error> {
    let lun = match &cdb.lun_field {
        Some(bytes) => bytes.0.as_slice().try_into().map_err(|_| {
            Error::Usage(format!("lun_field has {} bytes: must be 8", bytes.0.len()))
        })?,
        None => scsi::lun_field(cdb.target, cdb.lun, cdb.flat),
    };
    let mut transfer = Transfer::default();
    let header = scsi::request(lun, cdb.tag, &cdb.cdb.0);
    if cdb.cut_out.is_empty() {
        transfer.readable.push(header.to_vec());
        if !cdb.data_out.0.is_empty() {
            transfer.readable.push(cdb.data_out.0.clone());
        }
    } else {
        let mut rest = [&header[..], &cdb.data_out.0].concat();
        for len in &cdb.cut_out {
            let tail = rest.split_off((*len).min(rest.len()));
            transfer.readable.push(std::mem::replace(&mut rest, tail));
        }
        transfer.readable.push(rest);
        transfer.readable.retain(|part| !part.is_empty());
    }
    if cdb.cut_in.is_empty() {
        transfer.writable.push(scsi::RESPONSE_LEN as u32);
        transfer.writable.push(cdb.data_in_len);
    } else {
        let mut left = scsi::RESPONSE_LEN as u32 + cdb.data_in_len;
        for len in &cdb.cut_in {
            transfer.writable.push((*len).min(left));
            left -= (*len).min(left);
        }
        transfer.writable.push(left);
    }
    transfer.writable.retain(|len| *len > 0);
    Ok(transfer)
}

fn answer(done: &Done) -> Value {
    json!({"len": done.len, "us": done.elapsed.as_micros() as u64, "called": done.called})
}

fn scsi_answer(done: &Done) -> Result<Value, Error> {
    let response = scsi::Response::parse(&done.bytes)
        .ok_or_else(|| Error::Usage("the chain had no room for a response".into()))?;
    let mut answer = answer(done);
    answer["response"] = json!(response.response);
    answer["status"] = json!(response.status);
    answer["residual"] = json!(response.residual);
    answer["sense"] = json!(encode(&response.sense));
    answer["data_in"] = json!(encode(&done.bytes[scsi::RESPONSE_LEN..]));
    Ok(answer)
}

/// The chain of a virtio-blk request: header, data out, data in, status.
fn blk_frame(request: Blk) -> Transfer {
    let mut transfer = Transfer::default();
    transfer.readable.push(blk::header(request.kind, request.sector).to_vec());
    if !request.data_out.0.is_empty() {
        transfer.readable.push(request.data_out.0);
    }
    if request.data_in_len > 0 {
        transfer.writable.push(request.data_in_len);
    }
    transfer.writable.push(1);
    transfer
}

fn blk_answer(mut done: Done) -> Result<Value, Error> {
    let status = done.bytes.pop();
    let mut answer = answer(&done);
    answer["status"] = json!(status);
    answer["data_in"] = json!(encode(&done.bytes));
    Ok(answer)
}

fn raw(
    session: &mut Session,
    index: usize,
    descs: &[RawDesc],
    table: &[RawDesc],
    table_at: u64,
    heads: &[u16],
    avail_idx: Option<u16>,
) -> Result<(), Error> {
    if session.options.kind == Kind::Scsi && index == scsi::EVENTS {
        return Err(Error::Usage("the event queue has buffers of its own".into()));
    }
    for d in table {
        let range = session.arena.range(table_at + u64::from(d.index) * 16, 16)?;
        range.put(0, Desc::new(d.addr, d.len, d.flags, d.next))?;
    }
    let queue = session.queue_mut(index)?;
    for d in descs {
        queue.ring.set_desc(d.index, Desc::new(d.addr, d.len, d.flags, d.next))?;
    }
    for head in heads {
        queue.ring.add(*head);
    }
    session.publish(index)?;
    if let Some(idx) = avail_idx {
        session.queue_mut(index)?.ring.force_avail_idx(idx)?;
        session.kick(index)?;
    }
    Ok(())
}

fn wait_raw(
    session: &mut Session,
    index: usize,
    heads: usize,
    wait_ms: u64,
) -> Result<Vec<Used>, Error> {
    let until = Instant::now() + Duration::from_millis(wait_ms);
    let mut used = session.strays(index)?;
    while used.len() < heads.max(1) && wait_ms > 0 {
        if !session.wait_used(index, until)? {
            break;
        }
        used.extend(session.strays(index)?);
    }
    Ok(used)
}
