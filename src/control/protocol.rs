//! The lines of the control socket: a request is one JSON object with a version, its answer another.
//!
//! ```text
//! {"version":1,"request":"snapshot","tags":["best"]}
//! {"version":1,"ok":{"snapshot":{"image":"000004-20261121T200000Z","freeze_us":43000,"bytes":1048576,"stored":true}}}
//! {"version":1,"error":{"code":"refused","message":"the job is suspended: resume it first"}}
//! ```
//!
//! An unknown field in a request is an error: an older supervisor must not do half of a request. Later versions may add
//! fields to answers; clients ignore unknown ones.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::published::Published;
use rekindle_store::{ImageId, Tag};

/// Version of requests and answers.
pub const VERSION: u32 = 1;
/// Maximum bytes of a request, with its line end. The longest sensible one, a snapshot with 64 tags, has 5 KiB.
pub const MAX_LINE: usize = 64 << 10;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The published state.
    Status,
    /// A snapshot now; answered when there is an image or the snapshot failed.
    Snapshot(Snapshot),
    /// A snapshot, then the end of the job until it is resumed; answered when memory and GPUs are free.
    Suspend,
    /// Resumes the job; answered when the job runs.
    Resume,
    /// A final snapshot and then the end; answered at once.
    Stop(Stop),
    /// Goes back to an image; answered when the job runs again.
    Rewind(Rewind),
}

/// The names of the requests in the protocol.
pub const REQUESTS: [&str; 6] = ["status", "snapshot", "suspend", "resume", "stop", "rewind"];

/// `snapshot`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Snapshot {
    /// Tags for the image. It gets them in the store, so the answer is sent when the image is stored.
    pub tags: Vec<Tag>,
    /// Whether the answer is sent when the image is stored, not when it is in memory.
    pub stored: bool,
    /// Whether all GPU memory is copied, also what has not changed (`gpu.full-copy-every`). Only sent if it is true, so
    /// that older supervisors understand the other requests.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
}

/// `stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Stop {
    /// Stop without a snapshot, and without waiting until the last image is stored.
    pub now: bool,
}

/// `rewind`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rewind {
    /// An id or its beginning, a number, a tag, `latest`; or `-N` for the Nth newest image.
    pub to: String,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The content of `state.json`, which is perhaps not written yet.
    Status(Box<Published>),
    /// There is a new image.
    Snapshot(Snapped),
    /// The job has ended and can be resumed.
    Suspended {
        /// It will continue from this image; `None` means from the beginning.
        image: Option<ImageId>,
        /// Why the image is not stored, if it is not: then it is lost when the machine restarts.
        only_in_memory: Option<String>,
    },
    /// The job runs.
    Running {
        /// It was restored from this image; `None` means from the beginning.
        image: Option<ImageId>,
    },
    /// The job will be stopped.
    Stopping {},
}

/// A requested image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapped {
    /// The image.
    pub image: ImageId,
    /// The length of the freeze, in microseconds.
    pub freeze_us: u64,
    /// Size of the image.
    pub bytes: u64,
    /// Whether it is stored. Otherwise it is being stored.
    pub stored: bool,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// For programs.
    pub code: Code,
    /// For people.
    pub message: String,
}

/// The kinds of [`Fault`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// Not a JSON object.
    Malformed,
    /// An unsupported version.
    Version,
    /// An unknown request.
    UnknownRequest,
    /// A request with an unknown field, or a wrong value.
    BadRequest,
    /// Longer than [`MAX_LINE`].
    TooLong,
    /// The request was not complete in time.
    Timeout,
    /// Too many clients.
    Busy,
    /// The client is another user.
    Forbidden,
    /// Impossible in the present state of the job.
    Refused,
    /// It was tried and failed.
    Failed,
    /// The supervisor is ending.
    Ending,
    /// Only for the job: impossible now, but possible soon.
    Later,
    /// Only for the job: it was restored since.
    Restored,
    /// A code of a newer version.
    #[serde(other)]
    Other,
}

impl Fault {
    /// A fault of this kind.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Fault {
        Fault { code, message: message.into() }
    }
}

#[derive(Serialize, Deserialize)]
struct Line<T> {
    version: u32,
    #[serde(flatten)]
    rest: T,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    Ok(Answer),
    Error(Fault),
}

impl Request {
    /// Its name in the protocol.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let [status, snapshot, suspend, resume, stop, rewind] = REQUESTS;
        match self {
            Request::Status => status,
            Request::Snapshot(_) => snapshot,
            Request::Suspend => suspend,
            Request::Resume => resume,
            Request::Stop(_) => stop,
            Request::Rewind(_) => rewind,
        }
    }

    /// The line for this request, with its line end.
    #[must_use]
    pub fn to_line(&self) -> Vec<u8> {
        let fields = match self {
            Request::Status | Request::Suspend | Request::Resume => Ok(Value::Object(Map::new())),
            Request::Snapshot(it) => serde_json::to_value(it),
            Request::Stop(it) => serde_json::to_value(it),
            Request::Rewind(it) => serde_json::to_value(it),
        };
        let mut line = serde_json::json!({ "version": VERSION, "request": self.name() });
        if let (Value::Object(line), Ok(Value::Object(fields))) = (&mut line, fields) {
            line.extend(fields);
        }
        ended(line.to_string().into_bytes())
    }

    /// Reads a line, with or without its end.
    ///
    /// # Errors
    /// The problem, which names the field.
    pub fn parse(line: &[u8]) -> Result<Request, Fault> {
        let mut fields = fields(line)?;
        let name = name(&mut fields)?;
        let fields = Value::Object(fields);
        Ok(match name.as_str() {
            "status" => read::<Nothing, _>(fields, |_| Request::Status)?,
            "snapshot" => read(fields, Request::Snapshot)?,
            "suspend" => read::<Nothing, _>(fields, |_| Request::Suspend)?,
            "resume" => read::<Nothing, _>(fields, |_| Request::Resume)?,
            "stop" => read(fields, Request::Stop)?,
            "rewind" => read(fields, Request::Rewind)?,
            other => {
                let message = format!("unknown request {other:?}: use one of {}", REQUESTS.join(", "));
                return Err(Fault::new(Code::UnknownRequest, message));
            }
        })
    }
}

