use super::*;
use crate::store::chunk::Codec;
use proptest::prelude::*;

#[test]
fn a_chunk_takes_32_bytes() {
    assert_eq!(size_of::<Slot>(), 32);
}

#[derive(Debug, Clone)]
enum Step {
    /// A pack that is read from the disk.
    Read(Vec<u8>),
    /// A chunk that is written.
    Insert(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        prop_oneof![prop::collection::vec(any::<u8>(), 0..30).prop_map(Step::Read), any::<u8>().prop_map(Step::Insert)];
    prop::collection::vec(step, 0..40)
}

/// Names that differ in their first, last and middle bytes.
fn id(n: u8) -> ChunkId {
    let mut bytes = [0x55; 32];
    bytes[usize::from(n % 16)] = n;
    ChunkId::new(bytes)
}

proptest! {
    #[test]
    fn it_answers_as_a_map_does(steps in steps()) {
        let mut index = Index::default();
        let mut model: HashMap<ChunkId, Vec<Location>> = HashMap::new();
        for (number, step) in steps.iter().enumerate() {
            let pack = PackName::from(u128::try_from(number).unwrap().to_be_bytes());
            match step {
                Step::Read(chunks) => {
                    let entry = |(n, chunk): (u64, &u8)| Entry {
                        id: id(*chunk), offset: 64 + 100 * n, raw_len: 1 + u32::from(*chunk), stored_len: 3, codec: Codec::Raw,
                    };
                    let pack_index = PackIndex::new(1 << 20, (0..).zip(chunks).map(entry).collect());
                    index.add(PackInfo { name: pack, pack_len: 1 << 20, key: None, gone: false }, &pack_index);
                    for entry in pack_index.entries() {
                        model.entry(entry.id).or_default().push(Location::of(pack, entry));
                    }
                }
                Step::Insert(chunk) => {
                    let location = Location { pack, offset: 64, raw_len: 5, stored_len: 6 };
                    // As a writer does: only what is not there.
                    index.sort();
                    if index.get(&id(*chunk)).is_none() {
                        index.insert(&id(*chunk), location);
                        model.entry(id(*chunk)).or_default().push(location);
                    }
                }
            }
        }
        index.sort();
        prop_assert_eq!(index.len(), model.values().map(Vec::len).sum::<usize>());
        for n in 0..=255 {
            let key = |location: &Location| (location.pack, location.offset);
            let mut found: Vec<_> = index.all(&id(n)).collect();
            let mut expected = model.get(&id(n)).cloned().unwrap_or_default();
            found.sort_by_key(key);
            expected.sort_by_key(key);
            prop_assert_eq!(&found, &expected);
            prop_assert_eq!(index.get(&id(n)).is_some(), !expected.is_empty());
            prop_assert!(index.get(&id(n)).is_none_or(|location| expected.contains(&location)));
        }
    }
}
