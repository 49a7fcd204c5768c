//! Azure: Scheduled Events of the instance metadata service.
//!
//! An answer has the events of all machines that are maintained together, so an event counts only if it names this
//! machine. An event begins at its time, or when somebody acknowledges it, which ends the machine at once. So it is
//! acknowledged only once the final image is stored. The first request of a machine starts the service, which takes
//! up to two minutes.

use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::Method;
use serde::{Deserialize, Serialize};

use super::client::{self, Client, Error, Request};
use super::{MOST, Source};
use rekindle_base::notice::{Cloud, Kind, Notice};

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NAME: &str = "/metadata/instance/compute/name?api-version=2021-02-01&format=text";
const HEADERS: [(&str, &str); 1] = [("metadata", "true")];
/// How long the first answer may take.
const FIRST: Duration = Duration::from_secs(150);
/// Names of machines have at most 64 characters, ids of events 36.
const LONGEST: usize = 128;

/// Reads the notices of a machine of Azure.
#[derive(Debug, Default)]
pub(crate) struct Azure {
    /// The name of this machine.
    name: Option<String>,
    is_awake: bool,
}

impl Azure {
    fn name(&mut self, client: &Client) -> Result<String, Error> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let answer = client.send(Request::get(NAME, &HEADERS))?.ok()?;
        let name = answer.text()?;
        if !is_word(name) {
            return Err(Error::Malformed("it is not the name of a machine"));
        }
        self.name = Some(name.to_owned());
        Ok(name.to_owned())
    }
}

impl Source for Azure {
    fn cloud(&self) -> Cloud {
        Cloud::Azure
    }

    fn ask(&mut self, client: &Client) -> Result<Vec<Notice>, Error> {
        let name = self.name(client)?;
        let patience = if self.is_awake { client::PATIENCE } else { FIRST };
        let answer = client.send(Request { patience, ..Request::get(EVENTS, &HEADERS) })?.ok()?;
        let notices = notices(&answer.body, &name)?;
        self.is_awake = true;
        Ok(notices)
    }
}