fn malformed(why: &dyn std::fmt::Display) -> Fault {
    Fault::new(Code::Malformed, format!("not a request: {why}"))
}

/// The fields of a request.
pub(crate) fn fields(text: &[u8]) -> Result<Map<String, Value>, Fault> {
    serde_json::from_slice(text).map_err(|error| malformed(&error))
}

/// Removes and returns its name, if its version is supported.
pub(crate) fn name(fields: &mut Map<String, Value>) -> Result<String, Fault> {
    match fields.remove("version") {
        Some(Value::Number(version)) if version.as_u64() == Some(VERSION.into()) => {}
        Some(other) => {
            let message = format!("unknown version {other}: this supervisor uses {VERSION}");
            return Err(Fault::new(Code::Version, message));
        }
        None => {
            return Err(Fault::new(Code::Version, format!("\"version\" is missing: this supervisor uses {VERSION}")));
        }
    }
    match fields.remove("request") {
        Some(Value::String(name)) => Ok(name),
        _ => Err(malformed(&"\"request\" is missing or not a string")),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// Parses the remaining fields.
pub(crate) fn read<T: DeserializeOwned, R>(fields: Value, make: impl FnOnce(T) -> R) -> Result<R, Fault> {
    serde_json::from_value(fields).map(make).map_err(|error| Fault::new(Code::BadRequest, error.to_string()))
}

/// The line for an answer, with its line end.
#[must_use]
pub fn answer_line(result: Result<Answer, Fault>) -> Vec<u8> {
    let rest = result.map_or_else(Outcome::Error, Outcome::Ok);
    ended(serde_json::to_vec(&Line { version: VERSION, rest }).unwrap_or_default())
}

/// Reads the line of an answer.
///
/// # Errors
/// When it is not an answer.
pub fn parse_answer(line: &[u8]) -> serde_json::Result<Result<Answer, Fault>> {
    let line: Line<Outcome> = serde_json::from_slice(line)?;
    Ok(match line.rest {
        Outcome::Ok(answer) => Ok(answer),
        Outcome::Error(fault) => Err(fault),
    })
}

fn ended(mut line: Vec<u8>) -> Vec<u8> {
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_survive_their_line() {
        let tags = vec!["a".parse().unwrap(), "b".parse().unwrap()];
        let all = [
            Request::Status,
            Request::Snapshot(Snapshot { tags, stored: true, full: true }),
            Request::Suspend,
            Request::Resume,
            Request::Stop(Stop { now: true }),
            Request::Rewind(Rewind { to: "-2".into() }),
        ];
        for (request, name) in all.into_iter().zip(REQUESTS) {
            assert_eq!(request.name(), name);
            assert_eq!(Request::parse(&request.to_line()).unwrap(), request);
        }
        assert_eq!(
            Request::parse(br#"{"version":1,"request":"snapshot"}"#).unwrap(),
            Request::Snapshot(Snapshot::default())
        );
        let line = String::from_utf8(Request::Snapshot(Snapshot::default()).to_line()).unwrap();
        assert!(!line.contains("full"), "a supervisor that does not know the field would refuse the request: {line}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, code, word) in [
            ("", Code::Malformed, "EOF"),
            ("[]", Code::Malformed, "map"),
            ("{\"request\":\"status\"}", Code::Version, "missing"),
            ("{\"version\":2,\"request\":\"status\"}", Code::Version, "version 2"),
            ("{\"version\":\"1\",\"request\":\"status\"}", Code::Version, "\"1\""),
            ("{\"version\":1}", Code::Malformed, "\"request\""),
            ("{\"version\":1,\"request\":\"dance\"}", Code::UnknownRequest, "\"dance\""),
            ("{\"version\":1,\"request\":\"stop\",\"when\":1}", Code::BadRequest, "when"),
            ("{\"version\":1,\"request\":\"status\",\"x\":1}", Code::BadRequest, "`x`"),
            ("{\"version\":1,\"request\":\"rewind\"}", Code::BadRequest, "`to`"),
            ("{\"version\":1,\"request\":\"snapshot\",\"tags\":[\"42\"]}", Code::BadRequest, "not a tag"),
        ] {
            let fault = Request::parse(line.as_bytes()).unwrap_err();
            assert!(fault.code == code && fault.message.contains(word), "{line}: {fault:?}");
        }
    }

    #[test]
    fn answers_survive_their_line() {
        let fault = Fault::new(Code::Refused, "no");
        assert_eq!(
            String::from_utf8(answer_line(Err(fault.clone()))).unwrap(),
            "{\"version\":1,\"error\":{\"code\":\"refused\",\"message\":\"no\"}}\n"
        );
        assert_eq!(parse_answer(&answer_line(Err(fault.clone()))).unwrap(), Err(fault));
        let answer = Answer::Running { image: None };
        assert_eq!(parse_answer(&answer_line(Ok(answer.clone()))).unwrap(), Ok(answer));
        let newer = br#"{"version":1,"error":{"code":"odd","message":"m","more":1}}"#;
        assert_eq!(parse_answer(newer).unwrap(), Err(Fault::new(Code::Other, "m")));
    }

    proptest! {
        #[test]
        fn no_line_is_too_odd(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::parse(&line);
        }
    }
}
