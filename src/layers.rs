//! The modules of this crate lie in layers: each imports only what lies below it. Read off the sources, so that a circle
//! fails a test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The lowest first. A module may import those before it.
const LAYERS: [&str; 20] = [
    "base",
    "sys",
    "store",
    "launch",
    "guard",
    "snapshot",
    "restart",
    "config",
    "policy",
    "published",
    "telemetry",
    "scheduler",
    "watch",
    "control",
    "word",
    "hooks",
    "doctor",
    "report",
    "supervisor",
    "cli",
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The code without comments and without tests, which may use what they like.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// The modules that the code names after `crate::`, alone or in braces.
fn named(code: &str) -> BTreeSet<String> {
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
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

#[test]
fn each_module_imports_only_what_lies_below_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut wrong, mut seen) = (Vec::new(), BTreeSet::new());
    for path in sources(&root) {
        let inside = path.strip_prefix(&root).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.trim_end_matches(".rs");
        let is_test = inside.iter().any(|part| ["tests", "tests.rs", "simulator"].iter().any(|test| part == *test));
        if ["lib", "main", "layers", "test_gate"].contains(&module) || is_test {
            continue;
        }
        let Some(layer) = LAYERS.iter().position(|layer| *layer == module) else {
            wrong.push(format!("{module} is in no layer"));
            continue;
        };
        seen.insert(module.to_owned());
        for other in named(&code(&fs::read_to_string(&path).unwrap())) {
            let below = LAYERS.iter().position(|layer| *layer == other);
            if below.is_some_and(|below| below > layer) {
                wrong.push(format!("{} imports {other}, which lies above {module}", inside.display()));
            }
        }
    }
    assert_eq!(wrong, [""; 0], "\n{}", wrong.join("\n"));
    assert_eq!(seen.len(), LAYERS.len(), "a layer that is gone");
}

#[test]
fn imports_are_found_in_each_form() {
    let code =
        "use crate::store::{self, Image};\nuse crate::{config::{A, B}, sys};\nfn f() { crate::base::chain(); }\n";
    assert_eq!(named(code).into_iter().collect::<Vec<_>>(), ["base", "config", "store", "sys"]);
}
