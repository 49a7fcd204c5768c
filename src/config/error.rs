//! Errors of a configuration.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Origin;

/// Why there is no valid configuration. All of these have exit code 78, except wrong flags ([`Error::is_usage`]).
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The file cannot be opened or read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file, or the folder that holds it.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It is a folder, a pipe or a device.
    #[error("the configuration {} is not a regular file; name a TOML file", path.display())]
    NotAFile { path: PathBuf },
    /// It is larger than a configuration can be.
    #[error("the configuration {} is larger than {limit} bytes; name a TOML file", path.display())]
    TooLarge {
        path: PathBuf,
        /// The largest size, in bytes.
        limit: u64,
    },
    /// We are root, and other users could have written the file.
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
    /// We are root, and the file belongs to another user.
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
    /// We are root by sudo, and the file that was found belongs to the user who called it.
    #[error(
        "as root a configuration is read without --config only if it belongs to root, and {} belongs to the user who \
        called sudo", path.display()
    )]
    Callers {
        /// The file, a link to it, or the folder that holds it.
        path: PathBuf,
    },
    /// A file was found that must not be read, and a job must not run without what it says.
    #[error("the job does not start without the configuration {}, which cannot be used: {}. {}", path.display(), rekindle_base::chain(why), way_out(path, why))]
    Ignored {
        path: PathBuf,
        /// Why it must not be read.
        why: Box<Error>,
    },
    /// The file can be read, and has these problems.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
}

impl Error {
    /// Whether there is no such file.
    pub(super) fn is_absent(&self) -> bool {
        let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
        matches!(self, Error::Read { source, .. } if absent.contains(&source.kind()))
    }

    /// Whether the file is not for us: root may not follow it whatever it says, or we may not read it.
    pub(super) fn is_distrust(&self) -> bool {
        match self {
            Error::Read { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            Error::Invalid(_) => false,
            _ => true,
        }
    }
}

/// A problem, with its place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    /// The file and line, variable or flag; [`Origin::Default`] if a built-in default does not fit any more.
    pub(crate) origin: Origin,
    pub(crate) fault: Fault,
}

/// The kind of problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum Fault {
    /// It is not TOML.
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
        /// A similar name that may have been meant.
        nearest: Option<String>,
    },
    /// A key that earlier versions had.
    #[error("{name} was removed: {why}")]
    Removed {
        /// As it was typed.
        name: String,
        /// What replaces it, and what to do.
        why: &'static str,
    },
    /// A value that breaks a rule.
    #[error("{key} = {value}: {rule}")]
    Value {
        /// The key with its section.
        key: String,
        /// The value as TOML; hidden if it may be a secret.
        value: String,
        /// The rule, beginning with "must".
        rule: String,
    },
}

impl Error {
    /// Whether all that is wrong was typed on the command line: then the configuration is not at fault.
    #[must_use]
    pub(crate) fn is_usage(&self) -> bool {
        matches!(self, Error::Invalid(problems) if problems.iter().all(Problem::is_flag))
    }
}

impl Problem {
    fn is_flag(&self) -> bool {
        matches!(self.origin, Origin::Flag { .. })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.origin, &self.fault) {
            // As it was typed: whoever uses a flag need not know the key.
            (Origin::Flag { flag }, Fault::Value { value, rule, .. }) => write!(f, "{flag} {value}: {rule}"),
            // The fault names the variable.
            (Origin::Environment { variable }, fault @ Fault::Value { key, .. }) if key == variable => fault.fmt(f),
            (Origin::Environment { .. }, fault @ (Fault::Unknown { .. } | Fault::Removed { .. })) => fault.fmt(f),
            (origin, fault) => write!(f, "{origin}: {fault}"),
        }
    }
}

/// The warning about a file that was found and is not read.
pub(super) fn ignored(path: &Path, why: &Error) -> String {
    match (path.display(), why) {
        (path, Error::Read { .. }) => {
            format!("this user may not read the configuration {path}, so it is ignored: use sudo, or --config FILE")
        }
        (shown, why) => format!("{shown} is ignored: {}. {}", rekindle_base::chain(why), way_out(path, why)),
    }
}

/// What to do about a file that was found and must not be read.
pub(super) fn way_out(path: &Path, why: &Error) -> String {
    match why {
        Error::Callers { .. } => format!("To use it: --config {}. To use another one: --config FILE", path.display()),
        _ => "To use another one: --config FILE".to_owned(),
    }
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map(|nearest| format!(": did you mean {nearest}?")).unwrap_or_default()
}

fn list(problems: &[Problem]) -> String {
    match problems {
        [one] if one.is_flag() => one.to_string(),
        [one] => format!("the configuration is wrong: {one}"),
        flags if flags.iter().all(Problem::is_flag) => {
            flags.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        }
        many => many.iter().fold("the configuration is wrong:".to_owned(), |text, one| format!("{text}\n  {one}")),
    }
}
