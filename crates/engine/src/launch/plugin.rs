//! The file of the plugin that CRIU loads. `native/plugin/src/lib.rs` documents what it does.

use std::io;
use std::path::{Path, PathBuf};

use super::embedded;

/// Built by build.rs from `native/plugin/`. No image names it, so every version has it at the same path.
pub(crate) const PLUGIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rekindle-plugin.so"));

/// The plugin cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write CRIU's plugin to {}", path.display())]
pub struct Error {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Makes sure that a folder has this version's plugin and nothing else, because CRIU loads all that is in it, as root. Only
/// root must be able to change the folder.
///
/// # Errors
/// When the file cannot be written, or something else is there.
pub fn unpack(folder: &Path) -> Result<(), Error> {
    let path = folder.join(rekindle_criu::PLUGIN_NAME);
    let put = || {
        embedded::put(&path, PLUGIN, 0o600)?;
        for entry in std::fs::read_dir(folder)? {
            let name = entry?.file_name();
            if name != rekindle_criu::PLUGIN_NAME {
                return Err(io::Error::other(format!("there is also {name:?}, which CRIU would load")));
            }
        }
        match std::fs::read(&path)? == PLUGIN {
            true => Ok(()),
            false => Err(io::Error::other("it was changed since it was written")),
        }
    };
    put().map_err(|source| Error { path: path.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::embedded::tests::symbols;

    #[test]
    fn it_exports_what_it_stands_in_for_and_nothing_else_and_cannot_panic() {
        let [defined, needed] = symbols(PLUGIN);
        let opens = ["__open64_2", "__open_2", "__openat64_2", "__openat_2"];
        let calls = ["fchdir", "fchownat", "fstatat", "fstatat64", "linkat", "lutimes"];
        let more = ["open", "open64", "openat", "openat64", "setresuid"];
        let rest = ["stat", "stat64", "syscall", "unlink", "unlinkat"];
        let all = ["CR_PLUGIN_DESC"].into_iter().chain(opens).chain(calls).chain(more).chain(rest);
        let expected: Vec<&str> = all.collect();
        assert_eq!(defined, expected);
        // Weak symbols, without a version.
        assert_eq!(needed, ["__errno_location", "getenv"]);
        let mark = b"rekindle plugin can panic";
        assert!(!PLUGIN.windows(mark.len()).any(|window| window == mark));
    }

    #[test]
    fn criu_loads_this_versions_plugin_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let plugin = dir.path().join(rekindle_criu::PLUGIN_NAME);
        unpack(dir.path()).unwrap();
        assert_eq!(std::fs::read(&plugin).unwrap(), PLUGIN);
        std::fs::write(&plugin, "of an earlier version").unwrap();
        unpack(dir.path()).unwrap();
        assert_eq!(std::fs::read(&plugin).unwrap(), PLUGIN);
        std::fs::write(dir.path().join("x.so"), "mischief").unwrap();
        let error = unpack(dir.path()).unwrap_err();
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("x.so"), "{error:?}");
    }
}
