//! Errors, each with a sentence that says what to do, and the meaning of etcd's answers for a request.

use std::error::Error as _;
use std::fmt::Write as _;
use std::path::PathBuf;

use tonic::{Code, ConnectError, Status};

/// The result of a request.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options contradict each other, or one cannot be used.
    #[error("{0}")]
    Options(String),
    /// A file cannot be read.
    #[error("cannot read {what}, {}", path.display())]
    Read {
        /// The content of the file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// No member answers.
    #[error("no member of etcd answers ({tried}). {help}")]
    Unreachable {
        /// The members, and what is wrong with each.
        tried: String,
        /// What to do.
        help: &'static str,
    },
    /// Members answer, but cannot agree.
    #[error("etcd has no quorum ({tried}). Start its missing members, or repair the network between them")]
    NoQuorum {
        /// The members, and the answer of each.
        tried: String,
    },
    /// etcd refuses the login.
    #[error("etcd refuses the login of user \"{user}\": {why}. {help}")]
    Login {
        /// The user; empty if there is none.
        user: String,
        /// What etcd says.
        why: String,
        /// What to do.
        help: &'static str,
    },
    /// The user has no right to do this.
    #[error("etcd does not allow this{by}. Give {whose} the right to read and write keys below {prefix}")]
    Denied {
        /// " to user NAME", if there is a user.
        by: String,
        /// The user or the client, as in the sentence.
        whose: String,
        /// The prefix of the keys.
        prefix: String,
    },
    /// The database of etcd is full.
    #[error(
        "etcd refuses all writes: its database is full (alarm NOSPACE). Compact and defragment it, then run etcdctl alarm \
         disarm; --quota-backend-bytes sets its limit"
    )]
    Full,
    /// A member runs a version that is too old.
    #[error("{endpoint} runs etcd {version}, and 3.4 is needed. Install a newer etcd there")]
    TooOld {
        /// Its address.
        endpoint: String,
        /// Its version.
        version: String,
    },
    /// A member belongs to another cluster.
    #[error(
        "{endpoint} belongs to another cluster of etcd ({found:x}, the others to {expected:x}). Check the addresses; a member \
         that was set up again must join the cluster of the others"
    )]
    OtherCluster {
        /// Its address.
        endpoint: String,
        /// The id of its cluster.
        found: u64,
        /// The id of the cluster that answered before.
        expected: u64,
    },
    /// etcd has lost data that it had returned before.
    #[error(
        "etcd has gone back from revision {seen} to {found}: was it restored from a backup? End all runs of the group, and \
         start them again"
    )]
    WentBack {
        /// The revision that was seen.
        seen: u64,
        /// The revision that it has now.
        found: u64,
    },
    /// A write names a lease that no longer exists.
    #[error("the lease has expired in etcd")]
    LeaseGone,
    /// It is unknown whether the write is done. It may also be done later.
    #[error("it is unknown whether etcd carried out the write: {0}")]
    Unsure(String),
    /// etcd refuses the request.
    #[error("etcd refuses the request: {0}")]
    Refused(String),
    /// A local etcd cannot be used.
    #[error("{0}")]
    Local(String),
    /// A thread could not be started.
    #[error("cannot start a thread for etcd")]
    Thread(#[source] std::io::Error),
}

impl Error {
    /// Whether the write may be done, or may be done later: a paused member reads it from its socket when it continues.
    /// So each write needs a condition that no longer holds by then.
    #[must_use]
    pub fn is_unsure(&self) -> bool {
        matches!(self, Error::Unsure(_))
    }

    /// Whether the request named a lease that no longer exists.
    #[must_use]
    pub fn lease_is_gone(&self) -> bool {
        matches!(self, Error::LeaseGone)
    }

    /// Whether the request may succeed later with the same options.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Error::Unreachable { .. } | Error::NoQuorum { .. } | Error::Full | Error::Unsure(_) | Error::Refused(_)
        )
    }
}

/// The meaning of an answer.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Nothing was done. Another member may do it.
    Elsewhere(String),
    /// Nothing was done. The token is no longer valid.
    Login(String),
    /// Nothing was done: the members have no quorum.
    NoQuorum(String),
    /// It may be done. `broken`: the connection is no longer usable.
    Unsure(String),
    /// Nothing was done, and every member would answer the same.
    Final(Final),
}

/// The reason of a refusal.
#[derive(Debug)]
pub(crate) enum Final {
    Denied,
    Full,
    LeaseGone,
    NoUser,
    WrongPassword,
    NoAuthentication,
    Other(String),
}

/// etcd's texts are part of its interface: its own client compares them too (`api/v3rpc/rpctypes/error.go`).
pub(crate) fn judge(status: &Status) -> Verdict {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return Verdict::Elsewhere(chain(error));
        }
        source = error.source();
    }
    let text = status.message();
    let Some(said) = text.strip_prefix("etcdserver: ").or_else(|| text.strip_prefix("auth: ")) else {
        let text = status.source().map_or_else(|| text.to_owned(), chain);
        return match status.code() {
            Code::PermissionDenied => Verdict::Final(Final::Denied),
            Code::InvalidArgument | Code::Unimplemented | Code::OutOfRange => Verdict::Final(Final::Other(text)),
            _ => Verdict::Unsure(text),
        };
    };
    let owned = said.to_owned();
    match (status.code(), said) {
        (Code::PermissionDenied, _) => Verdict::Final(Final::Denied),
        (Code::Unauthenticated, _) | (_, "revision of auth store is old") => Verdict::Login(owned),
        (_, "user name is empty") => Verdict::Final(Final::NoUser),
        (_, "authentication failed, invalid user ID or password") => Verdict::Final(Final::WrongPassword),
        (_, "authentication is not enabled") => Verdict::Final(Final::NoAuthentication),
        (_, "requested lease not found") => Verdict::Final(Final::LeaseGone),
        (_, "mvcc: database space exceeded") => Verdict::Final(Final::Full),
        (_, "no leader") => Verdict::NoQuorum(owned),
        (_, "too many requests" | "rpc not supported for learner" | "not capable") => Verdict::Elsewhere(owned),
        (Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded | Code::Internal, _) => {
            Verdict::Unsure(owned)
        }
        _ => Verdict::Final(Final::Other(owned)),
    }
}

