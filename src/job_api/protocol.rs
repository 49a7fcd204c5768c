//! The datagrams: a request is one JSON object with a version, its answer another.
//!
//! ```text
//! {"version":1,"request":"hold","seconds":5}
//! {"version":1,"ok":{"held":{"seconds":5.0,"life":"20261121T200000123456Z-4711-1"}}}
//! {"version":1,"error":{"code":"later","message":"a snapshot is being taken: try again when it is over"}}
//! ```
//!
//! Any request may have an `id`, which its answer repeats, and a `life`: then it is refused if the job has been
//! restored since. Errors and unknown fields are treated as on the control socket ([`crate::control::protocol`]).

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::control::protocol::{Code, Fault, Nothing, VERSION, fields, name, read};
use rekindle_store::ImageId;

/// Maximum size of a request in bytes. The longest sensible one has some 300.
pub const MAX_REQUEST: usize = 4096;
/// Maximum length of a holder's name in bytes.
const MAX_NAME: usize = 64;

/// A request of a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// The current state: [`Facts`].
    State,
    /// A snapshot now. Answered at once; the result is in [`Facts`].
    Snapshot,
    /// Blocks snapshots for some time.
    Hold {
        /// Name of the holder, because a process may have several.
        holder: String,
        /// Time limit.
        time: Duration,
    },
    /// Ends a hold.
    Release {
        /// Name of the holder.
        holder: String,
    },
}

/// The names of the requests in the protocol.
pub const REQUESTS: [&str; 4] = ["state", "snapshot", "hold", "release"];

/// A parsed datagram.
#[derive(Debug, Clone, PartialEq)]
pub struct Datagram {
    /// The id to repeat in the answer.
    pub id: Option<String>,
    /// The life of the job that it is for.
    pub life: Option<String>,
    /// The request.
    pub request: Result<Request, Fault>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Hold {
    seconds: f64,
    #[serde(default)]
    holder: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Release {
    #[serde(default)]
    holder: String,
}

/// Facts that change with a snapshot or a restore.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// The job's name.
    pub job: String,
    /// The id of the run that started from the beginning.
    pub run: String,
    /// An id that changes with each start and each restore of the job.
    pub life: String,
    /// When this life began.
    pub since: DateTime<Utc>,
    /// The image that the job was restored from; null if it started from the beginning.
    pub from: Option<ImageId>,
    /// How often the job was restored in this run.
    pub restores: u32,
    /// Number of snapshots of this supervisor that are over, successful or not.
    pub snapshots: u64,
    /// Why the last of them failed, if it did.
    pub failed: Option<String>,
    /// The newest image of the job.
    pub image: Option<ImageId>,
    /// The host name of this machine.
    pub host: String,
    /// Its boot id.
    pub boot_id: String,
    /// The pid of the command's process, as the host sees it.
    pub pid: Option<i32>,
    /// The GPUs of this machine.
    pub gpus: Vec<Gpu>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: String,
    /// The product name.
    pub name: Option<String>,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The current state.
    State(Box<Facts>),
    /// A snapshot will be taken.
    Snapshot {
        /// The snapshot is over when [`Facts::snapshots`] is at least this, or the life has changed.
        number: u64,
        /// The life of the job that sent the request.
        life: String,
    },
    /// No snapshot starts.
    Held {
        /// For this time.
        seconds: f64,
        /// The life of the job that holds.
        life: String,
    },
    /// The hold has ended.
    Released {
        /// Whether there was a hold.
        held: bool,
    },
}

impl Datagram {
    /// Reads a datagram.
    #[must_use]
    pub fn read(text: &[u8]) -> Datagram {
        let mut fields = match fields(text) {
            Ok(fields) => fields,
            Err(fault) => return Datagram { id: None, life: None, request: Err(fault) },
        };
        let (id, life) = (text_of(&mut fields, "id"), text_of(&mut fields, "life"));
        let request = match (&id, &life) {
            (Err(fault), _) | (_, Err(fault)) => Err(fault.clone()),
            _ => request(fields),
        };
        Datagram { id: id.ok().flatten(), life: life.ok().flatten(), request }
    }
}

fn text_of(fields: &mut Map<String, Value>, key: &str) -> Result<Option<String>, Fault> {
    match fields.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => short(key, text).map(Some),
        Some(_) => Err(Fault::new(Code::BadRequest, format!("`{key}` is not a string"))),
    }
}

