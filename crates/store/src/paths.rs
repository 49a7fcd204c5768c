//! The paths that files of a store or a replica name: checked in one place, with types that cannot contain a bad one.
//!
//! [`PartPath`] is the name of a file inside an image, [`JobPath`] a path as the job sees it, [`GroupPath`] a control
//! group. They are checked when they are deserialised or created, and nowhere after that.
//!
//! A path in JSON is exact, although a path is bytes and JSON is Unicode: a UTF-8 path is a string; any other is `{
//! "bytes": [47, 255] }`.

mod group;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

pub use group::GroupPath;

use super::names;
use rekindle_os::beneath::Beneath;

/// A path that no file of ours may contain.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PathError {
    /// Not a valid path of a job.
    #[error("{path:?} is not a valid path of a job's file: {why}")]
    Job {
        /// The text.
        path: PathBuf,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Not a valid path of a control group.
    #[error("{path:?} is not a valid path of a control group: {why}")]
    Group {
        /// The text.
        path: String,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// Not a valid path inside an image.
    #[error("{path:?} is not a valid path inside an image: {why}")]
    Part {
        /// The text.
        path: String,
        /// The rule that it breaks.
        why: &'static str,
    },
}

/// A path as the job sees it: absolute, without `.`, `..`, empty parts and NUL bytes. The file there is the user's, and
/// is opened with the user's rights.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobPath(PathBuf);

impl JobPath {
    /// Checks a path. Superfluous slashes and `.` are removed.
    ///
    /// # Errors
    /// [`PathError::Job`] if it is relative, or contains `..` or a zero byte.
    pub fn new(path: impl Into<PathBuf>) -> Result<JobPath, PathError> {
        let path = path.into();
        let refuse = |path, why| Err(PathError::Job { path, why });
        if path.as_os_str().as_bytes().contains(&0) {
            return refuse(path, "it contains a NUL byte");
        }
        if !path.is_absolute() {
            return refuse(path, "it is not absolute");
        }
        if path.components().any(|part| part == Component::ParentDir) {
            return refuse(path, "it contains \"..\"");
        }
        Ok(JobPath(path.components().collect()))
    }
}

impl Deref for JobPath {
    type Target = PathBuf;

    fn deref(&self) -> &PathBuf {
        &self.0
    }
}

impl AsRef<Path> for JobPath {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<OsStr> for JobPath {
    fn as_ref(&self) -> &OsStr {
        self.0.as_os_str()
    }
}

impl PartialEq<Path> for JobPath {
    fn eq(&self, other: &Path) -> bool {
        self.0 == other
    }
}

impl PartialEq<&Path> for JobPath {
    fn eq(&self, other: &&Path) -> bool {
        self.0 == *other
    }
}

impl PartialEq<PathBuf> for JobPath {
    fn eq(&self, other: &PathBuf) -> bool {
        self.0 == *other
    }
}

impl FromStr for JobPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<JobPath, PathError> {
        JobPath::new(text)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text<'a> {
    Utf8(std::borrow::Cow<'a, str>),
    Other { bytes: Vec<u8> },
}

impl Serialize for JobPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => Text::Utf8(text.into()),
            None => Text::Other { bytes: self.0.as_os_str().as_bytes().to_vec() },
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JobPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<JobPath, D::Error> {
        let path = match Text::deserialize(deserializer)? {
            Text::Utf8(text) => PathBuf::from(text.into_owned()),
            Text::Other { bytes } => PathBuf::from(OsString::from_vec(bytes)),
        };
        JobPath::new(path).map_err(de::Error::custom)
    }
}

/// Checks a path as [`JobPath`] does, for fields of another type.
pub(super) mod of_job {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        JobPath(path.to_path_buf()).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        JobPath::deserialize(deserializer).map(|path| path.0)
    }
}

/// The path of a file inside an image: relative, with normal parts in a single spelling, and not one of the store's own
/// files there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartPath(String);

impl PartPath {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part with the device memory of a process.
    pub(super) fn of_process(pid: i32) -> PartPath {
        PartPath(format!("gpu/{pid}"))
    }

    /// The part with device memory that rekindle copied.
    pub(super) fn kept() -> PartPath {
        PartPath("gpu/kept".to_owned())
    }

    /// Opens the part of the image in `dir` for reading.
    ///
    /// # Errors
    /// As [`Beneath::read`].
    pub fn open(&self, dir: &Beneath) -> io::Result<File> {
        dir.join(self).read()
    }

    /// The same for a part that will be mapped for a device, which wants it writable. It is not changed.
    ///
    /// # Errors
    /// As [`PartPath::open`].
    pub fn open_for_device(&self, dir: &Beneath) -> io::Result<File> {
        dir.join(self).change()
    }

    /// Reads the part of the image in `dir` completely, at most so many bytes.
    ///
    /// # Errors
    /// As [`PartPath::open`]; `FileTooLarge`.
    pub fn read(&self, dir: &Beneath, most: u64) -> io::Result<Vec<u8>> {
        dir.join(self).content(most)
    }
}

impl FromStr for PartPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<PartPath, PathError> {
        let refuse = |why| Err(PathError::Part { path: text.to_owned(), why });
        if text.contains('\0') {
            return refuse("it contains a NUL byte");
        }
        if text.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
            return refuse("it leads out of the image, or has an empty, \".\" or \"..\" component");
        }
        if [names::MANIFEST, names::CHUNKS, names::MARK, names::TAGS].contains(&text) {
            return refuse("the store reserves that name");
        }
        Ok(PartPath(text.to_owned()))
    }
}

