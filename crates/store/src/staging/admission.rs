//! Chooses the slot for the next image, and checks whether there is enough memory. Changes nothing.

use std::collections::BTreeSet;

use bytesize::ByteSize;

use crate::id::ImageId;

/// Facts about a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotFacts {
    /// The good image in it, if it is on the job's line.
    pub image: Option<ImageId>,
    /// Bytes of memory that it occupies, which the next image in it reuses.
    pub allocated: u64,
    /// The value of its image if there is a newer one.
    pub worth: Worth,
}

/// The value of an image in memory if there is a newer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Worth {
    /// Nothing.
    #[default]
    Older,
    /// The job has lived on from it, and no image in the store is as new: newer images may contain a state that cannot
    /// continue.
    Proven,
}

/// The image among these in memory that is [`Worth::Proven`]. `stored` is the newest good image in the store.
#[must_use]
pub fn proven_only_here(
    staged: impl IntoIterator<Item = ImageId>,
    proven: &BTreeSet<ImageId>,
    stored: Option<ImageId>,
) -> Option<ImageId> {
    staged.into_iter().filter(|id| proven.contains(id) && stored.is_none_or(|stored| stored < *id)).max()
}

/// The needed and the available memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of the image.
    pub image: u64,
    /// Bytes needed additionally while the job is frozen.
    pub besides: u64,
    /// Available bytes of the machine.
    pub available: Option<u64>,
    /// Bytes left below the memory limit of the control group.
    pub below_limit: Option<u64>,
    /// Available bytes that must stay free.
    pub keep: u64,
    /// Bytes that must stay free if a second image is kept beside the newest: memory that the job may need is more
    /// important than a second image.
    pub keep_beside: u64,
}

/// Which slot is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// This slot; the newest image stays.
    Beside(usize),
    /// This slot, which contains the newest image, after the other one was emptied: memory has room for one image only.
    Instead(usize),
}

/// There is not enough memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not even for one image.
    #[error("an image of {need} does not fit into memory: {free} is free, and {keep} must stay free (snapshot.memory-reserve): set snapshot.staging to \"store\", or give the job less memory", need = ByteSize::b(*need), free = ByteSize::b(*free), keep = ByteSize::b(*keep))]
    NoRoom {
        /// Bytes needed.
        need: u64,
        /// Bytes free, including those of the slots.
        free: u64,
        /// Bytes that must stay free.
        keep: u64,
    },
    /// The slot for the next image is taken.
    #[error(
        "image {proven} is the newest proven one, and is not in the store yet: it is kept until a newer one is proven, \
        or it is in the store"
    )]
    Proven {
        /// The image in it.
        proven: ImageId,
    },
    /// There is memory for one image only, and the newest is not stored.
    #[error("memory has room for one image of {need}, and image {newest} is not in the store yet: it is kept", need = ByteSize::b(*need))]
    NotStored {
        /// Bytes needed.
        need: u64,
        /// The image in memory.
        newest: ImageId,
    },
}

/// Chooses a slot. `stored` tells whether the store has an image.
///
/// # Errors
/// When there is no room, or only by overwriting an image that exists nowhere else.
pub fn choose(slots: &[SlotFacts; 2], memory: &Memory, stored: impl Fn(ImageId) -> bool) -> Result<Choice, Refusal> {
    let newest = usize::from(slots[1].image > slots[0].image);
    let other = 1 - newest;
    if let SlotFacts { image: Some(proven), worth: Worth::Proven, .. } = slots[other] {
        return Err(Refusal::Proven { proven });
    }
    let fits = |reused: u64, keep: u64| {
        let free = memory.available.into_iter().map(|a| a.saturating_sub(keep)).chain(memory.below_limit).min();
        let growth = memory.image.saturating_sub(reused).saturating_add(memory.besides);
        free.is_none_or(|free| growth <= free)
    };
    let keep = if slots[newest].image.is_some() { memory.keep.max(memory.keep_beside) } else { memory.keep };
    if fits(slots[other].allocated, keep) {
        return Ok(Choice::Beside(other));
    }
    let Some(image) = slots[newest].image else {
        return Err(no_room(slots, memory));
    };
    let both = slots[0].allocated.saturating_add(slots[1].allocated);
    // Emptying the other slot frees its memory.
    if !fits(both, memory.keep) {
        return Err(no_room(slots, memory));
    }
    if stored(image) {
        Ok(Choice::Instead(newest))
    } else {
        Err(Refusal::NotStored { need: memory.image, newest: image })
    }
}

