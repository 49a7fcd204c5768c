use super::*;
use crate::chunk::Codec;
use proptest::prelude::*;

impl Index {
    /// The number of places.
    pub(crate) fn places(&self) -> usize {
        self.slots.len()
    }
}

#[test]
fn a_chunk_takes_32_bytes() {
    assert_eq!(size_of::<Slot>(), 32);
}

/// The chunks of each pack.
fn packs() -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop::collection::vec(any::<u8>(), 0..30), 0..40)
}

/// Names that differ in their first, last and middle bytes.
fn id(n: u8) -> ChunkId {
    let mut bytes = [0x55; 32];
    bytes[usize::from(n % 16)] = n;
    ChunkId::new(bytes)
}

/// An index in which packs are marked temporarily.
struct Marked<'a>(&'a mut Index, Vec<PackName>);

impl<'a> Marked<'a> {
    fn new(index: &'a mut Index, marked: &[PackName]) -> Marked<'a> {
        marked.iter().for_each(|name| index.set_gone(*name, true));
        Marked(index, marked.to_vec())
    }

    fn get_mut(&mut self) -> &mut Index {
        self.0
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        self.1.iter().for_each(|name| self.0.set_gone(*name, false));
    }
}

proptest! {
    #[test]
    fn it_answers_as_a_map_does(packs in packs()) {
        let mut index = Index::default();
        let mut model: HashMap<ChunkId, Vec<Location>> = HashMap::new();
        for (number, chunks) in packs.iter().enumerate() {
            let pack = PackName::from(u128::try_from(number).unwrap().to_be_bytes());
            let entry = |(n, chunk): (u64, &u8)| Entry {
                id: id(*chunk), offset: 64 + 100 * n, raw_len: 1 + u32::from(*chunk), stored_len: 3, codec: Codec::Raw,
            };
            let pack_index = PackIndex::new(1 << 20, (0..).zip(chunks).map(entry).collect());
            index.add(PackInfo { name: pack, pack_len: 1 << 20, key: None, gone: false }, &pack_index);
            for entry in pack_index.entries() {
                model.entry(entry.id).or_default().push(Location::of(pack, entry));
            }
        }
        index.sort();
        prop_assert_eq!(index.places(), model.values().map(Vec::len).sum::<usize>());
        for n in 0..=255 {
            let key = |location: &Location| (location.pack, location.offset);
            let mut found: Vec<_> = index.all(&id(n)).collect();
            let mut expected = model.get(&id(n)).cloned().unwrap_or_default();
            found.sort_by_key(key);
            expected.sort_by_key(key);
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(index.get(&id(n)).is_some(), !expected.is_empty());
            prop_assert!(index.get(&id(n)).is_none_or(|location| expected.contains(&location)));
            for copies in 1..=3 {
                // Every third pack is marked: those count only if no other pack has the chunk.
                let marked: Vec<PackName> = index.packs().iter().map(|info| info.name).step_by(3).collect();
                let mut index = Marked::new(&mut index, &marked);
                let kept: Vec<_> = index.get_mut().kept(&id(n), copies).collect();
                let stays = expected.iter().filter(|at| !marked.contains(&at.pack)).count();
                prop_assert_eq!(kept.len(), if stays > 0 { stays.min(copies) } else { expected.len().min(1) });
                prop_assert!(kept.iter().all(|at| expected.contains(at) && (stays == 0) == marked.contains(&at.pack)));
                let mut packs: Vec<_> = kept.iter().map(|at| at.pack).collect();
                packs.dedup();
                prop_assert_eq!(packs.len(), kept.len(), "each in a pack of its own");
                prop_assert_eq!(kept.first().copied(), index.get_mut().get(&id(n)), "a reader takes the first");
            }
        }
    }
}

#[test]
fn many_places_are_sorted_as_few_are() {
    // Random names, as hashes are, and names that all begin alike.
    for same in [0, 31] {
        let mut index = Index::default();
        for pack in 0..300_u32 {
            let name = PackName::from(u128::from(pack).to_be_bytes());
            let entry = |n: u64| {
                let mut id = *blake3::hash(&(n % 70_000).to_le_bytes()).as_bytes();
                id[..same].fill(0xff);
                let offset = 64 + 100 * n;
                Entry { id: ChunkId::new(id), offset, raw_len: 1, stored_len: 1, codec: Codec::Raw }
            };
            let first = u64::from(pack) * 300;
            let pack_index = PackIndex::new(1 << 24, (first..first + 300).map(entry).collect());
            index.add(PackInfo { name, pack_len: 1 << 24, key: None, gone: false }, &pack_index);
        }
        let key = |slot: &Slot| (slot.prefix, slot.pack, slot.offset);
        let mut expected: Vec<_> = index.slots.iter().map(key).collect();
        expected.sort_unstable();
        assert!(expected.len() > SORTED_ALONE / 2 && (same > 0 || expected.len() > SORTED_ALONE));
        index.sort();
        assert!(index.slots.iter().map(key).eq(expected));
    }
}
