use super::*;
use crate::chunk::{CHUNK_MAX, ChunkId, Key};
use crate::tests::manifest;
use crate::{Unsigned, Untrusted};
use proptest::prelude::*;
use rekindle_base::interval;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

fn part(path: &str) -> Part {
    Part { path: path.into(), size: 3, blake3: Some(blake3::hash(b"abc")) }
}

#[test]
fn a_map_fits_its_manifest_or_not() {
    let chunk = |n: u8, len: u32| Extent::Chunk { id: ChunkId::new([n; 32]), len };
    let parts = vec![
        vec![chunk(1, 262_144), Extent::Zero { len: 5 << 30 }, chunk(2, 7)],
        vec![],
        vec![Extent::Zero { len: 1 }],
        vec![chunk(1, CHUNK_MAX)],
    ];
    let map = ChunkMap { parts };
    let sizes = [262_144 + (5 << 30) + 7, 0, 1, u64::from(CHUNK_MAX)];
    let part = |(n, size): (usize, &u64)| Part { path: (&format!("p{n}")).into(), size: *size, blake3: None };
    let parts: Vec<Part> = sizes.iter().enumerate().map(part).collect();
    let good = Manifest { parts, ..manifest() };
    let chunks = Chunks { blake3: blake3::hash(b""), extents: 9, stored: 0 };
    good.check_map(&chunks, &map).unwrap();
    let field = |manifest: &Manifest, chunks: &Chunks| match manifest.check_map(chunks, &map) {
        Err(FormatError::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(&good, &Chunks { extents: 8, ..chunks.clone() }), "number of extents");
    assert_eq!(field(&Manifest { parts: good.parts[1..].to_vec(), ..good.clone() }, &chunks), "number of parts");
    let mut other = good.clone();
    other.parts[2].size = 2;
    assert_eq!(field(&other, &chunks), "size of a part");
}

#[test]
fn a_manifest_survives_its_bytes() {
    let odd = Path::new(OsStr::from_bytes(b"/data/\xff\xfe.csv")).to_owned();
    let manifest = Manifest {
        user: Some("alice".to_owned()),
        driver: Some("580.1".to_owned()),
        gpus: vec![Gpu { uuid: "GPU-1".to_owned(), name: "H200".to_owned() }],
        open_files: vec![
            OpenFile { append: true, position: 7, ..OpenFile::new(odd.clone().into(), u64::MAX) },
            OpenFile {
                mode: Some(0o100_640),
                part: Some("files/open-0".into()),
                ..OpenFile::new("/data/ü.csv".into(), 0)
            },
        ],
        bindings: vec![Binding { processors: "0-1".into(), threads: vec![7] }],
        cpu_time: Some(CpuTime { pid: 1001, ms: u64::MAX }),
        scheduling: vec![Scheduling {
            threads: vec![7],
            policy: 6,
            flags: u64::MAX,
            nice: -20,
            priority: 0,
            runtime_ns: 1,
            deadline_ns: 2,
            period_ns: u64::MAX,
            clamps: Some((0, 1024)),
        }],
        timers: vec![Timer {
            pid: 1001,
            fd: 3,
            clock: 0,
            flags: 3,
            due_ns: i64::MAX,
            left_ns: 5,
            interval_ns: 0,
            ticks: u64::MAX,
        }],
        saved_links: vec![SavedLink {
            link: odd.into(),
            saved: "/data/.rekindle-link-1".into(),
            owner: None,
            names: Vec::new(),
        }],
        recreate: vec![Recreate { path: "/x".into(), mode: 0o755, part: "bin/x".into() }],
        log: Some("/store/j/log".into()),
        phases: vec![Phase { phase: "dump".to_owned(), started_us: 1, took_us: 2 }],
        parts: vec![part("bin/x"), part("criu/core-1.img"), part("files/open-0")],
        interval: Some(interval::choose(&interval::Facts {
            freeze: Duration::from_millis(2200),
            mtbf: Duration::from_secs(86_400),
            mtbf_source: interval::MtbfSource::Observed { uptime: Duration::from_secs(1), failures: 2 },
            max_overhead: rekindle_base::Percentage::millionths(10_000),
            persist: Some(Duration::from_secs(9)),
        })),
        tree: JobTree { stopped: vec![2], ..manifest().tree },
        ..manifest()
    };
    assert_eq!(Manifest::parse(&manifest.to_bytes(&Trust::default()).unwrap(), &Trust::default()).unwrap(), manifest);
}

#[test]
fn the_file_is_json_that_others_can_read() {
    let manifest = Manifest { parts: vec![part("a")], ..manifest() };
    let json: serde_json::Value = serde_json::from_slice(&manifest.to_bytes(&Trust::default()).unwrap()).unwrap();
    assert_eq!(json["format"], "rekindle-image");
    assert_eq!(json["version"], 1);
    assert_eq!(json["manifest"]["reason"], "interval");
    assert_eq!(json["manifest"]["tree"]["root"], 1);
    assert_eq!(json["manifest"].get("interval"), None, "as before there was such a field");
    assert_eq!(json["manifest"]["parts"][0]["blake3"], blake3::hash(b"abc").to_hex().as_str());
}

#[test]
fn unknown_fields_are_additions() {
    let body = serde_json::to_string(&manifest()).unwrap();
    let body = format!("{{\"later\": [1], {}", &body[1..]);
    let hash = blake3::hash(body.as_bytes());
    let text = format!(r#"{{"format":"rekindle-image","version":1,"blake3":"{hash}","more":0,"manifest":{body}}}"#);
    assert_eq!(Manifest::parse(text.as_bytes(), &Trust::default()).unwrap(), manifest());
}

/// The manifest, changed as text, with a correct hash.
fn changed(manifest: &Manifest, change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut body = serde_json::to_value(manifest).unwrap();
    change(&mut body);
    let body = body.to_string();
    let hash = blake3::hash(body.as_bytes());
    let version = manifest.version();
    format!(r#"{{"format":"rekindle-image","version":{version},"blake3":"{hash}","manifest":{body}}}"#).into_bytes()
}

/// A manifest with a path in each field that has one.
fn full() -> Manifest {
    Manifest {
        open_files: vec![OpenFile {
            mode: Some(0o100_644),
            part: Some("a".into()),
            group: Some("/data".into()),
            attributes: Some(0),
            ..OpenFile::new("/data/a".into(), 3)
        }],
        absent_files: vec!["/data/a-journal".into()],
        tracked_folders: vec![TrackedFolder {
            path: "/data".into(),
            entries: vec![
                TrackedEntry { path: "/data/a".into(), kind: TrackedKind::File },
                TrackedEntry {
                    path: "/data/l".into(),
                    kind: TrackedKind::Link { target: "a".into(), owner: Some(Owner { uid: 1, gid: 2 }) },
                },
                TrackedEntry {
                    path: "/data/b".into(),
                    kind: TrackedKind::Folder { mode: 0o40_755, owner: Owner { uid: 1, gid: 2 }, attributes: Some(0) },
                },
            ],
        }],
        attributes: Some(vec![Attributes {
            acl: Some(Bytes(vec![2, 0, 255])),
            default_acl: Some(Bytes(Vec::new())),
            user: [("mime_type".to_owned(), Bytes(b"text".to_vec()))].into(),
        }]),
        given_files: vec![GivenFile { path: "/data/g".into(), device: 1, inode: 2, access: None }],
        fifos: vec![Fifo { path: "/data/fifo".into(), mode: 0o10_600, uid: 0, gid: 0, attributes: Some(0) }],
        folders: vec![Folder { path: "/data".into(), mode: 0o40_755, uid: 0, gid: 0, attributes: Some(0) }],
        control_groups: vec![ControlGroup {
            hierarchy: "pids".into(),
            path: "job/inner".parse().unwrap(),
            mode: 0o40_755,
            owner: Owner { uid: 1, gid: 2 },
            procs: Owner { uid: 1, gid: 2 },
            settings: [("pids.max".to_owned(), "50".to_owned())].into(),
            processes: vec![7],
        }],
        saved_links: vec![SavedLink {
            link: "/data/l".into(),
            saved: "/data/.rekindle-link-1".into(),
            owner: Some(Owner { uid: 1, gid: 2 }),
            names: Vec::new(),
        }],
        recreate: vec![Recreate { path: "/x".into(), mode: 0o755, part: "a".into() }],
        log: Some("/store/j/log".into()),
        mapped_files: vec![MappedFile {
            path: "/lib/m".into(),
            size: 1,
            mode: None,
            build_id: None,
            owner: Some(Owner { uid: 1, gid: 2 }),
            copy: Some(KeptCopy {
                part: "a".into(),
                owner: Owner { uid: 1, gid: 2 },
                stamp: Stamp { inode: 1, size: 1, modified_ns: 1, changed_ns: 1 },
                attributes: Some(0),
            }),
        }],
        landing: vec![Landing { pid: 7, path: "/run/l/7".into(), part: "a".into(), bytes: 3 }],
        kept: Some(Kept {
            part: "a".into(),
            pieces: vec![KeptPiece { pid: 7, index: 0, offset: 0, bytes: 1, gpu: Some(0) }],
        }),
        parts: vec![part("a")],
        ..manifest()
    }
}

const PARTS: [&str; 5] = ["/parts/0/path", "/open_files/0/part", "/recreate/0/part", "/landing/0/part", "/kept/part"];
const PATHS: [&str; 11] = [
    "/directory",
    "/open_files/0/path",
    "/given_files/0/path",
    "/folders/0/path",
    "/fifos/0/path",
    "/saved_links/0/link",
    "/saved_links/0/saved",
    "/recreate/0/path",
    "/log",
    "/mapped_files/0/path",
    "/landing/0/path",
];

#[test]
fn no_path_of_a_manifest_leads_elsewhere() {
    let parse = |place: &str, text: &str| {
        let bytes = changed(&full(), |body| *body.pointer_mut(place).unwrap() = text.into());
        Manifest::parse(&bytes, &Trust::default())
    };
    let bad =
        ["", "/", "/a", "..", "../a", "../../etc/shadow", "/etc/shadow", "a/../b", "a/..", "./a", "a//b", "a/", "a\0b"];
    for (place, text) in PARTS.iter().flat_map(|place| bad.map(|text| (place, text))) {
        let error = parse(place, text).unwrap_err();
        assert!(matches!(&error, ManifestError::Parse(_)), "{place} {text:?}: {error}");
        assert!(error.to_string().contains("is not a valid path inside an image"), "{error}");
    }
    for text in ["manifest.json", "bad.json", "tags.json", "chunks"] {
        assert!(parse(PARTS[0], text).unwrap_err().to_string().contains("the store reserves that name"));
    }
    for (place, text) in PATHS.iter().flat_map(|place| ["", "a", "../a", "/a/../b", "/a\0b"].map(|text| (place, text)))
    {
        let error = parse(place, text).unwrap_err().to_string();
        assert!(
            error.contains("is not a valid path of a job's file") && error.contains(&format!("{text:?}")),
            "{place} {text}: {error}"
        );
    }
    for text in ["", "/", "/x", "..", "../x", "x/../../y", "x/", "./x", "x//y", "x\0"] {
        let error = parse("/control_groups/0/path", text).unwrap_err().to_string();
        assert!(error.contains("is not a valid path of a control group"), "{text:?}: {error}");
    }
    for path in ["a", "a/b", "...", "a..b", "criu/manifest.json", ".hidden", "ü"] {
        Manifest { parts: vec![part(path)], ..manifest() }.to_bytes(&Trust::default()).unwrap();
    }
    assert_eq!(Manifest::parse(&changed(&full(), |_| {}), &Trust::default()).unwrap(), full());
}

#[test]
fn a_reader_checks_what_the_parts_are_as_well() {
    let parse = |change: &dyn Fn(&mut serde_json::Value)| {
        Manifest::parse(&changed(&full(), change), &Trust::default()).unwrap_err()
    };
    let twice = parse(&|body| body["parts"] = serde_json::json!([body["parts"][0], body["parts"][0]]));
    assert!(matches!(twice, ManifestError::PartTwice(_)), "{twice}");
    for place in PARTS[1..].iter() {
        let error = parse(&|body| *body.pointer_mut(place).unwrap() = "b".into());
        assert!(matches!(error, ManifestError::NoSuchPart(_)), "{place}: {error}");
    }
}

#[test]
fn extended_attributes_are_in_a_table_that_has_them() {
    let text = String::from_utf8(full().to_bytes(&Trust::default()).unwrap()).unwrap();
    assert!(text.contains("\"acl\": \"0200ff\"") && text.contains("\"mime_type\": \"74657874\""), "{text}");
    let parse = |place: &str, value: serde_json::Value| {
        let bytes = changed(&full(), |body| *body.pointer_mut(place).unwrap() = value);
        Manifest::parse(&bytes, &Trust::default())
    };
    let numbers = [
        "/open_files/0/attributes",
        "/tracked_folders/0/entries/2/attributes",
        "/folders/0/attributes",
        "/fifos/0/attributes",
        "/mapped_files/0/copy/attributes",
    ];
    for place in numbers {
        parse(place, 0.into()).unwrap();
        let error = parse(place, 1.into()).unwrap_err();
        assert!(matches!(error, ManifestError::NoSuchAttributes(1)), "{place}: {error}");
    }
    for bad in ["0", "0G", "FF", "é"] {
        let error = parse("/attributes/0/acl", bad.into()).unwrap_err();
        assert!(matches!(error, ManifestError::Parse(_)), "{bad}: {error}");
    }
    // Those of an earlier version are unknown, which is not the same as none.
    assert_eq!(manifest().attributes, None);
    let none = Manifest { attributes: Some(Vec::new()), ..manifest() };
    assert_eq!(Manifest::parse(&none.to_bytes(&Trust::default()).unwrap(), &Trust::default()).unwrap(), none);
}

#[test]
fn pieces_of_device_memory_have_each_a_place_of_their_own() {
    let with = |pieces: &[[u64; 3]]| {
        let piece = |[index, offset, bytes]: &[u64; 3]| KeptPiece {
            pid: 7,
            index: u32::try_from(*index).unwrap(),
            offset: *offset,
            bytes: *bytes,
            gpu: None,
        };
        let kept = Kept { part: "gpu/kept".into(), pieces: pieces.iter().map(piece).collect() };
        let parts = vec![Part { size: 100, ..part("gpu/kept") }];
        let manifest = Manifest { kept: Some(kept), parts, ..manifest() };
        let read = Manifest::parse(&changed(&manifest, |_| {}), &Trust::default());
        // What a reader refuses is not written either.
        assert_eq!(read.is_ok(), manifest.to_bytes(&Trust::default()).is_ok());
        read.map(drop).map_err(|error| error.to_string())
    };
    for good in [&[][..], &[[0, 0, 100]], &[[3, 40, 60], [1, 0, 40]], &[[0, 10, 5], [1, 90, 10]]] {
        with(good).unwrap();
    }
    for (bad, why) in [
        (&[[0, 0, 40], [0, 40, 40]][..], "GPU memory 0 of process 7 is there twice"),
        (&[[0, 0, 40], [1, 39, 40]], "GPU memory 1 of process 7 overlaps another one"),
        (&[[0, 0, 40], [1, 0, 40]], "overlaps another one"),
        (&[[0, 0, 0]], "is empty"),
        (&[[0, 0, 101]], "is beyond the end of its part"),
        (&[[0, 100, 1]], "is beyond the end of its part"),
        (&[[0, u64::MAX, 2]], "is beyond the end of its part"),
        (&[[0, 1, u64::MAX]], "is beyond the end of its part"),
    ] {
        let error = with(bad).unwrap_err();
        assert!(error.contains(why), "{bad:?}: {error}");
    }
}

fn trust(byte: u8, unsigned: Unsigned) -> Trust {
    Trust::new(Key::new(&[byte; 32]), Path::new("/etc/key"), unsigned).for_job(&manifest().job)
}

#[test]
fn with_a_key_only_what_is_signed_with_it_is_taken() {
    let ours = trust(7, Unsigned::Refused);
    for manifest in [full(), packed()] {
        let bytes = manifest.to_bytes(&ours).unwrap();
        assert_eq!(Manifest::parse(&bytes, &ours).unwrap(), manifest);
        assert_eq!(Manifest::parse(&bytes, &Trust::default()).unwrap(), manifest, "who has no key cannot tell");

        let plain = manifest.to_bytes(&Trust::default()).unwrap();
        let error = Manifest::parse(&plain, &ours).unwrap_err();
        assert!(matches!(&error, ManifestError::Untrusted(Untrusted::Unsigned { .. })), "{error}");
        assert!(error.to_string().contains("--accept-unsigned"), "{error}");
        assert_eq!(Manifest::parse(&plain, &trust(7, Unsigned::Accepted)).unwrap(), manifest);

        let theirs = manifest.to_bytes(&trust(8, Unsigned::Refused)).unwrap();
        let error = Manifest::parse(&theirs, &ours).unwrap_err();
        assert!(matches!(&error, ManifestError::Untrusted(Untrusted::OtherKey { .. })), "{error}");
        assert!(error.to_string().contains("/etc/key"), "{error}");
    }
}

#[test]
fn a_signature_goes_with_one_text_one_image_and_one_job() {
    let ours = trust(7, Unsigned::Refused);
    let text = String::from_utf8(full().to_bytes(&ours).unwrap()).unwrap();
    // The hash has no key, so anybody can correct it.
    let forged = |from: &str, to: &str| {
        let envelope: serde_json::Value = serde_json::from_str(&text).unwrap();
        let at = text.find("\"manifest\": ").unwrap() + "\"manifest\": ".len();
        let body = text[at..text.len() - 1].trim_end().replace(from, to);
        let (hash, signature) = (blake3::hash(body.as_bytes()), &envelope["signature"]);
        let version = &envelope["version"];
        let whole = format!(
            r#"{{"format":"rekindle-image","version":{version},"blake3":"{hash}","signature":{signature},"manifest":{body}}}"#
        );
        Manifest::parse(whole.as_bytes(), &ours)
    };
    assert_eq!(forged("no such text", "").unwrap(), full(), "the forger is a good one");
    let id = full().id.to_string();
    for (from, to) in [(id.as_str(), "000099-20261120T132105Z"), ("/data/a", "/etc/x"), ("\"size\": 3", "\"size\": 4")]
    {
        assert!(text.contains(from), "{from}");
        let error = forged(from, to).unwrap_err();
        assert!(matches!(error, ManifestError::Untrusted(Untrusted::Forged { .. })), "{from}: {error}");
    }
    let elsewhere =
        Trust::new(Key::new(&[7; 32]), Path::new("/etc/key"), Unsigned::Accepted).for_job(&"other".parse().unwrap());
    assert!(matches!(Manifest::parse(text.as_bytes(), &elsewhere), Err(ManifestError::OtherJob(_))));
}

#[test]
fn other_formats_and_versions_are_named() {
    let parse = |text: &str| Manifest::parse(text.as_bytes(), &Trust::default()).unwrap_err();
    let text = String::from_utf8(manifest().to_bytes(&Trust::default()).unwrap()).unwrap();
    assert!(matches!(parse(&text.replacen("rekindle-image", "other", 1)), ManifestError::Format(_)));
    assert!(matches!(parse(&text.replacen("\"version\": 1", "\"version\": 0", 1)), ManifestError::VersionZero));
    // A newer version is recognised by the header alone.
    assert!(matches!(parse(r#"{"format":"rekindle-image","version":9}"#), ManifestError::Newer(9)));
    assert!(matches!(parse("[]"), ManifestError::Parse(_)));
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
        prop_assert!(Manifest::parse(&bytes, &Trust::default()).is_err());
    }

    #[test]
    fn no_change_of_a_byte_goes_unnoticed(place: prop::sample::Index, byte: u8) {
        let whole = manifest().to_bytes(&Trust::default()).unwrap();
        let mut bytes = whole.clone();
        bytes[place.index(whole.len())] = byte;
        // White space between the outer fields may be replaced by other white space; that changes nothing.
        if let Ok(parsed) = Manifest::parse(&bytes, &Trust::default()) {
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
fn only_what_an_earlier_reader_would_get_wrong_needs_another_version() {
    let version = |manifest: &Manifest| {
        let json: serde_json::Value = serde_json::from_slice(&manifest.to_bytes(&Trust::default()).unwrap()).unwrap();
        json["version"].as_u64().unwrap()
    };
    let together = Manifest { absent_files: vec!["/data/a-journal".into()], ..packed() };
    let kept = Manifest { kept: full().kept, parts: vec![part("a")], ..together.clone() };
    assert_eq!([&manifest(), &packed(), &together, &kept].map(version), [1, 2, 3, 4]);
    assert_eq!(Manifest::parse(&packed().to_bytes(&Trust::default()).unwrap(), &Trust::default()).unwrap(), packed());
}

#[test]
fn an_image_of_a_version_that_knew_no_control_groups_is_read() {
    let bytes = changed(&full(), |body| drop(body.as_object_mut().unwrap().remove("control_groups")));
    let before = Manifest { control_groups: Vec::new(), ..full() };
    assert_eq!(Manifest::parse(&bytes, &Trust::default()).unwrap(), before);
    let text = String::from_utf8(manifest().to_bytes(&Trust::default()).unwrap()).unwrap();
    assert!(!text.contains("control_groups"), "as before there was such a field");
}

#[test]
fn a_version_that_does_not_go_with_the_content_is_damage() {
    for (manifest, from, to) in [(packed(), 2, 1), (manifest(), 1, 2)] {
        let text = String::from_utf8(manifest.to_bytes(&Trust::default()).unwrap()).unwrap();
        let other = text.replacen(&format!("\"version\": {from}"), &format!("\"version\": {to}"), 1);
        assert!(
            matches!(Manifest::parse(other.as_bytes(), &Trust::default()), Err(ManifestError::WrongVersion(it)) if it == to)
        );
    }
}
