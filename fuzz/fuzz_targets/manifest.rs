//! The reader of `manifest.json`: as it comes, and with a right hash around it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle::store::Manifest;

fuzz_target!(|bytes: &[u8]| {
    let _ = Manifest::parse(bytes);
    let Ok(body) = std::str::from_utf8(bytes) else { return };
    for version in [1, 2] {
        let hash = blake3::hash(bytes);
        let text = format!(r#"{{"format":"rekindle-image","version":{version},"blake3":"{hash}","manifest":{body}}}"#);
        if let Ok(manifest) = Manifest::parse(text.as_bytes()) {
            let again = manifest.to_bytes().expect("what was read can be written");
            assert_eq!(Manifest::parse(&again).expect("and read again"), manifest);
        }
    }
});
