//! What can be wrong with a configuration.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::Origin;

/// Why there is no configuration to work with. All of it is exit code 78.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened or read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file, or the folder that holds it.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It is a folder, a pipe or a device.
    #[error("the configuration {} is not a regular file; name a TOML file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// It is larger than a configuration can be.
    #[error("the configuration {} is larger than {limit} bytes; name a TOML file", path.display())]
    TooLarge {
        /// What was named.
        path: PathBuf,
        /// The largest size, in bytes.
        limit: u64,
    },
    /// We are root, and somebody else could have written what we would obey.
    #[error(
        "refusing the configuration as root, because others can write {} (mode {mode:04o}). Fix it with: chmod go-w \
        {}",
        path.display(), path.display()
    )]
    Writable {
        /// The file, or the folder that holds it.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// We are root, and it belongs to somebody else.
    #[error(
        "refusing the configuration as root, because {} belongs to user {owner}. Fix it with: chown -h root {}",
        path.display(), path.display()
    )]
    Foreign {
        /// The file, a link to it, or the folder that holds it.
        path: PathBuf,
        /// The user number it belongs to.
        owner: u32,
    },
    /// It can be read, and this is wrong with it.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
}

/// One thing that is wrong, with the place it comes from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file and line, variable or flag; [`Origin::Default`] where a built-in default no longer fits.
    pub origin: Origin,
    /// What is wrong there.
    pub fault: Fault,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Fault {
    /// It is no TOML.
    #[error("not valid TOML: {0}")]
    Syntax(String),
    /// The file does not name its format.
    #[error("version is missing. Add the line: version = 1")]
    NoVersion,
    /// A key, table or variable that does not exist.
    #[error("unknown {what} {name}{}", hint(nearest.as_deref()))]
    Unknown {
        /// "key", "table" or "variable".
        what: &'static str,
        /// As it was typed.
        name: String,
        /// What it may mean.
        nearest: Option<String>,
    },
    /// A key that earlier versions had.
    #[error("{name} was removed: {why}")]
    Removed {
        /// As it was typed.
        name: String,
        /// What is done instead, and what to do about it.
        why: &'static str,
    },
    /// A value that breaks a rule.
    #[error("{key} = {value}: {rule}")]
    Value {
        /// The key with its section.
        key: String,
        /// The value as TOML; hidden where it may be a secret.
        value: String,
        /// The rule, beginning with "must".
        rule: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.fault)
    }
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map(|nearest| format!(": did you mean {nearest}?")).unwrap_or_default()
}

fn list(problems: &[Problem]) -> String {
    match problems {
        [one] => format!("the configuration is wrong: {one}"),
        many => many.iter().fold("the configuration is wrong:".to_owned(), |text, one| format!("{text}\n  {one}")),
    }
}
