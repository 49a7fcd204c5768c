//! The path of a control group.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::PathError;

/// A control group below the supervisor's: a relative path with normal parts in a single spelling.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupPath(String);

impl GroupPath {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The names in the path, the group's own name last.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }

    /// This group and its parents, the outermost first.
    pub fn with_those_above(&self) -> impl Iterator<Item = GroupPath> {
        let ends = self.0.match_indices('/').map(|(at, _)| at).chain([self.0.len()]);
        ends.filter_map(|end| self.0.get(..end).map(|text| GroupPath(text.to_owned())))
    }
}

impl FromStr for GroupPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<GroupPath, PathError> {
        let refuse = |why| Err(PathError::Group { path: text.to_owned(), why });
        // A line of /proc/PID/cgroup ends at a line end, so the kernel allows no such name.
        if text.contains(['\0', '\n']) {
            return refuse("it contains a NUL byte or a line break");
        }
        if text.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
            return refuse("it leads out of the supervisor's group, or has an empty, \".\" or \"..\" component");
        }
        Ok(GroupPath(text.to_owned()))
    }
}

impl fmt::Display for GroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for GroupPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for GroupPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<GroupPath, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_below_the_supervisors() {
        for bad in ["", "/", "/x", "..", "../x", "x/../y", "x/..", "./x", "x//y", "x/", "x\0y", "x\ny"] {
            assert!(bad.parse::<GroupPath>().is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<GroupPath>(&json).is_err(), "{bad:?}");
        }
        for good in ["x", "x/y", "...", "x..y", "job.scope", "ü (deleted)"] {
            assert_eq!(good.parse::<GroupPath>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn those_above_come_first() {
        let path: GroupPath = "a/b/c".parse().unwrap();
        let all: Vec<String> = path.with_those_above().map(|path| path.to_string()).collect();
        assert_eq!(all, ["a", "a/b", "a/b/c"]);
        assert_eq!(path.parts().collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}
