//! The reader of `NAME.idx`: as it comes, and with a right hash behind it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_store::pack::PackIndex;

fuzz_target!(|bytes: &[u8]| {
    let _ = PackIndex::parse(bytes);
    let whole = [bytes, blake3::hash(bytes).as_bytes()].concat();
    if let Ok(index) = PackIndex::parse(&whole) {
        assert_eq!(index.to_bytes(), whole);
    }
});