fn short(key: &str, text: String) -> Result<String, Fault> {
    match text.len() {
        0..=MAX_NAME => Ok(text),
        _ => Err(Fault::new(Code::BadRequest, format!("`{key}` has more than {MAX_NAME} bytes"))),
    }
}

fn request(mut fields: Map<String, Value>) -> Result<Request, Fault> {
    let name = name(&mut fields)?;
    let fields = Value::Object(fields);
    match name.as_str() {
        "state" => read::<Nothing, _>(fields, |_| Request::State),
        "snapshot" => read::<Nothing, _>(fields, |_| Request::Snapshot),
        "hold" => {
            let Hold { seconds, holder } = read(fields, |hold| hold)?;
            let bad = |_| Fault::new(Code::BadRequest, format!("{seconds} is not a valid time to block snapshots"));
            let time = Duration::try_from_secs_f64(seconds).map_err(bad)?;
            Ok(Request::Hold { holder: short("holder", holder)?, time })
        }
        "release" => {
            let Release { holder } = read(fields, |release| release)?;
            Ok(Request::Release { holder: short("holder", holder)? })
        }
        other => {
            let other: String = other.chars().take(MAX_NAME).collect();
            let message = format!("unknown request {other:?}: use one of {}", REQUESTS.join(", "));
            Err(Fault::new(Code::UnknownRequest, message))
        }
    }
}

/// The datagram for an answer.
#[must_use]
pub fn answer(id: Option<&str>, result: &Result<Answer, Fault>) -> Vec<u8> {
    let mut all = match result {
        Ok(answer) => json!({ "version": VERSION, "ok": answer }),
        Err(fault) => json!({ "version": VERSION, "error": fault }),
    };
    if let (Some(id), Value::Object(all)) = (id, &mut all) {
        all.insert("id".into(), id.into());
    }
    all.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_read() {
        let read = |text: &str| Datagram::read(text.as_bytes());
        let plain = |request| Datagram { id: None, life: None, request: Ok(request) };
        assert_eq!(read(r#"{"version":1,"request":"state"}"#), plain(Request::State));
        assert_eq!(read(r#"{"version":1,"request":"release"}"#), plain(Request::Release { holder: "".into() }));
        let hold = read(r#"{"version":1,"request":"hold","seconds":1.5,"holder":"h","id":"7","life":"l"}"#);
        let request = Request::Hold { holder: "h".into(), time: Duration::from_millis(1500) };
        assert_eq!(hold, Datagram { id: Some("7".into()), life: Some("l".into()), request: Ok(request) });
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = "x".repeat(65);
        for (text, code, word) in [
            ("", Code::Malformed, "EOF"),
            ("[1]", Code::Malformed, "map"),
            (r#"{"request":"state"}"#, Code::Version, "missing"),
            (r#"{"version":1,"request":"state","x":1}"#, Code::BadRequest, "`x`"),
            (r#"{"version":1,"request":"stop"}"#, Code::UnknownRequest, "state, snapshot, hold, release"),
            (r#"{"version":1,"request":"state","id":7}"#, Code::BadRequest, "`id`"),
            (r#"{"version":1,"request":"hold"}"#, Code::BadRequest, "`seconds`"),
            (r#"{"version":1,"request":"hold","seconds":-1}"#, Code::BadRequest, "-1"),
            (r#"{"version":1,"request":"hold","seconds":1e300}"#, Code::BadRequest, "not a valid time"),
            (&format!(r#"{{"version":1,"request":"release","holder":"{long}"}}"#), Code::BadRequest, "64"),
            (&"[".repeat(4000), Code::Malformed, ""),
        ] {
            let fault = Datagram::read(text.as_bytes()).request.unwrap_err();
            assert!(fault.code == code && fault.message.contains(word), "{text}: {fault:?}");
        }
    }

    #[test]
    fn an_answer_has_the_id_of_its_request() {
        let released = Ok(Answer::Released { held: true });
        assert_eq!(
            String::from_utf8(answer(Some("a\nb"), &released)).unwrap(),
            r#"{"id":"a\nb","ok":{"released":{"held":true}},"version":1}"#
        );
        let refused = Err(Fault::new(Code::Later, "no"));
        let text = String::from_utf8(answer(None, &refused)).unwrap();
        assert_eq!(text, r#"{"error":{"code":"later","message":"no"},"version":1}"#);
    }

    proptest! {
        #[test]
        fn no_datagram_is_too_odd(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Datagram::read(&text);
        }
    }
}
