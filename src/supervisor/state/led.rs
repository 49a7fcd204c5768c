//! A job that is a part of a group: the group decides when it starts and ends, and when a snapshot is taken.
//!
//! ```text
//!   Idle --(Launch)--> Starting --(started)--> Running <--(done)--> Snapshotting
//!    ^                    |                       |                      |
//!    |                 (failed)             (ended, End)            (ended, End)
//!    |                    v                       v                      v
//!    +--------------------+-----------------------+----------------------+
//! ```
//!
//! While the group is suspended and no job is here, the state is Suspended instead of Idle ([`Standing`]).
//!
//! There is no interval, no back-off and no choice of an image: those are the leader's, in [`rekindle_group`]. What
//! rules and the watch of the job decide still ends the job; the group learns of the end.

use std::time::Instant;

use super::events::{Action, Event, Harm, Standing, Verdict};
use super::states::{Ending, Life, State, Then};
use super::transitions::{finish, kill, start};
use super::{History, Machine, Pace};
use crate::config::Config;

impl<'a> Machine<'a> {
    /// The machine of a member of a group. It waits for orders.
    #[must_use]
    pub(crate) fn led(config: &'a Config) -> Machine<'a> {
        let machine = Machine::in_state(config, State::Idle, History::default(), Pace::default());
        Machine { led: Some(Standing::Usual), ..machine }
    }

    /// The state without a job is that of the group.
    pub(super) fn stands(&self, state: State) -> State {
        match (state, self.led) {
            (State::Idle | State::Suspended { .. }, Some(Standing::Suspended(from))) => State::Suspended { from },
            (State::Suspended { .. }, Some(_)) => State::Idle,
            (state, _) => state,
        }
    }

    pub(super) fn obey(&mut self, state: State, event: Event, now: Instant) -> (State, Vec<Action>) {
        let lives = |from| Life { from, since: now, next: None, failures: 0, missed: 0 };
        match (state, event) {
            (_, Event::Over(how)) => finish(how),
            (State::Idle | State::Suspended { .. }, Event::Launch(from)) => start(from),
            (State::Starting { from, then: None }, Event::Started) => (State::Running(lives(from)), vec![]),
            (State::Starting { from, .. }, Event::Started) => kill(self.why_ordered(), lives(from)),
            (
                State::Starting { .. },
                Event::ImageFailed { .. }
                | Event::StartFailed { .. }
                | Event::StoreAway { .. }
                | Event::Impossible { .. }
                | Event::Ended { .. },
            ) => (State::Idle, vec![]),
            (State::Starting { from, .. }, Event::End) => {
                (State::Starting { from, then: Some(Then::End) }, vec![Action::Cancel])
            }
            (State::Running(life), Event::SnapshotNow(reason)) => {
                (State::Snapshotting { life, then: None, ended: None }, vec![Action::Snapshot(reason)])
            }
            (State::Running(life), Event::End) => kill(self.why_ordered(), life),
            (State::Running(life), Event::Condemn(verdict)) => self.condemn(life, verdict),
            (State::Running(_) | State::Ending { .. }, Event::Ended { .. }) => (State::Idle, vec![]),
            // One that had ended by itself could not be resumed in any case.
            (State::Snapshotting { life, ended: Some(_), .. }, Event::SnapshotFailed(Harm::Lost)) => {
                (State::Running(life), vec![])
            }
            (State::Snapshotting { life, .. }, Event::SnapshotFailed(Harm::Lost)) => kill(Ending::Lost, life),
            // An end that came in the meantime is reported after this.
            (
                State::Snapshotting { life, .. },
                Event::SnapshotTaken { .. } | Event::SnapshotFailed(Harm::None) | Event::SnapshotMissed,
            ) => (State::Running(life), vec![]),
            (State::Snapshotting { life, then, .. }, Event::Ended { ended, .. }) => {
                (State::Snapshotting { life, then, ended: Some(ended) }, vec![Action::Cancel])
            }
            (State::Snapshotting { life, .. }, Event::End) => called_off(kill(self.why_ordered(), life)),
            (State::Snapshotting { life, .. }, Event::Condemn(verdict)) => called_off(self.condemn(life, verdict)),
            (state, _) => (state, vec![]),
        }
    }

    fn why_ordered(&self) -> Ending {
        if matches!(self.led, Some(Standing::Suspended(_))) { Ending::Suspend } else { Ending::Ordered }
    }

    fn condemn(&mut self, life: Life, verdict: Verdict) -> (State, Vec<Action>) {
        self.verdict = Some(verdict);
        kill(Ending::Condemned, life)
    }
}

fn called_off((state, actions): (State, Vec<Action>)) -> (State, Vec<Action>) {
    (state, [vec![Action::Cancel], actions].concat())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::{Death, Images, StartPoint};
    use crate::supervisor::state::Wish;
    use rekindle_os::spawn::Ended;
    use rekindle_store::manifest::Reason;

    fn ended() -> Event {
        Event::Ended { ended: Ended::Exit(1), images: Images::default() }
    }

    fn running(config: &Config) -> Machine<'_> {
        let mut machine = Machine::led(config);
        let now = Instant::now();
        assert_eq!(machine.step(Event::Launch(StartPoint::Cold), now), [Action::Start(StartPoint::Cold)]);
        assert_eq!(machine.step(Event::Started, now), []);
        assert_eq!(machine.deadline(), None, "there is no interval");
        assert_eq!(machine.admits(Wish::Snapshot), Ok(()));
        machine
    }

