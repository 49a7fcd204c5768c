use super::*;
use crate::store::tests::manifest;
use crate::supervisor::interval;
use proptest::prelude::*;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

fn part(path: &str) -> Part {
    Part { path: path.to_owned(), size: 3, blake3: Some(blake3::hash(b"abc")) }
}

#[test]
fn a_manifest_survives_its_bytes() {
    let odd = Path::new(OsStr::from_bytes(b"/data/\xff\xfe.csv")).to_owned();
    let manifest = Manifest {
        user: Some("alice".to_owned()),
        driver: Some("580.1".to_owned()),
        gpus: vec![Gpu { uuid: "GPU-1".to_owned(), name: "H200".to_owned() }],
        open_files: vec![
            OpenFile { path: odd.clone(), size: u64::MAX, append: true, position: 7, mode: None, part: None },
            OpenFile {
                path: "/data/ü.csv".into(),
                size: 0,
                append: false,
                position: 0,
                mode: Some(0o100_640),
                part: Some("files/open-0".into()),
            },
        ],
        saved_links: vec![SavedLink { link: odd, saved: "/data/.rekindle-link-1".into() }],
        recreate: vec![Recreate { path: "/x".into(), mode: 0o755, part: "bin/x".to_owned() }],
        phases: vec![Phase { phase: "dump".to_owned(), started_us: 1, took_us: 2 }],
        parts: vec![part("bin/x"), part("criu/core-1.img")],
        interval: Some(interval::choose(&interval::Facts {
            freeze: Duration::from_millis(2200),
            mtbf: Duration::from_secs(86_400),
            mtbf_source: interval::MtbfSource::Observed { uptime: Duration::from_secs(1), failures: 2 },
            max_overhead: crate::config::Percentage::millionths(10_000),
            persist: Some(Duration::from_secs(9)),
        })),
        ..manifest()
    };
    assert_eq!(Manifest::parse(&manifest.to_bytes().unwrap()).unwrap(), manifest);
}

#[test]
fn the_file_is_json_that_others_can_read() {
    let manifest = Manifest { parts: vec![part("a")], ..manifest() };
    let json: serde_json::Value = serde_json::from_slice(&manifest.to_bytes().unwrap()).unwrap();
    assert_eq!(json["format"], "rekindle-image");
    assert_eq!(json["version"], 1);
    assert_eq!(json["manifest"]["reason"], "interval");
    assert_eq!(json["manifest"]["tree"]["pid_namespace"], "private");
    assert_eq!(json["manifest"].get("interval"), None, "as before there was such a field");
    assert_eq!(json["manifest"]["parts"][0]["blake3"], blake3::hash(b"abc").to_hex().as_str());
}

#[test]
fn unknown_fields_are_additions() {
    let body = serde_json::to_string(&manifest()).unwrap();
    let body = format!("{{\"later\": [1], {}", &body[1..]);
    let hash = blake3::hash(body.as_bytes());
    let text = format!(r#"{{"format":"rekindle-image","version":1,"blake3":"{hash}","more":0,"manifest":{body}}}"#);
    assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), manifest());
}

#[test]
fn paths_that_lead_out_are_refused() {
    for path in [
        "",
        "/",
        "/a",
        "..",
        "../a",
        "a/../b",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\0b",
        "manifest.json",
        "bad.json",
        "tags.json",
    ] {
        let error = Manifest { parts: vec![part(path)], ..manifest() }.to_bytes().unwrap_err();
        assert!(matches!(&error, ManifestError::PartPath(it) if it == path), "{path}: {error}");
    }
    for path in ["a", "a/b", "...", "a..b", "criu/manifest.json", ".hidden", "ü"] {
        Manifest { parts: vec![part(path)], ..manifest() }.to_bytes().unwrap();
    }
}

