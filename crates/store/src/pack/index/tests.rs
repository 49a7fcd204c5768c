use super::*;
use crate::chunk::Compression;
use crate::chunk::codec::encode;
use crate::pack::record::write;
use proptest::prelude::*;

fn entry(n: u8, offset: u64) -> Entry {
    Entry { id: ChunkId::new([n; 32]), offset, raw_len: 10, stored_len: 8, codec: Codec::Lz4 }
}

fn sample() -> PackIndex {
    PackIndex::new(1000, vec![entry(3, 64), entry(1, 136), entry(2, 208)])
}

fn rehash(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 32;
    let hash = blake3::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(hash.as_bytes());
    bytes
}

fn with(place: usize, new: &[u8]) -> FormatError {
    let mut bytes = sample().to_bytes();
    bytes[place..place + new.len()].copy_from_slice(new);
    PackIndex::parse(&rehash(bytes)).unwrap_err()
}

#[test]
fn an_index_survives_its_bytes() {
    let index = PackIndex::new(1000, vec![entry(3, 64), entry(1, 136), entry(2, 208), entry(3, 280)]);
    assert_eq!(index, sample(), "the first record of a chunk counts");
    let bytes = index.to_bytes();
    assert_eq!(bytes.len(), 64 + 3 * 56 + 32);
    assert_eq!(PackIndex::parse(&bytes).unwrap(), index);
    let empty = PackIndex::new(64, vec![]);
    assert_eq!(PackIndex::parse(&empty.to_bytes()).unwrap(), empty);
}

#[test]
fn every_bit_and_every_length_counts() {
    let bytes = sample().to_bytes();
    for bit in 0..bytes.len() * 8 {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(PackIndex::parse(&other).is_err(), "bit {bit}");
    }
    for cut in 0..bytes.len() {
        let error = PackIndex::parse(&bytes[..cut]).unwrap_err();
        assert!(matches!(error, FormatError::Truncated { .. }), "cut at {cut}: {error}");
    }
    let longer = [&bytes[..], b"x"].concat();
    assert_eq!(PackIndex::parse(&longer), Err(FormatError::TooLong { what: What::Index, extra: 1 }));
}

#[test]
fn each_kind_of_damage_has_its_name() {
    let what = What::Index;
    let field = |field| FormatError::Field { what, field };
    assert_eq!(with(0, b"X"), FormatError::NotOurs(what));
    assert_eq!(with(16, &[7]), FormatError::Newer { what, version: 7, known: 1 });
    assert_eq!(with(20, &[1]), field("flags"));
    assert!(matches!(with(24, &u64::MAX.to_le_bytes()), FormatError::OutOfBounds { field: "pack size", .. }));
    assert!(matches!(with(32, &u64::MAX.to_le_bytes()), FormatError::OutOfBounds { field: "number of entries", .. }));
    assert!(matches!(with(32, &[4]), FormatError::Truncated { .. }));
    assert!(matches!(with(32, &[2]), FormatError::TooLong { .. }));
    assert_eq!(with(40, &[1]), field("reserved field"));
    assert_eq!(with(64, &[9]), field("order"));
    assert_eq!(with(64 + 56, &[1; 32]), field("order"), "twice the same");
    assert_eq!(with(64 + 32, &[63, 0]), field("offset"));
    assert_eq!(with(64 + 32, &929_u64.to_le_bytes()), field("offset"));
    assert_eq!(with(64 + 32, &u64::MAX.to_le_bytes()), field("offset"));
    assert_eq!(with(64 + 40, &[0]), field("raw length"));
    assert!(matches!(with(64 + 44, &u32::MAX.to_le_bytes()), FormatError::OutOfBounds { field: "stored length", .. }));
    assert_eq!(with(64 + 48, &[3]), field("codec"));
    assert_eq!(with(64 + 49, &[1]), field("reserved field"));
}

/// A pack with these chunks, and the offsets of its records.
pub(in crate::pack) fn pack(chunks: &[&[u8]]) -> (Vec<u8>, Vec<u64>) {
    let (mut bytes, mut starts, mut scratch) = (PackHeader::of(None).to_bytes().to_vec(), Vec::new(), Vec::new());
    for raw in chunks {
        starts.push(size(&bytes));
        let (codec, stored) = encode(Compression::Auto, raw, &mut scratch);
        write(&mut bytes, blake3::hash(raw).into(), codec, raw.len(), stored, None).unwrap();
    }
    (bytes, starts)
}