impl Deref for PartPath {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl AsRef<Path> for PartPath {
    fn as_ref(&self) -> &Path {
        self.0.as_ref()
    }
}

impl PartialEq<str> for PartPath {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for PartPath {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl fmt::Display for PartPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for PartPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for PartPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PartPath, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Conversions for tests, which panic for a bad path.
#[cfg(test)]
mod in_tests {
    use super::*;

    impl<P: AsRef<Path> + ?Sized> From<&P> for JobPath {
        fn from(path: &P) -> JobPath {
            JobPath::new(path.as_ref()).unwrap()
        }
    }

    impl From<PathBuf> for JobPath {
        fn from(path: PathBuf) -> JobPath {
            JobPath::new(path).unwrap()
        }
    }

    impl<T: AsRef<str> + ?Sized> From<&T> for PartPath {
        fn from(text: &T) -> PartPath {
            text.as_ref().parse().unwrap()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_of_a_job_is_absolute_and_leads_where_it_says() {
        for bad in ["", "a", "./a", "..", "/..", "/a/../b", "/a/..", "/a\0b"] {
            assert!(JobPath::new(bad).is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<JobPath>(&json).is_err(), "{bad:?}");
        }
        assert!(serde_json::from_str::<JobPath>(r#"{ "bytes": [46, 46, 47, 255] }"#).is_err());
        assert!(serde_json::from_str::<JobPath>(r#"{ "bytes": [47, 46, 46, 47, 255] }"#).is_err());
        for (text, path) in
            [("/", "/"), ("/a/", "/a"), ("//a/./b", "/a/b"), ("/...", "/..."), ("/a (deleted)", "/a (deleted)")]
        {
            assert_eq!(JobPath::new(text).unwrap().as_os_str(), path);
        }
        let odd = JobPath::new(OsStr::from_bytes(b"/data/\xff")).unwrap();
        assert_eq!(serde_json::from_str::<JobPath>(&serde_json::to_string(&odd).unwrap()).unwrap(), odd);
    }

    #[test]
    fn a_part_is_not_opened_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (image, secret) = (dir.path().join("image"), dir.path().join("secret"));
        std::fs::create_dir_all(image.join("files")).unwrap();
        std::fs::create_dir_all(dir.path().join("other")).unwrap();
        std::fs::write(&secret, "root's").unwrap();
        std::fs::write(dir.path().join("other/x"), "root's").unwrap();
        std::fs::write(image.join("files/good"), "job's").unwrap();
        std::os::unix::fs::symlink(&secret, image.join("files/link")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), image.join("linked")).unwrap();
        let path = |text: &str| text.parse::<PartPath>().unwrap();
        nix::unistd::mkfifo(&image.join("files/fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let image = crate::tests::beneath(&image);
        assert_eq!(path("files/good").read(&image, 5).unwrap(), b"job's");
        std::fs::File::create(dir.path().join("image/files/hole")).unwrap().set_len(2 << 40).unwrap();
        assert_eq!(path("files/hole").read(&image, 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(path("files/good").open_for_device(&image).is_ok());
        for bad in ["files/link", "linked/x"] {
            assert!(path(bad).read(&image, 9).is_err(), "{bad}");
            assert!(path(bad).open_for_device(&image).is_err(), "{bad}");
        }
        assert!(path("files/fifo").read(&image, 9).is_err(), "and does not wait for a writer");
    }

    proptest! {
        #[test]
        fn what_is_taken_stays_inside(text in "[./a\\PC]{0,12}") {
            if let Ok(path) = text.parse::<PartPath>() {
                prop_assert!(Path::new("/image").join(&path).starts_with("/image"));
                prop_assert!(Path::new(path.as_str()).components().all(|part| matches!(part, Component::Normal(_))));
                prop_assert_eq!(path.as_str(), text.as_str());
            }
            if let Ok(path) = JobPath::new(text.as_str()) {
                prop_assert!(path.components().skip(1).all(|part| matches!(part, Component::Normal(_))));
                prop_assert_eq!(JobPath::new(path.as_path()).unwrap(), path);
            }
        }
    }
}
