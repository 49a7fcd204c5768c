//! Deaths of single ranks of the job, which the launcher notices late, and what must hold then.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::model::Doom;
use super::plants::Plant;
use super::world::{Happening, World, tell};
use crate::policy::HEALTHY_UPTIME;
use crate::policy::deaths::Victim;
use crate::supervisor::deaths::{MOMENT, ProcessDeaths};
use crate::supervisor::state::{Event, State, Verdict};
use crate::watch::deaths::Death;
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

/// The ranks of the job, by their pids.
const RANKS: [i32; 3] = [1, 2, 3];
/// From a death until the job has been ended for it.
const AT_ONCE: Duration = Duration::from_secs(1);
/// So often a job may go back to one image for deaths.
const MOST: usize = 3;

/// What the oracle knows of deaths in this run.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Those for which the job went back since the newest image.
    back: Vec<i32>,
    /// A death was left to the job: from then on more of them may be.
    left: bool,
    /// One that takes the job back, and by when.
    expected: Option<(i32, Instant)>,
    /// The newest image when the policy was asked last.
    newest: Option<ImageId>,
    /// The job makes progress: its next restart comes at once.
    progress: bool,
    /// The job was ended for the death of a rank, which somebody killed.
    pub(super) by_rank: bool,
}

/// What a supervisor knows of the ranks.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    pub(super) deaths: ProcessDeaths,
    /// By pid.
    watched: BTreeSet<i32>,
}

impl World {
    pub(super) fn kill_rank(&mut self, signal: i32) {
        let (pid, late) = (self.random.pick(&RANKS), self.random.millis(5000, 8000));
        let (fatal, now) = (self.random.chance(70), self.now);
        if self.job.as_ref().is_none_or(|job| job.ended.is_some() || job.gone.contains(&pid)) {
            return;
        }
        tell!(self, "rank {pid} dies of signal {signal}");
        let Some(job) = &mut self.job else { return };
        job.gone.insert(pid);
        let life = job.life;
        if fatal && job.doom.is_none() {
            // Its launcher hears of it, also after a restore of an image that is taken meanwhile.
            let ended = Ended::Exit(1);
            job.doom = Some(Doom { at: job.work(now) + late, ended });
            self.after(late, Happening::Ends { life, end: super::model::End::by_itself(ended), own: true });
        }
        let Some(run) = self.run.as_mut().filter(|run| run.finish.is_none() && run.ended.is_none()) else { return };
        if !run.ranks.watched.contains(&pid) {
            return;
        }
        let death = Death { life, pid, outer: pid, name: "rank".into(), signal };
        let state = run.machine.state().clone();
        let calls_off = run.ranks.deaths.comes(death, &state, now + MOMENT);
        let waits = run.ranks.deaths.next_wake(&state).is_some() || run.ranks.deaths.is_waiting();
        if waits {
            self.after(Duration::from_millis(250), Happening::Decide);
        }
        let may = matches!(state, State::Running(_) | State::Snapshotting { then: None, ended: None, .. });
        let account = &mut self.oracle.failures.ranks;
        let counts = signal == libc::SIGKILL && !account.left && !account.back.contains(&pid);
        if may && counts && account.back.len() < MOST && account.expected.is_none() {
            account.expected = Some((pid, now + AT_ONCE));
        }
        if calls_off && matches!(state, State::Snapshotting { .. }) && self.plant != Some(Plant::ImageWithoutTheRank) {
            self.call_off();
        }
    }

    /// As `Owner::check_deaths`.
    pub(super) fn decide_on_ranks(&mut self) {
        let (now, images) = (self.now, self.images());
        let plant = self.plant;
        let Some(run) = self.run.as_mut().filter(|run| run.finish.is_none()) else { return };
        let state = run.machine.state().clone();
        match run.ranks.deaths.next_wake(&state) {
            Some(due) if due <= now => {}
            Some(_) => return,
            None if run.ranks.deaths.is_waiting() => return self.after(Duration::from_millis(50), Happening::Decide),
            None => return,
        }
        let ends = run.ended.is_some() || self.job.as_ref().is_none_or(|job| job.ended.is_some());
        let none = !images.is_ok_and(|images| !images.good.is_empty());
        if ends || none || !matches!(state, State::Running(_)) || run.machine.is_stopping() {
            self.oracle.failures.ranks.expected = None;
            return run.ranks.deaths.forget();
        }
        if plant == Some(Plant::GoesBackForEver) {
            run.ranks.deaths.forget_ledger();
        }
        let (first, others) = run.ranks.deaths.decide(&self.config.restart, now);
        let account = &mut self.oracle.failures.ranks;
        account.left |= others.iter().any(|(_, why)| why.is_some());
        let Some(Victim { pid, signal, .. }) = first else {
            if account.expected.is_some_and(|(pid, _)| others.iter().any(|(other, _)| other.pid == pid)) {
                self.oracle
                    .violate("the death of a rank was left to the job, and nothing speaks against a restore".into());
            }
            return;
        };
        account.expected = None;
        if signal != libc::SIGKILL || account.back.contains(&pid) || account.back.len() >= MOST {
            let what = format!("the job goes back for rank {pid} (signal {signal}) again, after {:?}", account.back);
            return self.oracle.violate(what);
        }
        account.back.push(pid);
        tell!(self, "the job goes back for rank {pid}");
        self.oracle.disturb();
        self.oracle.failures.ranks.by_rank = true;
        self.step(Event::Condemn(Verdict::Died(signal)));
    }

