//! Errors of a replica, in words that contain no credentials.
//!
//! The clients' own errors quote requests and answers: an address with a signature, a header that a server sent. None
//! of that leaves this module. A message is our own sentence, with the status and the short code of the answer. If the
//! text of an error is used all the same, credentials from the environment are removed from it first.

use std::fmt;
use std::io;
use std::path::PathBuf;

use bytesize::ByteSize;

use crate::environment::Environment;
use crate::url::Scheme;
use rekindle_store::format::ReadError;
use rekindle_store::{FileError, ImageId};

/// The result of calls on a replica.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call on a replica failed. What was replicated before is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address, or the settings in the environment, cannot be used.
    #[error("the replica {url} cannot be used: {why}")]
    Open {
        /// The address.
        url: String,
        /// The reason in words.
        why: String,
    },
    /// The replica did not do what was requested.
    #[error("cannot {action} the replica {url}: {failure}")]
    Remote {
        /// The address.
        url: String,
        /// The action; ends in a preposition.
        action: String,
        /// The result.
        failure: Failure,
    },
    /// An object differs from what was sent there.
    #[error("{what} in the replica {url} is damaged: {why}")]
    Damaged {
        /// The address.
        url: String,
        /// The object.
        what: String,
        /// The reason in words.
        why: String,
    },
    /// There is a key, but the object has no valid signature of it.
    #[error("{what} in the replica {url} is refused, and left as it is: {why}")]
    Untrusted {
        /// The address.
        url: String,
        /// The object.
        what: String,
        /// The reason in words.
        why: String,
    },
    /// It does not exist, or is incomplete.
    #[error("image {image} is incomplete in the replica {url}: {why}")]
    NotWhole {
        /// The address.
        url: String,
        /// The image.
        image: ImageId,
        /// What is missing.
        why: String,
    },
    /// The image is not packed; only packed images can be sent.
    #[error("image {0} is not packed and cannot be replicated; it is packed when it is stored again")]
    NotPacked(ImageId),
    /// A file here cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A file here is damaged.
    #[error(transparent)]
    Local(#[from] ReadError),
    /// The image cannot be sent, because it is incomplete here.
    #[error("image {0} cannot be replicated: some of its content is in no pack; see `rekindle verify`")]
    NotWholeHere(ImageId),
    /// The image is encrypted, and we do not have its key.
    #[error(
        "image {image} in the replica {url} cannot be used: {why}; set store.encryption-key to the key with which it was made"
    )]
    Key {
        /// The address.
        url: String,
        /// The image.
        image: ImageId,
        /// The reason in words.
        why: String,
    },
    /// The disk is too full for it.
    #[error("image {image} of the replica needs {need}, and {path} has {free} free, and {keep} must stay free (store.min-free): free space there (`rekindle prune` removes images that no rule keeps), lower store.min-free, or choose another store.directory", need = ByteSize::b(*need), free = ByteSize::b(*free), keep = ByteSize::b(*keep), path = path.display())]
    NoRoom {
        /// The image.
        image: ImageId,
        /// Bytes to be fetched.
        need: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that must stay free.
        keep: u64,
        /// The job's folder.
        path: PathBuf,
    },
    /// A file here cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A chunk that was fetched cannot be stored here.
    #[error(transparent)]
    Put(#[from] FileError),
    /// The local store failed.
    #[error(transparent)]
    Store(#[from] rekindle_store::Error),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// A failure reported by the replica or the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The address cannot be reached.
    Unreachable(String),
    /// There was no answer in time.
    TimedOut,
    /// There are no credentials.
    NoCredentials(&'static str),
    /// The credentials are not sufficient.
    Refused {
        /// The short code of the answer, such as `AccessDenied`.
        code: Option<String>,
        /// What to do about it.
        help: &'static str,
    },
    /// The object or the bucket does not exist.
    NotThere {
        /// The short code of the answer, such as `NoSuchBucket`.
        code: Option<String>,
    },
    /// There is no space for more.
    Full {
        /// The short code of the answer, such as `QuotaExceeded`.
        code: Option<String>,
    },
    /// Another answer with an error status.
    Status {
        /// The HTTP status.
        status: u16,
        /// The short code of the answer.
        code: Option<String>,
    },
    /// Any other failure.
    Other(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = |code: &Option<String>| code.as_ref().map(|code| format!(" ({code})")).unwrap_or_default();
        match self {
            Failure::Unreachable(why) => {
                write!(f, "it cannot be reached ({why}); check the network, the address and the proxy settings")
            }
            Failure::TimedOut => f.write_str("it did not answer in time; check the network, or lower replica.rate"),
            Failure::NoCredentials(help) => write!(f, "there are no credentials; {help}"),
            Failure::Refused { code: of, help } => {
                write!(f, "it refused{}: the credentials are wrong or do not allow this; {help}", code(of))
            }
            Failure::NotThere { code: of } => {
                write!(f, "not found{}: check that the bucket or folder exists, and the region", code(of))
            }
            Failure::Full { code: of } => write!(
                f,
                "it is full{}: give it more space. What no image needs there is removed by itself two hours after the \
                image that needed it",
                code(of)
            ),
            Failure::Status { status, code: of } => write!(f, "it answered {status}{}", code(of)),
            Failure::Other(why) => f.write_str(why),
        }
    }
}

impl Error {
    /// Whether nothing is known about the replica: it could not be reached, or refused access.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Error::Open { .. } | Error::Remote { .. })
    }

    /// Whether trying again later may help without anybody's doing: the connection or the replica failed.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Error::Remote { failure, .. } => !matches!(failure, Failure::Refused { .. } | Failure::NoCredentials(_)),
            _ => false,
        }
    }

    /// Whether the replica may have no space for more. Not every service says so clearly.
    pub(super) fn may_be_full(&self) -> bool {
        let Error::Remote { failure, .. } = self else { return false };
        match failure {
            Failure::Full { .. } | Failure::Refused { .. } | Failure::Other(_) => true,
            // These pass.
            Failure::Status { status, .. } => !matches!(status, 429 | 502..=504),
            Failure::Unreachable(_) | Failure::TimedOut | Failure::NoCredentials(_) | Failure::NotThere { .. } => false,
        }
    }

    /// Whether the object does not exist.
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Error::Remote { failure: Failure::NotThere { .. }, .. })
    }
}

