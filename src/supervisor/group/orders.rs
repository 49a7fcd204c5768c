//! The orders of the group, carried out on this machine.

use std::sync::Arc;

use super::GroupEvent;
use super::ends::finish;
use super::memory::remember;
use crate::group::{GroupOrder, StartSignal, Turn};
use crate::policy::StartPoint;
use crate::supervisor::events::image_of;
use crate::supervisor::state::{Event, State};
use crate::supervisor::{Message, Owner};
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_engine::snapshot::Settled;
use rekindle_group::{
    Blame, Epoch, Fault, Incarnation, Local, Number, Order, Part, Progress, Replicated, SnapshotRefusal, StartFrom,
    Stored, newest_committed,
};
use rekindle_store::manifest::{Manifest, Reason};
use rekindle_store::{ImageId, gc};

impl Owner<'_> {
    pub(super) fn ordered(&mut self, order: Order) {
        tracing::debug!(?order, "the group orders");
        match order {
            Order::List => self.list_parts(),
            Order::Start { epoch, origin, from, part } => self.start_epoch(epoch, origin, from, part.as_ref()),
            Order::Plug => {
                let go = self.group.as_mut().and_then(|member| member.threads.go.take());
                match (self.life.job(), go) {
                    // It plugs its cable in itself.
                    (None, Some(go)) => drop(go.send(())),
                    _ => self.plug(),
                }
            }
            Order::Prepare(number) => self.prepare_part(number),
            Order::Pull(_) => self.give(GroupOrder::Pull),
            Order::Dump(_) => self.give(GroupOrder::Dump),
            Order::Resume(_) => self.give(GroupOrder::Keep(Settled::RunOn)),
            Order::Store(_) => self.give(GroupOrder::Keep(Settled::End)),
            Order::Abort(number) => {
                let in_progress = self.group.as_ref().and_then(|member| member.threads.orders.as_ref());
                match in_progress.is_some_and(|orders| orders.number == number) {
                    // The thread ends, and that is reported.
                    true => self.give(GroupOrder::Abort),
                    false => self.report_to_group(Local::Aborted(number)),
                }
            }
            Order::Kill => self.step(Event::End),
            Order::Forget(number) => self.forget_part(number),
            Order::Fetch(number) => self.fetch_part(number),
            Order::Replicate(number) => self.replicate_part(number),
            Order::Finish(end) => {
                let stop = self.group.as_ref().and_then(|member| member.requests.stop);
                self.step(Event::Over(finish(end, stop)));
            }
        }
    }

    fn plug(&self) {
        if let Some(cable) = self.life.job().and_then(|job| job.world.cable())
            && let Err(error) = cable.plug()
        {
            tracing::error!("the job does not reach the other machines: {}", chain(&error));
        }
    }

    /// What the job that is started next waits for before it runs, if it is restored.
    pub(in crate::supervisor) fn group_start_signal(&mut self) -> Option<StartSignal> {
        let (sender, member) = (self.threads.sender.clone(), self.group.as_mut()?);
        let ready = move || drop(sender.send(Message::Group(Box::new(GroupEvent::Local(Local::Started)))));
        let (signal, go) = StartSignal::new(ready);
        member.threads.go = Some(go);
        Some(signal)
    }

    fn give(&mut self, word: GroupOrder) {
        if let Some(orders) = self.group.as_mut().and_then(|member| member.threads.orders.as_mut()) {
            orders.give(word);
        }
    }

    fn start_epoch(&mut self, epoch: Epoch, origin: Incarnation, from: StartFrom, part: Option<&Part>) {
        let setup = Arc::clone(self.setup);
        let (Some(member), Some(group)) = (&mut self.group, &setup.group) else { return };
        let written = remember(&setup, epoch, member.membership.as_ref(), &member.machine)
            .map_err(|error| (error.to_string(), Blame::Machine));
        let point = match part.map(|part| part.image.parse::<ImageId>()) {
            None => Ok(StartPoint::Cold),
            Some(Ok(image)) => Ok(StartPoint::Image(image)),
            Some(Err(error)) => Err((error.to_string(), Blame::Image)),
        };
        let point = match written.and(point) {
            Ok(point) => point,
            Err((why, blame)) => return self.group_not_started(why, (blame, Fault::Job)),
        };
        member.epoch = (epoch, origin);
        let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
        member.network = Some(Arc::new(group.layout.plan(origin, epoch, &member.nodes, &hosts)));
        tracing::info!("the group starts from {from} ({epoch})");
        if let (StartFrom::Beginning, Some(number)) = (from, newest_committed(member.machine.view())) {
            tracing::warn!(
                "neither {number} nor an older group image can be used: the job starts from the beginning \
                (restart.cold-start)"
            );
        }
        let is_requested = std::mem::take(&mut member.requests.is_start_requested);
        if self.life.number() > 0 && !is_requested {
            self.reporting.published.restarts += 1;
            self.tell(What::Restarting { image: image_of(point), after_us: 0 });
        }
        self.step(Event::Launch(point));
    }

    fn prepare_part(&mut self, number: Number) {
        let refused = match self.machine.state() {
            State::Running(_) if self.machine.held().is_some() => Some(SnapshotRefusal::JobBlocks),
            State::Running(_) => None,
            state => Some(SnapshotRefusal::Other(format!("the job is {}", state.name()).into())),
        };
        let sender = self.threads.sender.clone();
        let tell = move |local| drop(sender.send(Message::Group(Box::new(GroupEvent::Local(local)))));
        let (Some(member), Some(group)) = (&mut self.group, &self.setup.group) else { return };
        let (rank, size) = (group.options.rank, group.options.size);
        let turn = match refused {
            Some(why) => Err(why),
            None => Turn::new(number, member.epoch, member.exchange(rank, size), tell)
                .map_err(|error| SnapshotRefusal::Other(format!("no random number: {error}").into())),
        };
        match turn {
            Ok((turn, orders)) => {
                (member.threads.turn, member.threads.orders) = (Some(turn), Some(orders));
                self.step(Event::SnapshotNow(Reason::Group));
            }
            Err(why) => {
                // It does not wait for the next one: there may be none.
                self.clients.control.not_begun(&why.to_string());
                self.report_to_group(Local::Refused(number, why));
            }
        }
    }

    fn forget_part(&mut self, number: Number) {
        let Some(member) = &mut self.group else { return };
        let Some(image) = member.parts.remove(&number) else { return };
        let is_in_replica = member.machine.report().and_then(|report| report.parts.get(&number).cloned());
        if is_in_replica.is_some_and(|part| part.replicated == Replicated::Only) {
            member.remote.keeps(number, image);
        }
        let (setup, bounds) = (Arc::clone(self.setup), self.setup.config.store.copies);
        self.spawn("forget", move || {
            for slot in setup.images.staging.iter().flat_map(|area| area.slots()) {
                if slot.image().is_some_and(|staged| staged.id == image) {
                    setup.folder.drop_links(&slot);
                    if let Err(error) = slot.empty() {
                        tracing::warn!("cannot free memory of image {image}: {}", chain(&error));
                    }
                }
            }
            setup.copier.forget();
            match setup.folder.remove(&setup.lock, &image) {
                Ok(()) | Err(rekindle_store::Error::UnknownImage { .. }) => {}
                Err(error) => tracing::warn!("cannot remove image {image}: {}", chain(&error)),
            }
            if let Err(error) = gc::sweep_now(&setup.folder, &setup.lock, bounds) {
                tracing::warn!("unneeded content was not swept: {}", chain(&error));
            }
        });
    }
}

/// The group image that an image with this manifest is a part of, and the part, in a store.
pub(super) fn progress_of(manifest: Option<&Manifest>) -> Option<(Number, Progress)> {
    let manifest = manifest?;
    let part = manifest.group.as_ref()?;
    let progress = Progress {
        part: Part { image: manifest.id.to_string(), digest: part.mark.clone() },
        epoch: Epoch(part.epoch),
        origin: Incarnation(part.origin),
        size: part.size,
        stored: Stored::Durable,
        replicated: Replicated::No,
    };
    Some((Number(part.number), progress))
}
