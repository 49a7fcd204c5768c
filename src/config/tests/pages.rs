//! The configuration in docs/ and README.md: what a reader copies from there is valid, and a key that is named exists.

use std::fs;

use super::model::VERSION;
use super::*;

/// The pages, each with its name.
fn pages() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of = |folder: &str| fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let docs = of("docs").chain(of("docs/internals"));
    let outside = ["README.md", "SECURITY.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root.join(name));
    let pages = docs.chain(outside).filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.map(|path| (path.file_name().unwrap().to_string_lossy().into(), fs::read_to_string(path).unwrap())).collect()
}

/// The blocks of TOML that are for rekindle, each with its page.
fn blocks() -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    for (name, page) in pages() {
        for block in page.split("```toml\n").skip(1) {
            blocks.push((name.clone(), block.split("```").next().unwrap().to_owned()));
        }
    }
    blocks
}

/// With the version, which a file needs and an extract does not.
fn as_file(block: &str) -> String {
    if block.contains("version = ") { block.to_owned() } else { format!("version = {VERSION}\n{block}") }
}

#[test]
fn what_they_show_is_valid() {
    let blocks = blocks();
    for (name, block) in &blocks {
        for text in [as_file(block), sample::uncommented(&as_file(block))] {
            assert_eq!(problems(&text), [""; 0], "{name}:\n{text}");
        }
    }
    assert!(blocks.len() >= 7, "only {} were found", blocks.len());
}

#[test]
fn no_table_hides_from_that() {
    let is_table = |line: &&str| {
        let name = line.trim_start_matches([' ', '[']).split(']').next().unwrap_or_default();
        line.starts_with("    [") && (name == "rules" || keys::SECTIONS.contains(&name))
    };
    for (name, page) in pages() {
        assert_eq!(page.lines().find(is_table), None, "{name}: write it as a block of toml");
    }
}

#[test]
fn the_keys_to_know_are_shown_with_their_defaults() {
    let (_, block) = blocks().into_iter().find(|(name, _)| name == "configuration.md").unwrap();
    assert_eq!(load_text(&block).unwrap(), Config::default());
}

/// What stands between single backticks, if it begins like a key: `store.keep-last`, `store.keep-last = 5`.
fn named(page: &str) -> Vec<&str> {
    let is_key = |text: &&str| {
        let Some((section, name)) = text.split_once('.') else { return false };
        let name = name.split(" = ").next().unwrap_or_default();
        let is_file = ["json", "py", "rs"].contains(&name);
        keys::SECTIONS.contains(&section) && !is_file && name.chars().all(|c| c.is_ascii_lowercase() || c == '-')
    };
    page.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).filter(is_key).collect()
}

#[test]
fn a_key_that_they_name_exists() {
    let pages = pages();
    let mut seen = 0;
    for (page, text) in &pages {
        for said in named(text) {
            seen += 1;
            let (path, value) = said.split_once(" = ").unzip();
            let path = path.unwrap_or(said);
            assert!(keys::find(path).is_some(), "{page} names `{said}`, and there is no such key");
            if let Some((value, (section, name))) = value.zip(path.split_once('.')) {
                let text = as_file(&format!("[{section}]\n{name} = {value}\n"));
                assert_eq!(problems(&text), [""; 0], "{page}: `{said}`");
            }
        }
    }
    assert!(seen > 100, "only {seen} were seen");
}
