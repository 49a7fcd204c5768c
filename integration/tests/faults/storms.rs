//! kill -9 of the job, of its supervisor and of both, again and again, at moments drawn from a seed.
//!
//! After each kill the harness itself looks for the newest good image, in memory and in the store, and the job has to
//! come back from that one. REKINDLE_TEST_KILLS is how often it kills in all (40, of which each of the two jobs gets
//! half), and REKINDLE_TEST_SEED repeats a run as far as the clock allows.

use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rekindle_store::ImageId;

use crate::rig::{Rig, Supervisor};

/// A xorshift.
struct Random(u64);

impl Random {
    /// Seeds that differ little give numbers that differ much.
    fn new(seed: u64) -> Random {
        let mut random = Random((seed | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let _ = (0..8).map(|_| random.below(2)).max();
        random
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }

    fn sleep_below_ms(&mut self, limit: u64) {
        std::thread::sleep(Duration::from_millis(self.below(limit)));
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

/// The processes that are killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Job,
    Supervisor,
    JobThenSupervisor,
    SupervisorThenJob,
    /// Both, and the images in memory are lost.
    Machine,
}

/// The time of a kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Any time.
    Any,
    /// After a snapshot was requested, within the time that one takes.
    Snapshot,
    /// While the job runs and its image is copied from memory to the store.
    Persist,
    /// While the job is restored after the previous kill.
    Restart,
}

/// Each as often as it is here.
const MOMENTS: [Moment; 6] =
    [Moment::Snapshot, Moment::Snapshot, Moment::Persist, Moment::Persist, Moment::Any, Moment::Restart];
const VICTIMS: [Victim; 8] = [
    Victim::Job,
    Victim::Job,
    Victim::Supervisor,
    Victim::Supervisor,
    Victim::Supervisor,
    Victim::JobThenSupervisor,
    Victim::SupervisorThenJob,
    Victim::Machine,
];

/// The counts of a storm.
#[derive(Debug, Default)]
struct Tally {
    kills: u64,
    /// Kills while a snapshot was taken or brought to the store, by what the supervisor said of itself just before.
    busy: u64,
    /// Kills of a supervisor whose newest image was in memory only.
    memory_only: u64,
}

/// Answers whom.
fn kill_job(rig: &Rig) -> Vec<i32> {
    let pids = rig.job_pids();
    for pid in &pids {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), Signal::SIGKILL);
    }
    pids
}

/// The newest good image by the harness's own reading, when nobody writes any more. All that is in the store is sound.
fn newest_there(rig: &Rig, tally: &mut Tally) -> ImageId {
    rig.assert_store_is_whole();
    let copies = rig.copies();
    let newest = copies.first().unwrap().id;
    if !copies.iter().any(|copy| copy.id == newest && !copy.is_staged()) {
        tally.memory_only += 1;
    }
    newest
}

/// Reads what one supervisor said: each restart is from the newest image that was there, beginning with `newest`.
/// Answers the newest at its end.
fn restarts_from_the_newest(said: &str, mut newest: ImageId) -> ImageId {
    for line in said.lines() {
        let named = || line.split("image ").nth(1)?.split([' ', ':']).next()?.parse::<ImageId>().ok();
        let restart = ["continues from ", "continuing from ", "the job was restored from "]
            .iter()
            .any(|words| line.contains(words));
        if line.contains("the job was frozen for") {
            newest = newest.max(named().unwrap());
        } else if restart {
            assert_eq!(named(), Some(newest), "{line}");
        }
        assert!(!line.contains("is marked as bad"), "a kill is no fault of the image: {line}");
    }
    newest
}

/// Waits until the job runs and works.
fn works(supervisor: &mut Supervisor<'_>) {
    let pid = supervisor.pid();
    supervisor.until("the job runs", |rig| {
        let runs = |state: &str| ["running", "snapshotting"].contains(&state);
        rig.state().is_some_and(|now| {
            now.supervisor == pid
                && runs(now.state.as_str())
                && now.pid.is_some_and(|pid| crate::rig::inner(pid).is_some())
        })
    });
    supervisor.counts();
}