    /// An image is there, of a job that has lost these ranks.
    pub(super) fn ranks_in_image(&mut self) {
        let Some(gone) = self.ground.images.last().map(|image| image.gone.clone()) else { return };
        let Some(run) = &mut self.run else { return };
        let has: Vec<i32> = RANKS.into_iter().filter(|pid| !gone.contains(pid)).collect();
        let account = &mut self.oracle.failures.ranks;
        let alone = matches!(run.machine.state(), State::Snapshotting { then: None, .. });
        if let Some((pid, _)) = account.expected.filter(|(pid, _)| alone && gone.contains(pid)) {
            self.oracle.violate(format!("an image is taken without rank {pid}, for which the job is to go back"));
        }
        let account = &mut self.oracle.failures.ranks;
        account.back.clear();
        if account.expected.is_some_and(|(pid, _)| gone.contains(&pid)) {
            account.expected = None;
        }
        run.ranks.deaths.image_taken(&has);
        run.ranks.watched = has.into_iter().collect();
    }

    pub(super) fn ranks_of_life(&mut self) {
        let (Some(run), Some(job)) = (&mut self.run, &self.job) else { return };
        let is_restored = matches!(job.from, crate::policy::StartPoint::Image(_));
        run.ranks.watched = RANKS.into_iter().filter(|pid| is_restored && !job.gone.contains(pid)).collect();
        self.oracle.failures.ranks.expected = None;
    }

    pub(super) fn check_ranks(&mut self) {
        let Some((pid, until)) = self.oracle.failures.ranks.expected else { return };
        let Some(run) = self.run.as_ref().filter(|run| run.finish.is_none() && run.ended.is_none()) else {
            self.oracle.failures.ranks.expected = None;
            return;
        };
        // A stop, a suspension or a rewind comes first.
        let goes_on = match run.machine.state() {
            State::Running(_) => !run.machine.is_stopping(),
            State::Snapshotting { then: None, ended: None, .. } => true,
            _ => false,
        };
        if !goes_on || self.ground.disk.reads_fail {
            self.oracle.failures.ranks.expected = None;
        } else if self.now > until && matches!(run.machine.state(), State::Running(_)) {
            self.oracle.violate(format!("rank {pid} has died, and the job is not restored for it"));
        }
    }

    /// The policy is asked, with these images, about a life that ended then.
    pub(super) fn oracle_sees_progress(&mut self, newest: Option<ImageId>, now: Instant) {
        let min = self.config.restart.min_uptime;
        let Some((since, run)) = self.job.as_ref().map(|job| job.since).zip(self.run.as_ref()) else { return };
        let from = self.job.as_ref().and_then(|job| match job.from {
            crate::policy::StartPoint::Image(id) => Some(id),
            crate::policy::StartPoint::Cold => None,
        });
        let did_nothing = self.did_nothing();
        let account = &mut self.oracle.failures.ranks;
        let asked = match run.machine.state() {
            State::Running(_) => !run.machine.is_stopping(),
            State::Ending { stop, .. } => {
                matches!(stop, crate::supervisor::state::Ending::Lost | crate::supervisor::state::Ending::Condemned)
            }
            _ => false,
        };
        let (uptime, is_new) = (now.saturating_duration_since(since), asked && newest > account.newest);
        account.progress = is_new && uptime >= min && !did_nothing;
        if asked {
            account.newest = account.newest.max(newest);
            self.oracle_sees_report_of_life();
        }
        if is_new && uptime >= HEALTHY_UPTIME {
            self.oracle_sees_health(from);
        }
    }

    /// An image of a hang that the job goes back to because somebody asked for it: it is no progress later.
    pub(super) fn oracle_knows_image(&mut self, id: ImageId) {
        let account = &mut self.oracle.failures.ranks;
        account.newest = account.newest.max(Some(id));
    }

    /// A restart is announced.
    pub(super) fn check_wait(&mut self, after: Duration) {
        if std::mem::take(&mut self.oracle.failures.ranks.progress) && !after.is_zero() {
            self.oracle.violate(format!("a job that makes progress waits for {after:?} before its restart"));
        }
    }
}
