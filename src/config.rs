//! The configuration: TOML, typed and then validated; touches nothing but the file it reads.
//!
//! Four layers, each stronger than the one before: the built-in defaults, the file, the environment
//! (`REKINDLE_SECTION_KEY`, `REKINDLE_STORE_KEEP_LAST=5`), the command line. What they set becomes one list of
//! settings; each is checked against the type of its key, the strongest of each key make up the [`Config`], and the
//! rules are checked on that. Everything found wrong on the way is reported together.
//!
//! - A [`Config`] that came from [`load`] holds all rules.
//! - Unknown keys, tables and variables are errors, never ignored: a misspelt `keep-last` must not cost an image.
//! - As root, a file that others can write is not obeyed.
//! - Values of `job.environment` are in no message, table or JSON.

mod auto;
mod control;
mod error;
mod file;
mod files;
mod gpu;
mod job_api;
mod keys;
mod layers;
mod model;
mod network;
mod notifications;
mod options;
mod rules;
mod scheduler;
mod storage;
#[cfg(test)]
mod tests;
mod value;
pub(crate) mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use auto::MeanTime;
pub(crate) use error::{Error, Fault, Problem};
pub(crate) use model::{
    ColdStart, Config, EnvironmentMode, Interposer, Level, OnSuccess, PidNamespace, Restart, Snapshot, Staging, Store,
};
pub(crate) use network::{NetworkMode, UplinkMode};
pub(crate) use notifications::{Hooks, LogFormat, OnError, WebhookUrl};
pub(crate) use scheduler::{Deadline, Profile, Requeue};
pub(crate) use storage::{SizeLimit, Threads, VerifyRate};
pub(crate) use value::{Interval, Limit, Rate, Stdin};
pub(crate) use watch::{CauseName, GpuFaults, HangAction, Match, Pattern, Rule, RuleAction, Watch};

use layers::{Layers, Setting};

/// The file that is read when none is named and this one exists.
pub(crate) const DEFAULT_FILE: &str = "/etc/rekindle/rekindle.toml";

/// What was typed on the command line, the strongest layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Overrides {
    /// `--name`, for `job.name`.
    pub name: Option<String>,
    /// `--interval`, for `snapshot.interval`.
    pub interval: Option<String>,
    /// `--grace`, for `snapshot.grace`.
    pub grace: Option<String>,
    /// `--deadline`, for `scheduler.deadline`.
    pub deadline: Option<String>,
    /// `--store`, for `store.directory`; a relative path is taken from the working directory.
    pub store: Option<PathBuf>,
}

/// Where a value comes from. The order is that of reports: the file from its top, then the environment, then flags.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case", tag = "from")]
pub enum Origin {
    /// The configuration file.
    File {
        /// Its path as it was named.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// The environment of this process.
    Environment {
        /// The name of the variable.
        variable: String,
    },
    /// The command line.
    Flag {
        /// The flag with its dashes.
        flag: &'static str,
    },
    /// Built in.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Environment { variable } => f.write_str(variable),
            Origin::Flag { flag } => f.write_str(flag),
            Origin::Default => f.write_str("default"),
        }
    }
}

/// A valid configuration and where each value of it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Effective {
    /// The configuration.
    pub config: Config,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// By key ("store.keep-last", "job.limits.nofile"); what is not in it is built in.
    origins: BTreeMap<String, Origin>,
}

/// One line of `config show`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Entry {
    /// The key with its section, and the name within it for a map.
    pub key: String,
    /// The value; none if the key is not set. Values of `job.environment` are [`HIDDEN`].
    pub value: Option<toml::Value>,
    /// Where it comes from.
    pub origin: Origin,
}

impl Effective {
    /// Every key with its value and origin, in the order of the file.
    #[must_use]
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let table = table(&self.config);
        let mut entries = Vec::new();
        for key in keys::KEYS {
            match value_at(&table, key.path) {
                Some(toml::Value::Array(tables)) if key.shape == keys::Shape::Tables && !tables.is_empty() => {
                    let path = |n: usize| format!("{}.{n}", key.path);
                    entries.extend((1..).zip(tables).map(|(n, value)| self.entry(path(n), Some(value))));
                }
                Some(toml::Value::Table(map)) if !map.is_empty() => {
                    entries.extend(
                        map.iter().map(|(name, value)| self.entry(format!("{}.{name}", key.path), Some(value))),
                    );
                }
                value => entries.push(self.entry(key.path.to_owned(), value)),
            }
        }
        entries
    }

    fn entry(&self, key: String, value: Option<&toml::Value>) -> Entry {
        let origin = self.origins.get(&key).cloned().unwrap_or(Origin::Default);
        Entry { value: value.cloned(), origin, key }
    }
}

