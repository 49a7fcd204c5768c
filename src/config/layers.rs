//! The layers of settings, each converted to the same list: key, value, source.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use toml::Value;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::emergency;
use super::error::{Fault, Problem};
use super::keys::{self, Key, SECTIONS, Shape};
use super::value::HIDDEN;
use super::{Config, Origin, Overrides};

/// One value that was set.
#[derive(Clone)]
pub(super) struct Setting {
    pub(super) key: &'static Key,
    /// The name within a key that is a map.
    pub(super) entry: Option<String>,
    pub(super) value: Value,
    pub(super) origin: Origin,
}

impl Setting {
    /// The key as it is named in messages and tables: "job.limits.nofile".
    pub(super) fn path(&self) -> String {
        match &self.entry {
            Some(entry) => format!("{}.{entry}", self.key.path),
            None => self.key.path.to_owned(),
        }
    }

    /// The value as TOML, hidden if it may be a secret.
    pub(super) fn shown(&self) -> String {
        let text = self.value.to_string();
        if self.key.is_secret(&text) { HIDDEN.to_owned() } else { text }
    }

    /// The number of a table in a list.
    pub(super) fn number(&self) -> Option<usize> {
        self.entry.as_ref().filter(|_| self.key.shape == Shape::Tables)?.parse().ok()
    }

    /// Puts the value into a table with the structure of the file. Tables of a list must be put in in order.
    pub(super) fn put(&self, into: &mut toml::Table) {
        if self.number().is_some() {
            let list = into.entry(self.key.path).or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                list.push(self.value.clone());
            }
            return;
        }
        let mut table = into;
        let path = self.path();
        // An entry's name may contain dots: at most section, key and entry.
        let mut parts = path.splitn(3, '.').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                table.insert(part.to_owned(), self.value.clone());
                return;
            }
            let inner = table.entry(part).or_insert_with(|| Value::Table(toml::Table::new()));
            let Value::Table(inner) = inner else { return };
            table = inner;
        }
    }

    /// Checks that the value has its key's type, with the configuration's own parser.
    pub(super) fn check(&self) -> Result<(), Problem> {
        let mut alone = toml::Table::new();
        self.put(&mut alone);
        Config::deserialize(alone).map(|_| ()).map_err(|error| match self.key.shape {
            // A table has many fields, so the parser's message is included.
            Shape::Tables => self.problem(&format!("must be {}: {}", self.key.expects, error.message())),
            _ => self.problem(&format!("must be {}", self.key.expects)),
        })
    }

    /// The problem that this value breaks a rule.
    pub(super) fn problem(&self, rule: &str) -> Problem {
        let fault = Fault::Value { key: self.path(), value: self.shown(), rule: rule.to_owned() };
        Problem { origin: self.origin.clone(), fault }
    }
}

/// The result of all layers: settings, later ones overriding earlier ones, and problems.
#[derive(Default)]
pub(super) struct Layers {
    pub(super) settings: Vec<Setting>,
    pub(super) problems: Vec<Problem>,
    /// Variables for emergencies, with their values.
    pub(super) emergencies: Vec<(&'static emergency::Variable, String)>,
    /// Sentences about variables that look like ours and are not.
    pub(super) strangers: Vec<String>,
}

impl Layers {
    /// Adds the text of a file. A list of tables replaces that of earlier files.
    pub(super) fn file(&mut self, path: &Path, text: &str) {
        let before = self.settings.len();
        self.add_file(path, text);
        let of_list = |setting: &Setting| setting.number().map(|_| setting.key.path);
        let added: Vec<&str> = self.settings.iter().skip(before).filter_map(of_list).collect();
        let mut at = 0;
        self.settings.retain(|setting| {
            at += 1;
            at > before || of_list(setting).is_none_or(|list| !added.contains(&list))
        });
    }

