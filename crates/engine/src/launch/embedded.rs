//! Executable files that are embedded in rekindle, and unpacked under a name that contains the hash of their content.
//!
//! A job maps these files, so every image names them, and CRIU needs the same file at the same path for a restore. With
//! the hash in its name, a file of another version does not replace this one.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{interposer, reaper};
use rekindle_os::durable;

/// A file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the {name} to {path}")]
pub struct Error {
    name: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// A file that build.rs made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Embedded {
    /// What it is, and how its file's name begins.
    pub(super) name: &'static str,
    /// What follows the hash in the name.
    pub(super) suffix: &'static str,
    pub(super) content: &'static [u8],
    pub(super) mode: u32,
}

impl Embedded {
    /// The name of a file of this kind with that content.
    pub(super) fn name_of(&self, content: &[u8]) -> String {
        let hash = blake3::hash(content).to_hex();
        format!("{}-{}{}", self.name, hash.get(..HASH).unwrap_or_default(), self.suffix)
    }

    /// Makes sure that `dir` contains this version's file, complete, and returns its path.
    pub(super) fn unpack(&self, dir: &Path) -> Result<PathBuf, Error> {
        let path = dir.join(self.name_of(self.content));
        let result = put(&path, self.content, self.mode);
        result.map_err(|source| Error { name: self.name, path: path.clone(), source })?;
        Ok(path)
    }

    /// The hash in the name of a file of this kind, whatever version it is of.
    fn hash_in<'a>(&self, name: &'a str) -> Option<&'a str> {
        let hash = name.strip_prefix(self.name)?.strip_prefix('-')?.strip_suffix(self.suffix)?;
        let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (hash.len() == HASH && hash.bytes().all(is_digit)).then_some(hash)
    }
}

/// Digits of the hash in a name.
const HASH: usize = 16;

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

/// Writes `content` to `path` with the permission bits `mode`, unless it exists already.
///
/// # Errors
/// When the file cannot be read or written.
pub(crate) fn put(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    match std::fs::read(path) {
        Ok(found) if found == content => return set_mode(path, mode),
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    durable::write_file(path, content, mode).map_err(io::Error::other)
}

/// A file of an earlier version may have another mode.
fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    let permissions = std::fs::metadata(path)?.permissions();
    if permissions.mode() & 0o7777 == mode {
        return Ok(());
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn a_cut_file_is_mended() {
        let file = Embedded { name: "thing", suffix: ".so", content: b"whole", mode: 0o750 };
        let dir = tempfile::tempdir().unwrap();
        let path = file.unpack(dir.path()).unwrap();
        std::fs::write(&path, b"cut").unwrap();
        assert_eq!(file.unpack(dir.path()).unwrap(), path);
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o750);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        file.unpack(dir.path()).unwrap();
        assert_eq!(mode(), 0o750);
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("thing-") && name.ends_with(".so"), "{name}");
    }

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

    /// The dynamic symbols that the object defines, and those that it needs (ELF-64, gABI chapter 4).
    pub(crate) fn symbols(file: &[u8]) -> [Vec<String>; 2] {
        let number = |at: usize, size: usize| file[at..at + size].iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
        let (sections, size, count) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2));
        let section = |index: usize, field: usize, width: usize| number(sections + index * size + field, width);
        const SHT_DYNSYM: usize = 11;
        let dynsym = (0..count).find(|index| section(*index, 4, 4) == SHT_DYNSYM).unwrap();
        let names = section(section(dynsym, 40, 4), 24, 8);
        let start = section(dynsym, 24, 8);
        let name = |at: usize| file[names + number(at, 4)..].split(|b| *b == 0).next().unwrap().to_vec();
        [true, false].map(|is_defined| {
            // The first entry of the table is reserved.
            let symbols = (start + 24..start + section(dynsym, 32, 8)).step_by(24);
            let wanted = symbols.filter(|at| (number(at + 6, 2) != 0) == is_defined);
            let mut names: Vec<String> = wanted.map(|at| String::from_utf8(name(at)).unwrap()).collect();
            names.sort();
            names
        })
    }
}
