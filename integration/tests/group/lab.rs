//! Machines as network namespaces on a bridge, with one supervisor each, and a real etcd.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::Cluster;

/// How long anything here may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Steps of a job that runs until [`Lab::completes`].
pub(crate) const ENDLESS: u32 = u32::MAX;

/// Times short enough for a test.
const CONFIG: &str = "version = 1
log.level = \"debug\"
snapshot.interval = \"1s\"
snapshot.rehearse = \"off\"
snapshot.grace = \"20s\"
store.min-free = \"1MiB\"
store.keep-last = 3
restart.backoff = \"100ms\"
restart.min-uptime = \"1s\"
group.lease = \"5s\"
group.wait = \"60s\"
";

/// Whether the tests of this file can run.
pub(crate) fn gate() -> bool {
    static NETWORK: OnceLock<Result<(), String>> = OnceLock::new();
    // The check makes a device of a fixed number, which a test that runs at the same time may be making too.
    let network = NETWORK.get_or_init(|| {
        let check = || rekindle_engine::launch::group::check_machine(rekindle_engine::launch::group::VXLAN_PORT);
        let end = Instant::now() + Duration::from_secs(3);
        loop {
            match check() {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(50)),
                result => return result.map_err(|error| error.to_string()),
            }
        }
    });
    rekindle_testing::root()
        && rekindle_testing::criu().is_some()
        && crate::support::etcd()
        && rekindle_testing::require("vxlan", network.is_ok(), network.as_ref().err().map_or("", String::as_str))
}

fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A network of machines.
pub(crate) struct Lab {
    folder: tempfile::TempDir,
    number: u32,
    _lock: fs::File,
    pub(crate) cluster: Cluster,
    pub(crate) machines: Vec<Machine>,
    members: usize,
    steps: u32,
    config: String,
    /// Instead of `ring.py`: the job of each rank, and its environment.
    pub(crate) jobs: Vec<Command>,
    /// The environment of all supervisors.
    pub(crate) environment: Vec<(String, String)>,
    /// Whether all ranks have the same store.
    shares: bool,
}

/// A machine: a network namespace and a host name, which a sleeping process keeps.
pub(crate) struct Machine {
    keeper: Child,
    veth: String,
    supervisor: Option<Child>,
}

