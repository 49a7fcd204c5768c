//! `job.json`: what a later `run` of the same name needs to know about the last one.

use std::io;
use std::path::Path;
use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::{Error, Result};
use super::id::{ImageId, JobName};
use super::paths::JobPath;
use super::trust::{Signature, Trust};
use rekindle_base::interval::Failures;
use rekindle_base::micros;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

pub(super) const FILE_NAME: &str = "job.json";
/// The newest version that this code reads. It writes the lowest possible one: 2 if it is signed.
const VERSION: u32 = 2;
/// Maximum size of the file: execve(2) takes at most 6 MiB of arguments (three quarters of `_STK_LIM`, fs/exec.c), and
/// JSON uses at most six bytes for one.
pub const MAX_BYTES: u64 = 64 << 20;

/// What a larger one is told with.
const TOO_LARGE: &str = "it is larger than any that rekindle writes: remove it; the images are not affected";

/// How the name of a lineage begins.
const LINEAGE_TIME: &str = "%Y%m%dT%H%M%S%3fZ";

/// The name of a lineage that begins now: for a run that starts from the beginning, or from an image that is not the
/// newest.
#[must_use]
pub fn new_lineage() -> String {
    format!("{}-{}", Utc::now().format(LINEAGE_TIME), std::process::id())
}

/// The record of the last run of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The command line, as [`super::manifest::words::text_of`] writes it.
    pub command: Vec<String>,
    /// The working directory.
    pub directory: JobPath,
    /// See [`super::Manifest::lineage`].
    pub lineage: String,
    /// The image of another lineage that this one started from (`rekindle restore`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<ImageId>,
    /// When the run began.
    pub created: DateTime<Utc>,
    /// How it ended, if it did.
    pub outcome: Outcome,
    /// The exit code of the job, if it exited.
    pub exit_code: Option<i32>,
    /// How long the job has run in total, under all supervisors, up to the last change of this record: it is written at
    /// the beginning and the end of a run, at a death and at each snapshot.
    #[serde(rename = "uptime_us", default, with = "micros")]
    pub uptime: Duration,
    /// How often it failed in that time; see [`rekindle_base::interval::Failures`].
    #[serde(default)]
    pub failures: u32,
    /// How often this run was restored from an image.
    #[serde(default)]
    pub restores: u32,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It has not ended, or the supervisor was killed before it could record the end.
    Running,
    /// The job exited with 0.
    Completed,
    /// Given up.
    Failed {
        /// The reason in words.
        why: String,
    },
    /// Stopped by a signal or a command, to be continued.
    Stopped,
}

/// Version 1: without a signature.
#[derive(Serialize, Deserialize)]
struct OnDisk<R> {
    version: u32,
    #[serde(flatten)]
    record: R,
}

/// Version 2. The record stays text until its signature is checked.
#[derive(Serialize, Deserialize)]
struct Signed<'a> {
    version: u32,
    signature: Signature,
    #[serde(borrow)]
    record: &'a RawValue,
}

#[derive(Deserialize)]
struct Header {
    version: u32,
}

/// The bytes that the signature covers: a constant for records, the job, and the exact text.
fn signed<'a>(job: &'a JobName, body: &'a RawValue) -> [&'a [u8]; 3] {
    [b"job.json", job.as_str().as_bytes(), body.get().as_bytes()]
}

pub(super) fn read(file: &Beneath, job: &JobName, trust: &Trust) -> Result<Option<JobRecord>> {
    match file.content(MAX_BYTES) {
        Ok(bytes) => parse(&bytes, file.path(), job, trust).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let source = match error.kind() {
                kind @ io::ErrorKind::FileTooLarge => io::Error::new(kind, TOO_LARGE),
                _ => error,
            };
            Err(Error::Read { path: file.path().to_owned(), source })
        }
    }
}

/// Whether there is a record with a signature.
pub(super) fn is_signed(file: &Beneath) -> bool {
    let bytes = file.content(MAX_BYTES).unwrap_or_default();
    serde_json::from_slice(&bytes).is_ok_and(|Header { version }| version == VERSION)
}

