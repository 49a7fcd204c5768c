//! Reports everything below a prefix, then each change, once and in order.
//!
//! etcd numbers its changes (revisions). A watch begins with the revision after the last one that was reported, so it
//! loses and repeats nothing, on any member. A member that is cut off from the others ends its watches by itself
//! (`hasleader`). A member that hangs does not answer requests for progress. If etcd has forgotten changes
//! (compaction), the whole state is reported.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http::uri::PathAndQuery;
use rekindle_os::clock::since_boot;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};
use tonic::Streaming;
use tonic_prost::ProstCodec;

use crate::Revision;
use crate::error::{Error, Result};
use crate::members::{Members, Refusal, ready, reason, unsigned, with_token};
use crate::messages::{
    EventKind, WatchAsk, WatchCreateRequest, WatchEvent, WatchProgressRequest, WatchRequest, WatchResponse,
};
use crate::read::{probe, state};
use crate::runtime::Running;
use crate::txn::{Entry, State, range_end, text};

/// The pause before the next try after a failure. It doubles, up to the second value.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A report to a follower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Everything below the prefix: at the beginning, and if etcd forgot changes before they were reported.
    State(State),
    /// All changes of one revision.
    Changed {
        /// The revision.
        revision: Revision,
        /// The changes, in etcd's order.
        changes: Vec<Change>,
    },
    /// etcd cannot be reached: the reported state may be old.
    Away {
        /// The error of the last request.
        reason: String,
        /// The time of the last answer, as time since the boot.
        since: Duration,
    },
    /// etcd answers again. The changes since then follow, or were already reported.
    Back,
}

/// A change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It was written.
    Put(Entry),
    /// It was removed, or its lease has expired.
    Deleted(String),
}

/// A thread that follows a prefix. Dropping this ends it.
#[derive(Debug)]
pub struct Follower {
    _running: Running,
}

impl Follower {
    pub(crate) fn start(members: &Members, prefix: &str, tell: impl FnMut(Event) + Send + 'static) -> Result<Follower> {
        let running = Running::start("etcd-follow", &members.options, members.known())?;
        let members = Arc::clone(&running.members);
        let following = Following {
            prefix: prefix.to_owned(),
            position: None,
            answered: since_boot(),
            away: false,
            tell: Box::new(tell),
            members,
        };
        running.spawn(following.run());
        Ok(Follower { _running: running })
    }
}

/// Why a watch ended.
enum Ended {
    /// etcd has forgotten the changes from here on.
    Compacted,
    /// This member failed.
    Failed(String),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Ended {
        Ended::Failed(error.to_string())
    }
}

struct Following {
    members: Arc<Members>,
    prefix: String,
    /// The last revision that was reported.
    position: Option<Revision>,
    /// When etcd answered last.
    answered: Duration,
    away: bool,
    tell: Box<dyn FnMut(Event) + Send>,
}

