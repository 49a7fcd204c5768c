//! `[hooks]` and `[metrics]`: how events of a job are reported.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::{HIDDEN, Malformed, duration};

/// `[hooks]`: commands and an address that are notified. Each command is a program and its arguments, without a shell;
/// an empty list means none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Hooks {
    /// Before the job is frozen.
    pub(crate) before_snapshot: Vec<String>,
    /// After the freeze, or after a snapshot that failed.
    pub(crate) after_snapshot: Vec<String>,
    /// Before an image is restored.
    pub(crate) before_restore: Vec<String>,
    /// When the job runs again from an image.
    pub(crate) after_restore: Vec<String>,
    /// When something failed.
    pub(crate) on_failure: Vec<String>,
    /// When the job has completed.
    pub(crate) on_completion: Vec<String>,
    /// When something happens to the group of the job.
    pub(crate) on_group: Vec<String>,
    /// Time limit for a command.
    #[serde(with = "duration")]
    pub(crate) timeout: Duration,
    /// What happens if a command before a snapshot or restore fails.
    pub(crate) on_error: OnError,
    /// Number of failed snapshots in a row that count as a failure; 0 means never.
    pub(crate) failed_snapshots: u32,
    /// The address to which failures are sent.
    pub(crate) webhook: Option<WebhookUrl>,
}

impl Default for Hooks {
    fn default() -> Hooks {
        Hooks {
            before_snapshot: Vec::new(),
            after_snapshot: Vec::new(),
            before_restore: Vec::new(),
            after_restore: Vec::new(),
            on_failure: Vec::new(),
            on_completion: Vec::new(),
            on_group: Vec::new(),
            timeout: Duration::from_secs(30),
            on_error: OnError::default(),
            failed_snapshots: 3,
            webhook: None,
        }
    }
}

/// `hooks.on-error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnError {
    /// It is reported, and the snapshot or restore is done.
    #[default]
    Ignore,
    /// It is reported, and the snapshot or restore is not done.
    Refuse,
}

/// `[metrics]`: metrics for Prometheus.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Metrics {
    /// Absolute path of a file that is replaced when the metrics change.
    pub(crate) textfile: Option<PathBuf>,
    /// Address and port that answers `GET /metrics`.
    pub(crate) listen: Option<SocketAddr>,
}

/// The address of a webhook. The part after the host is often a secret, so it is never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct WebhookUrl {
    text: String,
    /// Length of the text up to the end of host and port.
    shown: usize,
}

impl WebhookUrl {
    /// The complete address. Not for messages.
    #[must_use]
    pub(crate) fn secret(&self) -> &str {
        &self.text
    }

    /// Host and port.
    #[must_use]
    pub(crate) fn host(&self) -> &str {
        let origin = self.text.get(..self.shown).unwrap_or_default();
        origin.split_once("://").map_or(origin, |(_, host)| host)
    }
}

impl FromStr for WebhookUrl {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<WebhookUrl, Malformed> {
        let (scheme, rest) = text.split_once("://").ok_or(Malformed)?;
        let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let strange = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '\\' | '\u{fffd}');
        // A password before the host would be shown with it.
        let plain = !host.is_empty() && !host.contains('@') && !text.contains(strange);
        if !matches!(scheme, "http" | "https") || !plain || reqwest::Url::parse(text).is_err() {
            return Err(Malformed);
        }
        Ok(WebhookUrl { text: text.to_owned(), shown: scheme.len() + "://".len() + host.len() })
    }
}

impl TryFrom<String> for WebhookUrl {
    type Error = Malformed;

    fn try_from(text: String) -> Result<WebhookUrl, Malformed> {
        text.parse()
    }
}

impl From<WebhookUrl> for String {
    fn from(url: WebhookUrl) -> String {
        url.to_string()
    }
}

impl fmt::Display for WebhookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text.get(..self.shown).unwrap_or_default())?;
        if self.shown < self.text.len() {
            write!(f, "/{HIDDEN}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for WebhookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// `log.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// JSON objects, one per line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_webhook_only_the_host_is_shown() {
        for (text, host, shown) in [
            ("https://hooks.example.com", "hooks.example.com", "https://hooks.example.com"),
            ("https://hooks.example.com/T0/B1/hunter2", "hooks.example.com", "https://hooks.example.com/<hidden>"),
            ("http://127.0.0.1:8080?key=hunter2", "127.0.0.1:8080", "http://127.0.0.1:8080/<hidden>"),
            ("https://[::1]:1/x#hunter2", "[::1]:1", "https://[::1]:1/<hidden>"),
        ] {
            let url: WebhookUrl = text.parse().unwrap();
            assert_eq!((url.host(), url.to_string().as_str(), url.secret()), (host, shown, text));
            assert!(!format!("{url:?} {}", serde_json::to_string(&url).unwrap()).contains("hunter2"));
        }
        for text in [
            "",
            "hooks.example.com",
            "ftp://x/y",
            "https://",
            "https:///x",
            "https://me:hunter2@host/x",
            "https://host/a b",
            "https://host:99999/",
            "HTTPS://host/",
        ] {
            assert_eq!(text.parse::<WebhookUrl>(), Err(Malformed), "{text}");
        }
    }
}
