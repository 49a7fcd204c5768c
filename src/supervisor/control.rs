//! Requests to the supervisor, and the clients that still wait for an answer.
//!
//! A request becomes an event if [`Machine::admits`](super::state::Machine::admits) it, otherwise a refusal with a
//! reason. Its answer comes when the state shows the result ([`Owner::settle`], after every step), or with the snapshot
//! that it asked for. Every request gets an answer: a [`Reply`] that is dropped answers that the supervisor ended.

use signal_hook::consts::SIGTERM;

use super::events::image_of;
use super::line::Target;
use super::memory::Needed;
use super::state::{Ending, Event, Machine, State, Stop, Then, Wish};
use super::stops::{self, Stops};
use super::{Message, Owner};
use crate::control::protocol::{Answer, Code, Fault, Request, Snapped, Snapshot};
use crate::control::server::Server;
use crate::control::{Call, Reply};
use crate::published::Published;
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_store::manifest::Reason;
use rekindle_store::{Change, Image, ImageId};

/// Messages from other threads.
pub(super) enum Incoming {
    /// A request.
    Call(Call),
    /// A rewind whose image was checked.
    Rewind(Target, Reply),
}

/// A snapshot that a client waits for.
struct Asked {
    how: Snapshot,
    reply: Reply,
}

/// The socket, and the clients that wait.
#[derive(Default)]
pub(super) struct Control {
    server: Option<Server>,
    /// Waiting for a snapshot to begin.
    waiting: Vec<Asked>,
    /// Waiting for the snapshot in progress.
    attached: Vec<Asked>,
    /// Waiting for an image to be stored.
    storing: Vec<(Snapped, Asked)>,
    /// Waiting for the job to be suspended.
    suspending: Vec<Reply>,
    /// Whether the memory of the suspended job was freed.
    emptied: bool,
    /// Waiting for the job to run, from this image if one was named.
    starting: Vec<(Option<ImageId>, Reply)>,
}

/// Kinds of requests that a group has not decided yet.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Open {
    pub(super) snapshot: bool,
    pub(super) suspend: bool,
    /// To start or resume, or to go back.
    pub(super) start: bool,
}

/// What to do about a request.
pub(super) enum Todo {
    /// Nothing: it is answered, or something else will answer it.
    Nothing,
    /// Tell the state machine.
    Step(Event),
    /// Find the image to go back to.
    Find { to: String, reply: Reply },
}

fn refuse(reply: Reply, why: impl Into<String>) {
    reply(Err(Fault::new(Code::Refused, why)));
}

fn fail(reply: Reply, why: impl Into<String>) {
    reply(Err(Fault::new(Code::Failed, why)));
}

fn status(published: &Published) -> Answer {
    Answer::Status(Box::new(published.clone()))
}

impl Control {
    /// Sets the answer to `status`.
    pub(super) fn show(&self, published: &Published) {
        self.server.iter().for_each(|server| server.show(published));
    }

    /// Handles a request. The answer is sent with the call's reply, now or later.
    fn called(
        &mut self,
        call: Call,
        admits: impl Fn(Wish) -> Result<(), String>,
        published: &Published,
        stops: &mut Stops,
    ) -> Todo {
        let Call { request, reply } = call;
        let wish = match &request {
            Request::Status | Request::Stop(_) => None,
            Request::Snapshot(_) => Some(Wish::Snapshot),
            Request::Suspend => Some(Wish::Suspend),
            Request::Resume => Some(Wish::Resume),
            Request::Rewind(_) => Some(Wish::Rewind),
        };
        if let Some(Err(why)) = wish.map(admits) {
            refuse(reply, why);
            return Todo::Nothing;
        }
        match request {
            Request::Status => {
                reply(Ok(status(published)));
                Todo::Nothing
            }
            Request::Snapshot(how) => {
                self.waiting.push(Asked { how, reply });
                Todo::Step(Event::SnapshotNow(Reason::Request))
            }
            Request::Suspend => {
                self.suspending.push(reply);
                Todo::Step(Event::Suspend)
            }
            Request::Resume => {
                self.starting.push((None, reply));
                Todo::Step(Event::Resume)
            }
            Request::Stop(stop) => {
                let request = stops.command(stop.now);
                reply(Ok(Answer::Stopping {}));
                let how = Stop::Signal(SIGTERM);
                match request {
                    stops::Request::AtOnce => Todo::Step(Event::StopNow(how)),
                    stops::Request::First => Todo::Step(Event::Stop(how)),
                    stops::Request::Repeated => Todo::Nothing,
                }
            }
            Request::Rewind(rewind) => Todo::Find { to: rewind.to, reply },
        }
    }

    /// The job goes back to this image.
    fn rewinds(&mut self, image: ImageId, reply: Reply) {
        self.starting.push((Some(image), reply));
    }

    // ---- snapshots ----

    /// A snapshot begins: it serves all clients that wait for one. Returns whether one of them wants all GPU memory copied.
    pub(super) fn snapshot_begins(&mut self) -> bool {
        self.attached.append(&mut self.waiting);
        self.attached.iter().any(|asked| asked.how.full)
    }

