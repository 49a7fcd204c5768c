//! What others ask of the supervisor, and who still waits for an answer.
//!
//! A request becomes an event where [`Machine::admits`](super::state::Machine::admits) it, and a refusal in words where
//! not. Its answer comes when the state says what became of it ([`Owner::settle`], after every step), or with the snapshot
//! that it is about. Nobody is forgotten: a [`Reply`] that is dropped answers that the supervisor ended.

use crate::control::protocol::{Answer, Code, Fault, Request, Snapped, Snapshot};
use crate::control::server::Server;
use crate::control::{Call, Reply};
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_engine::snapshot::Taken;
use rekindle_store::manifest::Reason;
use rekindle_store::{Change, Image, ImageId};

use std::time::Instant;

use signal_hook::consts::SIGTERM;

use super::events::{image_of, micros};
use super::memory::Needed;
use super::state::{Ending, Event, State, Stop, Then, Wish};
use super::{Message, Owner, stops};

/// What comes from other threads.
pub(super) enum Incoming {
    /// A request.
    Call(Call),
    /// A rewind whose image was looked at.
    Rewind(super::line::Target, Reply),
}

/// A snapshot that somebody waits for.
struct Asked {
    how: Snapshot,
    reply: Reply,
}

/// Who waits, and where they ask.
#[derive(Default)]
pub(super) struct Control {
    server: Option<Server>,
    /// For a snapshot to begin.
    waiting: Vec<Asked>,
    /// For the snapshot under way.
    attached: Vec<Asked>,
    /// For an image to be in the store.
    storing: Vec<(Snapped, Asked)>,
    /// For the job to be suspended.
    suspending: Vec<Reply>,
    /// Whether its memory was given back.
    emptied: bool,
    /// For the job to run, from this image where one was named.
    starting: Vec<(Option<ImageId>, Reply)>,
}

fn refuse(reply: Reply, why: impl Into<String>) {
    reply(Err(Fault::new(Code::Refused, why)));
}

fn fail(reply: Reply, why: impl Into<String>) {
    reply(Err(Fault::new(Code::Failed, why)));
}

