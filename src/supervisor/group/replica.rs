//! The replica of a member: which parts it has, which are sent, and a part that is fetched before the job starts.
//!
//! The group decides which group image is sent, and which one the job starts from. The replica may have parts that the
//! store of this machine does not have, if the machine or its disk is new: they are listed as parts, and fetched when the
//! group wants to start from them. Nothing runs here meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::GroupEvent;
use super::ends::queued_again;
use super::orders::progress_of;
use crate::supervisor::state::{Event, Finish, Obstacle};
use crate::supervisor::{Message, Owner, Setup, replicate};
use rekindle_base::chain;
use rekindle_group::{Local, Number, Progress, Replicated, Stored};
use rekindle_replica::{Error, Keep, Patience};
use rekindle_store::{Image, ImageId};

/// The pause before a fetch is tried again.
const PAUSE: Duration = Duration::from_secs(5);
/// How long the list of its parts is tried again.
const MOMENT: Duration = Duration::from_secs(12);
/// How often a pause checks whether it is over.
const NAP: Duration = Duration::from_millis(100);

/// The parts in the replica.
#[derive(Debug, Default)]
pub(super) struct Remote {
    /// Those that the store does not have.
    only: BTreeMap<Number, ImageId>,
    /// The last listing that was begun. A membership that is lost may leave one behind, and its result comes late.
    listing: u64,
    /// Cancels the fetch in progress.
    cancel: Arc<AtomicBool>,
}

impl Remote {
    /// The run is over.
    pub(super) fn call_off(&self) {
        self.cancel.store(true, Ordering::Relaxed);
    }

    /// The number of a new listing.
    fn begins_listing(&mut self) -> u64 {
        self.listing += 1;
        self.listing
    }

    /// Whether the result of this listing counts.
    fn is_newest(&self, listing: u64) -> bool {
        self.listing == listing
    }

    /// Whether the replica has the part of this group image, and the store does not.
    pub(super) fn only_has(&self, number: Number) -> bool {
        self.only.contains_key(&number)
    }

    /// The part of this group image that only the replica has.
    pub(super) fn image_of(&self, number: Number) -> Option<ImageId> {
        self.only.get(&number).copied()
    }

    /// The group image that this image, which only the replica has, is a part of.
    pub(super) fn number_of(&self, image: ImageId) -> Option<Number> {
        self.only.iter().find(|(_, id)| **id == image).map(|(number, _)| *number)
    }

    /// The replica still has a part that is removed from the store.
    pub(super) fn keeps(&mut self, number: Number, image: ImageId) {
        self.only.insert(number, image);
    }
}

/// A part in the replica.
pub(in crate::supervisor) struct Listed {
    number: Number,
    image: ImageId,
    progress: Progress,
    command: Vec<String>,
}

/// How a fetch ended.
pub(in crate::supervisor) struct Fetched {
    number: Number,
    image: ImageId,
    result: Result<(), Error>,
}