/// Whether this is a short text of visible ASCII characters.
fn is_word(text: &str) -> bool {
    (1..=LONGEST).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Document {
    events: Vec<Event>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Event {
    event_id: String,
    event_type: String,
    event_status: String,
    resources: Vec<String>,
    /// Empty once the event has begun.
    #[serde(default)]
    not_before: Option<String>,
}

/// The notices for the machine `name` in an answer.
fn notices(body: &[u8], name: &str) -> Result<Vec<Notice>, Error> {
    let document: Document =
        serde_json::from_slice(body).map_err(|_| Error::Malformed("it is not a list of events"))?;
    if document.events.len() > MOST {
        return Err(Error::Malformed("it has too many events"));
    }
    let ours = document.events.iter().filter(|event| event.resources.iter().any(|it| it.eq_ignore_ascii_case(name)));
    // Later versions may have other types and states.
    let known = ours.filter(|event| matches!(event.event_status.as_str(), "Scheduled" | "Started"));
    known.filter_map(|event| kind(&event.event_type).map(|kind| event.notice(kind))).collect()
}

fn kind(name: &str) -> Option<Kind> {
    Some(match name {
        "Preempt" => Kind::Preempt,
        "Terminate" => Kind::Terminate,
        "Reboot" => Kind::Reboot,
        "Redeploy" => Kind::Redeploy,
        "Freeze" => Kind::Freeze,
        _ => return None,
    })
}

impl Event {
    fn notice(&self, kind: Kind) -> Result<Notice, Error> {
        if !is_word(&self.event_id) {
            return Err(Error::Malformed("an event has no id"));
        }
        let at = match self.not_before.as_deref().map(str::trim) {
            None | Some("") => None,
            Some(text) => Some(time(text).ok_or(Error::Malformed("an event has a wrong time"))?),
        };
        Ok(Notice { cloud: Cloud::Azure, kind, id: self.event_id.clone(), at })
    }
}

/// `Mon, 19 Sep 2016 18:29:47 GMT`.
fn time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc2822(text).ok().map(|time| time.to_utc())
}

/// Tells Azure that this machine is ready for the event. The event then begins at once.
///
/// # Errors
/// When Azure does not accept it.
pub(crate) fn acknowledge(client: &Client, id: &str) -> Result<(), Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct StartRequests<'a> {
        start_requests: [StartRequest<'a>; 1],
    }
    #[derive(Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct StartRequest<'a> {
        event_id: &'a str,
    }
    let body = serde_json::to_string(&StartRequests { start_requests: [StartRequest { event_id: id }] })
        .map_err(|_| Error::Malformed("the request cannot be written"))?;
    let request =
        Request { method: Method::POST, path: EVENTS, headers: &HEADERS, body: Some(body), patience: client::PATIENCE };
    client.send(request)?.ok().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: &str, status: &str, resources: &str, not_before: &str) -> String {
        format!(
            r#"{{"EventId":"A1-b2","EventType":"{kind}","ResourceType":"VirtualMachine","Resources":[{resources}],
            "EventStatus":"{status}","NotBefore":{not_before},"Description":"x","EventSource":"Platform","Later":1}}"#
        )
    }

    fn read(events: &[String]) -> Result<Vec<(Kind, Option<i64>)>, Error> {
        let body = format!(r#"{{"DocumentIncarnation":2,"Events":[{}]}}"#, events.join(","));
        let notices = notices(body.as_bytes(), "gpu_3")?;
        Ok(notices.into_iter().map(|notice| (notice.kind, notice.at.map(|at| at.timestamp()))).collect())
    }

    const AT: &str = "\"Mon, 19 Sep 2016 18:29:47 GMT\"";

    #[test]
    fn each_type_is_read_and_only_events_of_this_machine_count() {
        let at = Some(1_474_309_787);
        for (name, kind) in [
            ("Preempt", Kind::Preempt),
            ("Terminate", Kind::Terminate),
            ("Reboot", Kind::Reboot),
            ("Redeploy", Kind::Redeploy),
            ("Freeze", Kind::Freeze),
        ] {
            let event = event(name, "Scheduled", "\"gpu_1\",\"GPU_3\"", AT);
            assert_eq!(read(&[event]).unwrap(), [(kind, at)]);
        }
        for begun in ["\"\"", "null"] {
            assert_eq!(read(&[event("Preempt", "Started", "\"gpu_3\"", begun)]).unwrap(), [(Kind::Preempt, None)]);
        }
        let others = [
            event("Preempt", "Scheduled", "\"gpu_1\"", AT),
            event("Preempt", "Scheduled", "", AT),
            event("Vaporize", "Scheduled", "\"gpu_3\"", AT),
            event("Preempt", "Completed", "\"gpu_3\"", AT),
        ];
        assert_eq!(read(&others).unwrap(), []);
        assert_eq!(read(&[]).unwrap(), []);
    }

    #[test]
    fn what_is_no_list_of_events_is_refused_whole() {
        let fine = || event("Preempt", "Scheduled", "\"gpu_3\"", AT);
        for wrong in [
            event("Preempt", "Scheduled", "\"gpu_3\"", "\"soon\""),
            event("Preempt", "Scheduled", "\"gpu_3\"", "7"),
            event("Preempt", "Scheduled", "3", AT),
            fine().replace("A1-b2", ""),
            fine().replace("A1-b2", "A1 b2"),
            fine().replace("EventStatus", "Status"),
        ] {
            assert!(read(&[fine(), wrong.clone()]).is_err(), "{wrong}");
        }
        for body in ["", "null", "[]", "{}", "{\"Events\":{}}", "<html>", "{\"Events\":[[]]}"] {
            assert!(notices(body.as_bytes(), "gpu_3").is_err(), "{body}");
        }
        assert!(read(&vec![fine(); MOST + 1]).is_err());
    }
}
