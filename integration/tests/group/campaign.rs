//! Random faults at random moments, half of them inside a snapshot: processes of the job and of rekindle, supervisors,
//! machines, their network, members of etcd, and two of these at once.
//!
//! `REKINDLE_MACHINES` sets how many machines the group has, `REKINDLE_FAULTS` how many faults there are, and
//! `REKINDLE_FAULTS_SEED` repeats a run's choices. After each fault the job continues, or the run has ended with a
//! reason and the next run continues; no byte is wrong; all machines were restored from the same group image.

mod checks;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle_testing::random::Random;

use self::checks::Checks;
use crate::lab::{ENDLESS, LIMIT, Lab, gate, number};

/// Members of etcd.
const ETCD: usize = 3;

/// The exit code of a run that is to be queued again.
const AGAIN: i32 = 75;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// A process of the job ends.
    Process,
    /// Any process below the supervisor ends: init, the reaper, the job, CRIU.
    Any,
    /// The supervisor ends, and is started again.
    Supervisor,
    /// The machine is lost with its memory, and another one takes its place.
    Machine,
    /// The same, and a member of etcd was on it.
    MachineAndEtcd,
    /// The machine cannot be reached for a while.
    Network,
    /// The supervisor stands still for a while.
    Stop,
    /// A member of etcd ends, and is started again.
    Etcd,
    /// A member of etcd stands still for a while.
    Hang,
}

const KINDS: [Kind; 9] = [
    Kind::Process,
    Kind::Supervisor,
    Kind::Machine,
    Kind::Network,
    Kind::Etcd,
    Kind::Stop,
    Kind::MachineAndEtcd,
    Kind::Hang,
    Kind::Any,
];

/// How a fault ends.
#[derive(Debug, Clone, Copy)]
enum Mend {
    /// This machine can be reached again.
    Network(usize),
    /// This supervisor continues, if it is still the one of this machine.
    Stop(usize, i32),
    /// This member of etcd is started again, or continues.
    Etcd(usize),
}

struct Campaign {
    lab: Lab,
    random: Random,
    checks: Checks,
    /// The machine of each rank, and one that is free.
    machines: Vec<usize>,
    spare: usize,
    /// What is to be mended, and when.
    mends: Vec<(Instant, Mend)>,
    /// How many faults of each kind there were.
    count: BTreeMap<Kind, u32>,
    inside: u32,
    /// Runs that ended with a reason.
    ended: u32,
    longest: Duration,
}

impl Campaign {
    fn new(members: usize, seed: u64) -> Campaign {
        let mut lab = Lab::with_etcd(members as u32, members as u32 + 1, ETCD, ENDLESS);
        // A job of a machine ends by itself when another machine is gone, and that counts as a restart.
        lab.set("restart.max-restarts", "100000");
        // They share two processors: a snapshot of all takes its time.
        if members > 4 {
            lab.set("snapshot.interval", "\"2s\"");
        }
        Campaign {
            checks: Checks::new(&lab, members),
            lab,
            random: Random::new(seed),
            machines: (0..members).collect(),
            spare: members,
            mends: Vec::new(),
            count: BTreeMap::new(),
            inside: 0,
            ended: 0,
            longest: Duration::ZERO,
        }
    }

    fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.random.below(bound))
    }

    /// Looks at what was said, and mends what is due, for this time.
    fn wait(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            self.checks.look();
            let now = Instant::now();
            let due: Vec<Mend> = self.mends.extract_if(.., |(at, _)| *at <= now).map(|(_, mend)| mend).collect();
            due.into_iter().for_each(|mend| self.mend(mend));
            let next =
                self.mends.iter().map(|(at, _)| *at).chain([end, now + Duration::from_millis(100)]).min().unwrap();
            if now >= end {
                return;
            }
            std::thread::sleep(next.saturating_duration_since(now));
        }
    }

    fn mend(&mut self, mend: Mend) {
        match mend {
            Mend::Network(machine) => self.lab.machines[machine].cut_off(false),
            Mend::Stop(machine, pid) => {
                if self.lab.machines[machine].pid() == Some(pid) {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
                }
            }
            Mend::Etcd(member) if self.lab.cluster.is_stopped(member) => self.lab.cluster.go_on(member),
            Mend::Etcd(member) => self.lab.cluster.run(member),
        }
    }

    /// A member of etcd that nothing has happened to.
    fn member(&mut self) -> Option<usize> {
        let runs: Vec<usize> = (0..ETCD).filter(|member| self.lab.cluster.runs(*member)).collect();
        (!runs.is_empty()).then(|| self.random.pick(&runs))
    }

    fn mended_in(&mut self, bound: u64, mend: Mend) {
        let at = Instant::now() + self.millis(bound);
        self.mends.push((at, mend));
    }

    /// The machine of a rank is lost, and the free one takes its place.
    fn replace(&mut self, rank: usize) {
        let machine = self.machines[rank];
        let memory = self.lab.memory_of(machine);
        self.lab.machines[machine].lose(&memory);
        (self.machines[rank], self.spare) = (self.spare, machine);
        self.lab.run(self.machines[rank], rank, &[]);
    }

    /// Lets something happen. Returns it in words.
    fn fault(&mut self, kind: Kind) -> String {
        *self.count.entry(kind).or_default() += 1;
        let rank = self.random.below(self.machines.len() as u64) as usize;
        let machine = self.machines[rank];
        match kind {
            Kind::Process => {
                if let Some(process) = self.lab.machines[machine].process_of_job() {
                    let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
                }
                format!("the end of a process of rank {rank}")
            }
            Kind::Any => {
                let all = self.lab.machines[machine].processes();
                let found = (!all.is_empty()).then(|| self.random.below(all.len() as u64) as usize);
                let name = found.map_or_else(String::new, |at| {
                    let (pid, line) = &all[at];
                    let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
                    line.clone()
                });
                format!("the end of process {name:?} of rank {rank}")
            }
            Kind::Supervisor => {
                self.lab.machines[machine].kill();
                self.lab.run(machine, rank, &[]);
                format!("the end of the supervisor of rank {rank}")
            }
            Kind::Machine => {
                self.replace(rank);
                format!("the loss of the machine of rank {rank}")
            }
            Kind::MachineAndEtcd => {
                let member = self.member();
                if let Some(member) = member {
                    self.lab.cluster.kill(member);
                    self.mended_in(6000, Mend::Etcd(member));
                }
                self.replace(rank);
                format!("the loss of the machine of rank {rank} with member {member:?} of etcd")
            }
            Kind::Network => {
                self.lab.machines[machine].cut_off(true);
                self.mended_in(9000, Mend::Network(machine));
                format!("a cut of the network of rank {rank}")
            }
            Kind::Stop => {
                if let Some(pid) = self.lab.machines[machine].pid() {
                    self.lab.machines[machine].signal(Signal::SIGSTOP);
                    self.mended_in(9000, Mend::Stop(machine, pid));
                }
                format!("a stop of the supervisor of rank {rank}")
            }
            Kind::Etcd | Kind::Hang => {
                let member = self.member();
                if let Some(member) = member {
                    if kind == Kind::Etcd {
                        self.lab.cluster.kill(member);
                    } else {
                        self.lab.cluster.stop(member);
                    }
                    self.mended_in(4000, Mend::Etcd(member));
                }
                format!("the {} of member {member:?} of etcd", if kind == Kind::Etcd { "end" } else { "hang" })
            }
        }
    }

    /// All continue beyond where any of them was. If the run ended with a reason, as a batch system sees it, it is
    /// queued again.
    fn goes_on(&mut self, what: &str) {
        let before = self.checks.furthest();
        let began = Instant::now();
        let mut end = began + LIMIT;
        while !self.checks.are_all_beyond(before) {
            assert!(Instant::now() < end, "it does not continue after {what}");
            self.wait(Duration::from_millis(100));
            if self.has_ended(what) {
                end = Instant::now() + LIMIT;
            }
        }
        self.longest = self.longest.max(began.elapsed());
    }

    /// Starts the run again if it has ended with a reason.
    fn has_ended(&mut self, what: &str) -> bool {
        let mut codes = BTreeMap::new();
        let mut look = |lab: &mut Lab, machines: &[usize]| {
            for (rank, machine) in machines.iter().enumerate() {
                if let Some(code) = lab.machines[*machine].has_ended() {
                    codes.insert(rank, code);
                }
            }
            codes.len()
        };
        if look(&mut self.lab, &self.machines) == 0 {
            return false;
        }
        // The others wait for it, and then end too.
        let end = Instant::now() + LIMIT;
        while look(&mut self.lab, &self.machines) < self.machines.len() {
            assert!(Instant::now() < end, "after {what} some have ended, and some have not");
            self.wait(Duration::from_millis(100));
        }
        let reasons: Vec<String> = (0..self.machines.len()).map(|rank| self.checks.last_line(rank)).collect();
        eprintln!("after {what} the run ended: {reasons:#?}");
        assert!(codes.values().all(|code| *code == AGAIN), "after {what} the run ended with {codes:?}");
        self.ended += 1;
        for rank in 0..self.machines.len() {
            self.lab.run(self.machines[rank], rank, &[]);
        }
        true
    }

    /// Waits until a snapshot begins.
    fn is_inside_a_snapshot(&mut self) {
        let before = self.checks.snapshots();
        let end = Instant::now() + LIMIT;
        while self.checks.snapshots() == before {
            assert!(Instant::now() < end, "no snapshot begins");
            self.checks.look();
            std::thread::sleep(Duration::from_millis(20));
        }
        let time = self.millis(150);
        self.wait(time);
        self.inside += 1;
    }

    fn run(mut self, faults: u64, first: u64) {
        let began = Instant::now();
        self.lab.run_all();
        // One that is not committed is lost with a machine that has not stored its part.
        self.lab.said(0, "is committed", 1);
        for count in 0..faults {
            self.goes_on("the fault before");
            let time = self.millis(1500);
            self.wait(time);
            if self.random.below(2) == 0 {
                self.is_inside_a_snapshot();
            }
            // The first ones are one of each kind. Of the others a third come in pairs.
            let turn = usize::try_from(first + count).unwrap_or_default();
            let kind = if count < KINDS.len() as u64 { KINDS[turn % KINDS.len()] } else { self.random.pick(&KINDS) };
            let mut what = self.fault(kind);
            if self.random.below(3) == 0 {
                let time = self.millis(1000);
                self.wait(time);
                let other = self.random.pick(&KINDS);
                what = format!("{what}, and {} after {time:?}", self.fault(other));
            }
            eprintln!("{count}: {what}");
            let open = self.mends.len();
            self.goes_on(&what);
            // Something may have continued while another thing was still broken.
            let last = self.mends.iter().map(|(at, _)| *at).max();
            if let Some(at) = last {
                self.wait(at.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
                self.goes_on(&format!("the end of {open} faults"));
            }
        }
        self.lab.machines[self.machines[0]].signal(Signal::SIGTERM);
        for rank in 0..self.machines.len() {
            let code = self.lab.ends(self.machines[rank]);
            // A machine that was away while the others ended waits for them, and says so.
            let waited = code == 75 && self.lab.log(rank).contains("did not join in time");
            assert!(code == 143 || waited, "rank {rank}: {code}\n{}", self.lab.log(rank));
        }
        self.checks.look();
        let Campaign { count, inside, ended, longest, checks, .. } = &self;
        eprintln!(
            "{faults} moments in {:?}, {inside} of them inside a snapshot: {count:?}; longest time to the next step \
             {longest:?}; ended with a reason {ended} times; {}",
            began.elapsed(),
            checks.summary()
        );
    }
}

fn seed() -> u64 {
    let seed = number("REKINDLE_FAULTS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("REKINDLE_FAULTS_SEED={seed}");
    seed
}

#[test]
fn no_byte_is_lost_whatever_is_killed_and_when() {
    if !gate() {
        return;
    }
    let seed = seed();
    let members = number("REKINDLE_MACHINES").unwrap_or(3) as usize;
    assert!((2..=64).contains(&members), "REKINDLE_MACHINES: {members}");
    Campaign::new(members, seed).run(number("REKINDLE_FAULTS").unwrap_or(5), seed);
}

#[test]
fn eight_machines_continue_together() {
    if !gate() {
        return;
    }
    let seed = seed();
    Campaign::new(8, seed).run(2, seed);
}
