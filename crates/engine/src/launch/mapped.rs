//! The embedded files that a job maps. An image contains a copy of them, because a restore needs the same files at the
//! same paths, also of an earlier version of rekindle or from another machine.

use std::io;
use std::path::Path;

use super::embedded::{Embedded, put};
use super::{interposer, reaper};

/// The files that a job maps and that an image contains a copy of.
const MAPPED: [Embedded; 2] = [interposer::INTERPOSER, reaper::REAPER];

/// Whether the path ends in a name that [`Embedded::unpack`] gives, in any version of rekindle.
#[must_use]
pub(crate) fn is_named(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    MAPPED.iter().any(|kind| kind.hash_in(name).is_some())
}

/// Creates a file again that an earlier version unpacked, or that was unpacked elsewhere. The hash in its name must
/// match its content; its mode is that of its kind.
///
/// # Errors
/// `InvalidData` if the name is not that of the content; when the file cannot be read or written.
pub(crate) fn recreate(path: &Path, content: &[u8]) -> io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let kind = MAPPED.iter().find(|kind| kind.name_of(content) == name);
    let kind = kind.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "its content in the image does not match the hash in its name")
    })?;
    put(path, content, kind.mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_what_its_name_says_is_put_back_and_never_with_another_mode() {
        let dir = tempfile::tempdir().unwrap();
        let hash = blake3::hash(b"of old").to_hex().get(..16).unwrap().to_owned();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        for (name, expected) in [(format!("interposer-{hash}.so"), 0o755), (format!("reaper-{hash}"), 0o755)] {
            let path = dir.path().join(name);
            assert!(is_named(&path));
            recreate(&path, b"of old").unwrap();
            assert_eq!(mode(&path), expected);
            std::fs::remove_file(&path).unwrap();
            assert_eq!(recreate(&path, b"another").unwrap_err().kind(), io::ErrorKind::InvalidData);
            assert!(!path.exists());
        }
        for name in
            [&format!("other-{hash}"), "x", "reaper-", "reaper-../../x", &format!("reaper-{hash}.so"), "reaper-0123"]
        {
            assert!(!is_named(&dir.path().join(name)), "{name}");
        }
    }
}