impl Owner<'_> {
    /// Lists the parts that can be restored here. The replica is asked on a separate thread.
    pub(super) fn list_parts(&mut self) {
        let Some(member) = &mut self.group else { return };
        let listing = member.remote.begins_listing();
        let uses_replica = self.setup.group.as_ref().is_some_and(|group| group.uses_replica);
        if !uses_replica || self.setup.config.replica.url.is_none() {
            return self.listed(listing, Ok(Vec::new()));
        }
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        self.spawn("list", move || {
            let began = Instant::now();
            let listed = loop {
                match list(&setup) {
                    // Without it the group may start from an older image than the replica has.
                    Err(error) if error.is_unreachable() && began.elapsed() < MOMENT => std::thread::sleep(PAUSE),
                    listed => break listed,
                }
            };
            drop(sender.send(Message::Group(Box::new(GroupEvent::Listed(listing, listed)))));
        });
    }

    /// The parts in the replica are known, or why they are not.
    pub(super) fn listed(&mut self, listing: u64, remote: Result<Vec<Listed>, Error>) {
        if !self.group.as_ref().is_some_and(|member| member.remote.is_newest(listing)) {
            return;
        }
        let copies = match self.setup.folder.copies() {
            Ok(copies) => copies,
            Err(error) => {
                // Without the list this machine cannot join.
                let why = format!("cannot read the images: {}", chain(&error));
                return self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Machine }));
            }
        };
        let Some(member) = &mut self.group else { return };
        let mut parts: BTreeMap<Number, Progress> = BTreeMap::new();
        member.parts.clear();
        member.remote.only.clear();
        for image in copies.iter().filter(|image| image.is_good()) {
            let Some((number, progress)) = progress_of(image.manifest()) else { continue };
            let stored = if image.is_staged() { Stored::Staged } else { Stored::Durable };
            member.parts.insert(number, image.id);
            // Of two copies the one in the store counts.
            if stored == Stored::Durable || !parts.contains_key(&number) {
                parts.insert(number, Progress { stored, ..progress });
            }
        }
        let is_fresh = self.setup.group.as_ref().is_some_and(|group| group.is_fresh) && self.life.number() == 0;
        match remote {
            Ok(remote) => {
                let ours = &self.setup.program.launch.command;
                // A restored job runs the command that was started then.
                let other = remote.iter().find(|part| part.command != *ours && !is_fresh);
                if let Some(other) = other.filter(|_| parts.is_empty()) {
                    let why = format!(
                        "the parts of group images in the replica are of another command, {:?}: use --fresh on all \
                         machines to start from the beginning, or another --name",
                        other.command.join(" ")
                    );
                    return self.step(Event::Over(Finish::Impossible { why, obstacle: Obstacle::Configuration }));
                }
                for Listed { number, image, progress, .. } in remote {
                    match parts.get_mut(&number) {
                        Some(part) if part.part == progress.part => part.replicated = Replicated::Yes,
                        Some(_) => {}
                        None => {
                            parts.insert(number, Progress { replicated: Replicated::Only, ..progress });
                            member.remote.only.insert(number, image);
                        }
                    }
                }
            }
            // Without the numbers of its group images, a later start could take one of them for a new one.
            Err(error) if parts.is_empty() || is_fresh => {
                let obstacle = obstacle(&error);
                let why = format!(
                    "it is not known which parts of group images the replica has: {}. Fix that and run again",
                    chain(&error)
                );
                return self.step(Event::Over(Finish::Impossible { why, obstacle }));
            }
            Err(error) => tracing::warn!(
                "cannot look for parts of group images in the replica: {}. Those of this machine are used",
                chain(&error)
            ),
        }
        self.report_to_group(Local::Parts(parts));
    }

    /// Fetches a part.
    pub(super) fn fetch_part(&mut self, number: Number) {
        let Some((member, group)) = self.group.as_ref().zip(self.setup.group.as_ref()) else { return };
        let Some(image) = member.remote.only.get(&number).copied() else {
            return self.report_to_group(Local::Gone(number));
        };
        let (cancel, wait) = (Arc::clone(&member.remote.cancel), group.options.limits.wait);
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        tracing::info!("fetching image {image}, the part of {number}, from the replica");
        self.spawn("fetch", move || {
            let result = fetch(&setup, image, wait, &cancel);
            drop(sender.send(Message::Group(Box::new(GroupEvent::Fetched(Fetched { number, image, result })))));
        });
    }

    pub(super) fn fetched(&mut self, fetched: Fetched) {
        let Fetched { number, image, result } = fetched;
        let Some(member) = &mut self.group else { return };
        match result {
            Ok(()) => {
                tracing::info!("image {image} was fetched from the replica");
                member.remote.only.remove(&number);
                member.parts.insert(number, image);
                self.report_to_group(Local::Fetched(number));
            }
            Err(Error::Cancelled) => {}
            Err(error @ (Error::Damaged { .. } | Error::NotWhole { .. })) => {
                tracing::error!("the part of {number} in the replica cannot be used: {}", chain(&error));
                member.remote.only.remove(&number);
                self.report_to_group(Local::Gone(number));
            }
            Err(error) if error.is_unreachable() => {
                let why = format!("the part of {number} cannot be fetched from the replica: {}", chain(&error));
                self.step(Event::Over(queued_again(why)));
            }
            // The part may be good: an older group image would lose work.
            Err(error) => {
                let why = format!(
                    "the part of {number} cannot be fetched from the replica: {}. Remedy that, then run the same command \
                     again",
                    chain(&error)
                );
                self.step(Event::Over(Finish::Impossible { why, obstacle: obstacle(&error) }));
            }
        }
    }

    /// Sends the part of a group image that the replica is to have.
    pub(super) fn replicate_part(&mut self, number: Number) {
        let id = self.group.as_ref().and_then(|member| member.parts.get(&number)).copied();
        let images = self.setup.folder.images().unwrap_or_default();
        let image = images.into_iter().find(|image: &Image| Some(image.id) == id && self.is_usable(image));
        match image {
            Some(image) => self.replicate(image),
            None => self.report_to_group(Local::NotReplicated(number)),
        }
    }

    /// An image was sent, or could not be.
    pub(in crate::supervisor) fn group_replicated(&mut self, image: ImageId, is_there: bool) {
        let Some(number) = self.group.as_ref().and_then(|member| member.number_of(image)) else { return };
        self.report_to_group(if is_there { Local::Replicated(number) } else { Local::NotReplicated(number) });
    }

    /// The part that is sent after the end of the run: that of the newest committed group image.
    pub(in crate::supervisor) fn last_part_to_replicate(&self) -> Option<ImageId> {
        let member = self.group.as_ref()?;
        let number = rekindle_group::newest_committed(member.machine.view())?;
        member.parts.get(&number).copied()
    }

    /// What stays in the replica. `None`: all, because it is not known to have a whole group image.
    pub(in crate::supervisor) fn kept_in_replica(&self) -> Option<Keep> {
        let last = self.setup.config.replica.keep_last;
        match &self.group {
            None => Some(Keep::Newest(last)),
            Some(member) => {
                let whole = rekindle_group::whole_in_replica(member.machine.view())?;
                Some(Keep::Parts { last, whole: whole.0 })
            }
        }
    }
}

