//! The work of a SANITIZE or FORMAT UNIT, on a thread of its own with blocking I/O.

use super::order::{Method, Order};
use bdev::{AlignedBuf, AppTags, Bdev, IoError, Op, SyncChannel, SyncError};

/// Bytes of one write, whole blocks of any size.
const WRITE_BYTES: usize = 1 << 20;
/// Bytes of one unmap, or of zeros without data. It ends at multiples of it, so that it does not cut clusters.
const UNMAP_BYTES: u64 = 32 << 20;

/// Why the work ended before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It failed, for good.
    Failed,
    /// The volume is gone: it is done when it is shown again.
    Removed,
    /// Nobody shows the volume any more, as before.
    Away,
}

impl From<SyncError> for Ended {
    fn from(error: SyncError) -> Self {
        if error.cause == IoError::Removed { Ended::Removed } else { Ended::Failed }
    }
}

/// The application tags that so many blocks from this one on are to have.
type Tags<'a> = &'a dyn Fn(u64, u64) -> AppTags;

/// Carries out `order` from the beginning; `goes_on` is told blocks done and in all, and says whether to go
/// on. `zeroing` is what the units have for zeros without data. What is written has the application tags that it is to have by then. All is durable when it returns.
pub(crate) fn carry_out(
    bdev: &dyn Bdev,
    order: &Order,
    zeroing: Option<Op>,
    tags: Tags<'_>,
    goes_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), Ended> {
    let mut channel = SyncChannel::open(bdev).map_err(|_| Ended::Failed)?;
    let passes = order.method.passes();
    for pass in 0..passes {
        let mut told = |lba: u64, end: u64| {
            let (done, all) = (u64::from(pass) * end + lba, u64::from(passes) * end);
            if goes_on(done, all) { Ok(()) } else { Err(Ended::Away) }
        };
        match &order.method {
            Method::BlockErase if pass == 1 => each(bdev, Op::Unmap, &mut channel, &mut told)?,
            Method::Format => match zeroing {
                Some(op) => each(bdev, op, &mut channel, &mut told)?,
                None => overwrite((bdev, &mut channel, tags), &[0], 1, &mut told)?,
            },
            Method::BlockErase => overwrite((bdev, &mut channel, tags), &[0], 1, &mut told)?,
            Method::Overwrite { pattern, invert, .. } => {
                let flip = if *invert && pass % 2 == 1 { 0xFF } else { 0 };
                let pattern: Vec<u8> = pattern.iter().map(|byte| byte ^ flip).collect();
                overwrite(
                    (bdev, &mut channel, tags),
                    &pattern,
                    order.block_size as usize,
                    &mut told,
                )?;
            }
        }
        channel.flush()?;
    }
    Ok(())
}

/// Writes `pattern` to all blocks, anew from each of `block` bytes on. Where it is zeros, what has no room
/// and reads as zeros is left alone.
fn overwrite(
    (bdev, channel, tags): (&dyn Bdev, &mut SyncChannel, Tags<'_>),
    pattern: &[u8],
    block: usize,
    told: &mut dyn FnMut(u64, u64) -> Result<(), Ended>,
) -> Result<(), Ended> {
    let sparse = bdev.sparse().filter(|_| pattern.iter().all(|byte| *byte == 0));
    let (own, most) = (bdev.geometry().block_size as usize, bdev.features().max_blocks);
    let mut data = AlignedBuf::zeroed(WRITE_BYTES);
    for whole in data.chunks_mut(block) {
        whole.iter_mut().zip(pattern.iter().cycle()).for_each(|(to, from)| *to = *from);
    }
    let most = if most == 0 { u64::MAX } else { u64::from(most) };
    // Each write begins where the pattern does.
    let each = (block / own).max(1) as u64;
    let most = (most.min((WRITE_BYTES / own) as u64) / each * each).max(each);
    let mut lba = 0;
    loop {
        let end = bdev.geometry().num_blocks;
        if lba >= end {
            return Ok(());
        }
        told(lba, end)?;
        let run = sparse.map(|sparse| sparse.run(lba)).filter(|run| run.blocks > 0);
        let blocks = run.map_or(u64::MAX, |run| run.blocks).min(end - lba);
        if run.is_some_and(|run| run.hole) {
            lba += blocks;
            continue;
        }
        let blocks = blocks.min(most);
        channel.write_tagged(lba, &data[..blocks as usize * own], tags(lba, blocks))?;
        lba += blocks;
    }
}

/// Unmaps all blocks, or writes zeros to them without data.
fn each(
    bdev: &dyn Bdev,
    op: Op,
    channel: &mut SyncChannel,
    told: &mut dyn FnMut(u64, u64) -> Result<(), Ended>,
) -> Result<(), Ended> {
    let most = UNMAP_BYTES / u64::from(bdev.geometry().block_size);
    let most = match bdev.features().max_blocks {
        0 => most,
        limit => most.min(limit.into()),
    };
    let mut lba = 0;
    loop {
        let end = bdev.geometry().num_blocks;
        if lba >= end {
            return Ok(());
        }
        told(lba, end)?;
        let blocks = (most - lba % most).min(end - lba);
        match op {
            Op::Unmap => channel.unmap(lba, blocks)?,
            _ => channel.write_zeroes(lba, blocks)?,
        }
        lba += blocks;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bdev::{Malloc, MallocOptions, Protection, ProtectionType};
    use protection::ProtectedDisk;
    use std::cell::Cell;

    #[test]
    fn what_is_written_has_the_application_tags_of_then() {
        const STEP: u64 = WRITE_BYTES as u64 / 512;
        let options = MallocOptions {
            name: "m0".to_owned(),
            block_size: 512,
            physical_block_size: 0,
            num_blocks: 3 * STEP,
            uuid: None,
        };
        let kind = ProtectionType::Type1;
        let disk = ProtectedDisk::new(
            Malloc::with_metadata(options, 8).unwrap(),
            Protection { kind, interleaved: false, at_head: false },
        );
        let (tag, of) = (Cell::new(1), |tag| AppTags::new([(tag, STEP)]));
        let method = Method::Overwrite { pattern: vec![0xAB; 4], count: 1, invert: false };
        let order = Order { method, block_size: 512, unrestricted: false, failed: false };
        let mut goes_on = |done, _| {
            // A reset, after the first step.
            tag.set(if done < STEP { 1 } else { 2 });
            true
        };
        carry_out(&*disk, &order, None, &|_, _| of(tag.get()), &mut goes_on).unwrap();
        let mut channel = SyncChannel::open(&*disk).unwrap();
        let mut data = vec![0; WRITE_BYTES];
        for (lba, its, other) in [(0, 1, 2), (STEP, 2, 1), (2 * STEP, 2, 1)] {
            channel.read_tagged(lba, &mut data, of(its)).unwrap();
            assert!(data == vec![0xAB; WRITE_BYTES]);
            let told = channel.read_tagged(lba, &mut data, of(other)).unwrap_err();
            assert_eq!(told.cause, IoError::AppTag);
        }
    }
}
