//! Values of the store and its replica: compression, size limits, and the address of an object store.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::value::{ByteSize, Malformed, NumberOrText};

/// A limit of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub(crate) enum SizeLimit {
    /// No limit.
    #[default]
    Unlimited,
    /// This many bytes.
    AtMost(ByteSize),
}

impl SizeLimit {
    /// The limit in bytes, if there is one.
    #[must_use]
    pub(crate) fn bytes(self) -> Option<u64> {
        match self {
            SizeLimit::Unlimited => None,
            SizeLimit::AtMost(size) => Some(size.bytes()),
        }
    }
}

impl FromStr for SizeLimit {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<SizeLimit, Malformed> {
        if text == "unlimited" { Ok(SizeLimit::Unlimited) } else { text.parse().map(SizeLimit::AtMost) }
    }
}

impl TryFrom<NumberOrText> for SizeLimit {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<SizeLimit, Malformed> {
        match from {
            NumberOrText::Text(text) => text.parse(),
            number @ NumberOrText::Number(_) => ByteSize::try_from(number).map(SizeLimit::AtMost),
        }
    }
}

impl From<SizeLimit> for String {
    fn from(limit: SizeLimit) -> String {
        match limit {
            SizeLimit::Unlimited => "unlimited".to_owned(),
            SizeLimit::AtMost(size) => size.to_string(),
        }
    }
}