/// The variables with credentials that the clients read, for messages.
pub(super) fn credentials_help(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::S3 => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if you have one), AWS_REGION, and AWS_ENDPOINT_URL for a provider other than Amazon; profile files are not read"
        }
        Scheme::Gs => "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT to the file with the credentials",
        Scheme::Az => {
            "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or the AZURE_CLIENT_ID, AZURE_CLIENT_SECRET and AZURE_TENANT_ID of an application"
        }
        Scheme::File => "the folder must exist, and this user must be able to write to it",
    }
}

/// Addresses where a client asks for a machine's own credentials if the environment has none. On a machine without
/// them, nobody answers there.
const METADATA: [&str; 4] = ["169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity"];

/// Turns an error of the clients into a message of our own.
pub(super) fn translate(error: &object_store::Error, scheme: Scheme, secrets: &Secrets) -> Failure {
    use object_store::Error as E;
    let help = credentials_help(scheme);
    let text = texts(error);
    let (status, code) = (status_in(&text), code_in(&text));
    match (error, status) {
        _ if is_full(error, status, code.as_deref()) => Failure::Full { code },
        (E::NotFound { .. }, _) | (_, Some(404)) => Failure::NotThere { code },
        (E::PermissionDenied { .. } | E::Unauthenticated { .. }, _) | (_, Some(401 | 403)) => {
            Failure::Refused { code, help }
        }
        _ if METADATA.iter().any(|place| text.contains(place)) => Failure::NoCredentials(help),
        (_, Some(status)) => Failure::Status { status, code },
        (_, None) => match transport(error) {
            Some(object_store::client::HttpErrorKind::Timeout) => Failure::TimedOut,
            Some(_) => Failure::Unreachable(without_addresses(&secrets.strike_out(&innermost(error)))),
            None => Failure::Other(without_addresses(&secrets.strike_out(&innermost(error)))),
        },
    }
}

