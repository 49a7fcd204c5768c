//! What imports what, read off the sources and off Cargo, so that a circle fails a test. And how large a struct may be.
//!
//! Crates are in layers, which Cargo enforces: a crate can only use its dependencies. Modules within a crate could form
//! cycles, so those of most crates are in layers too: each may import only earlier ones. Modules within a module import
//! each other in no circle ([`circles`]). The rest is `native/preload`, whose table of hooks names the functions that use
//! it.

mod circles;
mod doors;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates, lowest first. Each may use only those before it.
const CRATES: [&str; 12] = [
    "rekindle-abi",
    "rekindle-base",
    "rekindle-group",
    "rekindle-os",
    "rekindle-objects",
    "rekindle-etcd",
    "rekindle-criu",
    "rekindle-cuda",
    "rekindle-store",
    "rekindle-engine",
    "rekindle-replica",
    "rekindle",
];

/// The modules of the plain data.
const BASE: [&str; 10] =
    ["chain", "ended", "micros", "moved", "notice", "percentage", "units", "xid", "cause", "interval"];

/// The modules for Linux.
const OS: [&str; 46] = [
    "affinity",
    "undo",
    "attributes",
    "same",
    "scheduling",
    "sockopt",
    "blocks",
    "sparse",
    "beneath",
    "regular",
    "shielded",
    "xattr",
    "clock",
    "timerfd",
    "detach",
    "elf",
    "identity",
    "datagrams",
    "descriptor_table",
    "descriptors",
    "inherited",
    "leases",
    "links",
    "maps",
    "mounts",
    "inotify",
    "parallel",
    "point",
    "sock_diag",
    "durable",
    "fence",
    "netns",
    "pages",
    "process",
    "stopped",
    "view",
    "cgroup",
    "direct",
    "ptrace",
    "rights",
    "spawn",
    "tcp_repair",
    "terminal",
    "ulp",
    "unix_diag",
    "exits",
];

/// The modules of etcd's client.
const ETCD: [&str; 13] = [
    "error", "messages", "options", "handout", "members", "runtime", "txn", "lease", "read", "follow", "client",
    "check", "local",
];

/// The modules of the record of kernel objects.
const OBJECTS: [&str; 13] = [
    "table",
    "record",
    "policy",
    "answers",
    "advice",
    "compare",
    "format",
    "multicast",
    "inotify",
    "settings",
    "signals",
    "put_back",
    "read",
];

/// The modules for CRIU.
const CRIU: [&str; 5] = ["log", "plugin", "proto", "image", "rpc"];

/// The modules for the CUDA driver.
const CUDA: [&str; 16] = [
    "packet",
    "candidate",
    "function",
    "job_table",
    "state",
    "uuid",
    "version",
    "nvml",
    "reasons",
    "error",
    "ffi",
    "nccl",
    "sharing",
    "driver",
    "copier",
    "process",
];

/// The modules of CRIU's plugin.
const PLUGIN: [&str; 8] = ["accept", "sys", "tracee", "ask", "rights", "trusted", "files", "hooks"];

/// The modules of the engine.
const ENGINE: [&str; 5] = ["steps", "launch", "parts", "snapshot", "restore"];

/// The modules of the replica.
const REPLICA: [&str; 17] = [
    "environment",
    "url",
    "error",
    "folder",
    "connect",
    "client",
    "layout",
    "read_mark",
    "replica",
    "read",
    "spans",
    "cover",
    "send",
    "upload",
    "fetch",
    "chunks",
    "retain",
];

/// The modules of the store: plain data, single files, what a job's folder has, and what is done with all of it.
const STORE: [&str; 42] = [
    "names",
    "id",
    "options",
    "file_error",
    "hex",
    "holder",
    "format",
    "chunk",
    "tag",
    "trust",
    "paths",
    "manifest",
    "error",
    "files",
    "folders",
    "rights",
    "links",
    "mark",
    "image",
    "tags",
    "select",
    "record",
    "lock",
    "seen",
    "pack",
    "folder",
    "store",
    "staging",
    "known",
    "proven",
    "evidence",
    "draft",
    "remove",
    "remove_job",
    "gc",
    "retention",
    "take",
    "persist",
    "heal",
    "unpack",
    "verify",
    "repair",
];

