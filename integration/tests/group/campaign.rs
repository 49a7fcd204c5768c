//! Random faults at random moments, half of them inside a snapshot: processes of the job, supervisors, machines, their
//! network, members of etcd. `REKINDLE_FAULTS` sets how many, `REKINDLE_FAULTS_SEED` repeats a run's choices.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle_testing::random::Random;

use crate::lab::{LIMIT, Lab, gate};

const MEMBERS: usize = 3;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The newest step that a rank has shown.
fn step(lab: &Lab, rank: usize) -> u64 {
    let out = lab.out(rank);
    assert!(!out.contains("WRONG"), "rank {rank}: {out}");
    out.lines().rev().find_map(|line| line.parse().ok()).unwrap_or(0)
}

/// All continue beyond where any of them was.
fn goes_on(lab: &Lab, what: &str) {
    let before = (0..MEMBERS).map(|rank| step(lab, rank)).max().unwrap();
    let end = Instant::now() + LIMIT;
    while !(0..MEMBERS).all(|rank| step(lab, rank) > before) {
        assert!(Instant::now() < end, "it does not continue after {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn no_byte_is_lost_whatever_is_killed_and_when() {
    if !gate() {
        return;
    }
    let seed = number("REKINDLE_FAULTS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let faults = number("REKINDLE_FAULTS").unwrap_or(6);
    eprintln!("REKINDLE_FAULTS_SEED={seed}");
    let mut random = Random::new(seed);
    let mut lab = Lab::with_etcd(MEMBERS as u32, MEMBERS as u32 + 1, 3, u32::MAX);
    // The machine of each rank, and one that is free.
    let mut machines: Vec<usize> = (0..MEMBERS).collect();
    let mut spare = MEMBERS;
    lab.run_all();
    lab.said(0, "was stored in", 1);
    for count in 0..faults {
        goes_on(&lab, "the fault before");
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        if random.below(2) == 0 {
            let snapshots = lab.log(0).matches("order=Prepare").count();
            lab.said(0, "order=Prepare", snapshots + 1);
            std::thread::sleep(Duration::from_millis(random.below(150)));
        }
        let rank = random.below(MEMBERS as u64) as usize;
        let machine = machines[rank];
        // The first ones are one of each kind.
        let kind = if count < 5 { count } else { random.below(5) };
        let what = match kind {
            0 => {
                if let Some(process) = lab.machines[machine].process_of_job() {
                    let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
                }
                format!("the end of a process of rank {rank}")
            }
            1 => {
                lab.machines[machine].kill();
                lab.run(machine, rank, &[]);
                format!("the end of the supervisor of rank {rank}")
            }
            2 => {
                lab.machines[machine].kill();
                lab.run(spare, rank, &[]);
                (machines[rank], spare) = (spare, machine);
                format!("the loss of the machine of rank {rank}")
            }
            3 => {
                lab.machines[machine].cut_off(true);
                std::thread::sleep(Duration::from_millis(random.below(9000)));
                lab.machines[machine].cut_off(false);
                format!("a cut of the network of rank {rank}")
            }
            _ => {
                let member = random.below(3) as usize;
                lab.cluster.kill(member);
                std::thread::sleep(Duration::from_millis(random.below(4000)));
                lab.cluster.run(member);
                format!("the end of member {member} of etcd")
            }
        };
        eprintln!("{what}");
        goes_on(&lab, &what);
    }
    lab.machines[machines[0]].signal(Signal::SIGTERM);
    for machine in machines {
        assert_eq!(lab.ends(machine), 143);
    }
}