/// What has to be changed before the replica can be used.
fn obstacle(error: &Error) -> Obstacle {
    match error {
        Error::Untrusted { .. } | Error::Key { .. } => Obstacle::Configuration,
        _ => Obstacle::Machine,
    }
}

/// The good parts in the replica. One that is not trusted is not used.
fn list(setup: &Setup) -> Result<Vec<Listed>, Error> {
    let Some(replica) = replicate::open(setup, Patience::Little)? else { return Ok(Vec::new()) };
    let images = replica.images(&|| false)?;
    if let Some(newest) = images.first() {
        replica.check_trusted(newest)?;
    }
    let good = images.iter().filter(|image| image.is_good());
    let listed = good.filter_map(|image| {
        let manifest = image.manifest()?;
        let (number, progress) = progress_of(Some(manifest))?;
        Some(Listed { number, image: image.id, progress, command: manifest.command.clone() })
    });
    Ok(listed.collect())
}

/// Fetches an image, unless it is here already. While the replica cannot be reached, it is tried again for this time.
fn fetch(setup: &Setup, image: ImageId, wait: Duration, cancel: &AtomicBool) -> Result<(), Error> {
    let (began, cancelled) = (Instant::now(), || cancel.load(Ordering::Relaxed));
    let folder = &setup.folder;
    loop {
        if folder.images()?.iter().any(|here| here.id == image && here.is_good()) {
            return Ok(());
        }
        let fetched = replicate::needed(setup).and_then(|replica| {
            let replica = replica.with_min_free(setup.config.store.min_free.bytes());
            replica.fetch(image, folder, &setup.lock, folder.trust().key(), &Default::default(), &cancelled)
        });
        match fetched {
            Ok(_) => return Ok(()),
            Err(error) if error.is_unreachable() && began.elapsed() < wait => {
                tracing::warn!("cannot fetch image {image} from the replica: {}. Trying again", chain(&error));
            }
            Err(error) => return Err(error),
        }
        let until = Instant::now() + PAUSE;
        while Instant::now() < until {
            if cancelled() {
                return Err(Error::Cancelled);
            }
            std::thread::sleep(NAP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_listing_counts() {
        let mut remote = Remote::default();
        let first = remote.begins_listing();
        assert!(remote.is_newest(first));
        // The membership is lost, and the next one lists the parts too.
        let second = remote.begins_listing();
        assert!(!remote.is_newest(first) && remote.is_newest(second));
    }
}