/// The configuration as a table; the values of `job.environment` are hidden in it.
fn table(config: &Config) -> toml::Table {
    // Fails only for paths that are not UTF-8, and each path here was read from UTF-8 text.
    toml::Table::try_from(config).unwrap_or_default()
}

fn value_at<'a>(table: &'a toml::Table, path: &str) -> Option<&'a toml::Value> {
    match path.split_once('.') {
        Some((section, name)) => table.get(section)?.get(name),
        None => table.get(path),
    }
}

/// The variables of this process that may be configuration, for [`load`]. Unlike `std::env::vars` it does not panic
/// where a variable is not UTF-8.
pub(crate) fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(move |(name, value)| (text(name), text(value)))
        .filter(|(name, _)| name.starts_with("REKINDLE_"))
}

/// Whether a variable is a part of the configuration that may hold a secret of ours, such as an address or a token for hooks.
#[must_use]
pub(crate) fn may_hold_secret(variable: &str) -> bool {
    let named = |key: &keys::Key| key.variable().is_some_and(|name| name == variable);
    keys::KEYS.iter().any(|key| key.may_hold_ours() && named(key))
}

/// Reads, merges and validates the configuration.
///
/// Without `file`, [`DEFAULT_FILE`] is read if it exists; otherwise the defaults apply. `env` is [`environment`]
/// outside of tests.
///
/// # Errors
///
/// The file cannot be read or may not be obeyed, or [`Error::Invalid`] with everything that is wrong.
pub(crate) fn load(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<Config, Error> {
    effective(file, env, overrides).map(|effective| effective.config)
}

/// Like [`load`], and keeps where each value comes from.
///
/// # Errors
///
/// Those of [`load`].
pub(crate) fn effective(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<Effective, Error> {
    let file = match file {
        Some(file) => Some(file.to_owned()),
        None => file::when_present(Path::new(DEFAULT_FILE))?,
    };
    let mut layers = Layers::default();
    if let Some(path) = &file {
        layers.file(path, &file::read(path)?);
    }
    layers.environment(env);
    layers.flags(overrides);
    let (config, settings) = merge(layers)?;
    let origins = settings.into_iter().map(|(key, setting)| (key, setting.origin)).collect();
    Ok(Effective { config, file, origins })
}

/// The strongest setting of each key over the defaults, checked by type and by rule.
fn merge(layers: Layers) -> Result<(Config, BTreeMap<String, Setting>), Error> {
    let Layers { settings, mut problems } = layers;
    let mut strongest = BTreeMap::new();
    for setting in settings {
        match setting.check() {
            Ok(()) => drop(strongest.insert(setting.path(), setting)),
            // Reported even if a stronger layer sets the key again: the mistake would show up on the day it does not.
            Err(problem) => problems.push(problem),
        }
    }
    let mut table = toml::Table::new();
    let mut whole: Vec<&Setting> = strongest.values().collect();
    // The tables of a list in their order.
    whole.sort_by_key(|setting| setting.number());
    whole.into_iter().for_each(|setting| setting.put(&mut table));
    match Config::deserialize(table) {
        Ok(config) => {
            let defaults = self::table(&config);
            for (key, rule) in rules::broken(&config) {
                problems.push(match strongest.get(&key) {
                    Some(setting) => setting.problem(&rule),
                    None => {
                        let value = value_at(&defaults, &key).map(ToString::to_string).unwrap_or_default();
                        Problem { origin: Origin::Default, fault: Fault::Value { key, value, rule } }
                    }
                });
            }
            if problems.is_empty() {
                return Ok((config, strongest));
            }
        }
        Err(e) => problems.push(Problem { origin: Origin::Default, fault: Fault::Syntax(e.message().to_owned()) }),
    }
    problems.sort();
    Err(Error::Invalid(problems))
}
