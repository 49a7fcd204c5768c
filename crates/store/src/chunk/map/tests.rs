use super::*;
use proptest::prelude::*;

fn chunk(n: u8, len: u32) -> Extent {
    Extent::Chunk { id: ChunkId::new([n; 32]), len }
}

fn sample() -> ChunkMap {
    let parts = vec![
        vec![chunk(1, 262_144), Extent::Zero { len: 5 << 30 }, chunk(2, 7)],
        vec![],
        vec![Extent::Zero { len: 1 }],
        vec![chunk(1, CHUNK_MAX)],
    ];
    ChunkMap { parts }
}

/// The same bytes with a correct footer.
fn rehash(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 32;
    let hash = blake3::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(hash.as_bytes());
    bytes
}

fn with(place: usize, new: &[u8]) -> Result<ChunkMap, FormatError> {
    let mut bytes = sample().to_bytes();
    bytes[place..place + new.len()].copy_from_slice(new);
    ChunkMap::parse(&rehash(bytes))
}

#[test]
fn a_map_survives_its_bytes() {
    let map = sample();
    assert_eq!(map.extents(), 9, "a run of zeros is written in pieces of 1 GiB");
    let bytes = map.to_bytes();
    assert_eq!(size(&bytes), 64 + 4 * 8 + 9 * 40 + 32);
    assert_eq!(ChunkMap::parse(&bytes).unwrap(), map);
    assert_eq!(map.chunks().count(), 3);
    assert_eq!(ChunkMap::parse(&ChunkMap::default().to_bytes()).unwrap(), ChunkMap::default());
}

#[test]
fn every_bit_and_every_length_counts() {
    let bytes = sample().to_bytes();
    for bit in 0..bytes.len() * 8 {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(ChunkMap::parse(&other).is_err(), "bit {bit}");
    }
    for cut in 0..bytes.len() {
        let error = ChunkMap::parse(&bytes[..cut]).unwrap_err();
        assert!(matches!(error, FormatError::Truncated { .. }), "cut at {cut}: {error}");
    }
    let longer = [&bytes[..], b"x"].concat();
    assert_eq!(ChunkMap::parse(&longer), Err(FormatError::TooLong { what: What::Map, extra: 1 }));
}

#[test]
fn each_kind_of_damage_has_its_name() {
    let what = What::Map;
    assert_eq!(with(0, b"X"), Err(FormatError::NotOurs(what)));
    assert_eq!(with(16, &[2]), Err(FormatError::Newer { what, version: 2, known: 1 }));
    assert_eq!(with(16, &[0]), Err(FormatError::Field { what, field: "version" }));
    assert!(matches!(with(24, &u64::MAX.to_le_bytes()), Err(FormatError::OutOfBounds { .. })));
    assert!(matches!(with(24, &(1_u64 << 40).to_le_bytes()), Err(FormatError::OutOfBounds { .. })));
    assert!(matches!(with(24, &10_u64.to_le_bytes()), Err(FormatError::Truncated { .. })));
    assert!(matches!(
        with(20, &u32::MAX.to_le_bytes()),
        Err(FormatError::OutOfBounds { .. } | FormatError::Truncated { .. })
    ));
    assert_eq!(with(32, &[1]), Err(FormatError::Field { what, field: "reserved field" }));
    assert!(matches!(with(64, &u64::MAX.to_le_bytes()), Err(FormatError::OutOfBounds { .. })));
    assert!(with(64, &6_u64.to_le_bytes()).is_err(), "an extent less than there are");
    let extent = |offset: usize, value: u32| with(72 + offset, &value.to_le_bytes());
    assert_eq!(extent(0, 2), Err(FormatError::Field { what, field: "extent" }));
    assert_eq!(extent(0, ZERO), Err(FormatError::Field { what, field: "extent" }), "zeros have no name");
    assert_eq!(extent(4, CHUNK_MAX + 1), Err(FormatError::Field { what, field: "extent" }));
    assert_eq!(extent(4, 0), Err(FormatError::Field { what, field: "length of an extent" }));
    assert_eq!(extent(44, (1 << 30) + 1), Err(FormatError::Field { what, field: "extent" }));
    // The first of five runs of zeros, shorter than allowed.
    assert_eq!(extent(44, 5), Err(FormatError::Field { what, field: "run of zeros" }));
    let mut bytes = sample().to_bytes();
    bytes[100] ^= 1;
    assert_eq!(ChunkMap::parse(&bytes), Err(FormatError::Checksum(what)));
}

#[test]
fn a_file_is_the_one_that_the_manifest_tells_of() {
    let dir = tempfile::tempdir().unwrap();
    let (path, bytes) = (dir.path().join(FILE_NAME), sample().to_bytes());
    let hash = blake3::hash(&bytes);
    assert!(matches!(ChunkMap::read(&crate::tests::beneath(&path), &hash), Err(ReadError::Read { .. })));
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(ChunkMap::read(&crate::tests::beneath(&path), &hash).unwrap(), sample());
    let other = ChunkMap::read(&crate::tests::beneath(&path), &blake3::hash(b"")).unwrap_err();
    assert!(matches!(other, ReadError::Format { source: FormatError::Checksum(What::Map), .. }), "{other}");
    let huge = std::fs::File::options().write(true).open(&path).unwrap();
    huge.set_len(MAX_BYTES + 1).unwrap();
    let error = ChunkMap::read(&crate::tests::beneath(&path), &hash).unwrap_err();
    assert!(matches!(error, ReadError::Format { source: FormatError::OutOfBounds { .. }, .. }), "{error}");
}

fn extent() -> impl Strategy<Value = Extent> {
    prop_oneof![
        (1_u64..5 << 30).prop_map(|len| Extent::Zero { len }),
        (any::<[u8; 32]>(), 1..=CHUNK_MAX).prop_map(|(id, len)| Extent::Chunk { id: ChunkId::new(id), len }),
    ]
}

proptest! {
    #[test]
    fn any_map_comes_back(parts in prop::collection::vec(prop::collection::vec(extent(), 0..20), 0..10)) {
        let mut map = ChunkMap::default();
        for extents in parts {
            let mut part = Vec::new();
            extents.into_iter().for_each(|extent| push(&mut part, extent));
            map.parts.push(part);
        }
        prop_assert_eq!(ChunkMap::parse(&map.to_bytes()).unwrap(), map);
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
        prop_assert!(ChunkMap::parse(&bytes).is_err());
    }

    #[test]
    fn nor_do_those_with_a_right_hash(place: prop::sample::Index, byte: u8) {
        let mut bytes = sample().to_bytes();
        let at = place.index(bytes.len() - 32);
        bytes[at] = byte;
        if let Ok(map) = ChunkMap::parse(&rehash(bytes.clone())) {
            prop_assert_eq!(map.to_bytes(), rehash(bytes));
        }
    }
}
