//! The reaper's executable: embedded in ours, unpacked by content hash.
//!
//! It is mapped by every job and so named in every image; CRIU wants the same file at the same path at a restore. Its
//! name therefore holds its hash: another version of rekindle unpacks another file and leaves this one alone.

use std::io;
use std::path::{Path, PathBuf};

use crate::sys::durable;

/// Built by build.rs from `reaper/`.
static EXECUTABLE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rekindle-reaper"));

/// The reaper can not be put in place.
#[derive(Debug, thiserror::Error)]
#[error("can not put the reaper at {path}")]
pub struct Error {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Makes sure that `dir` holds this version's reaper, whole, and returns its path.
///
/// # Errors
/// When the file can not be read or written.
pub fn unpack(dir: &Path) -> Result<PathBuf, Error> {
    let hash = blake3::hash(EXECUTABLE).to_hex();
    let path = dir.join(format!("reaper-{}", hash.get(..16).unwrap_or_default()));
    put(&path, EXECUTABLE).map_err(|source| Error { path: path.clone(), source })?;
    Ok(path)
}

/// Puts `content` at `path` as an executable, unless it is there already.
///
/// # Errors
/// When the file can not be read or written.
pub fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    match std::fs::read(path) {
        Ok(found) if found == content => return Ok(()),
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    durable::write_file(path, content, 0o700).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_cut_file_is_mended() {
        let dir = tempfile::tempdir().unwrap();
        let path = unpack(dir.path()).unwrap();
        std::fs::write(&path, b"cut").unwrap();
        assert_eq!(unpack(dir.path()).unwrap(), path);
        assert_eq!(std::fs::read(&path).unwrap(), EXECUTABLE);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
