//! The readers of a pack: the scan of its records, and each record that it finds. Every check in the input is made
//! right first, since no fuzzer guesses one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_store::chunk::Key;
use rekindle_store::pack::{index, record};

const HEADER: usize = 64;

fn mend(header: &mut [u8]) {
    let hash = blake3::hash(&header[..56]);
    header[56..64].copy_from_slice(&hash.as_bytes()[..8]);
}

fn scan(bytes: &[u8]) -> Option<index::Scan> {
    index::scan(bytes.len() as u64, |at, into| {
        let at = at as usize;
        into.copy_from_slice(&bytes[at..at + HEADER]);
        Ok(())
    })
    .ok()
}

fuzz_target!(|bytes: &[u8]| {
    let _ = scan(bytes);
    let mut bytes = bytes.to_vec();
    let mut at = 0;
    while let Some(header) = bytes.get_mut(at..at + HEADER) {
        mend(header);
        let stored = header[12..16].try_into().map(u32::from_le_bytes).unwrap_or(0);
        at += HEADER + if at == 0 { 0 } else { stored as usize };
    }
    let Some(scan) = scan(&bytes) else { return };
    let key = Key::new(&[7; 32]);
    let mut into = Vec::new();
    for entry in scan.index.entries() {
        let whole = &bytes[entry.offset as usize..entry.end() as usize];
        for key in [None, Some(&key)] {
            if record::read(&mut whole.to_vec(), &entry.id, key, &mut into).is_ok() {
                assert_eq!(into.len(), entry.raw_len as usize);
            }
        }
    }
    assert!(scan.index.pack_len() <= bytes.len() as u64);
});
