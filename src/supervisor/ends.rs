//! What is done when a life of the job ends, and when the run ends.

use std::time::Instant;

use super::life::Waits;
use super::state::{Event, Finish, State};
use super::{Owner, unread};
use crate::config::OnSuccess;
use crate::policy::Images;
use rekindle_base::chain;
use rekindle_os::spawn::Ended;
use rekindle_store::{self as store, Outcome, gc};

impl Owner<'_> {
    /// Nothing of the job is left.
    pub(super) fn job_ended(&mut self, ended: Ended) {
        let Some(job) = self.life.job() else { return };
        if job.world.is_fenced() {
            tracing::error!(
                "the job was ended by its init: this supervisor did not renew its membership of the group in time. \
                Was it stopped, or is the machine overloaded?"
            );
        }
        self.checks.proofs.life_ends(self.setup, Instant::now());
        self.life.ends(ended);
        self.deaths_end_of_life();
        let earlier = self.watch.gpus.first_death().map(ToOwned::to_owned);
        if let Ended::Signal(_) = ended {
            self.watch.gpus.died(format!("the job ended: {ended}"));
        }
        if matches!(self.machine.state(), State::Running(_) | State::Snapshotting { .. }) {
            match ended {
                Ended::Exit(0) => crate::routine!("the job completed"),
                ended => tracing::warn!("the job ended: {ended}"),
            }
            if let (Some(death), true) = (earlier, ended != Ended::Exit(0)) {
                tracing::warn!("shortly before that, {death}");
            }
        }
        self.tell_end(ended);
        self.report_end(ended);
    }

    pub(super) fn report_end(&mut self, ended: Ended) {
        let now = Instant::now();
        let images = match self.images_to_go_on_from() {
            _ if self.is_in_group() => Images::default(),
            Ok(images) => images,
            Err(error) => match self.life.images_unread(self.machine.state(), self.machine.is_stopping(), now) {
                Waits::Begins => {
                    let limit = unread::patience(self.machine.state()).map(humantime::format_duration);
                    let limit = limit.map(|limit| format!(". It is given up after {limit}")).unwrap_or_default();
                    return tracing::error!(
                        "cannot read the images; the job waits until they can be read: {}{limit}",
                        chain(&error)
                    );
                }
                Waits::Still => return,
                Waits::No => {
                    tracing::error!("cannot read the images: {}", chain(&error));
                    Images { unread: true, ..Images::default() }
                }
            },
        };
        let at = self.life.reported(now);
        // Before the next life begins, which may be at once. A running snapshot has its own reference to the job.
        if !matches!(self.machine.state(), State::Snapshotting { .. }) {
            drop(self.life.take_job());
        }
        let (verdict, death) = (self.machine.verdict().cloned(), self.machine.death(ended));
        let actions = self.machine.step(Event::Ended { ended, images }, at);
        self.carry_out(actions);
        self.group_ended(ended, verdict, death);
        self.remember();
    }

    /// An end whose images could not be read is reported once they can.
    pub(super) fn report_late_end(&mut self) {
        if let Some(ended) = self.life.due_again(Instant::now()) {
            self.report_end(ended);
        }
    }

    pub(super) fn end_job(&mut self) {
        if let Some(job) = self.life.take_job() {
            job.end();
        }
    }

    /// Records how the run ended; removes the images of a completed job if configured. A failure changes nothing about
    /// how the job ended, so it is only logged: whoever started this run must learn of the end itself.
    pub(super) fn wrap_up(&mut self, finish: &Finish) {
        let (outcome, code) = match finish {
            Finish::Completed => (Outcome::Completed, Some(0)),
            Finish::Stopped(_) | Finish::StoppedInMemory { .. } => (Outcome::Stopped, None),
            Finish::Impossible { why, .. } => (Outcome::Failed { why: why.clone() }, None),
            Finish::NoUsableImage { why } => (Outcome::Failed { why: why.clone() }, None),
            Finish::Failed { why, last } => {
                let code = last.and_then(|l| if let Ended::Exit(code) = l { Some(code) } else { None });
                (Outcome::Failed { why: why.clone() }, code)
            }
        };
        let recorded = self.record(outcome, code);
        let is_recorded = recorded.is_ok();
        if let Err(error) = self.lease.looked(recorded) {
            tracing::error!(
                "cannot record how the run ended, so `rekindle status` takes it for interrupted: {}",
                chain(&error)
            );
        }
        if !self.lease.is_held() {
            return;
        }
        self.tell_finish(finish, code);
        // If it is not recorded that the job completed, the next run needs the images.
        if is_recorded
            && *finish == Finish::Completed
            && self.setup.config.store.on_success == OnSuccess::Remove
            && let Err(error) = self.remove_images()
        {
            tracing::error!("cannot remove the images of the completed job: {}", chain(&error));
        }
        self.publish();
    }

    fn remove_images(&self) -> Result<(), store::Error> {
        let images = self.setup.folder.images()?;
        for id in self.good_images()?.iter().filter(|id| images.iter().any(|image| image.id == **id)) {
            match self.setup.folder.remove(&self.setup.lock, id) {
                Err(store::Error::Pinned(id)) => tracing::info!("image {id} is pinned and is kept"),
                other => other?,
            }
        }
        // Nothing would remove the content after the grace period.
        if let Err(error) = gc::sweep_now(&self.setup.folder, &self.setup.lock, self.setup.config.store.copies) {
            tracing::warn!("unneeded content was not swept: {}", chain(&error));
        }
        Ok(())
    }
}