    fn add_file(&mut self, path: &Path, text: &str) {
        let at = |offset: usize| {
            let line = text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1;
            Origin::File { path: path.to_owned(), line }
        };
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(e) => {
                // Only the message: the full text of the error quotes the line, which may contain a secret.
                let fault = Fault::Syntax(e.message().replace('\n', ", "));
                return self.problems.push(Problem { origin: at(e.span().map_or(0, |span| span.start)), fault });
            }
        };
        if !table.contains_key("version") {
            self.problems.push(Problem { origin: at(0), fault: Fault::NoVersion });
        }
        for (name, value) in table {
            let origin = at(name.span().start);
            match value.into_inner() {
                DeValue::Table(section) if SECTIONS.contains(&name.get_ref().as_ref()) => {
                    for (inner, value) in section {
                        let path = format!("{}.{}", name.get_ref(), inner.get_ref());
                        self.set(&path, value.into_inner(), at(inner.span().start), &at);
                    }
                }
                DeValue::Table(_) if keys::find(name.get_ref()).is_none() => {
                    let nearest = keys::nearest_word(name.get_ref(), SECTIONS.iter().copied());
                    self.unknown(origin, "table", &format!("[{}]", name.get_ref()), nearest.map(|n| format!("[{n}]")));
                }
                value if SECTIONS.contains(&name.get_ref().as_ref()) => {
                    let rule = format!("must be a table, written [{}]", name.get_ref());
                    // Only its type: it may contain job.environment.
                    let value = value.type_str().to_owned();
                    let fault = Fault::Value { key: name.get_ref().to_string(), value, rule };
                    self.problems.push(Problem { origin, fault });
                }
                value => self.set(name.get_ref(), value, origin, &at),
            }
        }
        // The parser's tables are sorted by name, but people read from the top.
        self.settings.sort_by(|a, b| a.origin.cmp(&b.origin));
    }

    /// Adds one key of the file; `at` returns the origin of what begins at that byte.
    fn set(&mut self, path: &str, value: DeValue<'_>, origin: Origin, at: &impl Fn(usize) -> Origin) {
        let Some(key) = keys::find(path) else {
            return self.unknown(origin, "key", path, keys::nearest(path).map(str::to_owned));
        };
        if let (Shape::Map, DeValue::Table(entries)) = (key.shape, &value) {
            for (name, value) in entries {
                let origin = at(name.span().start);
                self.add(key, Some(name.get_ref().to_string()), value.get_ref().clone(), origin);
            }
        } else if let (Shape::Tables, DeValue::Array(items)) = (key.shape, &value) {
            for (n, item) in (1usize..).zip(items.iter()) {
                let origin = at(item.span().start);
                self.add(key, Some(n.to_string()), item.get_ref().clone(), origin);
            }
        } else {
            self.add(key, None, value, origin);
        }
    }

    fn add(&mut self, key: &'static Key, entry: Option<String>, value: DeValue<'_>, origin: Origin) {
        match plain(value) {
            Ok(value) => self.settings.push(Setting { key, entry, value, origin }),
            Err(message) => self.problems.push(Problem { origin, fault: Fault::Syntax(message) }),
        }
    }

    fn unknown(&mut self, origin: Origin, what: &'static str, name: &str, nearest: Option<String>) {
        let name = name.to_owned();
        let fault = match keys::removed(&name) {
            Some(why) => Fault::Removed { name, why },
            None => Fault::Unknown { what, name, nearest },
        };
        self.problems.push(Problem { origin, fault });
    }

    /// Adds the variables REKINDLE_SECTION_KEY. An unknown one is a problem if it is of a section or misspelt;
    /// otherwise it may be somebody else's, and is only named.
    pub(super) fn environment(&mut self, variables: impl Iterator<Item = (String, String)>) {
        let known: BTreeMap<String, &'static Key> =
            keys::KEYS.iter().filter_map(|key| key.variable().map(|name| (name, key))).collect();
        let names: Vec<String> = known.keys().cloned().collect();
        let of_a_section = |name: &str| {
            SECTIONS
                .iter()
                .any(|section| name.starts_with(&format!("REKINDLE_{}_", section.to_uppercase().replace('-', "_"))))
        };
        // Sorted, because the order of the environment is random.
        for (name, text) in variables.collect::<BTreeMap<_, _>>() {
            let origin = Origin::Environment { variable: name.clone() };
            match known.get(&name) {
                Some(key) => self.variable(key, &text, &origin),
                None if emergency::find(&name).is_some() => self.emergency(name, text),
                None if keys::is_no_key(&name) => {}
                None => match keys::nearest_variable(&name, &names) {
                    (nearest, is_misspelt) if is_misspelt || of_a_section(&name) || keys::removed(&name).is_some() => {
                        self.unknown(origin, "variable", &name, nearest);
                    }
                    (nearest, _) => {
                        let hint = match nearest {
                            _ if name == "REKINDLE_CONFIG" => "; name the file with --config".to_owned(),
                            Some(nearest) => format!("; did you mean {nearest}?"),
                            None => String::new(),
                        };
                        self.strangers.push(format!("the variable {name} is ignored: rekindle does not know it{hint}"));
                    }
                },
            }
        }
    }