fn wait_for(moment: Moment, supervisor: &mut Supervisor<'_>, random: &mut Random) {
    if moment != Moment::Restart {
        works(supervisor);
    }
    match moment {
        Moment::Any => random.sleep_below_ms(400),
        Moment::Snapshot => {
            supervisor.until("no image is on its way", |rig| rig.state().is_some_and(|now| now.persisting.is_none()));
            supervisor.ask();
            random.sleep_below_ms(120);
        }
        Moment::Persist => {
            supervisor.ask();
            supervisor.until("an image is on its way", |rig| rig.state().is_some_and(|now| now.persisting.is_some()));
            random.sleep_below_ms(250);
        }
        Moment::Restart => random.sleep_below_ms(150),
    }
}

fn storm(mut rig: Rig) {
    let began = Instant::now();
    let kills = number("REKINDLE_TEST_KILLS").unwrap_or(40).div_ceil(2);
    let seed = number("REKINDLE_TEST_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20 | 0x5eed);
    eprintln!("REKINDLE_TEST_SEED={seed} REKINDLE_TEST_KILLS={}", kills * 2);
    let mut random = Random::new(seed);
    rig.may_take(Duration::from_secs(900 + 30 * kills));
    rig.set("RESTART_BACKOFF", "1ms");
    // A way to the store of some tenths of a second, in which a kill can come.
    rig.set("STORE_PERSIST_RATE", "64MiB");
    rig.set("SNAPSHOT_INTERVAL", "1s");
    let mut supervisor = rig.start();
    let mut newest = supervisor.image_from_now().id;
    supervisor.until("there is one that no loss of memory takes", |rig| {
        rig.copies().iter().any(|copy| copy.id >= newest && !copy.is_staged())
    });
    let mut tally = Tally::default();
    let mut killed = Vec::new();
    // The log of the current supervisor begins here.
    let mut mark = rig.log().len();
    while tally.kills < kills {
        let moment = MOMENTS[usize::try_from(random.below(6)).unwrap()];
        let victim = VICTIMS[usize::try_from(random.below(8)).unwrap()];
        wait_for(moment, &mut supervisor, &mut random);
        let busy = rig.state().is_some_and(|now| {
            now.supervisor == supervisor.pid() && (now.state.as_str() == "snapshotting" || now.persisting.is_some())
        });
        tally.kills += 1;
        tally.busy += u64::from(busy);
        eprintln!("kill {} of {kills}: {victim:?}, {moment:?}, busy: {busy}", tally.kills);
        if matches!(victim, Victim::Job | Victim::JobThenSupervisor) {
            killed = kill_job(&rig);
            random.sleep_below_ms(20);
        }
        if victim == Victim::Job {
            continue;
        }
        supervisor.kill();
        if victim == Victim::SupervisorThenJob {
            drop(kill_job(&rig));
        }
        rig.assert_nothing_left();
        if victim == Victim::Machine {
            rig.forget_memory();
        }
        let said = restarts_from_the_newest(&rig.log()[mark..], newest);
        newest = newest_there(&rig, &mut tally);
        assert!(
            newest >= said || victim == Victim::Machine,
            "image {said} was made, and {newest} is the newest that is there"
        );
        mark = rig.log().len();
        supervisor = rig.run();
        supervisor.said(&format!("continues from image {newest}"));
    }
    // Until the supervisor has seen the last kill, it takes that life for one that works.
    supervisor.until("the killed are gone", |_| killed.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    works(&mut supervisor);
    let last = supervisor.snapshot().id;
    supervisor.stop();
    restarts_from_the_newest(&rig.log()[mark..], newest);
    rig.assert_sequence();
    rig.assert_store_is_whole();
    assert!(rig.folder().images().unwrap()[0].id > last, "the last one was taken at the stop");
    assert_eq!(rig.drafts(), Vec::<String>::new());
    assert_eq!(rig.mounted(), Vec::<std::path::PathBuf>::new());
    eprintln!("{tally:?} in {:?}", began.elapsed());
    // Two in three, on a quick machine; what chance and a slow one make of it is more than this.
    assert!(tally.busy * 8 >= tally.kills, "too few in a snapshot or on the way to the store: {tally:?}");
}

#[test]
fn a_job_that_uses_no_gpu_is_killed_at_random_moments() {
    let Some(mut rig) = Rig::new() else { return };
    rig.plain(&["--mib", "16"]);
    storm(rig);
}

#[test]
fn a_cuda_job_is_killed_at_random_moments() {
    let Some(mut rig) = Rig::new() else { return };
    rig.job(&["--mib", "8"]);
    storm(rig);
}
