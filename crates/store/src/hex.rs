//! A hash in JSON: hexadecimal text, in lower case.

use serde::{Deserialize, Deserializer, Serializer, de};

pub(super) fn serialize<S: Serializer>(hash: &blake3::Hash, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&hash.to_hex())
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<blake3::Hash, D::Error> {
    let text = String::deserialize(d)?;
    let hash = blake3::Hash::from_hex(&text).map_err(de::Error::custom)?;
    // from_hex accepts upper case too, and a flipped bit can turn one case into the other.
    if hash.to_hex().as_str() == text { Ok(hash) } else { Err(de::Error::custom("it is not in lower case")) }
}

pub(crate) mod optional {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(hash: &Option<blake3::Hash>, s: S) -> Result<S::Ok, S::Error> {
        match hash {
            Some(hash) => super::serialize(hash, s),
            None => s.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<blake3::Hash>, D::Error> {
        super::deserialize(d).map(Some)
    }
}
