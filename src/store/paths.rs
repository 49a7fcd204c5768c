//! Paths in JSON without loss: a path is bytes, JSON is Unicode.
//!
//! A path that is UTF-8 is a string; any other is `{ "bytes": [47, 255] }`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Text<'a> {
    Utf8(std::borrow::Cow<'a, str>),
    Other { bytes: Vec<u8> },
}

pub(super) fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => Text::Utf8(text.into()),
        None => Text::Other { bytes: path.as_os_str().as_bytes().to_vec() },
    }
    .serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    Ok(match Text::deserialize(deserializer)? {
        Text::Utf8(text) => PathBuf::from(text.into_owned()),
        Text::Other { bytes } => PathBuf::from(OsString::from_vec(bytes)),
    })
}
