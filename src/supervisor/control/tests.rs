use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::*;
use crate::config::Config;
use crate::control::protocol;
use crate::policy::{Images, StartPoint};

type Said = Receiver<Result<Answer, Fault>>;

fn id(n: u32) -> ImageId {
    ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
}

fn snapped(n: u32) -> Snapped {
    Snapped { image: id(n), freeze_us: 1, bytes: 2, stored: false }
}

/// A client of the control socket, and the state machine of a running job.
struct Asker<'a> {
    control: Control,
    machine: Machine<'a>,
    stops: Stops,
}

impl<'a> Asker<'a> {
    fn new(config: &'a Config) -> Asker<'a> {
        let (mut machine, _) = Machine::new(config, StartPoint::Cold);
        machine.step(Event::Started, Instant::now());
        Asker { control: Control::default(), machine, stops: Stops::default() }
    }

    /// Sends a request, and carries out the result with the machine.
    fn ask(&mut self, request: Request) -> Said {
        let (sender, said) = mpsc::channel();
        let call = Call { request, reply: Box::new(move |answer| drop(sender.send(answer))) };
        let published = Published::new("lineage");
        let machine = &self.machine;
        let admits = |wish| machine.admits(wish).map_err(Into::into);
        match self.control.called(call, admits, &published, &mut self.stops) {
            Todo::Step(event) => self.step(event),
            Todo::Find { reply, .. } => self.control.rewinds(id(1), reply),
            Todo::Nothing => {}
        }
        said
    }

    fn step(&mut self, event: Event) {
        self.machine.step(event, Instant::now());
        self.control.settle(&self.machine, None, Open::default());
    }

    fn snapshot(&mut self, stored: bool) -> Said {
        self.ask(Request::Snapshot(protocol::Snapshot { stored, ..protocol::Snapshot::default() }))
    }

    fn full_snapshot(&mut self) -> Said {
        self.ask(Request::Snapshot(protocol::Snapshot { full: true, ..protocol::Snapshot::default() }))
    }
}

fn code(said: &Said) -> Code {
    said.try_recv().unwrap().unwrap_err().code
}

#[test]
fn a_snapshot_is_full_if_one_client_of_it_wants_that() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    let (_any, _full) = (asker.snapshot(false), asker.full_snapshot());
    assert!(asker.control.snapshot_begins());
    asker.control.snapshot_taken(&snapped(1));
    let _next = asker.snapshot(false);
    assert!(!asker.control.snapshot_begins(), "only the one that it was asked for");
}

#[test]
fn a_snapshot_is_answered_when_it_is_taken_or_stored_as_asked() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    let (taken, stored) = (asker.snapshot(false), asker.snapshot(true));
    asker.control.snapshot_begins();
    let later = asker.snapshot(false);
    asker.control.snapshot_taken(&snapped(1));
    assert_eq!(taken.try_recv().unwrap(), Ok(Answer::Snapshot(snapped(1))));
    assert!(stored.try_recv().is_err() && later.try_recv().is_err(), "one is not stored, one is for the next");
    asker.control.not_stored(id(2), "another image");
    assert!(stored.try_recv().is_err());
    asker.control.not_stored(id(1), "no space");
    assert_eq!(code(&stored), Code::Failed);
    asker.control.snapshot_begins();
    asker.control.snapshot_failed("a device");
    assert_eq!(code(&later), Code::Failed);
}

#[test]
fn who_waits_for_a_snapshot_hears_that_the_job_ended() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    asker.step(Event::PersistBegan);
    let said = asker.snapshot(false);
    assert!(said.try_recv().is_err(), "it waits for the image before it");
    asker.step(Event::Ended { ended: rekindle_os::spawn::Ended::Exit(0), images: Images::default() });
    assert_eq!(code(&said), Code::Failed);
    assert_eq!(code(&asker.snapshot(false)), Code::Refused, "it is over");
}

#[test]
fn a_rewind_is_answered_by_the_life_that_follows() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    let rewind = || Request::Rewind(protocol::Rewind { to: "-1".into() });
    let said = asker.ask(rewind());
    asker.step(Event::Rewind { image: id(1) });
    assert!(said.try_recv().is_err());
    asker.step(Event::Ended { ended: rekindle_os::spawn::Ended::Signal(9), images: Images::default() });
    assert!(said.try_recv().is_err());
    asker.step(Event::Started);
    assert_eq!(said.try_recv().unwrap(), Ok(Answer::Running { image: Some(id(1)) }));
    let said = asker.ask(rewind());
    asker.step(Event::Rewind { image: id(2) });
    asker.step(Event::Ended { ended: rekindle_os::spawn::Ended::Signal(9), images: Images::default() });
    asker.step(Event::Started);
    assert_eq!(code(&said), Code::Failed, "another image");
}

#[test]
fn memory_is_given_back_once_for_each_suspension() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    let said = asker.ask(Request::Suspend);
    let taken = Event::SnapshotTaken { freeze: Duration::from_secs(1) };
    let ended = || Event::Ended { ended: rekindle_os::spawn::Ended::Signal(9), images: Images::good(vec![id(1)]) };
    asker.step(taken.clone());
    asker.step(ended());
    assert!(matches!(asker.machine.state(), State::Suspended { .. }));
    assert!(asker.control.empties() && !asker.control.empties());
    asker.control.suspended(Some(id(1)), None);
    assert_eq!(said.try_recv().unwrap(), Ok(Answer::Suspended { image: Some(id(1)), only_in_memory: None }));
    let resumed = asker.ask(Request::Resume);
    asker.step(Event::Started);
    assert_eq!(resumed.try_recv().unwrap(), Ok(Answer::Running { image: Some(id(1)) }));
    asker.ask(Request::Suspend);
    asker.step(taken);
    asker.step(ended());
    assert!(asker.control.empties());
}

#[test]
fn who_waits_for_a_suspension_that_does_not_come_hears_why() {
    let config = Config::default();
    let mut asker = Asker::new(&config);
    let said = asker.ask(Request::Suspend);
    asker.step(Event::SnapshotFailed(super::super::state::Harm::None));
    assert_eq!(code(&said), Code::Failed);
}
