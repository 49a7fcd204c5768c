//! Groups records of a pack that are read in one request: a pure function.

use std::ops::Range;

use rekindle_store::pack::Entry;

/// Maximum length of a stretch, except for a longer record: a lost request costs this much.
const LONGEST: u64 = 8 << 20;
/// Unneeded bytes that are read to avoid another request: a round trip at 100 MB/s.
const GAP: u64 = 256 << 10;

/// A stretch of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Span {
    start: u64,
    end: u64,
    /// The needed records in it, by offset.
    pub(super) entries: Vec<Entry>,
}

impl Span {
    pub(super) fn range(&self) -> Range<u64> {
        self.start..self.end
    }

    /// The position of the record in the stretch.
    pub(super) fn record(&self, entry: &Entry) -> Option<Range<usize>> {
        let at = |offset: u64| usize::try_from(offset.checked_sub(self.start)?).ok();
        Some(at(entry.offset)?..at(entry.end())?)
    }
}

/// The stretches with these records of one pack.
pub(super) fn spans(entries: &[Entry]) -> Vec<Span> {
    let mut sorted = entries.to_vec();
    sorted.sort_by_key(|entry| entry.offset);
    let mut spans: Vec<Span> = Vec::new();
    for entry in sorted {
        let fits = |span: &Span| {
            entry.offset <= span.end.saturating_add(GAP)
                && entry.end().max(span.end) <= span.start.saturating_add(LONGEST)
        };
        match spans.last_mut() {
            Some(span) if fits(span) => {
                span.end = span.end.max(entry.end());
                span.entries.push(entry);
            }
            _ => spans.push(Span { start: entry.offset, end: entry.end(), entries: vec![entry] }),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rekindle_store::chunk::{ChunkId, Codec};

    fn entry((offset, stored_len): (u32, u32)) -> Entry {
        let id = ChunkId::new([0; 32]);
        Entry { id, offset: offset.into(), raw_len: 1, stored_len, codec: Codec::Raw }
    }

    #[test]
    fn neighbours_are_read_together_and_far_ones_are_not() {
        let near = [(64, 100), (64 + 164 + 1000, 100)];
        let far = (1 << 20, 100);
        let entries: Vec<Entry> = near.into_iter().chain([far]).map(entry).collect();
        let found = spans(&entries);
        assert_eq!(found.iter().map(Span::range).collect::<Vec<_>>(), [64..1392, 1_048_576..1_048_740]);
        assert_eq!(found[0].record(&entries[1]), Some(1164..1328));
    }

    proptest! {
        #[test]
        fn every_record_is_in_one_stretch_of_bounded_length(places in proptest::collection::vec((64..u32::MAX / 2, 0..20_u32 << 20), 0..50)) {
            let entries: Vec<Entry> = places.into_iter().map(entry).collect();
            let found = spans(&entries);
            prop_assert_eq!(found.iter().map(|span| span.entries.len()).sum::<usize>(), entries.len());
            for span in found {
                prop_assert!(span.entries.len() == 1 || span.end - span.start <= LONGEST);
                for entry in &span.entries {
                    prop_assert!(span.start <= entry.offset && entry.end() <= span.end);
                }
            }
        }
    }
}