/// The bytes that a writer without our checks would make.
fn unchecked(manifest: &Manifest) -> Vec<u8> {
    let body = serde_json::to_string(manifest).unwrap();
    let hash = blake3::hash(body.as_bytes());
    format!(r#"{{"format":"rekindle-image","version":1,"blake3":"{hash}","manifest":{body}}}"#).into_bytes()
}

#[test]
fn a_reader_checks_as_well() {
    let twice = Manifest { parts: vec![part("a"), part("a")], ..manifest() };
    assert!(matches!(Manifest::parse(&unchecked(&twice)), Err(ManifestError::PartTwice(_))));
    let out = Manifest { parts: vec![part("../a")], ..manifest() };
    assert!(matches!(Manifest::parse(&unchecked(&out)), Err(ManifestError::PartPath(_))));
    let recreate = vec![Recreate { path: "/x".into(), mode: 0, part: "b".to_owned() }];
    let lacking = Manifest { parts: vec![part("a")], recreate, ..manifest() };
    assert!(matches!(Manifest::parse(&unchecked(&lacking)), Err(ManifestError::NoSuchPart(_))));
    Manifest::parse(&unchecked(&manifest())).unwrap();
}

#[test]
fn other_formats_and_versions_are_named() {
    let parse = |text: &str| Manifest::parse(text.as_bytes()).unwrap_err();
    let text = String::from_utf8(manifest().to_bytes().unwrap()).unwrap();
    assert!(matches!(parse(&text.replacen("rekindle-image", "other", 1)), ManifestError::Format(_)));
    assert!(matches!(parse(&text.replacen("\"version\": 1", "\"version\": 0", 1)), ManifestError::VersionZero));
    // A newer one is recognised by its header alone.
    assert!(matches!(parse(r#"{"format":"rekindle-image","version":9}"#), ManifestError::Newer(9)));
    assert!(matches!(parse("[]"), ManifestError::Parse(_)));
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
        prop_assert!(Manifest::parse(&bytes).is_err());
    }

    #[test]
    fn no_change_of_a_byte_goes_unnoticed(place: prop::sample::Index, byte: u8) {
        let whole = manifest().to_bytes().unwrap();
        let mut bytes = whole.clone();
        bytes[place.index(whole.len())] = byte;
        // White space between the outer fields may become other white space; that changes nothing.
        if let Ok(parsed) = Manifest::parse(&bytes) {
            prop_assert_eq!(parsed, manifest());
        }
    }
}

fn packed() -> Manifest {
    let part = Part { blake3: None, ..part("criu/pages-1.img") };
    let chunks = Chunks { blake3: blake3::hash(b"map"), extents: 3, stored: 1 << 40 };
    Manifest { parts: vec![part], chunks: Some(chunks), ..manifest() }
}

#[test]
fn only_a_packed_image_needs_version_2() {
    let version = |manifest: &Manifest| {
        let json: serde_json::Value = serde_json::from_slice(&manifest.to_bytes().unwrap()).unwrap();
        json["version"].as_u64().unwrap()
    };
    assert_eq!((version(&manifest()), version(&packed())), (1, 2));
    assert_eq!(Manifest::parse(&packed().to_bytes().unwrap()).unwrap(), packed());
}

#[test]
fn a_version_that_does_not_go_with_the_content_is_damage() {
    for (manifest, from, to) in [(packed(), 2, 1), (manifest(), 1, 2)] {
        let text = String::from_utf8(manifest.to_bytes().unwrap()).unwrap();
        let other = text.replacen(&format!("\"version\": {from}"), &format!("\"version\": {to}"), 1);
        assert!(matches!(Manifest::parse(other.as_bytes()), Err(ManifestError::WrongVersion(it)) if it == to));
    }
}

#[test]
fn the_name_of_the_chunk_map_is_taken() {
    let error = Manifest { parts: vec![part("chunks")], ..manifest() }.to_bytes().unwrap_err();
    assert!(matches!(error, ManifestError::PartPath(_)));
    Manifest { parts: vec![part("criu/chunks")], ..manifest() }.to_bytes().unwrap();
}