/// Reads the result of [`to_bytes`]; the path is for messages.
///
/// # Errors
/// [`Error::ParseRecord`], [`Error::NewerRecord`], [`Error::UntrustedRecord`].
pub fn parse(bytes: &[u8], path: &Path, job: &JobName, trust: &Trust) -> Result<JobRecord> {
    let parse = |source| Error::ParseRecord { path: path.to_owned(), source };
    let untrusted = |source| Error::UntrustedRecord { path: path.to_owned(), source };
    match serde_json::from_slice(bytes).map_err(parse)? {
        Header { version } if version > VERSION => Err(Error::NewerRecord { path: path.to_owned(), version }),
        Header { version } if version < VERSION => {
            trust.check(None, &[]).map_err(untrusted)?;
            serde_json::from_slice::<OnDisk<JobRecord>>(bytes).map(|it| it.record).map_err(parse)
        }
        Header { .. } => {
            let read: Signed<'_> = serde_json::from_slice(bytes).map_err(parse)?;
            trust.check(Some(&read.signature), &signed(job, read.record)).map_err(untrusted)?;
            serde_json::from_str(read.record.get()).map_err(parse)
        }
    }
}

/// The content of the file, signed if there is a key.
///
/// # Errors
/// When the record has no form in JSON.
pub fn to_bytes(record: &JobRecord, job: &JobName, trust: &Trust) -> io::Result<Vec<u8>> {
    let body = RawValue::from_string(serde_json::to_string_pretty(record)?)?;
    match trust.sign(&signed(job, &body)) {
        Some(signature) => serde_json::to_vec_pretty(&Signed { version: VERSION, signature, record: &body }),
        None => serde_json::to_vec_pretty(&OnDisk { version: VERSION - 1, record }),
    }
    .map_err(io::Error::from)
}

pub(super) fn write(file: &Beneath, record: &JobRecord, job: &JobName, trust: &Trust) -> Result<()> {
    let failed = |source| Error::Write { path: file.path().to_owned(), source };
    durable::write_file(file, &to_bytes(record, job, trust).map_err(failed)?, 0o600).map_err(failed)
}

impl JobRecord {
    /// Whether an image is on the line of this run: it is of the same lineage, or the one that the run started from.
    #[must_use]
    pub fn has(&self, image: ImageId, lineage: &str) -> bool {
        self.lineage == lineage || self.base == Some(image)
    }

    /// When the present line began: a rewind begins another one during a run, and its name tells when.
    #[must_use]
    pub fn line_began(&self) -> DateTime<Utc> {
        let text = self.lineage.split_once('-').map_or(self.lineage.as_str(), |(when, _)| when);
        let began = NaiveDateTime::parse_from_str(text, LINEAGE_TIME).map(|began| began.and_utc());
        began.map_or(self.created, |began| began.max(self.created))
    }

    /// Whether this run has left an image that was taken at this time: the image is not on its line, and is older than
    /// that. One that is younger may be of another machine.
    #[must_use]
    pub fn has_left(&self, image: ImageId, lineage: &str, taken: DateTime<Utc>) -> bool {
        !self.has(image, lineage) && self.line_began() > taken
    }