fn no_room(slots: &[SlotFacts; 2], memory: &Memory) -> Refusal {
    let held = slots[0].allocated.saturating_add(slots[1].allocated);
    let free = memory.available.into_iter().chain(memory.below_limit).min().unwrap_or(0).saturating_add(held);
    Refusal::NoRoom { need: memory.image.saturating_add(memory.besides), free, keep: memory.keep }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn id(n: u32) -> ImageId {
        ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
    }

    fn memory(image: u64, available: u64) -> Memory {
        Memory {
            image: image * GIB,
            besides: 0,
            available: Some(available * GIB),
            below_limit: None,
            keep: GIB,
            keep_beside: 0,
        }
    }

    fn slot(image: Option<u32>, allocated: u64) -> SlotFacts {
        SlotFacts { image: image.map(id), allocated: allocated * GIB, worth: Worth::Older }
    }

    #[test]
    fn the_newest_image_is_not_written_to() {
        let choose = |a, b, m| choose(&[a, b], &m, |_| true);
        assert_eq!(choose(slot(None, 0), slot(None, 0), memory(10, 20)), Ok(Choice::Beside(1)));
        assert_eq!(choose(slot(None, 0), slot(Some(1), 10), memory(10, 20)), Ok(Choice::Beside(0)));
        assert_eq!(choose(slot(Some(2), 10), slot(Some(1), 10), memory(10, 2)), Ok(Choice::Beside(1)));
        // Existing memory is reused; only the growth must fit.
        assert_eq!(choose(slot(Some(2), 10), slot(Some(1), 10), memory(11, 2)), Ok(Choice::Beside(1)));
    }

    #[test]
    fn the_newest_proven_image_is_not_written_to_while_it_is_nowhere_else() {
        let proven = |slot: SlotFacts| SlotFacts { worth: Worth::Proven, ..slot };
        let choose = |a, b| choose(&[a, b], &memory(10, 90), |_| false);
        assert_eq!(choose(proven(slot(Some(1), 10)), slot(Some(2), 10)), Err(Refusal::Proven { proven: id(1) }));
        assert_eq!(choose(slot(Some(1), 10), proven(slot(Some(2), 10))), Ok(Choice::Beside(0)), "a newer one is");
        assert_eq!(choose(slot(None, 0), proven(slot(Some(2), 10))), Ok(Choice::Beside(0)));
        let (staged, known) = ([id(3), id(2)], BTreeSet::from([id(2), id(1)]));
        assert_eq!(proven_only_here(staged, &known, Some(id(1))), Some(id(2)));
        assert_eq!(proven_only_here(staged, &known, None), Some(id(2)));
        assert_eq!(proven_only_here(staged, &known, Some(id(2))), None, "the store has it");
        assert_eq!(proven_only_here(staged, &BTreeSet::from([id(1)]), None), None);
    }

    #[test]
    fn one_slot_where_memory_is_short() {
        let slots = [slot(Some(1), 10), slot(None, 0)];
        assert_eq!(choose(&slots, &memory(10, 9), |_| true), Ok(Choice::Instead(0)));
        let refused = choose(&slots, &memory(10, 9), |_| false).unwrap_err();
        assert_eq!(refused, Refusal::NotStored { need: 10 * GIB, newest: id(1) });
        // The limit of the control group counts as much as the memory of the machine.
        let tight = Memory { below_limit: Some(9 * GIB), ..memory(10, 100) };
        assert_eq!(choose(&slots, &tight, |_| true), Ok(Choice::Instead(0)));
    }

    #[test]
    fn a_second_image_leaves_the_job_more_than_one_does() {
        let slots = [slot(Some(1), 10), slot(None, 0)];
        let careful = |available| Memory { keep_beside: 4 * GIB, ..memory(10, available) };
        assert_eq!(choose(&slots, &careful(14), |_| true), Ok(Choice::Beside(1)));
        assert_eq!(choose(&slots, &careful(13), |_| true), Ok(Choice::Instead(0)));
        let none = [slot(None, 0), slot(None, 0)];
        assert_eq!(choose(&none, &careful(11), |_| true), Ok(Choice::Beside(1)), "the first one");
    }

    #[test]
    fn no_room_at_all() {
        let empty = [slot(None, 0), slot(None, 0)];
        assert!(matches!(choose(&empty, &memory(10, 5), |_| true), Err(Refusal::NoRoom { .. })));
        // The driver needs as much again for its own copy.
        let twice = Memory { besides: 10 * GIB, ..memory(10, 15) };
        let refused = choose(&empty, &twice, |_| true).unwrap_err();
        assert!(
            refused.to_string().contains("20.0 GiB") && refused.to_string().contains("snapshot.staging"),
            "{refused}"
        );
        assert!(choose(&empty, &Memory { available: None, ..twice }, |_| true).is_ok());
    }
}
