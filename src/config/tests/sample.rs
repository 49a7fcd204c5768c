//! config/rekindle.toml against the built-in defaults.

use super::*;

const SAMPLE: &str = include_str!("../../../config/rekindle.toml");

/// The file with every commented-out key switched on: those begin with # and no blank.
fn uncommented() -> String {
    SAMPLE
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase()) => key,
            _ => line,
        })
        .fold(String::new(), |text, line| text + line + "\n")
}

/// The keys that a text sets, an empty table among them.
fn keys_of(text: &str) -> BTreeSet<String> {
    let table: toml::Table = text.parse().unwrap();
    let mut keys = BTreeSet::new();
    for (section, value) in &table {
        match value {
            toml::Value::Table(inner) => keys.extend(inner.keys().map(|key| format!("{section}.{key}"))),
            _ => drop(keys.insert(section.clone())),
        }
    }
    keys
}

#[test]
fn its_values_are_the_defaults() {
    assert_eq!(load_text(SAMPLE).unwrap(), Config::default());
}

#[test]
fn it_has_every_key() {
    let built_in = table(&Config::default());
    let with_default = keys::KEYS.iter().filter(|key| value_at(&built_in, key.path).is_some());
    assert_eq!(keys_of(SAMPLE), with_default.map(|key| key.path.to_owned()).collect());
    assert_eq!(keys_of(&uncommented()), keys::KEYS.iter().map(|key| key.path.to_owned()).collect());
}

#[test]
fn its_examples_are_valid() {
    let config = load_text(&uncommented()).unwrap();
    assert_eq!(config.job.name.as_deref(), Some("train"));
    assert_eq!(config.criu.path.as_deref(), Some(Path::new("/usr/local/sbin/criu")));
}

#[test]
fn every_key_has_a_comment_before_it_and_every_limit_is_named() {
    let lines: Vec<&str> = SAMPLE.lines().collect();
    for key in keys::KEYS {
        let name = key.path.rsplit('.').next().unwrap();
        let is_key = |line: &str| line.trim_start_matches('#').starts_with(&format!("{name} = "));
        let at = lines.iter().position(|line| is_key(line)).unwrap();
        assert!(lines[at - 1].starts_with("# "), "{name} has no comment");
    }
    for limit in LIMITS {
        assert!(SAMPLE.contains(&format!(" {limit},")) || SAMPLE.contains(&format!(" {limit}.")), "{limit}");
    }
}
