//! The reader of `manifest.json`: as it comes, and with a right hash around it, without a key and signed. No path that
//! is read leads elsewhere.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use rekindle_store::chunk::Key;
use rekindle_store::{Manifest, Trust, Unsigned};

/// Whether it leads to something below the folder, and nowhere else.
fn stays(part: &str) -> bool {
    let path = Path::new("/image").join(part);
    path != Path::new("/image")
        && path.starts_with("/image")
        && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)))
        && !part.contains('\0')
}

fn is_absolute(path: &Path) -> bool {
    path.is_absolute() && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)))
}

fn check(manifest: &Manifest) {
    let parts = manifest.parts.iter().map(|part| &part.path);
    let parts = parts.chain(manifest.open_files.iter().filter_map(|file| file.part.as_ref()));
    let parts = parts.chain(manifest.recreate.iter().map(|file| &file.part));
    let mut parts = parts.chain(manifest.landing.iter().map(|landing| &landing.part));
    assert!(parts.all(|part| stays(part)));
    let paths = manifest.open_files.iter().map(|file| file.path.as_path()).chain([manifest.directory.as_path()]);
    let paths = paths.chain(manifest.folders.iter().map(|folder| folder.path.as_path()));
    let paths = paths.chain(manifest.saved_links.iter().flat_map(|link| [link.link.as_path(), link.saved.as_path()]));
    let paths = paths.chain(manifest.recreate.iter().map(|file| file.path.as_path()));
    let paths = paths.chain(manifest.mapped_files.iter().map(|file| file.path.as_path()));
    let mut paths = paths.chain(manifest.landing.iter().map(|landing| landing.path.as_path()));
    assert!(paths.all(is_absolute));
}

fuzz_target!(|bytes: &[u8]| {
    let signed = Trust::new(Key::new(&[7; 32]), Path::new("/key"), Unsigned::Refused);
    for trust in [&Trust::default(), &signed] {
        if let Ok(manifest) = Manifest::parse(bytes, trust) {
            check(&manifest);
        }
    }
    let Ok(body) = std::str::from_utf8(bytes) else { return };
    for version in [1, 2] {
        let hash = blake3::hash(bytes);
        let text = format!(r#"{{"format":"rekindle-image","version":{version},"blake3":"{hash}","manifest":{body}}}"#);
        assert!(Manifest::parse(text.as_bytes(), &signed).is_err(), "nobody signed it");
        if let Ok(manifest) = Manifest::parse(text.as_bytes(), &Trust::default()) {
            check(&manifest);
            for trust in [&Trust::default(), &signed] {
                let again = manifest.to_bytes(trust).expect("what was read can be written");
                assert_eq!(Manifest::parse(&again, trust).expect("and read again"), manifest);
            }
        }
    }
});