    /// The snapshot succeeded.
    pub(super) fn snapshot_taken(&mut self, snapped: &Snapped) {
        for asked in std::mem::take(&mut self.attached) {
            match asked.how.stored || !asked.how.tags.is_empty() {
                true => self.storing.push((snapped.clone(), asked)),
                false => (asked.reply)(Ok(Answer::Snapshot(snapped.clone()))),
            }
        }
    }

    /// The snapshot failed.
    pub(super) fn snapshot_failed(&mut self, why: &str) {
        self.attached.drain(..).for_each(|asked| fail(asked.reply, why));
    }

    /// The image was not stored, and will not be.
    pub(super) fn not_stored(&mut self, image: ImageId, why: &str) {
        self.take_storing(image).into_iter().for_each(|(_, asked)| fail(asked.reply, why));
    }

    fn take_storing(&mut self, image: ImageId) -> Vec<(Snapped, Asked)> {
        let all = std::mem::take(&mut self.storing);
        let (these, others) = all.into_iter().partition(|(snapped, _)| snapped.image == image);
        self.storing = others;
        these
    }

    // ---- after every step ----

    /// Answers the clients that wait for the current state. `last_failure` is why the last snapshot failed, if it did.
    /// [`Control::suspended`] answers clients that wait for a complete suspension.
    /// `open` is what a group has not decided yet.
    fn settle(&mut self, machine: &Machine<'_>, last_failure: Option<&str>, open: Open) {
        let state = machine.state();
        let may_come = matches!(state, State::Running(_) | State::Snapshotting { .. }) || open.snapshot;
        if !may_come && !self.waiting.is_empty() {
            let why = format!("no snapshot: the job is {}", state.name());
            self.waiting.drain(..).for_each(|asked| fail(asked.reply, why.clone()));
        }
        if !self.starting.is_empty() && !open.start {
            self.settle_starting(state);
        }
        if matches!(state, State::Suspended { .. }) {
            return;
        }
        self.emptied = false;
        if !machine.is_suspending() && !open.suspend && !self.suspending.is_empty() {
            let why = match (state, last_failure) {
                (State::Running(_), Some(why)) => format!("the job continues: {why}"),
                (state, _) => format!("the job is {}", state.name()),
            };
            self.suspending.drain(..).for_each(|reply| fail(reply, why.clone()));
        }
    }

    fn settle_starting(&mut self, state: &State) {
        let from = match state {
            State::Starting { .. }
            | State::Ending { stop: Ending::Rewind(_), .. }
            | State::Snapshotting { then: Some(Then::Rewind(_)), .. } => return,
            State::Running(life) | State::Snapshotting { life, .. } => Ok(image_of(life.from)),
            State::Waiting { from, .. } => Err(format!("the job was not restored; the next attempt is from {from}")),
            state => Err(format!("the job is {}", state.name())),
        };
        for (wanted, reply) in std::mem::take(&mut self.starting) {
            match (&from, wanted) {
                (Ok(image), wanted) if wanted.is_none() || wanted == *image => {
                    reply(Ok(Answer::Running { image: *image }));
                }
                (Ok(_), _) => fail(reply, "the job was restored from another image in the meantime"),
                (Err(why), _) => fail(reply, why.clone()),
            }
        }
    }

    // ---- in a group ----

    /// The group does not suspend the job.
    pub(super) fn not_suspended(&mut self, why: &str) {
        self.suspending.drain(..).for_each(|reply| fail(reply, format!("the job continues: {why}")));
    }

    /// The group does not start the job as requested.
    pub(super) fn not_started(&mut self, why: &str) {
        self.starting.drain(..).for_each(|(_, reply)| fail(reply, why));
    }

    /// The group takes no snapshot.
    pub(super) fn not_begun(&mut self, why: &str) {
        self.waiting.drain(..).for_each(|asked| fail(asked.reply, format!("no snapshot: {why}")));
    }

    /// The job is suspended. Returns whether to free its memory, which is done once.
    fn empties(&mut self) -> bool {
        !std::mem::replace(&mut self.emptied, true)
    }

    /// The job is suspended; this image contains it until it is resumed.
    fn suspended(&mut self, image: Option<ImageId>, only_in_memory: Option<&str>) {
        for reply in std::mem::take(&mut self.suspending) {
            reply(Ok(Answer::Suspended { image, only_in_memory: only_in_memory.map(ToOwned::to_owned) }));
        }
    }
}

