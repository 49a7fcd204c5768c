//! A Slurm of our own: its daemons as children, in a folder, on ports that are free.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use crate::supervisor::{LIMIT, comes, gate, tail, wait_for};

const PROGRAMS: [&str; 6] = ["munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue"];

/// A cluster with one node for each case.
#[derive(Debug)]
pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    daemons: Mutex<Vec<Child>>,
}

/// Says SKIP and answers false where there is no Slurm; fails where there must be one.
fn has_slurm() -> bool {
    let paths = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin";
    let found = |name: &&str| std::env::split_paths(&paths).any(|dir| dir.join(name).is_file());
    let missing = PROGRAMS.iter().find(|name| !found(name));
    let why = missing.map(|missing| format!("there is no {missing}; scripts/deps.sh slurm gets Slurm"));
    rekindle_testing::require("slurm", missing.is_none(), &why.unwrap_or_default())
}

/// It dies with the thread that started it, however that ends.
fn daemon(name: &str) -> Command {
    let mut command = Command::new("setpriv");
    let paths = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin";
    command.args(["--pdeathsig", "KILL", "--", name]).env("PATH", paths).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl Cluster {
    pub(crate) fn start(nodes: &[&str]) -> Option<Cluster> {
        if !gate() || !has_slurm() {
            return None;
        }
        let folder = tempfile::Builder::new().prefix("rekindle-slurm-").tempdir().unwrap();
        // munged wants a way to its socket that others may go and not write.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let cluster = Cluster { folder, daemons: Mutex::default() };
        cluster.munge();
        let host = nix::sys::utsname::uname().unwrap().nodename().to_string_lossy().into_owned();
        let host = host.split('.').next().unwrap();
        let ports = crate::support::ports("127.0.0.1", nodes.len() + 1);
        fs::write(cluster.config(), cluster.slurm_conf(host, nodes, &ports)).unwrap();
        fs::create_dir(cluster.file("state")).unwrap();
        // -i: there is no state to go on from.
        cluster.keep(daemon("slurmctld").arg("-D").arg("-i").arg("-f").arg(cluster.config()).spawn().unwrap());
        nodes.iter().for_each(|node| cluster.start_node(node));
        let idle = || cluster.ask("sinfo", ["-h", "-N", "-o", "%T"]).lines().filter(|line| *line == "idle").count();
        wait_for("the nodes are there", || idle() >= nodes.len());
        Some(cluster)
    }

    fn munge(&self) {
        let key = self.file("munge.key");
        fs::write(&key, blake3::hash(self.file("").as_os_str().as_encoded_bytes()).as_bytes()).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let option = |name: &str, file: &str| format!("--{name}={}", self.file(file).display());
        let mut munged = daemon("munged");
        munged.arg("--foreground").arg("--force").arg(option("key-file", "munge.key"));
        munged.args([option("socket", "munge.socket"), option("pid-file", "munge.pid")]);
        munged.args([option("log-file", "munge.log"), option("seed-file", "munge.seed")]);
        self.keep(munged.spawn().unwrap());
        wait_for("munged is there", || self.file("munge.socket").exists());
    }

    fn slurm_conf(&self, host: &str, nodes: &[&str], ports: &[u16]) -> String {
        let dir = self.folder.path().display();
        let (controller, nodes_ports) = ports.split_first().unwrap();
        let mut text = format!(
            "ClusterName=rekindle\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}\n\
             SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nCredType=cred/munge\n\
             # A job that is queued again may begin when its last credential has expired.\n\
             AuthInfo=socket={dir}/munge.socket,cred_expire=8\n\
             StateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/%n\nSlurmctldPidFile={dir}/slurmctld.pid\n\
             SlurmdPidFile={dir}/%n.pid\nSlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/%n.log\n\
             SlurmctldDebug=debug\nSlurmdDebug=debug\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             JobAcctGatherType=jobacct_gather/none\nMpiDefault=none\nMailProg=/bin/true\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nSlurmdParameters=config_overrides\n\
             SchedulerType=sched/builtin\nSchedulerParameters=sched_interval=1\n\
             PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n\
             SlurmctldParameters=preempt_send_user_signal\n\
             RequeueExit=75\nKillWait=20\nSlurmdTimeout=10\nReturnToService=2\n"
        );
        for (node, port) in nodes.iter().zip(nodes_ports) {
            text += &format!("NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n");
        }
        let nodes = nodes.join(",");
        text += &format!("PartitionName=low Nodes={nodes} Default=YES PriorityTier=1 GraceTime=30\n");
        text += &format!("PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF\n");
        text
    }

    fn keep(&self, child: Child) {
        self.daemons.lock().unwrap().push(child);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.file("slurm.conf")
    }

    /// Starts a node's daemon. It goes when this thread does.
    pub(crate) fn start_node(&self, node: &str) {
        fs::create_dir_all(self.file(node)).unwrap();
        // -b: as after a restart of the machine.
        self.keep(daemon("slurmd").args(["-D", "-b", "-N", node, "-f"]).arg(self.config()).spawn().unwrap());
    }

    /// Kills a node's daemon and all that it has started.
    pub(crate) fn kill_node(&self, node: &str) {
        let pid: i32 = fs::read_to_string(self.file(&format!("{node}.pid"))).unwrap().trim().parse().unwrap();
        let mut family = steps(&self.file(&format!("{node}.log")));
        family.push(pid);
        family.into_iter().for_each(|pid| {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        });
        let mut daemons = self.daemons.lock().unwrap();
        // To be reaped.
        let ours = daemons.iter_mut().find(|child| i32::try_from(child.id()) == Ok(pid)).unwrap();
        ours.wait().unwrap();
    }

    /// The standard output of a Slurm command; its exit status is ignored.
    pub(crate) fn ask<A: AsRef<OsStr>>(&self, command: &str, args: impl IntoIterator<Item = A>) -> String {
        let out = Command::new(command).args(args).env("SLURM_CONF", self.config()).output().unwrap();
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    }

    /// The same for one that must work.
    pub(crate) fn tell(&self, command: &mut Command) -> String {
        let out = command.env("SLURM_CONF", self.config()).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{command:?}: {said}");
        String::from_utf8_lossy(&out.stdout).trim().to_owned()
    }

    /// What the controller did, for the report of a failure.
    pub(crate) fn log(&self) -> String {
        tail(&fs::read_to_string(self.file("slurmctld.log")).unwrap_or_default())
    }
}

/// The step daemons of a node, which are no children of its daemon any more: they write to its log.
fn steps(log: &Path) -> Vec<i32> {
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let ours = all.filter(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let mut files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        name.starts_with("slurmstepd") && files.any(|file| fs::read_link(file.path()).is_ok_and(|path| path == log))
    });
    ours.collect()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let left = self.ask("squeue", ["-h", "-o", "%i"]);
        if !left.is_empty() {
            self.ask("scancel", left.lines());
            comes(LIMIT, || self.ask("squeue", ["-h", "-t", "R,CG", "-o", "%i"]).is_empty());
        }
        let nodes = fs::read_dir(self.folder.path()).into_iter().flatten().flatten().map(|entry| entry.path());
        for log in nodes.filter(|path| path.extension() == Some(OsStr::new("log"))) {
            for pid in steps(&log) {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
            }
        }
        for child in self.daemons.get_mut().unwrap().iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
