//! `config show` and `config check`.

use std::io;
use std::path::{Path, PathBuf};

use super::Exit;
use super::output::{Column, Format, print_table, print_text};
use crate::config::{self, Overrides};

/// Why a `config` command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The file that was typed does not exist.
    #[error("there is no file {}: name another one, or none to check those that `run` reads", .0.display())]
    NoFile(PathBuf),
    /// Standard output could not be written.
    #[error("cannot write the result")]
    Print(#[from] io::Error),
}

impl Error {
    /// The exit code for the error.
    #[must_use]
    pub(super) fn exit(&self) -> Exit {
        match self {
            Error::NoFile(_) => Exit::Usage,
            Error::Config(error) if error.is_usage() => Exit::Usage,
            Error::Config(_) => Exit::Config,
            Error::Print(_) => Exit::Internal,
        }
    }
}

/// `config check [FILE]`: prints one line if `run` would accept the file together with this environment.
///
/// # Errors
///
/// All errors, together.
pub(super) fn check(file: Option<&Path>) -> Result<(), Error> {
    if let Some(path) = file.filter(|path| matches!(path.try_exists(), Ok(false))) {
        return Err(Error::NoFile(path.to_owned()));
    }
    let effective = config::effective(file, config::environment(), &Overrides::default())?.complete()?;
    super::name_strangers(&effective, super::output::complain);
    let files: Vec<String> = effective.files.iter().map(|path| path.display().to_string()).collect();
    let line = match files.as_slice() {
        [] => format!("there is no {}: the built-in defaults apply and are valid", config::DEFAULT_FILE),
        [file] => format!("{file} is valid"),
        files => format!("{} are valid together; each overrides the ones before", files.join(", ")),
    };
    Ok(print_text(&line)?)
}

/// `config show`: prints each key with its value, as TOML, and its source. Values of `job.environment` are hidden.
///
/// # Errors
///
/// All errors of the configuration, together.
pub(super) fn show(file: Option<&Path>, overrides: &Overrides, format: Format) -> Result<(), Error> {
    let effective = config::effective(file, config::environment(), overrides)?;
    super::name_strangers(&effective, super::output::complain);
    let entries = effective.entries();
    let rows = entries.iter().map(|entry| {
        let value = entry.value.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        vec![entry.key.clone(), value, entry.origin.to_string()]
    });
    Ok(print_table(format, &[Column::whole("KEY"), Column::short("VALUE"), Column::short("ORIGIN")], rows, &entries)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_file_passes_and_a_wrong_one_is_exit_78() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rekindle.toml");
        std::fs::write(&path, "version = 1\n[job]\nenvironment = { TOKEN = \"x\" }\n").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        check(Some(&path)).unwrap();
        show(Some(&path), &Overrides::default(), Format::Text).unwrap();

        std::fs::write(&path, "version = 1\n[store]\nkeep-last = 0\n").unwrap();
        for result in [check(Some(&path)), show(Some(&path), &Overrides::default(), Format::Json)] {
            let error = result.unwrap_err();
            assert_eq!(error.exit().code(), 78);
            assert!(error.to_string().contains("store.keep-last = 0: must be at least 1"), "{error}");
        }
    }
}