impl Machine {
    fn new(lab: u32, number: u32) -> Machine {
        let mut command = Command::new("unshare");
        let keep = format!("hostname node-{number} && exec sleep infinity");
        command.args(["--net", "--uts", "sh", "-c", &keep]).process_group(0);
        let keeper = command.spawn().unwrap();
        let pid = keeper.id();
        let comm = PathBuf::from(format!("/proc/{pid}/comm"));
        wait_for("a machine", || fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "sleep"));
        let (veth, address) = (format!("rg{lab}v{number}"), format!("10.99.{lab}.{}", 10 + number));
        // The kernel removes those of an earlier machine a moment after its end.
        let _ = Command::new("ip").args(["link", "del", &veth]).stderr(Stdio::null()).status();
        ip(&format!("link add {veth} type veth peer name eth0 netns {pid}"));
        ip(&format!("link set {veth} master rg{lab} up"));
        let net = format!("--net=/proc/{pid}/ns/net");
        for args in ["link set lo up", &format!("addr add {address}/24 dev eth0"), "link set eth0 up"] {
            assert!(Command::new("nsenter").args([&net, "ip"]).args(args.split(' ')).status().unwrap().success());
        }
        Machine { keeper, veth, supervisor: None }
    }

    /// Pulls the machine's network cable, or plugs it in.
    pub(crate) fn cut_off(&self, off: bool) {
        ip(&format!("link set {} {}", self.veth, if off { "down" } else { "up" }));
    }

    /// What `ip link` shows of the job's device.
    pub(crate) fn device_of_job(&self) -> String {
        let Some(process) = self.process_of_job() else { return String::new() };
        let net = format!("--net=/proc/{process}/ns/net");
        let output = Command::new("nsenter").args([&net, "ip", "link", "show", "rk0"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Its network has packets of this size from now on.
    pub(crate) fn set_mtu(&self, mtu: u32) {
        let net = format!("--net=/proc/{}/ns/net", self.keeper.id());
        let args = format!("link set eth0 mtu {mtu}");
        assert!(Command::new("nsenter").args([&net, "ip"]).args(args.split(' ')).status().unwrap().success());
        ip(&format!("link set {} mtu {mtu}", self.veth));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = self.supervisor.as_ref().expect("a supervisor").id();
        kill(Pid::from_raw(id as i32), signal).unwrap();
    }

    /// The machine dies: its supervisor at once, and its network.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.supervisor.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// The machine dies as with [`kill`](Self::kill), and loses its memory with the images in it.
    pub(crate) fn lose(&mut self, memory: &Path) {
        self.kill();
        unmount(memory);
        let _ = fs::remove_dir_all(memory);
    }

    /// The pid of the supervisor.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.supervisor.as_ref().map(|child| child.id() as i32)
    }

    /// The exit code of the supervisor, if it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> Option<i32> {
        let status = self.supervisor.as_mut()?.try_wait().unwrap()?;
        self.supervisor = None;
        Some(code(status))
    }

    /// All processes below the supervisor, with their command lines: init, reaper, the job, CRIU.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        // The threads of a process have the children.
        let of = |pid: i32| {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
            children.flat_map(|all| all.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
        };
        let mut all: Vec<i32> = self.pid().into_iter().flat_map(of).collect();
        let mut next = 0;
        while let Some(pid) = all.get(next) {
            let below: Vec<i32> = of(*pid).collect();
            all.extend(below);
            next += 1;
        }
        let line = |pid: i32| Some((pid, fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?.replace('\0', " ")));
        all.into_iter().filter_map(line).collect()
    }

    /// A process of the job.
    pub(crate) fn process_of_job(&self) -> Option<i32> {
        let is_job = |line: &str| line.contains("ring.py") || line.contains("libcuda");
        self.processes().into_iter().find(|(_, line)| is_job(line)).map(|(pid, _)| pid)
    }
}

impl Lab {
    pub(crate) fn new(machines: u32, steps: u32) -> Lab {
        Lab::with_etcd(machines, machines, 1, steps)
    }

    /// With one machine more than the group has members.
    pub(crate) fn with_spare(members: u32, steps: u32) -> Lab {
        Lab::with_etcd(members, members + 1, 1, steps)
    }

    /// With this many members of etcd.
    pub(crate) fn with_etcd(members: u32, machines: u32, etcd: usize, steps: u32) -> Lab {
        let folder = tempfile::tempdir().unwrap();
        let (number, lock) = number_of_our_own();
        // One that a run left which was killed.
        let _ = Command::new("ip").args(["link", "del", &format!("rg{number}")]).stderr(Stdio::null()).status();
        ip(&format!("link add rg{number} type bridge"));
        ip(&format!("addr add 10.99.{number}.1/24 dev rg{number}"));
        ip(&format!("link set rg{number} up"));
        let cluster = Cluster::at(&format!("10.99.{number}.1"), etcd);
        let machines = (0..machines).map(|machine| Machine::new(number, machine)).collect();
        let (members, config) = (members as usize, CONFIG.into());
        let (jobs, environment) = (Vec::new(), vec![("REKINDLE_RETRY_AFTER".into(), "200ms".into())]);
        Lab { folder, number, _lock: lock, cluster, machines, members, steps, config, jobs, environment, shares: false }
    }

    /// Without an etcd, and with a store that all share.
    pub(crate) fn sharing(members: u32, machines: u32, steps: u32) -> Lab {
        let mut lab = Lab::with_etcd(members, machines, 0, steps);
        lab.shares = true;
        lab
    }

    /// The folder of a rank's job.
    pub(crate) fn job(&self, rank: usize) -> PathBuf {
        self.store_of(rank).join(format!("ring.{rank}"))
    }

