//! Chooses the needed packs if a chunk can be in several: a pure function.

use std::collections::{BTreeSet, HashSet};

use rekindle_store::chunk::ChunkId;
use rekindle_store::pack::{PackIndex, PackName};

/// Packs that together contain all needed chunks: those with most of them first, and none that adds nothing to the
/// others.
///
/// # Errors
/// A chunk that is in no pack.
pub(super) fn cover(
    mut needed: HashSet<ChunkId>,
    packs: &[(PackName, PackIndex)],
) -> Result<BTreeSet<PackName>, ChunkId> {
    let worth = |index: &PackIndex| -> u64 {
        let of = index.entries().iter().filter(|entry| needed.contains(&entry.id));
        of.map(|entry| u64::from(entry.stored_len)).sum()
    };
    let mut order: Vec<_> = packs.iter().map(|(name, index)| (worth(index), *name, index)).collect();
    order.sort_by_key(|(worth, name, _)| (std::cmp::Reverse(*worth), *name));
    let mut chosen = BTreeSet::new();
    for (_, name, index) in order {
        let before = needed.len();
        for entry in index.entries() {
            needed.remove(&entry.id);
        }
        if needed.len() < before {
            chosen.insert(name);
        }
    }
    needed.into_iter().next().map_or(Ok(chosen), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_store::chunk::Codec;
    use rekindle_store::pack::Entry;

    fn id(n: u8) -> ChunkId {
        ChunkId::new([n; 32])
    }

    fn pack(name: u8, chunks: &[u8]) -> (PackName, PackIndex) {
        let entry = |n: &u8| Entry { id: id(*n), offset: 64, raw_len: 10, stored_len: 10, codec: Codec::Raw };
        ([name; 16].into(), PackIndex::new(1000, chunks.iter().map(entry).collect()))
    }

    fn chosen(needed: &[u8], packs: &[(PackName, PackIndex)]) -> Result<Vec<PackName>, ChunkId> {
        cover(needed.iter().map(|n| id(*n)).collect(), packs).map(|set| set.into_iter().collect())
    }

    #[test]
    fn what_another_pack_has_too_does_not_keep_a_pack() {
        let packs = [pack(1, &[1, 2, 9]), pack(2, &[1, 2, 3]), pack(3, &[4]), pack(4, &[8])];
        assert_eq!(chosen(&[1, 2, 3, 4], &packs), Ok(vec![[2; 16].into(), [3; 16].into()]));
        assert_eq!(chosen(&[1, 9], &packs), Ok(vec![[1; 16].into()]));
        assert_eq!(chosen(&[], &packs), Ok(vec![]));
    }

    #[test]
    fn a_chunk_that_is_nowhere_is_named() {
        assert_eq!(chosen(&[1, 7], &[pack(1, &[1])]), Err(id(7)));
    }
}