/// The failed tries, for a message.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    failures: Vec<(String, String)>,
    /// A member answered that it cannot reach the others in time.
    pub(crate) no_quorum: bool,
}

impl Tried {
    /// Whether another try would fail in the same way, until somebody changes certificates.
    pub(crate) fn is_hopeless(&self) -> bool {
        !self.no_quorum && self.failures.iter().all(|(_, why)| certificate_help(why).is_some())
    }

    /// Keeps the newest failure of a member, unless an earlier one says more. A server that refuses a certificate
    /// closes the connection, and its reason does not always arrive.
    pub(crate) fn add(&mut self, endpoint: &str, why: String) {
        let told = |(other, before): &(String, String)| other == endpoint && weight(before) > weight(&why);
        if self.failures.iter().any(told) {
            return;
        }
        self.failures.retain(|(other, _)| other != endpoint);
        self.failures.push((endpoint.to_owned(), why));
    }

    /// Keeps a failure if the member has none yet. The last try ends early, with the time for the request: that says nothing
    /// of the member.
    pub(crate) fn add_first(&mut self, endpoint: &str, why: String) {
        if !self.failures.iter().any(|(other, _)| other == endpoint) {
            self.failures.push((endpoint.to_owned(), why));
        }
    }

    pub(crate) fn text(&self) -> String {
        self.failures.iter().fold(String::new(), |mut text, (endpoint, why)| {
            let gap = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{gap}{endpoint}: {why}");
            text
        })
    }

    pub(crate) fn into_error(self) -> Error {
        let tried = self.text();
        if self.no_quorum {
            return Error::NoQuorum { tried };
        }
        let help = help(&tried);
        Error::Unreachable { tried, help }
    }
}

/// The advice if no more is known.
const HELP: &str = "Check that etcd runs, its addresses, and the network";

/// Errors of TLS about certificates, and what to do.
const CERTIFICATES: [(&[&str], &str); 4] = [
    (
        &["UnknownIssuer", "BadSignature"],
        "etcd's certificate is signed by another authority: name the certificate of that authority",
    ),
    (&["certificate expired", "not valid yet"], "Renew the certificate of etcd, and check the clocks"),
    (&["not valid for name"], "Use an address that is in etcd's certificate"),
    (
        &["alert: BadCertificate", "alert: Certificate", "alert: Unknown", "alert: Unsupported", "alert: DecryptError"],
        "etcd does not accept the client's certificate: name one that has not expired and is signed by etcd's authority",
    ),
];

/// Errors of connections that end at once, as those to another kind of server do.
const ENDED: [&str; 7] =
    ["InvalidContentType", "corrupt message", "handshake eof", "frame", "connection closed", "broken pipe", "reset"];

fn certificate_help(why: &str) -> Option<&'static str> {
    let found = CERTIFICATES.iter().find(|(signs, _)| signs.iter().any(|sign| why.contains(sign)));
    found.map(|(_, help)| *help)
}

fn ended(why: &str) -> bool {
    ENDED.iter().any(|sign| why.contains(sign))
}

/// How informative a failure is.
fn weight(why: &str) -> u8 {
    match certificate_help(why) {
        Some(_) => 2,
        None => u8::from(ended(why)),
    }
}

fn help(why: &str) -> &'static str {
    certificate_help(why).unwrap_or_else(|| {
        let http = "Check that these are addresses for clients, whether they use TLS (https://, or http:// without), and which \
            certificates they accept";
        if ended(why) { http } else { HELP }
    })
}

/// An error with its causes, each once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if texts.last().is_some_and(|last| !last.contains(&text)) {
            texts.push(text);
        }
        source = error.source();
    }
    // The outermost text says only that something failed.
    if texts.len() > 1 && texts.first().is_some_and(|text| text == "transport error") {
        texts.remove(0);
    }
    texts.join(": ").trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_tells_more_is_kept() {
        let certificate = "received fatal alert: BadCertificate";
        let mut tried = Tried::default();
        for why in ["timed out", "InvalidContentType"] {
            tried.add("a", why.into());
        }
        tried.add_first("a", "no connection within 2.6ms".into());
        assert_eq!(tried.text(), "a: InvalidContentType");
        for why in [certificate, "operation was canceled: connection closed"] {
            tried.add("a", why.into());
        }
        assert_eq!(tried.text(), format!("a: {certificate}"));
        tried.add("b", "timed out".into());
        tried.add("b", "no answer".into());
        assert_eq!(tried.text(), format!("a: {certificate}; b: no answer"));
    }

    #[test]
    fn the_end_of_the_time_replaces_no_reason() {
        let other = "it belongs to another cluster";
        let mut tried = Tried::default();
        tried.add("a", other.into());
        for endpoint in ["a", "b"] {
            tried.add_first(endpoint, "no connection within 2.6ms".into());
        }
        assert_eq!(tried.text(), format!("a: {other}; b: no connection within 2.6ms"));
    }
}
