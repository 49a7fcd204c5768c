//! config/rekindle.toml against the built-in defaults.

use super::*;

const SAMPLE: &str = include_str!("../../../config/rekindle.toml");

/// A file with every commented-out key switched on: those begin with # and no blank.
pub(super) fn uncommented(text: &str) -> String {
    text.lines()
        .map(|line| match line.strip_prefix('#') {
            Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => key,
            _ => line,
        })
        .fold(String::new(), |text, line| text + line + "\n")
}

/// The keys that a text sets, including empty tables.
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
    assert_eq!(keys_of(&uncommented(SAMPLE)), keys::KEYS.iter().map(|key| key.path.to_owned()).collect());
}

#[test]
fn its_keys_are_in_the_order_in_which_they_are_shown() {
    let text = uncommented(SAMPLE);
    let mut section = "";
    let mut seen = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match (line.strip_prefix('['), line.split_once(" = ")) {
            (Some(name), _) => section = name.trim_end_matches(']'),
            (None, Some((name, _))) if section.is_empty() => seen.push(name.to_owned()),
            (None, Some((name, _))) => seen.push(format!("{section}.{name}")),
            (None, None) => {}
        }
    }
    // `rules` stands at the top as a key, and may stand at the end as tables.
    assert_eq!(seen, keys::KEYS.iter().map(|key| key.path).collect::<Vec<_>>());
}

#[test]
fn its_examples_are_valid() {
    let config = load_text(&uncommented(SAMPLE)).unwrap();
    assert_eq!(config.job.name.as_deref(), Some("train"));
    assert_eq!(config.criu.path.as_deref(), Some(Path::new("/usr/local/sbin/criu")));
}

#[test]
fn every_key_has_a_comment_with_its_values_and_every_limit_is_named() {
    let lines: Vec<&str> = SAMPLE.lines().collect();
    for key in keys::KEYS {
        let name = key.path.rsplit('.').next().unwrap();
        let is_key = |line: &str| line.trim_start_matches('#').starts_with(&format!("{name} = "));
        let at = lines.iter().position(|line| is_key(line)).unwrap();
        assert!(lines[at - 1].starts_with("# "), "{name} has no comment");
        let comment: Vec<&str> = lines[..at].iter().rev().take_while(|line| line.starts_with('#')).copied().collect();
        // What an error offers as a value, not as an example of one.
        for word in key.expects.split("such as").next().unwrap().split('"').skip(1).step_by(2) {
            let word = word.split(':').next().unwrap();
            let is_told = |line: &&str| line.contains(&format!("\"{word}"));
            assert!(comment.iter().any(is_told) || is_told(&lines[at]), "the comment of {name} does not have {word:?}");
        }
    }
    for limit in LIMITS {
        assert!(SAMPLE.contains(&format!(" {limit},")) || SAMPLE.contains(&format!(" {limit}.")), "{limit}");
    }
}
