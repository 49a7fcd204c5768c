//! The variables that clients read.

use std::ffi::OsString;

/// Options for a client: names and values of variables.
#[derive(Clone)]
pub(super) struct Environment(Vec<(String, String)>);

impl Environment {
    pub(super) fn new(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        // The clients accept no names or values that are not text.
        let text = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Environment(text.collect())
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The variables with the prefix, with names as the clients spell their settings.
    pub(super) fn settings(&self, prefix: &str) -> impl Iterator<Item = (String, &str)> {
        let of = self.all().filter(move |(name, _)| name.starts_with(prefix));
        of.map(|(name, value)| (name.to_ascii_lowercase(), value))
    }

    pub(super) fn get(&self, wanted: &str) -> Option<&str> {
        self.all().find_map(|(name, value)| (name == wanted).then_some(value))
    }
}
