use super::*;
use crate::chunk::Compression;

/// A record of `raw`, and the name of its chunk.
fn record(raw: &[u8], wanted: Compression, key: Option<&Key>) -> (Vec<u8>, ChunkId) {
    let (mut scratch, mut into, id) = (Vec::new(), Vec::new(), chunk_id(key, raw));
    let (codec, stored) = codec::encode(wanted, raw, &mut scratch);
    let header = write(&mut into, id, codec, raw.len(), stored, key).unwrap();
    assert_eq!((size(&into), header), (header.record_len(), RecordHeader::parse(&into).unwrap()));
    (into, id)
}

fn key() -> Key {
    Key::new(&[7; 32])
}

#[test]
fn a_chunk_comes_back_from_every_codec_sealed_or_not() {
    let raw: Vec<u8> = (0..100_000_u32).flat_map(|n| (n % 1000).to_le_bytes()).collect();
    for key in [None, Some(key())] {
        for wanted in [Compression::None, Compression::Lz4, Compression::Zstd(3), Compression::Auto] {
            for raw in [&raw[..], &raw[..1], &raw[..5000]] {
                let (bytes, id) = record(raw, wanted, key.as_ref());
                let mut into = vec![9; 7];
                read(&mut bytes.clone(), &id, key.as_ref(), &mut into).unwrap();
                assert_eq!(into, raw, "{wanted}");
                let mut scratch = vec![9; 7];
                assert_eq!(super::raw(&mut bytes.clone(), &id, key.as_ref(), &mut scratch).unwrap(), raw, "{wanted}");
            }
        }
    }
}

#[test]
fn every_bit_of_a_record_counts_and_every_length() {
    let raw: Vec<u8> = (0..300_u16).flat_map(u16::to_le_bytes).collect();
    for key in [None, Some(key())] {
        for wanted in [Compression::None, Compression::Lz4, Compression::Zstd(3)] {
            let (bytes, id) = record(&raw, wanted, key.as_ref());
            let mut into = Vec::new();
            for bit in 0..bytes.len() * 8 {
                let mut other = bytes.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                let in_place = super::raw(&mut other.clone(), &id, key.as_ref(), &mut Vec::new()).map(<[u8]>::to_vec);
                let copied = read(&mut other.clone(), &id, key.as_ref(), &mut into).map(|_| into.clone());
                assert_eq!(in_place, copied, "{wanted}, bit {bit}");
                if read(&mut other, &id, key.as_ref(), &mut into).is_ok() {
                    // Compressed data has bits without meaning; the result is still correct.
                    assert_eq!(into, raw, "{wanted}, bit {bit}");
                    assert!(bit / 8 >= 64 && key.is_none(), "{wanted}, bit {bit}");
                }
            }
            for cut in 0..bytes.len() {
                let error = read(&mut bytes.clone()[..cut], &id, key.as_ref(), &mut into).unwrap_err();
                assert!(matches!(error, FormatError::Truncated { .. }), "{wanted}, cut at {cut}: {error}");
            }
            let mut longer = [&bytes[..], b"x"].concat();
            let error = read(&mut longer, &id, key.as_ref(), &mut into).unwrap_err();
            assert_eq!(error, FormatError::TooLong { what: What::Record, extra: 1 });
        }
    }
}

/// Changes a header and corrects its check.
fn with(header: [u8; HEADER], place: usize, new: &[u8]) -> [u8; HEADER] {
    let mut bytes = header;
    bytes[place..place + new.len()].copy_from_slice(new);
    format::put_check(&mut bytes);
    bytes
}

#[test]
fn each_kind_of_damage_of_a_record_has_its_name() {
    let (bytes, id) = record(b"some content", Compression::None, None);
    let header = RecordHeader::parse(&bytes).unwrap();
    let wrong = |place, new: &[u8]| RecordHeader::parse(&with(header.to_bytes(), place, new)).unwrap_err();
    let what = What::Record;
    assert_eq!(wrong(0, b"X"), FormatError::NotOurs(what));
    assert_eq!(wrong(4, &[3]), FormatError::Field { what, field: "codec" });
    assert_eq!(wrong(5, &[1]), FormatError::Field { what, field: "reserved field" });
    assert_eq!(wrong(48, &[1]), FormatError::Field { what, field: "reserved field" });
    assert_eq!(wrong(8, &[0]), FormatError::Field { what, field: "raw length" });
    assert!(matches!(wrong(8, &(CHUNK_MAX + 1).to_le_bytes()), FormatError::OutOfBounds { field: "raw length", .. }));
    assert!(matches!(
        wrong(12, &(12_u32 + 4097).to_le_bytes()),
        FormatError::OutOfBounds { field: "stored length", .. }
    ));
    assert!(matches!(wrong(12, &u32::MAX.to_le_bytes()), FormatError::OutOfBounds { field: "stored length", .. }));
    let mut flipped = header.to_bytes();
    flipped[20] ^= 1;
    assert_eq!(RecordHeader::parse(&flipped), Err(FormatError::Checksum(what)));

    let mut into = Vec::new();
    let other = ChunkId::new([1; 32]);
    assert_eq!(read(&mut bytes.clone(), &other, None, &mut into), Err(FormatError::OtherChunk));
    // A record whose header was changed to describe other content.
    let lie = RecordHeader { id: other, ..header }.to_bytes();
    let mut lying = [&lie[..], &bytes[64..]].concat();
    assert_eq!(read(&mut lying, &other, None, &mut into), Err(FormatError::Checksum(What::Chunk)));
    assert_eq!(read(&mut bytes.clone(), &id, Some(&key()), &mut into), Err(FormatError::Unsealed));
    let longer = RecordHeader { raw_len: 13, ..header }.to_bytes();
    let error = read(&mut [&longer[..], &bytes[64..]].concat(), &id, None, &mut into).unwrap_err();
    assert!(matches!(error, FormatError::Undecodable(_)), "{error}");
}

