//! The reader of the chunk map: as it comes, and with a right hash behind it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_store::chunk::ChunkMap;

fuzz_target!(|bytes: &[u8]| {
    let _ = ChunkMap::parse(bytes);
    let whole = [bytes, blake3::hash(bytes).as_bytes()].concat();
    if let Ok(map) = ChunkMap::parse(&whole) {
        assert_eq!(map.to_bytes(), whole);
    }
});