impl Following {
    async fn run(mut self) {
        let mut pause = PAUSE.0;
        loop {
            let before = self.answered;
            match self.once().await {
                Ended::Compacted => self.position = None,
                Ended::Failed(why) => {
                    self.failed(&why);
                    if self.answered > before {
                        pause = PAUSE.0;
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
            }
        }
    }

    /// Follows until something fails.
    async fn once(&mut self) -> Ended {
        let result = match self.position {
            Some(_) => Ok(()),
            None => self.begin().await,
        };
        if let Err(error) = result {
            return error.into();
        }
        let member = self.members.preferred();
        let ended = match self.open(member).await {
            Ok((stream, asks)) => self.watch(member, stream, &asks).await,
            Err(ended) => ended,
        };
        if matches!(ended, Ended::Failed(_)) {
            self.members.distrust(member);
        }
        match ended {
            Ended::Failed(why) => Ended::Failed(format!("{}: {why}", self.members.address(member))),
            Ended::Compacted => ended,
        }
    }

    async fn begin(&mut self) -> Result<()> {
        let state = state(&self.members, &self.prefix).await?;
        self.position = Some(state.revision);
        self.heard();
        (self.tell)(Event::State(state));
        Ok(())
    }

    /// Something failed. Short failures are not reported.
    fn failed(&mut self, why: &str) {
        tracing::debug!("cannot follow {}: {why}", self.prefix);
        let silent = since_boot().saturating_sub(self.answered);
        if !self.away && silent >= self.members.options.request_timeout {
            self.away = true;
            (self.tell)(Event::Away { reason: why.to_owned(), since: self.answered });
        }
    }

    fn heard(&mut self) {
        self.answered = since_boot();
    }

    /// Opens a watch from the position on.
    async fn open(
        &mut self,
        member: usize,
    ) -> std::result::Result<(Streaming<WatchResponse>, UnboundedSender<WatchRequest>), Ended> {
        let limit = self.members.turn();
        let start = self.position.unwrap_or(0).saturating_add(1);
        let opened = async {
            let channel = match self.members.channel(member).await {
                Ok(channel) => channel,
                Err(Refusal::Member(why)) => return Err(Ended::Failed(why)),
                Err(Refusal::All(error)) => return Err(error.into()),
            };
            let create = WatchCreateRequest {
                key: self.prefix.as_str().into(),
                range_end: range_end(&self.prefix),
                start_revision: i64::try_from(start).unwrap_or(i64::MAX),
                fragment: true,
            };
            let (asks, mut asked) = unbounded_channel();
            let _ = asks.send(WatchRequest { ask: Some(WatchAsk::Create(create)) });
            let request =
                with_token(stream::poll_fn(move |context| asked.poll_recv(context)), self.members.token().as_deref());
            let failed = |status: tonic::Status| Ended::Failed(reason(&status));
            let mut grpc = ready(channel).await.map_err(failed)?;
            let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
            let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
            let answer = grpc.streaming(request, path, codec).await.map_err(failed)?;
            Ok((answer.into_inner(), asks))
        };
        timeout(limit, opened).await.unwrap_or_else(|_| Err(Ended::Failed(format!("no watch within {limit:.1?}"))))
    }

    async fn watch(
        &mut self,
        member: usize,
        mut stream: Streaming<WatchResponse>,
        asks: &UnboundedSender<WatchRequest>,
    ) -> Ended {
        let limit = self.members.turn();
        let pulse = self.members.options.request_timeout / 5;
        let (mut events, mut heard) = (Vec::new(), since_boot());
        loop {
            let message = match timeout(pulse, stream.message()).await {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return Ended::Failed("it ended the watch".into()),
                Ok(Err(status)) => {
                    if status.code() == tonic::Code::Unauthenticated {
                        self.members.forget_token();
                    }
                    return Ended::Failed(reason(&status));
                }
                Err(_) => {
                    if since_boot().saturating_sub(heard) > limit {
                        return Ended::Failed(format!("no answer within {limit:.1?}"));
                    }
                    let progress = WatchAsk::Progress(WatchProgressRequest {});
                    let _ = asks.send(WatchRequest { ask: Some(progress) });
                    continue;
                }
            };
            if let Err(error) = self.members.same_cluster(member, message.header.as_ref()) {
                return error.into();
            }
            if message.canceled {
                return if message.compact_revision > 0 {
                    Ended::Compacted
                } else {
                    self.canceled(message.cancel_reason)
                };
            }
            heard = since_boot();
            if message.created {
                // An etcd that has lost data would be silent until it reaches our position again.
                if let Err(error) = probe(&self.members).await {
                    return error.into();
                }
            }
            self.heard();
            if std::mem::take(&mut self.away) {
                (self.tell)(Event::Back);
            }
            events.extend(message.events);
            if !message.fragment {
                self.changed(std::mem::take(&mut events));
            }
        }
    }

    fn canceled(&self, reason: String) -> Ended {
        // The token that the watch was opened with.
        self.members.forget_token();
        Ended::Failed(if reason.is_empty() { "it refused the watch".into() } else { reason })
    }

    /// Reports the changes, those of one revision together.
    fn changed(&mut self, events: Vec<WatchEvent>) {
        let mut changes: Vec<Change> = Vec::new();
        let mut current = 0;
        for event in events {
            let deleted = event.kind == i32::from(EventKind::Delete);
            let Some(kv) = event.kv else { continue };
            if self.members.options.is_hidden(&kv.key) {
                continue;
            }
            let revision = unsigned(kv.mod_revision);
            if revision != current {
                self.told(current, std::mem::take(&mut changes));
                current = revision;
            }
            changes.push(if deleted { Change::Deleted(text(kv.key)) } else { Change::Put(kv.into()) });
        }
        self.told(current, changes);
    }

    fn told(&mut self, revision: Revision, changes: Vec<Change>) {
        if changes.is_empty() || self.position.is_some_and(|position| revision <= position) {
            return;
        }
        self.position = Some(revision);
        self.members.saw(revision);
        (self.tell)(Event::Changed { revision, changes });
    }
}