#[test]
fn a_sealed_body_belongs_to_its_header() {
    let key = key();
    let (one, _) = record(b"one content", Compression::None, Some(&key));
    let (two, id) = record(b"two content", Compression::None, Some(&key));
    let mut mixed = [&two[..64], &one[64..]].concat();
    assert_eq!(read(&mut mixed, &id, Some(&key), &mut Vec::new()), Err(FormatError::Unsealed));
    assert!(!two.windows(7).any(|window| window == b"content"));
}

#[test]
fn a_record_out_of_bounds_is_not_written() {
    let mut into = vec![1, 2];
    let id = ChunkId::new([0; 32]);
    for (raw_len, stored) in [(0, 0), (CHUNK_MAX as usize + 1, 5), (5, 5 + 4097)] {
        let error = write(&mut into, id, Codec::Raw, raw_len, &vec![0; stored], None).unwrap_err();
        assert_eq!((error.kind(), into.len()), (io::ErrorKind::InvalidInput, 2));
    }
}

#[test]
fn each_kind_of_damage_of_a_pack_header_has_its_name() {
    let what = What::Pack;
    let (plain, sealed) = (PackHeader::of(None), PackHeader::of(Some(&key())));
    for header in [plain, sealed] {
        let bytes = header.to_bytes();
        assert_eq!(PackHeader::parse(&bytes), Ok(header));
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(PackHeader::parse(&other).is_err(), "bit {bit}");
        }
        for cut in 0..bytes.len() {
            assert!(matches!(PackHeader::parse(&bytes[..cut]), Err(FormatError::Truncated { .. })), "cut at {cut}");
        }
    }
    let wrong = |place, new: &[u8]| PackHeader::parse(&with(plain.to_bytes(), place, new)).unwrap_err();
    assert_eq!(wrong(0, b"X"), FormatError::NotOurs(what));
    assert_eq!(wrong(16, &[2]), FormatError::Newer { what, version: 2, known: 1 });
    assert_eq!(wrong(16, &[0]), FormatError::Field { what, field: "version" });
    assert_eq!(wrong(20, &[2]), FormatError::Field { what, field: "flags" });
    assert_eq!(wrong(24, &[1]), FormatError::Field { what, field: "flags" }, "a key of a pack that has none");
    assert_eq!(wrong(40, &[1]), FormatError::Field { what, field: "reserved field" });
}

#[test]
fn a_key_fits_or_not_and_the_answer_says_what_to_do() {
    let (key, other) = (key(), Key::new(&[8; 32]));
    let (plain, sealed) = (PackHeader::of(None), PackHeader::of(Some(&key)));
    let id = |key: Option<&Key>| key.map(Key::id);
    assert_eq!(plain.key_for(None).map(id), Ok(None));
    assert_eq!(plain.key_for(Some(&key)).map(id), Err(FormatError::Plain), "anybody can make one");
    assert!(FormatError::Plain.is_not_for_us() && FormatError::Plain.to_string().contains("--accept-unsigned"));
    let accepting = key.clone().with_plain_packs(PlainPacks::Accepted);
    assert_eq!(plain.key_for(Some(&accepting)).map(id), Ok(None), "from before there was a key");
    assert_eq!(sealed.key_for(Some(&key)).map(id), Ok(Some(key.id())));
    for (given, error) in [(None, FormatError::NoKey), (Some(&other), FormatError::OtherKey(key.id()))] {
        assert_eq!(sealed.key_for(given).map(id), Err(error.clone()));
        assert!(error.is_not_for_us() && error.to_string().contains("store.encryption-key"), "{error}");
    }
}

#[test]
fn a_pack_header_with_one_bit_wrong_is_told_and_with_two_is_not() {
    let header = PackHeader::of(Some(&key()));
    let whole = header.to_bytes();
    for bit in 0..8 * HEADER {
        let mut bytes = whole;
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(PackHeader::with_one_bit_wrong(&bytes), Some(header), "bit {bit}");
        bytes[(bit / 8 + 1) % HEADER] ^= 1;
        assert_eq!(PackHeader::with_one_bit_wrong(&bytes), None, "bit {bit}");
    }
}
