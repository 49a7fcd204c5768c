//! The JSON document that a hook reads, described in docs/hooks.md. Later versions may add fields.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::Failure;
use crate::telemetry::events::Event;

/// Fields that are the same in all documents of a supervisor.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    /// The job's name.
    pub(crate) job: String,
    /// The job's folder in the store.
    pub(crate) folder: PathBuf,
}

/// An event, and who receives it.
#[derive(Debug, Serialize)]
pub(crate) struct Document<'a> {
    hook: &'a str,
    job: &'a str,
    folder: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<Failure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(flatten)]
    event: &'a Event,
}

impl<'a> Document<'a> {
    /// The document of an event.
    #[must_use]
    pub(crate) fn new(hook: &'a str, context: &'a Context, event: &'a Event) -> Document<'a> {
        Document { hook, job: &context.job, folder: &context.folder, failure: None, text: None, event }
    }

    /// The document of a failure.
    #[must_use]
    pub(crate) fn of_failure(self, failure: Failure) -> Document<'a> {
        let text = format!("job {}: {}", self.job, failure.in_words(&self.event.what));
        Document { failure: Some(failure), text: Some(text), ..self }
    }

    /// Its bytes, with a line end.
    #[must_use]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        // Plain data with text keys can always be written as JSON.
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::events::What;
    use rekindle_base::cause::Cause;

    #[test]
    fn a_document_is_the_event_and_whom_it_is_told() {
        let context = Context { job: "j".into(), folder: "/s/j".into() };
        let cause = Some(Cause::Exit { code: 3 });
        let event = Event::now("r", What::Ended { exit_code: Some(3), signal: None, cause });
        let document = Document::new("on-failure", &context, &event).of_failure(Failure::JobEnded);
        let read: serde_json::Value = serde_json::from_slice(&document.bytes()).unwrap();
        let time = serde_json::to_value(event.time).unwrap();
        assert_eq!(
            read,
            serde_json::json!({
                "hook": "on-failure", "job": "j", "folder": "/s/j", "failure": "job-ended",
                "text": "job j: it exited with code 3", "version": 1, "time": time, "run": "r",
                "event": "ended", "exit_code": 3, "signal": null, "cause": { "kind": "exit", "code": 3 },
            })
        );
    }
}