/// The modules of the product.
const PRODUCT: [&str; 15] = [
    "variables",
    "config",
    "policy",
    "published",
    "telemetry",
    "scheduler",
    "watch",
    "control",
    "job_api",
    "notifications",
    "report",
    "group",
    "doctor",
    "supervisor",
    "cli",
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The code without comments and without tests, which may import anything.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// Whether a file below the root of a crate has only tests, which may import anything.
fn is_test(path: &Path) -> bool {
    path.iter().any(|part| ["tests", "tests.rs", "simulator", "simulator.rs"].iter().any(|test| part == *test))
}

/// The name at the beginning of the text.
fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The names in the code after the root of the crate, alone or in braces: after `crate::`, or after as many `super::` as
/// the module lies deep.
fn named(code: &str, depth: usize) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let by_crate = code.split("crate::").skip(1);
    let above = "super::".repeat(depth);
    let by_super = code.match_indices(&above).filter_map(|(at, _)| {
        let rest = code.get(at + above.len()..)?;
        (!code[..at].ends_with("super::") && !rest.starts_with("super::")).then_some(rest)
    });
    for rest in by_crate.chain(by_super) {
        match rest.strip_prefix('{') {
            None => drop(found.insert(word(rest))),
            Some(list) => {
                let (mut depth, mut item) = (0, String::new());
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => drop(found.insert(word(std::mem::take(&mut item).trim()))),
                        c if depth == 0 => item.push(c),
                        _ => {}
                    }
                }
                found.insert(word(item.trim()));
            }
        }
    }
    found
}

/// The names that the root of a crate passes on from its modules, with the module of each.
fn passed_on(root: &str) -> BTreeMap<String, String> {
    let statements = root.split(';').filter_map(|text| text.trim().strip_prefix("pub use "));
    let parts = statements.filter_map(|text| text.split_once("::"));
    let each = |(module, names): (&str, &str)| -> Vec<(String, String)> {
        let names = names.trim_matches(['{', '}']).split(',').map(|name| word(name.trim()));
        names.filter(|name| !name.is_empty()).map(|name| (name, module.to_owned())).collect()
    };
    parts.flat_map(each).collect()
}

/// The wrong imports below `root`, and the modules that were found.
fn misplaced(root: &Path, layers: &[&str]) -> (Vec<String>, BTreeSet<String>) {
    let (mut wrong, mut seen) = (Vec::new(), BTreeSet::new());
    let passed_on = passed_on(&code(&fs::read_to_string(root.join("lib.rs")).unwrap()));
    for path in sources(root) {
        let inside = path.strip_prefix(root).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.trim_end_matches(".rs");
        if ["lib", "main", "layers", "samples"].contains(&module) || is_test(inside) {
            continue;
        }
        let Some(layer) = layers.iter().position(|layer| *layer == module) else {
            wrong.push(format!("{module} is in no layer"));
            continue;
        };
        seen.insert(module.to_owned());
        let depth = inside.components().count() - usize::from(inside.ends_with("mod.rs"));
        for other in named(&code(&fs::read_to_string(&path).unwrap()), depth) {
            let other = passed_on.get(&other).unwrap_or(&other);
            let below = layers.iter().position(|layer| *layer == other.as_str());
            if below.is_some_and(|below| below > layer) {
                wrong.push(format!("{} imports {other}, which lies above {module}", inside.display()));
            }
        }
    }
    (wrong, seen)
}

#[test]
fn each_module_imports_only_what_lies_below_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (folder, layers) in [
        ("src", &PRODUCT[..]),
        ("crates/base/src", &BASE[..]),
        ("crates/os/src", &OS[..]),
        ("crates/etcd/src", &ETCD[..]),
        ("crates/criu/src", &CRIU[..]),
        ("crates/cuda/src", &CUDA[..]),
        ("native/plugin/src", &PLUGIN[..]),
        ("crates/engine/src", &ENGINE[..]),
        ("crates/objects/src", &OBJECTS[..]),
        ("crates/replica/src", &REPLICA[..]),
        ("crates/store/src", &STORE[..]),
    ] {
        let (wrong, seen) = misplaced(&root.join(folder), layers);
        assert_eq!(wrong, [""; 0], "\n{}", wrong.join("\n"));
        assert_eq!(seen.len(), layers.len(), "{folder}: a layer that is gone");
    }
}

/// For each crate of ours, the crates of ours that it uses outside of tests, from Cargo.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let mut found = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let used = package["dependencies"].as_array().unwrap().iter();
        let used = used.filter(|used| used["kind"].is_null()).map(|used| text(&used["name"]));
        found.insert(text(&package["name"]), used.filter(|name| name.starts_with("rekindle")).collect());
    }
    found
}