impl Owner<'_> {
    /// Opens the job's socket. The job is also supervised without one.
    pub(super) fn open_control(&mut self) {
        let sender = self.threads.sender.clone();
        let deliver = move |call| sender.send(Message::Control(Box::new(Incoming::Call(call)))).is_ok();
        let directory = &self.setup.config.control.directory;
        match Server::start(directory, &self.setup.folder.place_name(), Box::new(deliver)) {
            Ok(server) => {
                self.reporting.published.control = Some(server.path().to_owned());
                self.clients.control.server = Some(server);
            }
            Err(error) => tracing::warn!(
                "cannot create a control socket in {}, so `rekindle snapshot` and others cannot reach the job: \
                {error}",
                directory.display()
            ),
        }
    }

    /// Closes the socket. Clients that still wait get an answer.
    pub(super) fn close_control(&mut self) {
        let server = self.clients.control.server.take();
        self.clients.control = Control::default();
        self.reporting.published.control = None;
        drop(server);
    }

    pub(super) fn heard(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Call(call) => self.called(call),
            Incoming::Rewind(target, reply) => self.rewind(target, reply),
        }
    }

    /// Handles a request after the job has ended, while its last image is being stored.
    pub(super) fn heard_late(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Call(Call { request: Request::Stop(stop), reply }) => {
                self.end.stops.command(stop.now);
                reply(Ok(Answer::Stopping {}));
            }
            Incoming::Call(Call { request: Request::Status, reply }) => reply(Ok(status(&self.reporting.published))),
            Incoming::Call(Call { reply, .. }) | Incoming::Rewind(_, reply) => {
                reply(Err(Fault::new(Code::Ending, "the job is over, and the supervisor is about to exit")));
            }
        }
    }

    fn called(&mut self, call: Call) {
        let (machine, group) = (&self.machine, &self.group);
        let admits = |wish| match group {
            Some(member) => member.admits(wish, machine),
            None => machine.admits(wish).map_err(Into::into),
        };
        let (control, published) = (&mut self.clients.control, &self.reporting.published);
        match control.called(call, admits, published, &mut self.end.stops) {
            Todo::Nothing => {}
            Todo::Step(event) => self.step(event),
            Todo::Find { to, reply } => self.look_at_target(to, reply),
        }
    }

    /// Rewinds to an image, on request.
    fn rewind(&mut self, target: Target, reply: Reply) {
        // The state may have changed while the image was checked.
        let image = target.image();
        let admitted = match &self.group {
            Some(member) => member.admits_rewind(image),
            None => self.machine.admits(Wish::Rewind).map_err(Into::into),
        };
        if let Err(why) = admitted {
            return refuse(reply, why);
        }
        tracing::info!("rewinding the job to image {image}, as requested");
        self.tell(What::Rewinding { image });
        if !self.is_in_group() {
            self.line.aim(target);
        }
        self.transfers.goes_to(self.setup.lock.hold(image));
        self.clients.control.rewinds(image, reply);
        self.step(Event::Rewind { image });
    }

    /// An image was stored and can be tagged.
    pub(super) fn answer_stored(&mut self, image: &Image) {
        for (snapped, asked) in self.clients.control.take_storing(image.id) {
            let image = image.clone();
            let Asked { how, reply } = asked;
            // In a thread, because it waits for the disk.
            self.spawn("tag", move || {
                let tagged = (!how.tags.is_empty()).then(|| image.change_tags(Change::Tag(how.tags)));
                match tagged {
                    Some(Err(error)) => {
                        fail(reply, format!("image {} exists, but cannot be tagged: {}", image.id, chain(&error)));
                    }
                    _ => reply(Ok(Answer::Snapshot(Snapped { stored: true, ..snapped }))),
                }
            });
        }
    }

    /// Answers those who wait for the current state.
    pub(super) fn settle(&mut self) {
        let last_failure = self.reporting.published.last_failure.as_deref();
        let open = self.group.as_ref().map(|member| member.open()).unwrap_or_default();
        self.clients.control.settle(&self.machine, last_failure, open);
        let State::Suspended { from } = *self.machine.state() else { return };
        if self.transfers.is_storing() || self.group.as_ref().is_some_and(|member| member.is_in_snapshot()) {
            return;
        }
        let only_here = self.only_in_memory();
        if self.clients.control.empties() {
            self.empty_memory(Needed {
                only_here: only_here.as_ref().map(|image| image.id),
                proven: self.setup.folder.proven_in_memory_only(),
                persisting: None,
            });
            self.tell(What::Suspended { image: image_of(from) });
            tracing::info!("the job is suspended; `rekindle resume` continues from {from}");
        }
        if open.suspend {
            return;
        }
        let why = self.reporting.published.persist_failure.as_deref().unwrap_or("it was not stored");
        let elsewhere = self.group.as_ref().and_then(|member| member.not_stored_elsewhere());
        let why = only_here.map(|_| why).or(elsewhere.as_deref());
        self.clients.control.suspended(image_of(from), why);
    }

    /// Frees the memory of all images but these, and what rekindle itself has on the GPUs.
    fn empty_memory(&self, needed: Needed) {
        for slot in self.setup.images.staging.iter().flat_map(|area| area.slots()) {
            if needed.has(slot.image().map(|image| image.id)) {
                continue;
            }
            self.setup.folder.drop_links(&slot);
            if let Err(error) = slot.empty() {
                tracing::warn!("cannot free memory of images: {}", chain(&error));
            }
        }
        self.setup.copier.end();
    }
}

#[cfg(test)]
mod tests;
