//! Google Compute Engine: two values of the metadata server, each with a request that waits for a change.
//!
//! `preempted` becomes TRUE when a spot machine is taken back, 30 s before its end. `maintenance-event` announces a
//! maintenance of the host: one that moves the machine while it runs (60 s before), or one that ends it (60 s before;
//! one hour for a machine with GPUs). The server does not say when.

use std::time::Duration;

use super::client::{Answer, Client, Error, Request};
use super::{Source, client};
use rekindle_base::notice::{Cloud, Kind, Notice};

/// The header that each request needs and each answer has. An answer of another server does not have it.
const FLAVOR: (&str, &str) = ("metadata-flavor", "Google");
/// How long the server waits for a change.
const WAIT: Duration = Duration::from_secs(60);
/// The pause between two requests: a server that does not wait must not be asked all the time.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest tag of a version; they have 16 characters.
const LONGEST_TAG: usize = 64;

/// A value of the metadata server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// Whether the machine is taken back.
    Preempted,
    /// Whether the host is maintained.
    Maintenance,
}

/// The values that are read.
pub(crate) const VALUES: [Value; 2] = [Value::Preempted, Value::Maintenance];

impl Value {
    fn path(self) -> &'static str {
        match self {
            Value::Preempted => "/computeMetadata/v1/instance/preempted",
            Value::Maintenance => "/computeMetadata/v1/instance/maintenance-event",
        }
    }

    /// The notice in an answer.
    fn notice(self, text: &str) -> Result<Option<Notice>, Error> {
        let kind = match (self, text) {
            (Value::Preempted, "FALSE") | (Value::Maintenance, "NONE") => return Ok(None),
            (Value::Preempted, "TRUE") => Kind::Preempt,
            (Value::Maintenance, "MIGRATE_ON_HOST_MAINTENANCE") => Kind::Migrate,
            (Value::Maintenance, "TERMINATE_ON_HOST_MAINTENANCE") => Kind::Terminate,
            _ => return Err(Error::Malformed("it has an unknown value")),
        };
        Ok(Some(Notice { cloud: Cloud::Google, kind, id: self.path().into(), at: None }))
    }
}

/// Reads one value.
#[derive(Debug)]
pub(crate) struct Google {
    value: Value,
    /// The version that was read last.
    tag: Option<String>,
}

impl Google {
    /// The first request does not wait.
    #[must_use]
    pub(crate) fn new(value: Value) -> Google {
        Google { value, tag: None }
    }

    fn request(&self, client: &Client) -> Result<Answer, Error> {
        let headers = [FLAVOR];
        let Some(tag) = &self.tag else { return client.send(Request::get(self.value.path(), &headers)) };
        let path = format!("{}?wait_for_change=true&timeout_sec={}&last_etag={tag}", self.value.path(), WAIT.as_secs());
        client.send(Request { patience: WAIT + client::PATIENCE, ..Request::get(&path, &headers) })
    }
}

impl Source for Google {
    fn cloud(&self) -> Cloud {
        Cloud::Google
    }

    fn ask(&mut self, client: &Client) -> Result<Vec<Notice>, Error> {
        let answer = self.request(client);
        // After a failure, the next request does not wait: the service may have forgotten the version.
        self.tag = None;
        let answer = answer?.ok()?;
        if answer.header(FLAVOR.0) != Some(FLAVOR.1) {
            return Err(Error::Malformed("it is not of Google's metadata server"));
        }
        let notice = self.value.notice(answer.text()?)?;
        let is_tag =
            |tag: &&str| (1..=LONGEST_TAG).contains(&tag.len()) && tag.bytes().all(|c| c.is_ascii_alphanumeric());
        self.tag = answer.header("etag").filter(is_tag).map(ToOwned::to_owned);
        Ok(notice.into_iter().collect())
    }

    fn pause(&self) -> Duration {
        // Without a version it does not wait for a change.
        if self.tag.is_some() { PAUSE } else { super::EVERY }
    }
}