    /// How often the job failed until the end of this run. A run without a recorded end was killed, together with the
    /// job.
    #[must_use]
    pub fn seen_so_far(&self) -> Failures {
        let by_force = u32::from(self.outcome == Outcome::Running);
        Failures { uptime: self.uptime, failures: self.failures.saturating_add(by_force) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::Key;
    use crate::{Unsigned, Untrusted};

    fn record() -> JobRecord {
        JobRecord {
            command: vec!["train".into()],
            directory: "/home/alice".parse().unwrap(),
            lineage: "first".into(),
            base: None,
            created: DateTime::UNIX_EPOCH,
            outcome: Outcome::Running,
            exit_code: None,
            uptime: Duration::ZERO,
            failures: 0,
            restores: 0,
        }
    }

    fn trust(byte: u8, unsigned: Unsigned) -> Trust {
        Trust::new(Key::new(&[byte; 32]), Path::new("/etc/key"), unsigned)
    }

    fn untrusted(result: Result<JobRecord>) -> Untrusted {
        match result {
            Err(Error::UntrustedRecord { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_record_is_its_jobs_and_nobody_changes_it_without_the_key() {
        let (job, other): (JobName, JobName) = ("train".parse().unwrap(), "other".parse().unwrap());
        let read = |bytes: &[u8], job: &JobName, trust: &Trust| parse(bytes, Path::new("job.json"), job, trust);
        let ours = trust(7, Unsigned::Refused);
        let bytes = to_bytes(&record(), &job, &ours).unwrap();
        assert_eq!(read(&bytes, &job, &ours).unwrap(), record());
        assert_eq!(read(&bytes, &job, &Trust::default()).unwrap(), record(), "it is no secret");
        let done = String::from_utf8(bytes.clone()).unwrap().replace("\"running\"", "\"completed\"").into_bytes();
        assert!(matches!(untrusted(read(&done, &job, &ours)), Untrusted::Forged { .. }));
        assert!(matches!(untrusted(read(&bytes, &other, &ours)), Untrusted::Forged { .. }));
        let theirs = to_bytes(&record(), &job, &trust(8, Unsigned::Refused)).unwrap();
        assert!(matches!(untrusted(read(&theirs, &job, &ours)), Untrusted::OtherKey { .. }));

        let old = to_bytes(&record(), &job, &Trust::default()).unwrap();
        assert!(String::from_utf8(old.clone()).unwrap().contains("\"version\": 1"));
        assert_eq!(read(&old, &job, &Trust::default()).unwrap(), record());
        assert!(matches!(untrusted(read(&old, &job, &ours)), Untrusted::Unsigned { .. }));
        assert_eq!(read(&old, &job, &trust(7, Unsigned::Accepted)).unwrap(), record());
    }

    #[test]
    fn an_image_is_left_if_it_is_older_than_the_line_and_not_on_it() {
        let id = |n| ImageId::new(n, DateTime::UNIX_EPOCH);
        let before = Utc::now() - chrono::TimeDelta::seconds(1);
        let rewound = JobRecord { lineage: new_lineage(), base: Some(id(3)), ..record() };
        let after = Utc::now() + chrono::TimeDelta::seconds(1);
        assert!(before < rewound.line_began() && rewound.line_began() < after, "the run began long before");
        assert!(rewound.has_left(id(4), "first", before));
        assert!(!rewound.has_left(id(3), "first", before), "it goes on from there");
        assert!(!rewound.has_left(id(4), &rewound.lineage, before));
        assert!(!rewound.has_left(id(4), "other", after), "another machine took it since");
        let later = JobRecord { created: after, ..rewound };
        assert_eq!(later.line_began(), after);
        for lineage in ["", "first", "20261120T132105Z-1", "group-7"] {
            assert_eq!(JobRecord { lineage: lineage.into(), ..record() }.line_began(), record().created, "{lineage}");
        }
    }

    #[test]
    fn a_run_that_was_ended_by_force_has_failed() {
        let record = |outcome| JobRecord {
            command: Vec::new(),
            directory: "/".into(),
            lineage: String::new(),
            base: None,
            created: chrono::DateTime::UNIX_EPOCH,
            outcome,
            exit_code: None,
            uptime: Duration::from_secs(3600),
            failures: 2,
            restores: 0,
        };
        for (outcome, failures) in [(Outcome::Running, 3), (Outcome::Stopped, 2), (Outcome::Completed, 2)] {
            assert_eq!(record(outcome).seen_so_far(), Failures { uptime: Duration::from_secs(3600), failures });
        }
    }

    #[test]
    fn a_record_that_is_too_large_is_told_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::File::create(dir.path().join(FILE_NAME)).unwrap().set_len(2 << 40).unwrap();
        let file = crate::tests::beneath(dir.path()).join(FILE_NAME);
        let error = super::read(&file, &"j".parse().unwrap(), &Trust::default()).unwrap_err();
        assert!(rekindle_base::chain(&error).ends_with(TOO_LARGE), "{error:?}");
    }
}