impl Owner<'_> {
    /// Opens the job's socket. Without one the job is supervised all the same.
    pub(super) fn open_control(&mut self) {
        let sender = self.sender.clone();
        let deliver = move |call| sender.send(Message::Control(Box::new(Incoming::Call(call)))).is_ok();
        let directory = &self.shared.config.control.directory;
        match Server::start(directory, &self.shared.folder.place_name(), Box::new(deliver)) {
            Ok(server) => {
                self.published.control = Some(server.path().to_owned());
                self.control.server = Some(server);
            }
            Err(error) => tracing::warn!(
                "there is no control socket in {}, so `rekindle snapshot` and others cannot reach the job: {error}",
                directory.display()
            ),
        }
    }

    /// Nobody is heard any more. Whoever still waits is told so.
    pub(super) fn close_control(&mut self) {
        let server = self.control.server.take();
        self.control = Control::default();
        self.published.control = None;
        drop(server);
    }

    /// What `status` answers from now on.
    pub(super) fn show(&self) {
        self.control.server.iter().for_each(|server| server.show(&self.published));
    }

    pub(super) fn heard(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Call(call) => self.called(call),
            Incoming::Rewind(target, reply) => self.rewind(target, reply),
        }
    }

    /// The job is over, and only its image is still on its way.
    pub(super) fn heard_late(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Call(Call { request: Request::Stop(stop), reply }) => {
                self.stops.command(stop.now, Instant::now());
                reply(Ok(Answer::Stopping {}));
            }
            Incoming::Call(Call { request: Request::Status, reply }) => {
                reply(Ok(Answer::Status(Box::new(self.published.clone()))));
            }
            Incoming::Call(Call { reply, .. }) | Incoming::Rewind(_, reply) => {
                reply(Err(Fault::new(Code::Ending, "the job is over, and the supervisor about to end")));
            }
        }
    }

    /// Does what is asked; the answer comes by the call's reply, now or later.
    pub(super) fn called(&mut self, call: Call) {
        let Call { request, reply } = call;
        let wish = match &request {
            Request::Status | Request::Stop(_) => None,
            Request::Snapshot(_) => Some(Wish::Snapshot),
            Request::Suspend => Some(Wish::Suspend),
            Request::Resume => Some(Wish::Resume),
            Request::Rewind(_) => Some(Wish::Rewind),
        };
        if let Some(Err(why)) = wish.map(|wish| self.machine.admits(wish)) {
            return refuse(reply, why);
        }
        match request {
            Request::Status => reply(Ok(Answer::Status(Box::new(self.published.clone())))),
            Request::Snapshot(how) => {
                self.control.waiting.push(Asked { how, reply });
                self.step(Event::SnapshotNow(Reason::Request));
            }
            Request::Suspend => {
                self.control.suspending.push(reply);
                self.step(Event::Suspend);
            }
            Request::Resume => {
                self.control.starting.push((None, reply));
                self.step(Event::Resume);
            }
            Request::Stop(stop) => {
                let request = self.stops.command(stop.now, Instant::now());
                reply(Ok(Answer::Stopping {}));
                let how = Stop::Signal(SIGTERM);
                match request {
                    stops::Request::AtOnce => self.step(Event::StopNow(how)),
                    stops::Request::First => self.step(Event::Stop(how)),
                    stops::Request::Repeated => {}
                }
            }
            Request::Rewind(rewind) => self.look_at_target(rewind.to, reply),
        }
    }

    /// Goes back to an image, because somebody or something asked for it.
    pub(super) fn rewind(&mut self, target: super::line::Target, reply: Reply) {
        // It may have changed while the image was looked at.
        if let Err(why) = self.machine.admits(Wish::Rewind) {
            return refuse(reply, why);
        }
        let image = target.image();
        tracing::info!("the job goes back to image {image}, as asked");
        self.tell(What::Rewinding { image });
        self.line.aim(target);
        self.control.starting.push((Some(image), reply));
        self.step(Event::Rewind { image });
    }

    // ---- snapshots ----

    /// A snapshot begins: whoever waits for one gets this one.
    pub(super) fn attach_askers(&mut self) {
        self.control.attached.append(&mut self.control.waiting);
    }

    /// There is an image.
    pub(super) fn answer_taken(&mut self, taken: &Taken) {
        let snapped = Snapped {
            image: taken.image.id,
            freeze_us: micros(taken.freeze),
            bytes: taken.image.manifest().map_or(0, |manifest| manifest.bytes),
            stored: !taken.image.is_staged(),
        };
        for asked in std::mem::take(&mut self.control.attached) {
            match asked.how.stored || !asked.how.tags.is_empty() {
                true => self.control.storing.push((snapped.clone(), asked)),
                false => (asked.reply)(Ok(Answer::Snapshot(snapped.clone()))),
            }
        }
        if snapped.stored {
            self.answer_stored(&taken.image);
        }
    }

    /// There is none.
    pub(super) fn answer_not_taken(&mut self, why: &str) {
        self.control.attached.drain(..).for_each(|asked| fail(asked.reply, why));
    }

    /// It is in the store, where it can be tagged.
    pub(super) fn answer_stored(&mut self, image: &Image) {
        for (snapped, asked) in self.take_storing(image.id) {
            let image = image.clone();
            let Asked { how, reply } = asked;
            // It waits for the disk.
            self.spawn("tag", move || {
                let tagged = (!how.tags.is_empty()).then(|| image.change_tags(Change::Tag(how.tags)));
                match tagged {
                    Some(Err(error)) => {
                        fail(reply, format!("image {} is there, but cannot be tagged: {}", image.id, chain(&error)));
                    }
                    _ => reply(Ok(Answer::Snapshot(Snapped { stored: true, ..snapped }))),
                }
            });
        }
    }

    /// It is not, and will not be.
    pub(super) fn answer_not_stored(&mut self, image: ImageId, why: &str) {
        self.take_storing(image).into_iter().for_each(|(_, asked)| fail(asked.reply, why));
    }

    fn take_storing(&mut self, image: ImageId) -> Vec<(Snapped, Asked)> {
        let all = std::mem::take(&mut self.control.storing);
        let (these, others) = all.into_iter().partition(|(snapped, _)| snapped.image == image);
        self.control.storing = others;
        these
    }

    // ---- after every step ----

    /// Answers whoever waits for what the state says now.
    pub(super) fn settle(&mut self) {
        let state = self.machine.state();
        if !matches!(state, State::Running(_) | State::Snapshotting { .. }) && !self.control.waiting.is_empty() {
            let why = format!("the job is {}, so there is no snapshot", state.name());
            self.control.waiting.drain(..).for_each(|asked| fail(asked.reply, why.clone()));
        }
        self.settle_starting();
        self.settle_suspending();
    }

    fn settle_starting(&mut self) {
        if self.control.starting.is_empty() {
            return;
        }
        let from = match self.machine.state() {
            State::Starting { .. }
            | State::Ending { stop: Ending::Rewind(_), .. }
            | State::Snapshotting { then: Some(Then::Rewind(_)), .. } => return,
            State::Running(life) | State::Snapshotting { life, .. } => Ok(image_of(life.from)),
            State::Waiting { from, .. } => Err(format!("it did not come back; the next try is from {from}")),
            state => Err(format!("the job is {}", state.name())),
        };
        for (wanted, reply) in std::mem::take(&mut self.control.starting) {
            match (&from, wanted) {
                (Ok(image), wanted) if wanted.is_none() || wanted == *image => {
                    reply(Ok(Answer::Running { image: *image }));
                }
                (Ok(_), _) => fail(reply, "the job was brought back from another image meanwhile"),
                (Err(why), _) => fail(reply, why.clone()),
            }
        }
    }

    fn settle_suspending(&mut self) {
        let State::Suspended { from } = *self.machine.state() else {
            self.control.emptied = false;
            if !self.machine.is_suspending() && !self.control.suspending.is_empty() {
                let why = match (self.machine.state(), &self.published.last_failure) {
                    (State::Running(_), Some(why)) => format!("the job runs on: {why}"),
                    (state, _) => format!("the job is {}", state.name()),
                };
                self.control.suspending.drain(..).for_each(|reply| fail(reply, why.clone()));
            }
            return;
        };
        if self.persist.is_some() {
            return;
        }
        let only_here = self.only_in_memory();
        if !std::mem::replace(&mut self.control.emptied, true) {
            self.empty_memory(Needed {
                only_here: only_here.as_ref().map(|image| image.id),
                proven: self.shared.folder.proven_in_memory_only(),
                persisting: None,
            });
            self.tell(What::Suspended { image: image_of(from) });
            tracing::info!("the job is suspended; `rekindle resume` goes on from {from}");
        }
        let only_in_memory = only_here.map(|_| {
            self.published.persist_failure.clone().unwrap_or_else(|| "it was not brought to the store".into())
        });
        for reply in std::mem::take(&mut self.control.suspending) {
            reply(Ok(Answer::Suspended { image: image_of(from), only_in_memory: only_in_memory.clone() }));
        }
    }

    /// Gives back the memory of all images but these.
    fn empty_memory(&self, needed: Needed) {
        for slot in self.shared.staging.iter().flat_map(|area| area.slots()) {
            if needed.has(slot.image().map(|image| image.id)) {
                continue;
            }
            self.shared.folder.drop_links(&slot);
            if let Err(error) = slot.empty() {
                tracing::warn!("memory of images cannot be given back: {}", chain(&error));
            }
        }
    }
}
