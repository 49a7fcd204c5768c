//! Names of images and jobs. Both become file names, so both are checked when they are parsed.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Datelike, NaiveDateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// The time in an image's name.
const TIME: &str = "%Y%m%dT%H%M%SZ";

/// A text that is not a valid name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NameError {
    /// Not the text form of an [`ImageId`].
    #[error("\"{0}\" is not an image id; one looks like 000042-20261120T132105Z")]
    Image(String),
    /// Not a [`JobName`].
    #[error("\"{0}\" is not a job name; use 1 to 64 letters, digits, '.', '_' and '-', not starting with '.' or '-'")]
    Job(String),
}

/// Which image: `000042-20261120T132105Z`.
///
/// Images are ordered by their sequence numbers, because a clock may go backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId {
    sequence: u32,
    taken: DateTime<Utc>,
}

impl ImageId {
    /// Fractions of a second, and leap seconds, are cut off; a time outside of 1970 to 9999 (a broken clock) becomes
    /// 1970.
    #[must_use]
    pub fn new(sequence: u32, taken: DateTime<Utc>) -> ImageId {
        let whole = DateTime::from_timestamp(taken.timestamp(), 0);
        let taken = whole.filter(|it| (1970..=9999).contains(&it.year())).unwrap_or(DateTime::UNIX_EPOCH);
        ImageId { sequence, taken }
    }

    /// The sequence number of the image within the job, from 1.
    #[must_use]
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// The time when it was taken, in whole seconds.
    #[must_use]
    pub fn taken(&self) -> DateTime<Utc> {
        self.taken
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:06}-{}", self.sequence, self.taken.format(TIME)))
    }
}

impl FromStr for ImageId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<ImageId, NameError> {
        let bad = || NameError::Image(text.to_owned());
        let (sequence, taken) = text.split_once('-').ok_or_else(bad)?;
        let sequence = sequence.parse().map_err(|_| bad())?;
        let taken = NaiveDateTime::parse_from_str(taken, TIME).map_err(|_| bad())?;
        let id = ImageId::new(sequence, taken.and_utc());
        // Each image has exactly one name: no plus sign, no missing zeros, no leap second.
        if id.to_string() == text { Ok(id) } else { Err(bad()) }
    }
}

/// A job's name, which is also the name of its folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobName(String);

impl JobName {
    /// The longest name, in bytes.
    pub(crate) const MAX: usize = 64;

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for JobName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<JobName, NameError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fits = (1..=JobName::MAX).contains(&text.len());
        if fits && text.bytes().all(allowed) && !text.starts_with(['.', '-']) {
            Ok(JobName(text.to_owned()))
        } else {
            Err(NameError::Job(text.to_owned()))
        }
    }
}

macro_rules! serde_as_text {
    ($name:ident) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}
serde_as_text!(ImageId);
serde_as_text!(JobName);

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{TimeDelta, TimeZone};
    use proptest::prelude::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        Utc.timestamp_opt(seconds, 5_000_000).unwrap()
    }

    #[test]
    fn text_of_an_id() {
        let id = ImageId::new(42, Utc.with_ymd_and_hms(2026, 11, 20, 13, 21, 5).unwrap());
        assert_eq!(id.to_string(), "000042-20261120T132105Z");
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"000042-20261120T132105Z\"");
        for bad in [
            "",
            "42",
            "42-20261120T132105Z",
            "+00042-20261120T132105Z",
            "000042-20261120T132105",
            "000042-20261320T132105Z",
            "000042-20261120T132160Z",
            "000042-20261120T132105Z/",
            "-1-20261120T132105Z",
            "99999999999-20261120T132105Z",
        ] {
            assert_eq!(bad.parse::<ImageId>(), Err(NameError::Image(bad.to_owned())));
        }
    }

    #[test]
    fn a_broken_clock_still_names_an_image() {
        for taken in [DateTime::<Utc>::MAX_UTC, DateTime::<Utc>::MIN_UTC] {
            let id = ImageId::new(7, taken);
            assert_eq!(id.to_string().parse(), Ok(id));
        }
    }

    #[test]
    fn names_of_jobs() {
        for good in ["a", "train.py", "A_b-9", &"x".repeat(64)] {
            assert_eq!(good.parse::<JobName>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "..", ".a", "-a", "a/b", "a b", "ü", "a\0", &"x".repeat(65)] {
            assert!(bad.parse::<JobName>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn ids_survive_their_text(sequence: u32, seconds in 0_i64..253_402_300_799) {
            let id = ImageId::new(sequence, at(seconds));
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn the_sequence_orders_even_when_the_clock_goes_back(low in 0_u32..1000, back in 0_i64..1_000_000) {
            let now = at(2_000_000_000);
            prop_assert!(ImageId::new(low + 1, now - TimeDelta::seconds(back)) > ImageId::new(low, now));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC*") {
            let _ = (text.parse::<ImageId>(), text.parse::<JobName>());
        }
    }
}
