//! The configuration: TOML, typed and then validated; touches nothing but the file it reads.
//!
//! There are four layers; each overrides the one before: the built-in defaults, the files, the environment
//! (`REKINDLE_SECTION_KEY`, `REKINDLE_STORE_KEEP_LAST=5`), the command line. They become one list of settings. Each
//! setting is checked against the type of its key, the last setting of each key goes into the [`Config`], and the rules
//! are checked with that. All problems are reported together.
//!
//! - A [`Config`] from [`effective`] obeys all rules.
//! - Unknown keys, tables and variables are errors, never ignored: a misspelt `keep-last` must not lose an image.
//! - As root, a file that others can write is refused.
//! - Values of `job.environment` never appear in messages, tables or JSON.

mod auto;
mod control;
mod emergency;
mod error;
mod file;
mod files;
mod gpu;
mod group;
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

use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

pub(crate) use auto::MeanTime;
pub(crate) use error::{Error, Fault, Problem};
pub(crate) use group::{Coordinator, Group, GroupNetwork};
pub(crate) use model::{
    Allowed, ColdStart, Config, EnvironmentMode, Interposer, Job, Level, OnProcessDeath, OnSuccess, Restart, Snapshot,
    Staging, Store,
};
pub(crate) use network::NetworkMode;
pub(crate) use notifications::{Hooks, LogFormat, OnError};
pub(crate) use scheduler::{Deadline, Profile, Requeue};
pub(crate) use storage::SizeLimit;
pub(crate) use value::{Interval, Limit, Rate, Stdin};
pub(crate) use watch::{CauseName, HangAction, Interruption, Match, Pattern, Rule, RuleAction, Watch};

use file::Given;
use layers::{Layers, Setting};

/// The first of the files that are read if none is named.
pub(crate) const DEFAULT_FILE: &str = "/etc/rekindle/rekindle.toml";

/// The files that are read if none is named, as far as they exist; each overrides the ones before: the machine's, the
/// user's (XDG Base Directory Specification), and that of the working directory.
pub(crate) fn default_files() -> Vec<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = folder("XDG_CONFIG_HOME").or_else(|| folder("HOME").map(|home| home.join(".config")));
    let users = home.map(|home| home.join("rekindle").join(FILE_NAME));
    [Some(PathBuf::from(DEFAULT_FILE)), users, Some(PathBuf::from(FILE_NAME))].into_iter().flatten().collect()
}

const FILE_NAME: &str = "rekindle.toml";

/// Settings from the command line, which override all others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Overrides {
    /// `--name`, for `job.name`.
    pub(crate) name: Option<String>,
    /// `--interval`, for `snapshot.interval`.
    pub(crate) interval: Option<String>,
    /// `--grace`, for `snapshot.grace`.
    pub(crate) grace: Option<String>,
    /// `--deadline`, for `scheduler.deadline`.
    pub(crate) deadline: Option<String>,
    /// `--nodes`, for `group.nodes`.
    pub(crate) nodes: Option<u32>,
    /// `--node-rank`, for `group.node-rank`.
    pub(crate) node_rank: Option<u32>,
    /// `--coordinator`, for `group.coordinator`.
    pub(crate) coordinator: Option<Vec<String>>,
    /// `--store`, for `store.directory`; a relative path is taken from the working directory.
    pub(crate) store: Option<PathBuf>,
}

/// The source of a value. The order is that of reports: the file from its top, then the environment, then flags.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case", tag = "from")]
pub(crate) enum Origin {
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
    /// The built-in default.
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
#[derive(Debug)]
pub(crate) struct Effective {
    pub(crate) config: Config,
    /// The files that were read.
    pub(crate) files: Vec<PathBuf>,
    /// Sentences about files in a place where we look, and about variables that look like rekindle's, that were not
    /// taken.
    pub(crate) strangers: Vec<String>,
    /// Why a file in a place where we look was not taken; the last of them, as it would override the others.
    ignored: Option<Error>,
    /// By key ("store.keep-last", "job.limits.nofile"); other keys have the built-in value.
    origins: BTreeMap<String, Origin>,
}

/// One line of `config show`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Entry {
    /// The key with its section, and the name within it for a map.
    pub(crate) key: String,
    /// The value; none if the key is not set. Values of `job.environment` are [`value::HIDDEN`].
    pub(crate) value: Option<toml::Value>,
    /// The source of the value.
    pub(crate) origin: Origin,
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

