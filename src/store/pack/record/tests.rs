use super::*;
use crate::store::chunk::Compression;

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
                let (mut bytes, id) = record(raw, wanted, key.as_ref());
                let mut into = vec![9; 7];
                read(&mut bytes, &id, key.as_ref(), &mut into).unwrap();
                assert_eq!(into, raw, "{wanted}");
            }
        }
    }
}
