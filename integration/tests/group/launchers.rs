//! Jobs as users start them: torchrun with both kinds of rendezvous, mpirun, and a launcher of a user's own. Processes,
//! supervisors and machines are lost at random moments, and the results are those of a run without rekindle.
//!
//! `REKINDLE_FAULTS` sets how many losses there are in each, and `REKINDLE_FAULTS_SEED` repeats a run's choices.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle_testing::random::Random;

use crate::lab::{LIMIT, Lab, gate, number, wait_for};

const COMMITTED: &str = "is committed";
const RESTORED: &str = "the job was restored from image";

/// The Python of the distribution, which has the packages.
const PYTHON: &str = "/usr/bin/python3";

fn torch() -> bool {
    let found = Path::new("/usr/lib/python3/dist-packages/torch/distributed/run.py").is_file();
    gate() && rekindle_testing::require("torch", found, "scripts/deps.sh torch installs PyTorch with gloo")
}

fn mpi() -> bool {
    let found = Path::new("/usr/bin/mpirun").exists() && Path::new("/usr/lib/python3/dist-packages/mpi4py").is_dir();
    gate() && rekindle_testing::require("stacks", found, "scripts/deps.sh stacks installs Open MPI with mpi4py")
}

fn source(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

/// What is lost.
#[derive(Debug, Clone, Copy)]
enum Loss {
    /// A process of the job.
    Process,
    /// A supervisor, which is started again.
    Supervisor,
    /// A machine with its memory: a free one takes its place.
    Machine,
}

/// A group whose job is started by a shell command on each machine.
struct Launched {
    lab: Lab,
    random: Random,
    /// The machine of each rank, and one that is free.
    machines: Vec<usize>,
    spare: usize,
    /// What the command lines of the job's processes contain.
    process: &'static str,
    losses: usize,
}

impl Launched {
    fn new(members: usize, process: &'static str, launch: impl Fn(&Lab) -> String) -> Launched {
        let seed = number("REKINDLE_FAULTS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
        eprintln!("REKINDLE_FAULTS_SEED={seed}");
        let mut lab = Lab::with_spare(members as u32, 0);
        // They are requested: PyTorch ends with an error if a snapshot interrupts it while it waits for the first rank.
        lab.set("snapshot.interval", "\"off\"");
        // So many processes of Python can keep a supervisor from the processors for seconds, and nobody shall be lost by that.
        lab.set("group.lease", "\"20s\"");
        fs::create_dir(lab.path("results")).unwrap();
        for rank in 0..members {
            let temporary = lab.path(&format!("tmp{rank}"));
            fs::create_dir(&temporary).unwrap();
            let mut job = Command::new("sh");
            job.args(["-c", &launch(&lab)]).env("TMPDIR", temporary).env("OMP_NUM_THREADS", "1");
            lab.jobs.push(job);
        }
        lab.run_all();
        let machines = (0..members).collect();
        Launched { lab, random: Random::new(seed), machines, spare: members, process, losses: 0 }
    }

    /// Requests a snapshot of all.
    fn snapshot(&self) {
        self.lab.machines[self.machines[0]].signal(Signal::SIGUSR1);
    }

    fn lose(&mut self, loss: Loss, rank: usize) {
        let machine = self.machines[rank];
        // Half of them are lost around a snapshot.
        if self.random.chance(50) {
            self.snapshot();
        }
        let wait = self.random.millis(0, 1500);
        std::thread::sleep(wait);
        eprintln!("{loss:?} of rank {rank} is lost");
        match loss {
            Loss::Process => {
                let all = self.lab.machines[machine].processes();
                let all: Vec<i32> =
                    all.into_iter().filter(|(_, line)| line.contains(self.process)).map(|(pid, _)| pid).collect();
                assert!(!all.is_empty(), "no {} on machine {machine}", self.process);
                kill(Pid::from_raw(self.random.pick(&all)), Signal::SIGKILL).unwrap();
            }
            Loss::Supervisor => {
                self.lab.machines[machine].kill();
                self.lab.run(machine, rank, &[]);
            }
            Loss::Machine => {
                let memory = self.lab.memory_of(machine);
                self.lab.machines[machine].lose(&memory);
                (self.machines[rank], self.spare) = (self.spare, machine);
                self.lab.run(self.machines[rank], rank, &[]);
            }
        }
        self.losses += 1;
        for rank in 0..self.machines.len() {
            self.lab.said(rank, RESTORED, self.losses);
        }
    }

    /// Loses these, and then others if the environment asks for more. `goes_on` waits until the job has made progress.
    fn lose_all(&mut self, losses: &[(Loss, usize)], mut goes_on: impl FnMut(&Lab)) {
        goes_on(&self.lab);
        self.snapshot();
        for rank in 0..self.machines.len() {
            self.lab.said(rank, COMMITTED, 1);
        }
        let more = number("REKINDLE_FAULTS").map_or(0, |count| (count as usize).saturating_sub(losses.len()));
        for count in 0..losses.len() + more {
            let (loss, rank) = losses.get(count).copied().unwrap_or_else(|| {
                let loss = self.random.pick(&[Loss::Process, Loss::Supervisor, Loss::Machine]);
                (loss, self.random.below(self.machines.len() as u64) as usize)
            });
            self.lose(loss, rank);
            goes_on(&self.lab);
        }
    }

    fn all_end_with_0(&mut self) {
        for machine in self.machines.clone() {
            assert_eq!(self.lab.ends(machine), 0);
        }
    }
}

/// What a rank of the training has written.
fn lines(folder: &Path, rank: usize) -> usize {
    fs::read_to_string(folder.join(rank.to_string())).map_or(0, |text| text.lines().count())
}

/// All ranks continue beyond where any of them was.
fn trains_on(folder: &Path, ranks: usize) {
    let before = (0..ranks).map(|rank| lines(folder, rank)).max().unwrap();
    wait_for("the training continues", || (0..ranks).all(|rank| lines(folder, rank) > before));
}

/// The training on this machine alone, without rekindle.
fn train_alone(folder: &Path, ranks: usize, steps: usize) {
    fs::create_dir(folder).unwrap();
    let port = crate::support::ports("127.0.0.1", 1)[0];
    let rank = |rank: usize| {
        let mut command = Command::new(PYTHON);
        command.arg(source("integration/jobs/gloo.py")).arg(folder).args(["--steps", &steps.to_string()]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string()).env("OMP_NUM_THREADS", "1");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("GLOO_SOCKET_IFNAME", "lo");
        command.stdin(Stdio::null()).spawn().unwrap()
    };
    let mut all: Vec<_> = (0..ranks).map(rank).collect();
    let end = Instant::now() + LIMIT;
    for child in &mut all {
        while child.try_wait().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        assert!(child.wait().unwrap().success(), "the training without rekindle failed");
    }
}

/// DDP with gloo, started by `launch` with the program and its arguments behind it.
fn trains_with_the_same_bits(members: usize, ranks: usize, launch: &str, losses: &[(Loss, usize)]) {
    let job = |lab: &Lab| {
        let (out, until) = (lab.path("results"), lab.path("finish"));
        let program = source("integration/jobs/gloo.py");
        format!("{launch} {program} {} --until {} --pause 0.02", out.display(), until.display())
    };
    let mut launched = Launched::new(members, "gloo.py", job);
    let folder: PathBuf = launched.lab.path("results");
    launched.lose_all(losses, |_| trains_on(&folder, ranks));
    fs::write(launched.lab.path("finish"), "").unwrap();
    launched.all_end_with_0();
    // One line is the digest of the weights.
    let steps = lines(&folder, 0) - 1;
    let alone = launched.lab.path("alone");
    train_alone(&alone, ranks, steps);
    let mut weights = Vec::new();
    for rank in 0..ranks {
        let read = |folder: &Path| fs::read_to_string(folder.join(rank.to_string())).unwrap();
        let (text, expected) = (read(&folder), read(&alone));
        let differ = text.lines().zip(expected.lines()).find(|(ours, theirs)| ours != theirs);
        assert!(text == expected, "rank {rank}, of {steps} steps: the first that differs is {differ:?}");
        weights.push(text.lines().last().unwrap().to_owned());
    }
    assert!(weights[0].starts_with("weights ") && weights.iter().all(|it| *it == weights[0]), "{weights:?}");
}

/// PyTorch 1.13 cannot read its own default for where the output goes with Python 3.11, so it is told.
const TORCHRUN: &str = "exec /usr/bin/python3 -m torch.distributed.run --redirects 1 --tee 1";

#[test]
fn torchrun_with_a_static_rendezvous_over_four_machines() {
    if !torch() {
        return;
    }
    let launch = format!(
        "{TORCHRUN} --nnodes 4 --nproc_per_node 1 --node_rank $REKINDLE_GROUP_RANK --master_addr $REKINDLE_GROUP_FIRST \
         --master_port 29500"
    );
    let losses = [(Loss::Process, 2), (Loss::Supervisor, 1), (Loss::Machine, 3)];
    trains_with_the_same_bits(4, 4, &launch, &losses);
}

#[test]
fn torchrun_with_a_c10d_rendezvous_whose_machine_is_lost() {
    if !torch() {
        return;
    }
    let launch = format!(
        "{TORCHRUN} --nnodes 2 --nproc_per_node 1 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint $REKINDLE_GROUP_FIRST:29500"
    );
    // The first machine has the rendezvous.
    trains_with_the_same_bits(2, 2, &launch, &[(Loss::Machine, 0), (Loss::Process, 1)]);
}

#[test]
fn a_launcher_of_a_users_own_with_two_processes_on_each_machine() {
    if !torch() {
        return;
    }
    let launch = format!("exec {} 2 {PYTHON}", source("integration/jobs/gloo_ranks.sh"));
    trains_with_the_same_bits(2, 4, &launch, &[(Loss::Process, 0), (Loss::Machine, 1)]);
}

#[test]
fn mpirun_over_two_machines_without_ssh() {
    if !mpi() {
        return;
    }
    let job = |lab: &Lab| {
        let (mpirun, program) = (source("examples/deploy/mpi/mpirun.py"), source("integration/jobs/stacks.py"));
        // Here all machines have one /dev/shm, in which Open MPI always takes the same name.
        let options = "--mca shmem mmap --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl tcp,self";
        format!("exec {PYTHON} {mpirun} 2 {options} {PYTHON} {program} mpi {}", lab.path("results").display())
    };
    let mut launched = Launched::new(2, "stacks.py", job);
    // Rank 0 of MPI prints "n STEP".
    let step = |lab: &Lab| {
        let last = lab.out(0).lines().rev().find_map(|line| line.strip_prefix("n ")?.parse::<u64>().ok());
        last.unwrap_or(0)
    };
    let goes_on = |lab: &Lab| {
        let before = step(lab);
        wait_for("the job of MPI continues", || step(lab) > before);
    };
    // mpirun itself is on the first machine, and its daemon on the other.
    launched.lose_all(&[(Loss::Process, 1), (Loss::Machine, 0), (Loss::Supervisor, 1)], goes_on);
    fs::write(launched.lab.path("results/finish"), "").unwrap();
    launched.all_end_with_0();
    for rank in 0..2 {
        assert!(!launched.lab.out(rank).contains("WRONG"), "{}", launched.lab.out(rank));
    }
    assert!(launched.lab.out(0).lines().any(|line| line == "done"), "{}", launched.lab.out(0));
}