    /// Refuses if a file was ignored. For what starts jobs: the file may say as which user.
    ///
    /// # Errors
    ///
    /// [`Error::Ignored`].
    pub(crate) fn complete(self) -> Result<Effective, Error> {
        match self.ignored {
            Some(error) => Err(error),
            None => Ok(self),
        }
    }

    /// The source of a key's value.
    #[must_use]
    pub(crate) fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
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

/// The variables of this process that may be configuration, for [`effective`]. Unlike `std::env::vars` it does not
/// panic if a variable is not UTF-8.
pub(crate) fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(move |(name, value)| (text(name), text(value)))
        .filter(|(name, _)| name.starts_with("REKINDLE_"))
}

/// Whether a variable is a part of the configuration that may contain a secret, such as an address or a token for
/// hooks.
#[must_use]
pub(crate) fn may_hold_secret(variable: &str) -> bool {
    let named = |key: &keys::Key| key.variable().is_some_and(|name| name == variable);
    keys::KEYS.iter().any(|key| key.may_hold_ours() && named(key))
}

/// Reads, merges and validates the configuration, and says where each value comes from.
///
/// Without a named file, the [`default_files`] that exist are read. `env` is [`environment`] outside of tests.
///
/// # Errors
///
/// A file cannot be read or is refused, or [`Error::Invalid`] with all problems.
pub(crate) fn effective(
    file: Option<&Path>,
    env: impl Iterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<Effective, Error> {
    let (given, places) = match file {
        Some(file) => (Given::Named, vec![file.to_owned()]),
        None => (Given::Found, default_files()),
    };
    let (mut layers, mut files, mut ignored) = (Layers::default(), Vec::new(), None);
    for path in places {
        match file::read(&path, given) {
            Ok(text) => layers.file(&path, &text),
            Err(error) if given == Given::Found && error.is_absent() => continue,
            Err(_) if given == Given::Found && is_out_of_sight(&path) => {
                layers.strangers.push(format!(
                    "the working directory cannot be entered, so a {FILE_NAME} that may be there is not read: if there is one, \
                     name it (--config FILE) from a place that can be"
                ));
                continue;
            }
            // Somebody may have put it there for root to find: that must neither be followed nor stop commands that
            // only look.
            Err(error) if given == Given::Found && path != Path::new(DEFAULT_FILE) && error.is_distrust() => {
                layers.strangers.push(error::ignored(&path, &error));
                // Another user is told that this needs root, whatever the configuration says. With HOME of somebody
                // else, not even whether there is a file can be known.
                if Uid::effective().is_root() {
                    ignored = Some(Error::Ignored { path, why: Box::new(error) });
                }
                continue;
            }
            Err(error) => return Err(error),
        }
        files.push(path);
    }
    layers.environment(env);
    layers.flags(overrides);
    let strangers = std::mem::take(&mut layers.strangers);
    let (config, settings) = merge(layers)?;
    let origins = settings.into_iter().map(|(key, setting)| (key, setting.origin)).collect();
    Ok(Effective { config, files, strangers, ignored, origins })
}

/// Whether the file would be in the working directory, which this user may not search: the home of somebody, on a file
/// system that gives root no rights (NFS with root_squash). Whether there is a file cannot be known.
fn is_out_of_sight(path: &Path) -> bool {
    let hidden = |path: &Path| path.symlink_metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied);
    path == Path::new(FILE_NAME) && hidden(path)
}

/// Merges the settings over the defaults, and checks types and rules.
fn merge(layers: Layers) -> Result<(Config, BTreeMap<String, Setting>), Error> {
    let Layers { settings, mut problems, emergencies, .. } = layers;
    let mut strongest = BTreeMap::new();
    for setting in settings {
        match setting.check() {
            Ok(()) => drop(strongest.insert(setting.path(), setting)),
            // Reported even if another layer overrides the key: otherwise the mistake would appear later.
            Err(problem) => problems.push(problem),
        }
    }
    let mut table = toml::Table::new();
    let mut whole: Vec<&Setting> = strongest.values().collect();
    // Tables of a list are put in in their order.
    whole.sort_by_key(|setting| setting.number());
    whole.into_iter().for_each(|setting| setting.put(&mut table));
    match Config::deserialize(table) {
        Ok(mut config) => {
            for (variable, text) in &emergencies {
                let _checked_before = (variable.set)(&mut config, text);
            }
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