/// Scans bytes instead of a file.
fn scan_bytes(bytes: &[u8]) -> Result<Scan, ScanError> {
    scan(size(bytes), |at, into| {
        let from = usize::try_from(at).unwrap();
        into.copy_from_slice(bytes.get(from..from + HEADER).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    })
}

#[test]
fn the_records_say_what_the_index_says() {
    let (bytes, starts) = pack(&[b"one", &[5; 70_000], b"three"]);
    let Scan { header, index, lost } = scan_bytes(&bytes).unwrap();
    assert_eq!((header, lost), (PackHeader { key: None }, None));
    assert_eq!(index.pack_len(), size(&bytes));
    let mut found: Vec<u64> = index.entries().iter().map(|entry| entry.offset).collect();
    found.sort_unstable();
    assert_eq!(found, starts);
    assert_eq!(PackIndex::parse(&index.to_bytes()).unwrap(), index);
}

#[test]
fn a_scan_keeps_what_is_whole_at_every_length() {
    let (bytes, starts) = pack(&[b"one", b"two and more", b"three"]);
    let ends: Vec<u64> = starts[1..].iter().copied().chain([size(&bytes)]).collect();
    for cut in 0..bytes.len() {
        let found = scan_bytes(&bytes[..cut]);
        if cut < HEADER {
            assert!(matches!(found, Err(ScanError::Format(FormatError::Truncated { .. }))), "cut at {cut}");
            continue;
        }
        let Scan { index, lost, .. } = found.unwrap();
        let whole = ends.iter().filter(|end| **end <= cut as u64).count();
        assert_eq!(index.entries().len(), whole, "cut at {cut}");
        let end = ends[..whole].last().copied().unwrap_or(64);
        assert_eq!((index.pack_len(), lost.is_some()), (end, end != cut as u64), "cut at {cut}");
    }
}

#[test]
fn a_scan_stops_at_a_damaged_header_and_says_so() {
    let (bytes, starts) = pack(&[b"one", b"two", b"three"]);
    for bit in 0..64 * 8 {
        let mut other = bytes.clone();
        other[usize::try_from(starts[1]).unwrap() + bit / 8] ^= 1 << (bit % 8);
        let Scan { index, lost, .. } = scan_bytes(&other).unwrap();
        assert_eq!((index.entries().len(), index.pack_len()), (1, starts[1]), "bit {bit}");
        assert!(lost.is_some(), "bit {bit}");
    }
    let error = scan(PACK_MAX + 1, |_, _| panic!("nothing is read")).unwrap_err();
    assert!(matches!(error, ScanError::Format(FormatError::OutOfBounds { .. })), "{error}");
    let error = scan(5000, |_, _| Err(io::ErrorKind::PermissionDenied.into())).unwrap_err();
    assert!(matches!(error, ScanError::Read(_)), "{error}");
}

proptest! {
    #[test]
    fn any_index_comes_back(entries in prop::collection::vec((any::<[u8; 32]>(), 64_u64..1 << 30, 1..=CHUNK_MAX_TESTED), 0..60)) {
        let entry = |(id, offset, raw_len)| Entry {
            id: ChunkId::new(id), offset, raw_len, stored_len: raw_len / 2, codec: Codec::Zstd,
        };
        let index = PackIndex::new(PACK_MAX, entries.into_iter().map(entry).collect());
        prop_assert_eq!(PackIndex::parse(&index.to_bytes()).unwrap(), index);
    }

    #[test]
    fn no_bytes_make_the_parsers_panic(bytes: Vec<u8>) {
        prop_assert!(PackIndex::parse(&bytes).is_err());
        prop_assert!(scan_bytes(&bytes).is_err());
    }

    #[test]
    fn nor_do_those_with_a_right_hash(place: prop::sample::Index, byte: u8) {
        let mut bytes = sample().to_bytes();
        let at = place.index(bytes.len() - 32);
        bytes[at] = byte;
        if let Ok(index) = PackIndex::parse(&rehash(bytes.clone())) {
            prop_assert_eq!(index.to_bytes(), rehash(bytes));
        }
    }
}

const CHUNK_MAX_TESTED: u32 = crate::chunk::CHUNK_MAX;
