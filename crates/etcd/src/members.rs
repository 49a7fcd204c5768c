//! The members of etcd: one connection to each member in use, and requests that go to the next member if that is safe.
//!
//! - A request goes to the member that answered last. If it has certainly not been done, it goes to the next member. If
//!   it may have been done, it goes there only if it may be done twice ([`Kind::Repeatable`]).
//! - A member is checked before it gets a request: its version, and whether it belongs to the same cluster.
//! - After a failure a new connection is made, with the present content of the certificate files.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::uri::PathAndQuery;
use tokio::time::{sleep, timeout};
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::error::{Error, Final, Result, Tried, Verdict, judge};
use crate::messages::{Answer, AuthenticateRequest, AuthenticateResponse, Header, StatusRequest, StatusResponse};
use crate::options::{MAX_ANSWER, Options};

/// The pause between two rounds over all members.
const PAUSE: Duration = Duration::from_millis(100);

/// The oldest version that works: 3.4 has progress requests for watches.
const OLDEST: (u32, u32) = (3, 4);

/// Whether a request may be done twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Repeatable,
    Once,
}

/// Facts about the cluster that all connections of a process share.
#[derive(Debug, Default)]
pub(crate) struct Known {
    cluster: Option<u64>,
    /// The highest revision that a linearizable request has returned.
    revision: u64,
}

/// The connections.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) options: Options,
    channels: Vec<Mutex<Option<Channel>>>,
    /// The one that answered last.
    preferred: AtomicUsize,
    token: Mutex<Option<String>>,
    known: Arc<Mutex<Known>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave this half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The unsigned number that etcd means.
pub(crate) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

impl Members {
    pub(crate) fn new(options: Options, known: Arc<Mutex<Known>>) -> Members {
        let channels = options.endpoints.iter().map(|_| Mutex::new(None)).collect();
        Members { options, channels, preferred: AtomicUsize::new(0), token: Mutex::new(None), known }
    }

    pub(crate) fn known(&self) -> Arc<Mutex<Known>> {
        Arc::clone(&self.known)
    }

    pub(crate) fn count(&self) -> usize {
        self.options.endpoints.len()
    }

    pub(crate) fn preferred(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }

    /// Sends the next request to this member.
    pub(crate) fn prefer(&self, member: usize) {
        self.preferred.store(member, Ordering::Relaxed);
    }

    pub(crate) fn address(&self, member: usize) -> &str {
        self.options.endpoints.get(member).map_or("", String::as_str)
    }

