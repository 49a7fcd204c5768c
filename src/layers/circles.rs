//! Whether modules that lie side by side import each other in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::{code, is_test, sources, word};

/// From the root of the crate.
type Module = Vec<String>;

/// Reads one path of a `use`, or a list of them in braces. Returns the text behind it.
fn tree<'a>(text: &'a str, base: &[String], found: &mut Vec<Module>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        while !list.trim_start().starts_with('}') {
            let rest = tree(list, base, found);
            // What follows is `as NAME`, a comma or the end.
            let Some(end) = rest.find([',', '}']) else { return "" };
            let (_, rest) = rest.split_at(end);
            list = rest.strip_prefix(',').unwrap_or(rest);
        }
        return &list.trim_start()[1..];
    }
    let name = word(text);
    let rest = &text[name.len()..];
    let path = match name.as_str() {
        "self" => base.to_vec(),
        "super" => base[..base.len().saturating_sub(1)].to_vec(),
        name => base.iter().cloned().chain([name.to_owned()]).collect(),
    };
    match rest.strip_prefix("::") {
        Some(more) if !name.is_empty() => tree(more, &path, found),
        _ => {
            found.push(path);
            rest
        }
    }
}

/// What the code of a module names by a path from the root or from a module above it.
fn named(code: &str, module: &[String]) -> Vec<Module> {
    let mut found = Vec::new();
    for (start, base) in [("crate::", &[][..]), ("super::", module)] {
        for (at, _) in code.match_indices(start) {
            let is_inside = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            if !is_inside {
                let path = if base.is_empty() { &code[at + start.len()..] } else { &code[at..] };
                tree(path, base, &mut found);
            }
        }
    }
    found
}

/// The circles among modules with the same parent: what remains once all are taken away that import no other one, or are
/// imported by no other one.
fn circles(mut edges: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let imported: BTreeSet<String> = edges.values().flatten().cloned().collect();
        let before = edges.len();
        let importing: BTreeSet<String> = edges.keys().cloned().collect();
        edges.values_mut().for_each(|others| others.retain(|other| importing.contains(other)));
        edges.retain(|name, others| !others.is_empty() && imported.contains(name));
        if edges.len() == before {
            return edges;
        }
    }
}

/// The circles below the root of a crate, in words.
fn circles_below(root: &Path) -> Vec<String> {
    let mut all = BTreeMap::new();
    for path in sources(root) {
        let inside = path.strip_prefix(root).unwrap();
        if !is_test(inside) {
            let module: Module =
                inside.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            all.insert(module, code(&fs::read_to_string(&path).unwrap()));
        }
    }
    let mut edges: BTreeMap<Module, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (module, code) in &all {
        for name in named(code, module) {
            let lengths = (1..=name.len()).rev();
            let Some(target) = lengths.map(|length| &name[..length]).find(|path| all.contains_key(*path)) else {
                continue;
            };
            let common = module.iter().zip(target).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(common), target.get(common)) {
                edges.entry(module[..common].to_vec()).or_default().entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    let found = edges.into_iter().flat_map(|(parent, edges)| {
        let words = move |(name, others): (String, BTreeSet<String>)| {
            let others: Vec<String> = others.into_iter().collect();
            format!("{}: {name} imports {}", parent.join("/"), others.join(", "))
        };
        circles(edges).into_iter().map(words).collect::<Vec<_>>()
    });
    found.collect()
}

#[test]
fn modules_side_by_side_import_each_other_in_no_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    for folder in crates.chain([root.to_owned(), root.join("native/plugin"), root.join("native/reaper")]) {
        let found = circles_below(&folder.join("src"));
        assert_eq!(found, [""; 0], "{}:\n{}", folder.display(), found.join("\n"));
    }
}

#[test]
fn a_circle_is_found_in_each_form_of_an_import() {
    let module = ["a".to_owned(), "b".to_owned()];
    let paths = |code: &str| named(code, &module).iter().map(|path| path.join("::")).collect::<Vec<_>>();
    assert_eq!(
        paths("use super::c::{self, D as E, f::{G, H}};\nuse super::I;"),
        ["a::c", "a::c::D", "a::c::f::G", "a::c::f::H", "a::I"]
    );
    assert_eq!(paths("let x = crate::y::z(1); super::super::w();"), ["y::z", "w"]);
    assert_eq!(paths("use other_crate::x;"), [""; 0]);
    let edges = |all: &[(&str, &str)]| {
        let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in all {
            edges.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        circles(edges).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(edges(&[("a", "b"), ("b", "c"), ("a", "c")]), [""; 0]);
    assert_eq!(edges(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]), ["b", "c"]);
}
