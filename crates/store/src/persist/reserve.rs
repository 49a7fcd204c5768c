//! The part of the disk that packing leaves free.
//!
//! Room is made before an image is packed, for what it is expected to add. If it adds more, packing ends before it takes
//! what must stay free. Second copies are made only of what is left besides: without one, content is as safe as before.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Error;
use crate::folders::free_space;
use rekindle_os::beneath::Beneath;

/// The free space is read again each time so many bytes were written. Up to three buffers of each thread are not on the
/// disk yet at that time.
const STEP: u64 = 8 << 20;

/// What must stay free.
#[derive(Debug)]
pub(super) struct Reserve {
    packs: Option<Beneath>,
    min_free: u64,
    written: AtomicU64,
    /// Bytes for second copies.
    spare: AtomicU64,
    /// Bytes of second copies that had no room.
    skipped: AtomicU64,
}

impl Reserve {
    /// Everything may be used.
    pub(super) fn none() -> Reserve {
        Reserve::new(None, 0, u64::MAX)
    }

    /// Ends packing when less than `min_free` bytes are free beside these packs. Second copies may take `spare` bytes.
    pub(super) fn new(packs: Option<Beneath>, min_free: u64, spare: u64) -> Reserve {
        Reserve {
            packs,
            min_free,
            written: AtomicU64::new(0),
            spare: AtomicU64::new(spare),
            skipped: AtomicU64::new(0),
        }
    }

    /// Whether there is room for a second copy of this many bytes, which then counts as made.
    pub(super) fn has_spare(&self, bytes: usize) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let less = |spare: u64| spare.checked_sub(bytes);
        let is_made = self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if !is_made {
            self.skipped.fetch_add(bytes, Ordering::Relaxed);
        }
        is_made
    }

    /// A second copy was compressed: it took only this much of its room.
    pub(super) fn needed_less(&self, room: usize, written: u64) {
        let rest = u64::try_from(room).unwrap_or(u64::MAX).saturating_sub(written);
        let more = |spare: u64| Some(spare.saturating_add(rest));
        let _ = self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// Bytes of second copies that had no room.
    pub(super) fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    /// Counts bytes, and fails if too little is free.
    pub(super) fn wrote(&self, bytes: u64) -> Result<(), Error> {
        let before = self.written.fetch_add(bytes, Ordering::Relaxed);
        if self.min_free == 0 || before / STEP == before.saturating_add(bytes) / STEP {
            return Ok(());
        }
        let Some(packs) = &self.packs else { return Ok(()) };
        let free = free_space(packs)?;
        if free < self.min_free { Err(Error::MinFree { free, min_free: self.min_free }) } else { Ok(()) }
    }
}