    #[test]
    fn nothing_starts_or_is_taken_without_an_order() {
        let (config, now) = (Config::default(), Instant::now());
        let mut machine = Machine::led(&config);
        assert_eq!(machine.deadline(), None);
        for event in [Event::Tick, Event::End, ended(), Event::SnapshotNow(Reason::Group)] {
            assert_eq!(machine.step(event, now), []);
            assert_eq!(*machine.state(), State::Idle);
        }
        let mut machine = running(&config);
        assert_eq!(machine.step(ended(), now), [], "no restart");
        assert_eq!(*machine.state(), State::Idle);
    }

    #[test]
    fn a_suspended_group_is_suspended_here_once_the_job_has_ended() {
        let (config, now) = (Config::default(), Instant::now());
        let mut machine = running(&config);
        let from = StartPoint::Cold;
        machine.step(Event::Group(Standing::Suspending), now);
        assert!(machine.is_suspending() && !machine.is_stopping());
        machine.step(Event::SnapshotNow(Reason::Group), now);
        assert_eq!(machine.step(Event::Group(Standing::Suspended(from)), now), []);
        assert_eq!(machine.step(Event::End, now), [Action::Cancel, Action::Kill]);
        assert_eq!(machine.state().published(), crate::published::JobState::Suspending);
        assert_eq!(machine.step(ended(), now), []);
        assert_eq!(*machine.state(), State::Suspended { from });
        machine.step(Event::Group(Standing::Usual), now);
        assert_eq!(*machine.state(), State::Idle);
        machine.step(Event::Group(Standing::Suspended(from)), now);
        assert_eq!(*machine.state(), State::Suspended { from }, "a supervisor that joins a suspended group");
        machine.step(Event::Group(Standing::Stopping), now);
        assert!(machine.is_stopping());
        assert_eq!(machine.step(Event::Launch(from), now), [Action::Start(from)]);
    }

    #[test]
    fn an_end_in_a_snapshot_is_reported_after_it() {
        let (config, now) = (Config::default(), Instant::now());
        let exit = Ended::Exit(1);
        for harm in [Harm::None, Harm::Lost] {
            let mut machine = running(&config);
            assert_eq!(machine.step(Event::SnapshotNow(Reason::Group), now), [Action::Snapshot(Reason::Group)]);
            assert_eq!(machine.step(ended(), now), [Action::Cancel]);
            assert_eq!(machine.step(Event::SnapshotFailed(harm), now), []);
            assert!(matches!(machine.state(), State::Running(_)));
            assert_eq!(machine.death(exit), Death::Ended(exit), "the snapshot did not end it");
            assert_eq!(machine.step(ended(), now), []);
            assert_eq!(*machine.state(), State::Idle);
        }
    }

    #[test]
    fn an_order_to_end_ends_it_in_every_state() {
        let (config, now) = (Config::default(), Instant::now());
        let mut machine = running(&config);
        assert_eq!(machine.step(Event::End, now), [Action::Kill]);
        assert_eq!(machine.step(ended(), now), []);
        assert_eq!(machine.step(Event::Launch(StartPoint::Cold), now), [Action::Start(StartPoint::Cold)]);
        assert_eq!(machine.step(Event::End, now), [Action::Cancel]);
        assert_eq!(machine.step(Event::Started, now), [Action::Kill], "it had started all the same");
        assert_eq!(machine.step(ended(), now), []);
        let mut machine = running(&config);
        machine.step(Event::SnapshotNow(Reason::Group), now);
        assert_eq!(machine.step(Event::End, now), [Action::Cancel, Action::Kill]);
        assert_eq!(machine.step(Event::SnapshotFailed(Harm::None), now), []);
        assert_eq!(machine.step(ended(), now), []);
        assert_eq!(*machine.state(), State::Idle);
    }

    #[test]
    fn the_group_learns_that_the_final_snapshot_is_near() {
        let (config, now) = (Config::default(), Instant::now());
        let mut machine = running(&config);
        assert!(!machine.is_quiet(now));
        let near = now + Duration::from_secs(60);
        machine.no_interval_from(Some(near));
        assert!(!machine.is_quiet(now) && machine.is_quiet(near));
    }

    #[test]
    fn the_group_learns_how_a_life_ended() {
        let (config, now) = (Config::default(), Instant::now());
        let exit = Ended::Exit(1);
        let mut machine = running(&config);
        assert_eq!(machine.death(exit), Death::Ended(exit));
        machine.step(Event::Excused, now);
        assert_eq!(machine.death(exit), Death::Excused(exit));
        machine.step(ended(), now);
        let mut lives = |event| {
            machine.step(Event::Launch(StartPoint::Cold), now);
            machine.step(Event::Started, now);
            machine.step(Event::SnapshotNow(Reason::Group), now);
            machine.step(event, now);
            let death = machine.death(exit);
            machine.step(ended(), now);
            death
        };
        assert_eq!(lives(Event::SnapshotFailed(Harm::Lost)), Death::Lost);
        assert_eq!(lives(Event::Condemn(Verdict::Restart)), Death::Judged);
        assert_eq!(lives(Event::Condemn(Verdict::Died(9))), Death::Ended(Ended::Signal(9)));
        assert_eq!(lives(Event::End), Death::Ended(exit), "the lives before are over");
    }

    #[test]
    fn a_hang_ends_this_life_and_a_lost_job_too() {
        let (config, now) = (Config::default(), Instant::now());
        let mut machine = running(&config);
        assert_eq!(machine.step(Event::Condemn(Verdict::Restart), now), [Action::Kill]);
        assert_eq!(machine.step(ended(), now), []);
        assert_eq!(*machine.state(), State::Idle);
        let mut machine = running(&config);
        machine.step(Event::SnapshotNow(Reason::Group), now);
        assert_eq!(machine.step(Event::SnapshotFailed(Harm::Lost), now), [Action::Kill]);
    }
}