#[test]
fn each_crate_uses_only_those_below_it() {
    let found = dependencies();
    let layer = |name: &str| CRATES.iter().position(|it| *it == name);
    for (name, used) in &found {
        let Some(of) = layer(name) else {
            assert!(
                ["rekindle-testing", "standin-cuda", "standin-nccl"].contains(&name.as_str()),
                "{name} is in no layer"
            );
            continue;
        };
        for other in used {
            assert!(layer(other).is_some_and(|other| other < of), "{name} uses {other}, which does not lie below it");
        }
    }
    assert!(CRATES.iter().all(|name| found.contains_key(*name)), "a crate that is gone: {:?}", found.keys());
}

/// Fields that a struct may have. One with more is made of parts that have no name yet.
const MOST_FIELDS: usize = 14;

/// Marks of structs whose fields are given by a document: a file, a command line, a protocol, memory that others lay out.
const DOCUMENTS: [&str; 6] = ["Serialize", "Deserialize", "Args", "Parser", "Message", "repr(C)"];

/// The structs that are no documents, with the number of their fields. Relies on the layout of rustfmt.
fn structs(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let Some((seen, rest)) = code.split_once("struct ") else { continue };
        if !code.ends_with('{') || !(seen.is_empty() || seen.starts_with("pub")) {
            continue;
        }
        let above = lines[..n].iter().rev().take_while(|line| !line.trim().is_empty() && line.trim() != "}");
        if above.filter(|line| !line.contains("//")).any(|line| DOCUMENTS.iter().any(|mark| line.contains(mark))) {
            continue;
        }
        let end = format!("{indent}}}");
        let within = lines[n + 1..].iter().take_while(|line| **line != end);
        let field = |line: &&&str| {
            let inside = line.strip_prefix(indent).and_then(|line| line.strip_prefix("    ")).unwrap_or_default();
            // What is indented more belongs to the type of a field.
            !inside.starts_with([' ', '#', '/', ')', '}', '>']) && inside.contains(": ")
        };
        found.push((rest.chars().take_while(|c| c.is_alphanumeric()).collect(), within.filter(field).count()));
    }
    found
}

#[test]
fn no_struct_is_a_bag_of_fields() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["src", "crates", "native", "integration"];
    let all = folders.iter().flat_map(|folder| sources(&root.join(folder)));
    let mut seen = 0;
    let mut wrong = Vec::new();
    for path in all.filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        let structs = structs(&fs::read_to_string(&path).unwrap());
        seen += structs.len();
        let large = structs.iter().filter(|(_, fields)| *fields > MOST_FIELDS);
        wrong.extend(large.map(|(name, fields)| format!("{}: {name} has {fields} fields", path.display())));
    }
    assert_eq!(wrong, [""; 0], "\n{}", wrong.join("\n"));
    assert!(seen > 300, "only {seen} structs were seen");
}

#[test]
fn fields_are_counted_and_documents_are_left_out() {
    let text = "/// A.\n#[derive(Debug)]\npub(crate) struct A<'a> {\n    /// One: it.\n    a: &'a str,\n    #[x(y: z)]\n    \
        pub b: Vec<\n        (u8, c: u8),\n    >,\n}\n\n/// Not Serialize.\n#[derive(Serialize)]\nstruct B {\n    a: u8,\n}\n\n    \
        struct C {\n        a: u8,\n    }\nstruct D;\n";
    assert_eq!(structs(text), [("A".to_owned(), 2), ("C".to_owned(), 1)]);
}

#[test]
fn imports_are_found_in_each_form() {
    let code = "use crate::store::{self, Image};\nuse crate::{config::{A, B}, sys};\nfn f() { crate::base::chain(); }\n\
        use super::sibling;\nuse super::super::{lock, Name};\nuse super::super::super::beyond;\n";
    let all = ["base", "config", "sibling", "store", "sys"];
    assert_eq!(named(code, 1).into_iter().collect::<Vec<_>>(), all);
    let all = ["Name", "base", "config", "lock", "store", "sys"];
    assert_eq!(named(code, 2).into_iter().collect::<Vec<_>>(), all);
    let root = "mod a;\npub use a::{\n    B, C,\n};\npub use d::E;\n";
    let names = [("B", "a"), ("C", "a"), ("E", "d")];
    assert_eq!(passed_on(root), names.map(|(name, module)| (name.to_owned(), module.to_owned())).into());
}