    fn emergency(&mut self, name: String, text: String) {
        let Some(variable) = emergency::find(&name) else { return };
        if (variable.set)(&mut Config::default(), &text).is_some() {
            return self.emergencies.push((variable, text));
        }
        let rule = format!("must be {}", variable.expects);
        let origin = Origin::Environment { variable: name.clone() };
        self.problems.push(Problem { origin, fault: Fault::Value { key: name, value: text, rule } });
    }

    fn variable(&mut self, key: &'static Key, text: &str, origin: &Origin) {
        let integer = |text: &str| text.trim().parse().map_or_else(|_| Value::from(text.trim()), Value::Integer);
        let items = || text.split(',').map(str::trim).filter(|item| !item.is_empty());
        let whole = |value| Setting { key, entry: None, value, origin: origin.clone() };
        match key.shape {
            Shape::Text => self.settings.push(whole(Value::from(text))),
            Shape::Count => self.settings.push(whole(integer(text))),
            Shape::Flag => {
                let flag = text.parse().map_or_else(|_| Value::from(text), Value::Boolean);
                self.settings.push(whole(flag));
            }
            // These keys have no variable.
            Shape::Tables => {}
            Shape::Words => {
                let words = text.split_whitespace().map(Value::from);
                self.settings.push(whole(Value::Array(words.collect())));
            }
            Shape::Map => {
                for item in items() {
                    match item.split_once('=') {
                        Some((name, value)) => self.settings.push(Setting {
                            key,
                            entry: Some(name.to_owned()),
                            value: Value::from(value),
                            origin: origin.clone(),
                        }),
                        None => self
                            .problems
                            .push(whole(Value::from(text)).problem(
                                "must be NAME=VALUE, separated by commas; put values with commas in the file",
                            )),
                    }
                }
            }
        }
    }

    /// Adds the settings from the command line.
    pub(super) fn flags(&mut self, overrides: &Overrides) {
        let typed = [
            ("job.name", "--name", overrides.name.clone().map(Value::from)),
            ("snapshot.interval", "--interval", overrides.interval.clone().map(Value::from)),
            ("snapshot.grace", "--grace", overrides.grace.clone().map(Value::from)),
            ("scheduler.deadline", "--deadline", overrides.deadline.clone().map(Value::from)),
            ("group.nodes", "--nodes", overrides.nodes.map(Value::from)),
            ("group.node-rank", "--node-rank", overrides.node_rank.map(Value::from)),
            ("group.coordinator", "--coordinator", overrides.coordinator.clone().map(Value::from)),
            ("store.directory", "--store", overrides.store.as_deref().map(|path| Value::from(absolute(path)))),
        ];
        for (path, flag, value) in typed {
            if let (Some(key), Some(value)) = (keys::find(path), value) {
                let origin = Origin::Flag { flag };
                self.settings.push(Setting { key, entry: None, value, origin });
            }
        }
    }
}

/// Makes a path on the command line absolute. A path that is not UTF-8 is refused later, by its rule.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}

/// The value without its positions in the text.
fn plain(value: DeValue<'_>) -> Result<Value, String> {
    let spanned = toml::Spanned::new(0..0, value);
    Value::deserialize(ValueDeserializer::from(spanned)).map_err(|e| e.message().to_owned())
}
