//! Where large blocks of memory come from.

/// The smallest block that the system itself provides, in bytes: glibc's own default.
#[cfg(target_env = "gnu")]
const LARGE: i32 = 128 << 10;

/// Has blocks of 128 KiB and more always come from the system, whose pages are zeros and count only once they
/// are used: rings have room for far longer chains than most of them ever hold, and channels for pieces.
///
/// glibc's allocator gives up on that for good when a large block is freed (`M_MMAP_THRESHOLD` of
/// mallopt(3)): it keeps what is freed, and writes all of it with zeros when the next asks for some. The same
/// guests cost a target some third more memory then. Called once, before other threads start.
pub fn large_blocks_from_system() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes two numbers, and changes nothing of what was allocated.
    unsafe {
        // 0 if it does not know the parameter: then all is as it was.
        _ = libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::hint::black_box;
    use std::os::unix::fs::FileExt;

    /// How many pages of `block` are in memory (pagemap: bit 63 of each page's entry).
    fn present(block: &[u8]) -> usize {
        const PAGE: usize = 4096;
        let map = File::open("/proc/self/pagemap").unwrap();
        let first = block.as_ptr() as usize / PAGE;
        let last = (block.as_ptr() as usize + block.len() - 1) / PAGE;
        (first..=last)
            .filter(|page| {
                let mut entry = [0; 8];
                map.read_exact_at(&mut entry, *page as u64 * 8).unwrap();
                u64::from_ne_bytes(entry) >> 63 != 0
            })
            .count()
    }

    #[test]
    fn a_large_block_after_a_larger_one_was_freed_has_no_page_yet() {
        large_blocks_from_system();
        drop(black_box(vec![1u8; 4 << 20]));
        let used = black_box(vec![1u8; 512 << 10]);
        assert_eq!(present(&used), used.len() / 4096 + 1);
        // So that the end of the heap is not given back with the other.
        let after = black_box(vec![1u8; 64 << 10]);
        drop(used);
        let zeros = black_box(vec![0u8; 512 << 10]);
        // The allocator's own words stand before it.
        assert!(present(&zeros) <= 1);
        drop(after);
    }
}
