//! The file of the plugin that CRIU loads. `native/plugin/src/lib.rs` documents what it does.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::{embedded, interposer};

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

/// Writes this version's plugin to a new folder below `scratch`, in which CRIU finds no other, and returns the folder.
///
/// # Errors
/// When the file cannot be read or written.
pub fn unpack(scratch: &Path) -> Result<PathBuf, Error> {
    let own = scratch.join("plugins");
    let folder = if interposer::preload_value(&own, None).is_ok() { own } else { PathBuf::from(ELSEWHERE) };
    let path = folder.join(rekindle_criu::PLUGIN_NAME);
    let put = || {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        embedded::put(&path, PLUGIN, 0o600)
    };
    put().map_err(|source| Error { path: path.clone(), source })?;
    Ok(folder)
}

/// The folder to use if LD_PRELOAD cannot name the store because its path contains a space. Only root can create
/// anything in /run.
const ELSEWHERE: &str = "/run/rekindle-plugins";

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
    fn its_path_is_one_that_can_be_preloaded() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(unpack(dir.path()).unwrap(), dir.path().join("plugins"));
        let folder = unpack(&dir.path().join("two words")).unwrap();
        assert!(interposer::preload_value(&folder, None).is_ok());
        assert_eq!(std::fs::read(folder.join(rekindle_criu::PLUGIN_NAME)).unwrap(), PLUGIN);
    }
}