    /// Makes the next request use a new connection, and prefer another member.
    pub(crate) fn distrust(&self, member: usize) {
        if let Some(channel) = self.channels.get(member) {
            *lock(channel) = None;
        }
        let next = (member + 1) % self.count().max(1);
        let _ = self.preferred.compare_exchange(member, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The highest revision that was seen.
    pub(crate) fn seen(&self) -> u64 {
        lock(&self.known).revision
    }

    pub(crate) fn saw(&self, revision: u64) {
        let mut known = lock(&self.known);
        known.revision = known.revision.max(revision);
    }

    /// Refuses an answer of an etcd that has lost data which it returned before this request.
    pub(crate) fn not_before(&self, header: Option<&Header>, seen: u64) -> Result<u64> {
        let found = unsigned(header.map_or(0, |header| header.revision));
        if found < seen {
            return Err(Error::WentBack { seen, found });
        }
        self.saw(found);
        Ok(found)
    }

    /// Refuses a member of another cluster.
    pub(crate) fn same_cluster(&self, member: usize, header: Option<&Header>) -> Result<()> {
        let Some(header) = header else { return Ok(()) };
        let mut known = lock(&self.known);
        let expected = *known.cluster.get_or_insert(header.cluster_id);
        if expected == header.cluster_id {
            return Ok(());
        }
        let endpoint = self.address(member).to_owned();
        Err(Error::OtherCluster { endpoint, found: header.cluster_id, expected })
    }

    /// Makes a request, within the time limit for requests.
    pub(crate) async fn call<Q, A>(&self, path: &'static str, request: Q, kind: Kind) -> Result<A>
    where
        Q: prost::Message + Clone + 'static,
        A: Answer,
    {
        let end = Instant::now() + self.options.request_timeout;
        let (mut tried, mut logins) = (Tried::default(), 0);
        loop {
            let first = self.preferred();
            let mut offset = 0;
            while offset < self.count() {
                let member = (first + offset) % self.count();
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(tried.into_error());
                }
                offset += 1;
                let channel = match timeout(left, self.channel(member)).await {
                    Ok(Ok(channel)) => channel,
                    Ok(Err(Refusal::Member(why))) => {
                        tried.add(self.address(member), why);
                        continue;
                    }
                    Ok(Err(Refusal::All(error))) => return Err(error),
                    Err(_) => {
                        tried.add_first(self.address(member), format!("no connection within {left:.1?}"));
                        continue;
                    }
                };
                // Another try must still be possible if this one hangs.
                let left = end.saturating_duration_since(Instant::now());
                let limit = if kind == Kind::Repeatable { left.min(self.turn()) } else { left };
                let token = lock(&self.token).clone();
                let verdict =
                    match timeout(limit, unary(channel, path, with_token(request.clone(), token.as_deref()))).await {
                        Ok(Ok(answer)) => return self.answered(member, answer),
                        Ok(Err(status)) => judge(&status),
                        Err(_) => Verdict::Unsure(format!("no answer within {limit:.1?}")),
                    };
                match verdict {
                    Verdict::Elsewhere(why) => {
                        self.distrust(member);
                        tried.add(self.address(member), why);
                    }
                    Verdict::NoQuorum(why) => {
                        tried.no_quorum = true;
                        tried.add(self.address(member), why);
                    }
                    Verdict::Login(_) if self.options.login.is_some() && logins < 3 => {
                        // The same member again, with a new token.
                        let _ = lock(&self.token).take_if(|it| Some(&*it) == token.as_ref());
                        logins += 1;
                        offset -= 1;
                    }
                    Verdict::Login(why) => return Err(self.refused(Final::Other(why))),
                    Verdict::Unsure(why) => {
                        self.distrust(member);
                        tried.no_quorum |= why.starts_with("request timed out");
                        let what = format!("{}: {why}", self.address(member));
                        tried.add(self.address(member), why);
                        if kind == Kind::Once {
                            return Err(Error::Unsure(what));
                        }
                    }
                    Verdict::Final(why) => return Err(self.refused(why)),
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || tried.is_hopeless() {
                return Err(tried.into_error());
            }
            sleep(PAUSE.min(left)).await;
        }
    }

    /// The limit for one try of a request that may go to another member.
    pub(crate) fn turn(&self) -> Duration {
        self.options.request_timeout.mul_f64(0.45)
    }

    fn answered<A: Answer>(&self, member: usize, answer: A) -> Result<A> {
        if let Err(error) = self.same_cluster(member, answer.header()) {
            self.distrust(member);
            return Err(error);
        }
        self.prefer(member);
        Ok(answer)
    }

    /// A connection to a checked member.
    pub(crate) async fn channel(&self, member: usize) -> std::result::Result<Channel, Refusal> {
        let Some(slot) = self.channels.get(member) else { return Err(Refusal::Member("unknown".into())) };
        let there = lock(slot).clone();
        let channel = match there {
            Some(channel) => channel,
            None => {
                let (channel, _) = self.look(member).await?;
                *lock(slot) = Some(channel.clone());
                channel
            }
        };
        if self.options.login.is_some() && lock(&self.token).is_none() {
            let token = self.log_in(member, &channel).await?;
            *lock(&self.token) = Some(token);
        }
        Ok(channel)
    }

    /// Connects to a member, and asks for its version and cluster.
    pub(crate) async fn look(&self, member: usize) -> std::result::Result<(Channel, StatusResponse), Refusal> {
        let address = self.address(member);
        let endpoint = self.options.endpoint(address).map_err(Refusal::All)?;
        let channel = endpoint.connect_lazy();
        let asked = unary(channel.clone(), "/etcdserverpb.Maintenance/Status", Request::new(StatusRequest {}));
        // Covers the connection, TLS, and an answer that needs no other member.
        let limit = self.options.dial_timeout * 2;
        let status: StatusResponse = match timeout(limit, asked).await {
            Ok(Ok(status)) => status,
            Ok(Err(status)) => return Err(Refusal::Member(reason(&status))),
            Err(_) => return Err(Refusal::Member(format!("no answer within {limit:.1?}"))),
        };
        if !new_enough(&status.version) {
            let (endpoint, version) = (address.to_owned(), status.version);
            return Err(Refusal::All(Error::TooOld { endpoint, version }));
        }
        self.same_cluster(member, status.header.as_ref()).map_err(|error| Refusal::Member(error.to_string()))?;
        Ok((channel, status))
    }

    async fn log_in(&self, member: usize, channel: &Channel) -> std::result::Result<String, Refusal> {
        let Some((user, password)) = &self.options.login else { return Ok(String::new()) };
        let password = password.read("the password for etcd").map_err(Refusal::All)?;
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        let request = AuthenticateRequest { name: user.clone(), password };
        let asked = unary(channel.clone(), "/etcdserverpb.Auth/Authenticate", with_token(request, None));
        let status = match timeout(self.turn(), asked).await {
            Ok(Ok(AuthenticateResponse { token, .. })) => return Ok(token),
            Ok(Err(status)) => status,
            Err(_) => {
                self.distrust(member);
                return Err(Refusal::Member(format!("no answer to the login within {:.1?}", self.turn())));
            }
        };
        match judge(&status) {
            Verdict::Final(why) => Err(Refusal::All(self.refused(why))),
            Verdict::Elsewhere(why) | Verdict::Login(why) | Verdict::NoQuorum(why) | Verdict::Unsure(why) => {
                self.distrust(member);
                Err(Refusal::Member(why))
            }
        }
    }

    pub(crate) fn token(&self) -> Option<String> {
        lock(&self.token).clone()
    }

    pub(crate) fn forget_token(&self) {
        *lock(&self.token) = None;
    }

    /// The error for a refusal that every member would repeat.
    pub(crate) fn refused(&self, why: Final) -> Error {
        let user = self.options.login.as_ref().map(|(user, _)| user.clone()).unwrap_or_default();
        let login = |why: &str, help| Error::Login { user: user.clone(), why: why.to_owned(), help };
        match why {
            Final::Denied => {
                let (by, whose) = match self.options.login {
                    Some(_) => (format!(" to user \"{user}\""), "the user".to_owned()),
                    None => (String::new(), "the user that the client's certificate names".to_owned()),
                };
                Error::Denied { by, whose, prefix: self.options.prefix.clone() }
            }
            Final::Full => Error::Full,
            Final::LeaseGone => Error::LeaseGone,
            Final::NoUser => login(
                "it requires a user",
                "Set a user and a file with the password, or a certificate with the user's name",
            ),
            Final::WrongPassword => {
                login("unknown user or wrong password", "Check the user and the file with the password")
            }
            Final::NoAuthentication => {
                login("its authentication is off, so anybody can write", "Run etcdctl auth enable, or remove the user")
            }
            Final::Other(why) => Error::Refused(why),
        }
    }
}

/// Why a member gets no request.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The reason is the member's.
    Member(String),
    /// All members would refuse.
    All(Error),
}

/// The message of a failed request, with its cause.
pub(crate) fn reason(status: &Status) -> String {
    match judge(status) {
        Verdict::Elsewhere(why) | Verdict::Login(why) | Verdict::NoQuorum(why) | Verdict::Unsure(why) => why,
        Verdict::Final(Final::Other(why)) => why,
        Verdict::Final(_) => status.message().to_owned(),
    }
}

fn new_enough(version: &str) -> bool {
    let (major, minor, _) = numbers(version);
    (major, minor) >= OLDEST
}

/// A version, as numbers that can be compared.
pub(crate) fn numbers(version: &str) -> (u32, u32, u32) {
    let mut parts = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let mut part = || parts.next().unwrap_or(0);
    (part(), part(), part())
}

/// The request with the token. A member that knows no leader refuses it at once, instead of waiting for one.
pub(crate) fn with_token<T>(message: T, token: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    if let Some(Ok(token)) = token.map(MetadataValue::try_from) {
        request.metadata_mut().insert("token", token);
    }
    request
}

/// A client for one request.
pub(crate) async fn ready(channel: Channel) -> std::result::Result<Grpc<Channel>, Status> {
    let mut grpc = Grpc::new(channel).max_decoding_message_size(MAX_ANSWER).max_encoding_message_size(MAX_ANSWER);
    grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
    Ok(grpc)
}

/// One request on one connection.
pub(crate) async fn unary<Q, A>(
    channel: Channel,
    path: &'static str,
    request: Request<Q>,
) -> std::result::Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = ready(channel).await?;
    let codec = ProstCodec::<Q, A>::default();
    let answer = grpc.unary(request, PathAndQuery::from_static(path), codec).await?;
    Ok(answer.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for good in ["3.4.0", "3.4.23", "3.5.0-rc.1", "3.10.2", "4.0.0"] {
            assert!(new_enough(good), "{good}");
        }
        for bad in ["3.3.25", "2.3.8", "", "not_decided"] {
            assert!(!new_enough(bad), "{bad}");
        }
    }
}