/// Whether there is no space for more: the kernel says so of a folder, and each service in its own way.
fn is_full(error: &object_store::Error, status: Option<u16>, code: Option<&str>) -> bool {
    let of_kernel = |cause: &(dyn std::error::Error + 'static)| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    };
    let named =
        code.is_some_and(|code| ["Quota", "StorageFull", "InsufficientStorage"].iter().any(|it| code.contains(it)));
    status == Some(507) || named || causes(error).any(of_kernel)
}

fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

/// The texts of the error and its sources, for analysis only.
fn texts(error: &object_store::Error) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// The innermost text, which is from the kernel or a parser: it contains nothing of a request.
fn innermost(error: &object_store::Error) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

fn transport(error: &object_store::Error) -> Option<object_store::client::HttpErrorKind> {
    causes(error).find_map(|cause| Some(cause.downcast_ref::<object_store::client::HttpError>()?.kind()))
}

/// The HTTP status, which the clients have only in their text.
fn status_in(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The short code in an answer, if it has the form of one: a letter, then letters and digits.
fn code_in(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let plain = (1..=64).contains(&code.len()) && code.chars().all(|c| c.is_ascii_alphanumeric());
    plain.then(|| code.to_owned())
}

/// Removes addresses, which may contain a signature; the important one is in the message anyway.
fn without_addresses(text: &str) -> String {
    let is_address = |word: &&str| word.contains("://") || word.contains('?');
    let words: Vec<&str> = text.split_whitespace().map(|word| if is_address(&word) { "..." } else { word }).collect();
    words.join(" ").chars().take(300).collect()
}

/// Values that must not be shown.
#[derive(Default)]
pub(super) struct Secrets(Vec<String>);

/// Shorter values are no secrets, and would match everywhere.
const SHORTEST: usize = 6;

impl Secrets {
    /// Values of variables with credentials for the clients, and of proxies, which may contain passwords.
    pub(super) fn of(environment: &Environment) -> Secrets {
        let secret =
            |name: &str| ["KEY", "SECRET", "TOKEN", "SAS", "PASSWORD", "CREDENTIAL"].iter().any(|it| name.contains(it));
        let ours =
            |name: &str| ["AWS_", "GOOGLE_", "AZURE_", "IDENTITY_", "MSI_"].iter().any(|it| name.starts_with(it));
        let proxy = |name: &str| name.to_ascii_uppercase().ends_with("_PROXY");
        let values = environment.all().filter(|(name, _)| (ours(name) && secret(name)) || proxy(name));
        Secrets::new(values.map(|(_, value)| value.to_owned()))
    }

    fn new(values: impl Iterator<Item = String>) -> Secrets {
        let mut values: Vec<String> = values.filter(|value| value.len() >= SHORTEST).collect();
        // Longest first: if one is the beginning of another, replacing it first would leave the end of the other.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        Secrets(values)
    }

    fn strike_out(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "..."))
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} secrets", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn an_answer_is_reduced_to_its_number_and_code() {
        let secrets = Secrets::new(std::iter::empty());
        let answer = "Server returned non-2xx status code: 503 Service Unavailable: <Error><Code>SlowDown</Code><X>Authorization: hunter22</X>";
        let failure = translate(&generic(answer), Scheme::S3, &secrets);
        assert_eq!(failure, Failure::Status { status: 503, code: Some("SlowDown".into()) });
        for answer in [
            "status code: 507 Insufficient Storage: <Error><Code>XMinioStorageFull</Code>",
            "status code: 403 Forbidden: <Error><Code>QuotaExceeded</Code>",
        ] {
            let failure = translate(&generic(answer), Scheme::S3, &secrets);
            assert!(matches!(failure, Failure::Full { code: Some(_) }), "{failure:?}");
        }
        let hostile = "status code: 400 x: <Error><Code>AWS4 hunter22</Code>";
        assert_eq!(translate(&generic(hostile), Scheme::S3, &secrets), Failure::Status { status: 400, code: None });
    }

    #[test]
    fn addresses_and_secrets_are_struck_out_of_what_is_taken_over() {
        let secrets = Secrets::new(["hunter22".to_owned(), "hunter2222".to_owned(), "ab".to_owned()].into_iter());
        let text = "about hunter2222 and hunter22 at https://x.example/y?sig=abc";
        let failure = translate(&generic(text), Scheme::S3, &secrets);
        assert_eq!(failure, Failure::Other("about ... and ... at ...".into()));
    }

    #[test]
    fn who_asks_the_machine_for_credentials_has_none() {
        let text = "error sending request for url (http://169.254.169.254/latest/api/token)";
        let failure = translate(&generic(text), Scheme::S3, &Secrets::new(std::iter::empty()));
        let Failure::NoCredentials(help) = &failure else { panic!("{failure}") };
        assert!(help.contains("AWS_SECRET_ACCESS_KEY"));
    }
}
