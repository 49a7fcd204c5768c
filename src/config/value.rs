//! Simple values: how each is written in TOML and in environment variables, and parsed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

pub(super) use rekindle_base::units::NumberOrText;
pub(crate) use rekindle_base::units::{ByteSize, Malformed};

/// The replacement for a value that must not be shown.
pub(crate) const HIDDEN: &str = "<hidden>";

/// Durations as text with units ("1h 30m"), for `#[serde(with = "duration")]`.
pub(super) mod duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in crate::config) fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&humantime::format_duration(*value))
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(from)?;
        humantime::parse_duration(&text).map_err(serde::de::Error::custom)
    }
}

/// One resource limit, soft and hard, in the unit of setrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub(crate) enum Limit {
    /// RLIM_INFINITY.
    Unlimited,
    /// Bytes, seconds, microseconds or a count, depending on the limit.
    Value(u64),
}

impl TryFrom<NumberOrText> for Limit {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Limit, Malformed> {
        match from {
            NumberOrText::Text(text) if text == "unlimited" => Ok(Limit::Unlimited),
            other => ByteSize::try_from(other).map(|n| Limit::Value(n.bytes())),
        }
    }
}

impl From<Limit> for NumberOrText {
    fn from(limit: Limit) -> NumberOrText {
        match limit {
            Limit::Unlimited => NumberOrText::Text("unlimited".to_owned()),
            // TOML's integers are signed.
            Limit::Value(n) if i64::try_from(n).is_err() => NumberOrText::Text(n.to_string()),
            Limit::Value(n) => NumberOrText::Number(n),
        }
    }
}

/// Maximum bytes written per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub(crate) enum Rate {
    /// No limit.
    #[default]
    Unlimited,
    /// This many bytes.
    PerSecond(ByteSize),
}

impl Rate {
    /// Bytes per second, if there is a limit.
    #[must_use]
    pub(crate) fn bytes(self) -> Option<u64> {
        match self {
            Rate::Unlimited => None,
            Rate::PerSecond(size) => Some(size.bytes()),
        }
    }
}

impl TryFrom<NumberOrText> for Rate {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Rate, Malformed> {
        match from {
            NumberOrText::Text(text) if text == "unlimited" => Ok(Rate::Unlimited),
            other => ByteSize::try_from(other).map(Rate::PerSecond),
        }
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> String {
        match rate {
            Rate::Unlimited => "unlimited".to_owned(),
            Rate::PerSecond(size) => size.to_string(),
        }
    }
}

/// How often to snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Interval {
    /// With this time between the end of one snapshot and the start of the next.
    Every(Duration),
    /// Chosen from what a snapshot costs and how often the job fails ([`rekindle_base::interval`]).
    Auto,
    /// Only on request.
    Off,
}

impl FromStr for Interval {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Interval, Malformed> {
        match text {
            "auto" => Ok(Interval::Auto),
            "off" => Ok(Interval::Off),
            other => humantime::parse_duration(other).map(Interval::Every).map_err(|_| Malformed),
        }
    }
}

impl TryFrom<String> for Interval {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Interval, Malformed> {
        text.parse()
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Interval::Every(time) => humantime::format_duration(*time).fmt(f),
            Interval::Auto => f.write_str("auto"),
            Interval::Off => f.write_str("off"),
        }
    }
}

impl From<Interval> for String {
    fn from(interval: Interval) -> String {
        interval.to_string()
    }
}

/// What the job reads as standard input.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Stdin {
    /// Nothing: /dev/null.
    #[default]
    Null,
    /// The caller's standard input.
    Inherit,
    /// This file, by its absolute path.
    File(PathBuf),
}

impl TryFrom<String> for Stdin {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Stdin, Malformed> {
        match text.as_str() {
            "null" => Ok(Stdin::Null),
            "inherit" => Ok(Stdin::Inherit),
            path if path.starts_with('/') => Ok(Stdin::File(PathBuf::from(path))),
            _ => Err(Malformed),
        }
    }
}

impl From<Stdin> for String {
    fn from(stdin: Stdin) -> String {
        match stdin {
            Stdin::Null => "null".to_owned(),
            Stdin::Inherit => "inherit".to_owned(),
            Stdin::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}

/// Environment variables. `Debug` and `Serialize` write [`HIDDEN`] instead of the values: they are often secrets, and
/// printed text ends in logs and manifests.
#[derive(Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// Names and values, sorted by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Environment {
        Environment(variables.into_iter().collect())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.keys().map(|name| (name, HIDDEN))).finish()
    }
}

impl Serialize for Environment {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.keys().map(|name| (name, HIDDEN)))
    }
}
