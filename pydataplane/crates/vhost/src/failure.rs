//! What a guest did that its queue is closed for.

use virtqueue::{ChainError, ConfigError, QueueError};

/// Why a queue was closed: the guest broke the rules. Nothing else is affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// The ring itself.
    #[error(transparent)]
    Ring(QueueError),
    /// A chain.
    #[error(transparent)]
    Chain(ChainError),
    /// The same head twice.
    #[error("head {0} was made available again while its request is in flight")]
    HeadInUse(u16),
    /// The queue is not in the new memory table.
    #[error("the queue is not in the new memory: {0}")]
    Config(ConfigError),
}
