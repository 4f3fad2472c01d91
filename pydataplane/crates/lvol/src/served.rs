//! A volume as the metadata thread of its lvstore serves it: the requests of its channels, in order.

use crate::asked::{ChannelShared, Reply, Request};
use crate::data::Taken;
use crate::volume::Volume;
use bdev::IoError;
use blobstore::{BlobId, Over};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// A volume as the metadata thread serves it.
pub(crate) struct Served {
    pub volume: Arc<Volume>,
    /// Requests in order.
    pub queue: VecDeque<Waiting>,
}

/// A request that was taken from its channel's queue.
pub(crate) struct Waiting {
    volume: Arc<Volume>,
    channel: Arc<ChannelShared>,
    pub request: Request,
    /// The request's data is in the batch.
    pub writes: bool,
    /// Clusters from its first on that were dealt with.
    pub done: u64,
    /// Since when it lacks room.
    pub lacks_room: Option<Instant>,
}

impl Served {
    pub fn new(volume: Arc<Volume>) -> Self {
        Served { volume, queue: VecDeque::new() }
    }

    /// Takes what the channels asked for.
    pub fn collect(&mut self) {
        let queue = &mut self.queue;
        self.volume.requests(|channel, request| {
            let (volume, channel) = (self.volume.clone(), channel.clone());
            let waiting =
                Waiting { volume, channel, request, writes: false, done: 0, lacks_room: None };
            queue.push_back(waiting);
        });
    }

    /// Answers all that is asked for: the volume is gone.
    pub fn answer_removed(&mut self) {
        self.collect();
        for waiting in self.queue.drain(..) {
            waiting.answer(Err(IoError::Removed));
        }
    }
}

impl Waiting {
    /// Whether its volume lost writes that nobody was told of.
    pub fn lost_writes(&self) -> bool {
        self.volume.take_lost_writes()
    }

    /// The blob of its volume.
    pub fn blob(&self) -> BlobId {
        self.volume.blob()
    }

    /// Gives the request's data to a batch, which `add` may refuse.
    pub fn write(&mut self, add: impl FnOnce(Over) -> bool) {
        let Some((at, data)) = self.request.data.take() else { return };
        let Some(data) = Taken::of(data, &self.channel.writes) else { return };
        self.writes = add(Over { at, data: Box::new(data) });
    }

    /// Puts the reply into the channel's queue and wakes its thread.
    pub fn answer(&self, result: Result<(), IoError>) {
        let written = self.writes && result.is_ok();
        let reply = Reply { slot: self.request.slot, result, written };
        let pushed = self.channel.replies.push(reply);
        assert!(pushed.is_ok(), "the queue has room for every slot");
        self.channel.waker.wake();
    }
}
