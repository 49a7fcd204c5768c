//! What others can change is opened through `rekindle_os::beneath` only, never by its path.

use std::fs;
use std::path::Path;

use super::{code, is_test, sources, word};

/// A file, a call that is allowed in it, and the reason.
type Allowed = (&'static str, &'static str, &'static str);

/// Where no path may be opened, and what is allowed there nevertheless.
const ROOMS: [(&str, &[Allowed]); 13] = [
    (
        "crates/store/src",
        &[
            ("holder.rs", "fs::", "the kernel's name of a namespace"),
            ("links.rs", "fs::", "the user's files, with the user's rights"),
            ("seen.rs", "fs::", "the notes of this machine are outside of the store"),
            ("seen.rs", "DirBuilder::new", "the notes of this machine are outside of the store"),
            ("staging/leftovers.rs", ".canonicalize", "paths that the user names"),
            ("staging/mounted.rs", ".canonicalize", "the folder for memory, which the user names"),
            ("staging/mounted.rs", ".exists", "the folder for memory, which the user names"),
            ("staging/mounted.rs", "mount(", "in the folder for memory, which is root's"),
            ("staging/mounted.rs", "umount2(", "only what the mount table shows as ours"),
            ("store.rs", ".exists", "the store itself, which the user names"),
            ("store.rs", "DirBuilder::new", "the store itself, which the user names"),
            ("store.rs", "fs::", "the store itself, which the user names"),
        ],
    ),
    (
        "crates/replica/src",
        &[
            ("folder.rs", "DirBuilder::new", "the folder of a replica: the library for object stores takes paths, too"),
            ("folder.rs", "fs::", "the folder of a replica: the library for object stores takes paths, too"),
        ],
    ),
    ("src/telemetry/events.rs", &[]),
    ("src/published.rs", &[]),
    ("src/report.rs", &[]),
    ("src/supervisor/result.rs", &[]),
    ("src/supervisor/group/memory.rs", &[]),
    ("crates/engine/src/launch/output.rs", &[]),
    ("crates/engine/src/launch/output", &[]),
    ("crates/engine/src/launch/tail.rs", &[]),
    ("crates/engine/src/snapshot/opened.rs", &[]),
    ("crates/etcd/src/handout.rs", &[]),
    ("crates/etcd/src/local.rs", &[("", "fs::read_to_string", "a random number of the kernel")]),
];

/// Other calls that take a path, and methods of paths.
const CALLS: [&str; 19] = [
    "std::fs;",
    "DirBuilder::new",
    "OpenOptions::new",
    "File::open",
    "File::create",
    "File::options",
    "mount(",
    "umount2(",
    "Command::new",
    "symlink(",
    "tempfile",
    "tempdir",
    "statvfs(",
    "mkfifo",
    "lchown",
    ".exists()",
    ".canonicalize()",
    ".read_dir()",
    ".read_link()",
];

/// The calls in the code that take a path.
fn calls(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fs::") {
        let rest = &code[at + "fs::".len()..];
        let name = word(rest);
        let is_type = ["DirBuilder", "OpenOptions"].contains(&name.as_str());
        // Traits and constants of modules of that name take no path.
        if is_type || rest.starts_with("{self") || name.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.push(format!("fs::{name}"));
        }
    }
    for call in CALLS {
        let is_whole = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let is_method = call.starts_with('.');
        let there = code.match_indices(call).filter(|(at, _)| is_method || is_whole(*at));
        found.extend(there.map(|_| call.to_owned()));
    }
    found
}

#[test]
fn doors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (room, allowed) in ROOMS {
        let room = root.join(room);
        let files = if room.is_dir() { sources(&room) } else { vec![room.clone()] };
        let mut used = vec![false; allowed.len()];
        let mut wrong = Vec::new();
        for path in files {
            let inside = path.strip_prefix(&room).unwrap();
            if is_test(inside) {
                continue;
            }
            for call in calls(&code(&fs::read_to_string(&path).unwrap())) {
                let is_it = |(file, known, _): &Allowed| inside == Path::new(file) && call.starts_with(known);
                match allowed.iter().position(is_it) {
                    Some(at) => used[at] = true,
                    None => wrong.push(format!("{}: {call}", path.display())),
                }
            }
        }
        assert_eq!(wrong, [""; 0], "these take a path in a folder that others can change:\n{}", wrong.join("\n"));
        let unused = allowed.iter().zip(used).filter(|(_, used)| !used).map(|(it, _)| it);
        assert_eq!(unused.collect::<Vec<_>>(), [&("", "", ""); 0], "nothing is to be allowed any more");
    }
}

/// A line of SECURITY.md is only as good as the test that holds it.
#[test]
fn the_tests_that_security_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let (_, table) = text.split_once("## Which tests hold it").unwrap();
    let (_, table) = table.split_once("|---|---|").unwrap();
    let (table, _) = table.split_once("\n\n").unwrap();
    let names: Vec<&str> = table.split('`').skip(1).step_by(2).filter(|name| !name.ends_with(".sh")).collect();
    assert!(names.len() > 20, "{names:?}");
    let folders = ["src", "crates", "integration"].map(|folder| root.join(folder));
    let all: Vec<String> = folders
        .iter()
        .flat_map(|folder| sources(folder))
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            format!("mod {stem};\n{text}")
        })
        .collect();
    let is_there = |name: &&str| {
        let wanted = match name.strip_suffix("::") {
            Some(module) => format!("mod {module};"),
            None => format!("fn {name}("),
        };
        all.iter().any(|text| text.contains(&wanted))
    };
    assert_eq!(names.into_iter().filter(|name| !is_there(name)).collect::<Vec<_>>(), [""; 0], "no such test");
}

#[test]
fn every_call_is_found() {
    let found = |code| calls(code).len();
    for bad in [
        "let file = std::fs::read(&path)",
        "use std::fs::{self, File};",
        "use std::fs;",
        "File::options().read(true)",
        "fs::OpenOptions",
        "path.exists()",
        "mount(a, b)",
        "umount2(path, flags)",
        "std::os::unix::fs::symlink(a, b)",
        "tempfile::tempfile_in(dir)",
    ] {
        assert!(found(bad) > 0, "{bad}");
    }
    for good in ["use std::fs::File;", "use std::os::unix::fs::MetadataExt;", "dir.is_there()", "mounted::unmount"] {
        assert_eq!(found(good), 0, "{good}");
    }
}