    pub(crate) fn store_of(&self, rank: usize) -> PathBuf {
        self.path(&if self.shares { "store".into() } else { format!("store{rank}") })
    }

    /// Where a machine has its images in memory.
    pub(crate) fn memory_of(&self, machine: usize) -> PathBuf {
        self.path(&format!("memory{machine}"))
    }

    /// The processes of etcd that members of the group run.
    pub(crate) fn own_etcds(&self) -> Vec<i32> {
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        // Its working directory is a mount of its folder that has no path.
        let id = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
        let jobs =
            fs::read_dir(self.folder.path()).unwrap().flatten().filter_map(|store| fs::read_dir(store.path()).ok());
        let folders: Vec<_> = jobs.flatten().flatten().filter_map(|job| id(&job.path().join("etcd"))).collect();
        let is_ours = |pid: &i32| {
            id(Path::new(&format!("/proc/{pid}/cwd"))).is_some_and(|cwd| folders.contains(&cwd))
                && fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "etcd")
        };
        pids.filter(is_ours).collect()
    }

    /// Changes a line of the configuration.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        let others = self.config.lines().filter(|line| !line.starts_with(&format!("{key} = ")));
        self.config = others.map(|line| format!("{line}\n")).collect::<String>() + &format!("{key} = {value}\n");
    }

    /// The next run has another number of machines.
    pub(crate) fn resize(&mut self, members: usize) {
        self.members = members;
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn log(&self, rank: usize) -> String {
        fs::read_to_string(self.path(&format!("log{rank}"))).unwrap_or_default()
    }

    pub(crate) fn out(&self, rank: usize) -> String {
        fs::read_to_string(self.path(&format!("out{rank}"))).unwrap_or_default()
    }

    /// `rekindle` on a machine, with the store of a rank.
    pub(crate) fn command(&self, machine: usize, rank: usize) -> Command {
        let config = self.path("rekindle.toml");
        // A supervisor that starts must not read half of it.
        if fs::read_to_string(&config).ok().as_ref() != Some(&self.config) {
            fs::write(&config, &self.config).unwrap();
        }
        let pid = self.machines[machine].keeper.id();
        let mut command = Command::new("nsenter");
        command.args([format!("--net=/proc/{pid}/ns/net"), format!("--uts=/proc/{pid}/ns/uts")]);
        command.arg(env!("CARGO_BIN_EXE_rekindle"));
        // They are of the tests.
        for name in ["REKINDLE_FAULTS", "REKINDLE_FAULTS_SEED", "REKINDLE_MACHINES"] {
            command.env_remove(name);
        }
        command.arg("--config").arg(config).arg("--store").arg(self.store_of(rank));
        let coordinator =
            self.cluster.members.iter().map(|member| member.client.as_str()).collect::<Vec<_>>().join(" ");
        if !coordinator.is_empty() {
            command.env("REKINDLE_GROUP_COORDINATOR", coordinator);
        }
        command.env("REKINDLE_CONTROL_DIRECTORY", self.path(&format!("control{machine}")));
        command.env("REKINDLE_SNAPSHOT_STAGING_DIRECTORY", self.memory_of(machine));
        command.env("REKINDLE_METRICS_TEXTFILE", self.path(&format!("{rank}.prom")));
        command.env("REKINDLE_TEST_SEEN_DIRECTORY", self.path(&format!("seen{machine}")));
        command
    }

    /// Starts the supervisor of a rank on a machine.
    pub(crate) fn run(&mut self, machine: usize, rank: usize, more: &[&str]) {
        let open = |name: String| fs::File::options().create(true).append(true).open(self.path(&name)).unwrap();
        let (out, log) = (open(format!("out{rank}")), open(format!("log{rank}")));
        let size = self.members.to_string();
        let mut command = self.command(machine, rank);
        command.env("RING_END", self.path("end"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.args(["run", "--name", "ring", "--node-rank", &rank.to_string()]);
        if !more.contains(&"--nodes") {
            command.args(["--nodes", &size]);
        }
        command.args(more).arg("--");
        if let Some(job) = self.jobs.get(rank) {
            command.arg(job.get_program()).args(job.get_args());
            command.envs(job.get_envs().filter_map(|(name, value)| Some((name, value?))));
        } else {
            command.args(self.ring());
        }
        command.stdin(Stdio::null()).stdout(out).stderr(log);
        self.machines[machine].supervisor = Some(command.spawn().unwrap());
    }

    /// The job.
    pub(crate) fn ring(&self) -> [String; 3] {
        let ring = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/ring.py");
        ["python3".into(), ring.display().to_string(), self.steps.to_string()]
    }

    pub(crate) fn run_all(&mut self) {
        for rank in 0..self.members {
            self.run(rank, rank, &[]);
        }
    }

    /// Waits until a text is in the log of a rank this many times.
    pub(crate) fn said(&self, rank: usize, text: &str, times: usize) {
        wait_for(&format!("rank {rank} says {text:?} {times} times"), || self.log(rank).matches(text).count() >= times);
    }

    /// Waits until a rank is a member of the group.
    pub(crate) fn joined(&self, rank: usize) {
        let key = format!("/rekindle/1/ring/nodes/{rank}");
        let node = || self.cluster.control(0, &["get", "--print-value-only", &key]);
        wait_for(&format!("rank {rank} joins"), || !node().trim().is_empty());
    }

    /// Waits for the end of the supervisor on a machine. Returns its exit code.
    pub(crate) fn ends(&mut self, machine: usize) -> i32 {
        assert!(self.machines[machine].supervisor.is_some(), "machine {machine} has no supervisor");
        let mut code = None;
        wait_for("the end of a supervisor", || {
            code = self.machines[machine].has_ended();
            code.is_some()
        });
        code.unwrap()
    }

    /// Lets the job on these machines complete, with all that it has to receive.
    pub(crate) fn completes(&mut self, machines: &[usize]) {
        fs::write(self.path("end"), "").unwrap();
        for machine in machines {
            assert_eq!(self.ends(*machine), 0, "machine {machine}");
        }
        self.assert_whole();
    }

    /// That all have received all, in order, and nothing else.
    pub(crate) fn assert_whole(&self) {
        for rank in 0..self.members {
            let out = self.out(rank);
            assert!(!out.contains("WRONG"), "rank {rank}: {out}");
            assert!(out.contains("done "), "rank {rank}: {out}");
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for machine in &mut self.machines {
            machine.kill();
            let _ = machine.keeper.kill();
            let _ = machine.keeper.wait();
        }
        let _ = Command::new("ip").args(["link", "del", &format!("rg{}", self.number)]).status();
        // Images in memory outlive their supervisors.
        unmount(self.folder.path());
        if std::thread::panicking() {
            if std::env::var_os("REKINDLE_FAULTS").is_some() {
                self.folder.disable_cleanup(true);
                eprintln!("logs and stores are left in {}", self.folder.path().display());
            }
            for rank in 0..self.members {
                let log = self.log(rank);
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("--- rank {rank}\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
            }
        }
    }
}

/// The number of a network that no other test on this machine has, and what keeps it.
fn number_of_our_own() -> (u32, fs::File) {
    let free = (1..250).find_map(|number| {
        let path = std::env::temp_dir().join(format!("rekindle-test-network-{number}"));
        let file = fs::File::options().create(true).append(true).open(path).ok()?;
        file.try_lock().ok().map(|()| (number, file))
    });
    free.expect("a network that nobody uses")
}

/// The exit code as a shell has it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Unmounts all below a folder.
fn unmount(folder: &Path) {
    for point in rekindle_testing::mounts_below(folder) {
        let _ = nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// A number in the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Waits until `done`, at most [`LIMIT`].
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "waited {LIMIT:?} in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
