//! One job in a [`Lab`], with a stand-in driver and a CRIU of its own.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rekindle::published::Published;
use rekindle_cuda::{self as cuda, Driver, Process};
use rekindle_store::{Image, ImageId, JobFolder};

use crate::standin::Standin;
use crate::supervisor::{LIMIT, Lab, Running, criu, job_file, kill, python};

/// For jobs that are meant to fail often. The rest is the lab's.
const CONFIG: [(&str, &str); 5] = [
    ("store.min-free", "0"),
    ("restart.backoff", "\"5ms\""),
    ("restart.max-restarts", "1000"),
    ("restart.min-uptime", "\"0s\""),
    ("log.level", "\"debug\""),
];

/// How a job finds the functions of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Calls {
    /// By dlsym, as JAX does.
    ByName,
    /// By its symbols, as PyTorch does.
    BySymbol,
}

/// A job, and what it is run with.
pub(crate) struct Rig {
    lab: Lab,
    pub(crate) standin: Standin,
    command: Vec<String>,
    /// The command of rekindle, if it is not `run`.
    instead: Option<String>,
    /// Additional arguments of the command.
    flags: Vec<String>,
    /// One test at a time may hold back the machine; each has an end.
    deadline: Instant,
}

impl Rig {
    /// A job of one process. None, with a word, where a lab cannot be.
    pub(crate) fn new() -> Option<Rig> {
        let lab = Lab::new()?;
        let standin = Standin::new();
        // A fault is a piece of shell that runs in CRIU's place; what it does not end goes on to the real one.
        let text = format!(
            "real='{}'; store='{}'; memory='{}'\n\
             if [ \"$1\" != --version ] && [ -f '{fault}' ]; then . '{fault}'; fi\nexec \"$real\" \"$@\"",
            criu().display(),
            lab.store().display(),
            lab.memory().display(),
            fault = lab.file("criu-fault").display()
        );
        lab.script("criu", &text);
        let lab = CONFIG.iter().fold(lab, |lab, (key, value)| lab.set(key, value));
        let mut lab = lab.set_file("criu.path", "criu").without("snapshot.freeze-limit").marked_by(standin.path());
        for (name, value) in standin.variables() {
            lab.set_variable(name, value);
        }
        let deadline = Instant::now() + Duration::from_secs(900);
        let (command, flags, instead) = (Vec::new(), Vec::new(), None);
        let mut rig = Rig { lab, standin, command, instead, flags, deadline };
        rig.job(&[]);
        Some(rig)
    }

    /// A job of one process, with arguments of standin_job.py.
    pub(crate) fn job(&mut self, args: &[&str]) {
        self.set_command("standin_job.py", args);
    }

    /// A job of several processes, with arguments of standin_ranks.py after the number.
    pub(crate) fn ranks(&mut self, ranks: usize, args: &[&str]) {
        let ranks = ranks.to_string();
        let args: Vec<&str> = std::iter::once(ranks.as_str()).chain(args.iter().copied()).collect();
        self.set_command("standin_ranks.py", &args);
    }

    /// A job of several processes that share memory, with arguments of standin_share.py after the number.
    pub(crate) fn share(&mut self, ranks: usize, args: &[&str]) {
        let (ranks, todo) = (ranks.to_string(), self.todo().display().to_string());
        let args: Vec<&str> = [&*ranks, "--do", &*todo].into_iter().chain(args.iter().copied()).collect();
        self.set_command("standin_share.py", &args);
    }

    /// A job whose memory can stay on the GPU, with arguments of standin_kept.py.
    pub(crate) fn kept(&mut self, args: &[&str]) {
        let todo = self.todo().display().to_string();
        let args: Vec<&str> = ["--do", &*todo].into_iter().chain(args.iter().copied()).collect();
        self.set_command("standin_kept.py", &args);
        self.set("GPU_MEMORY", "kept");
    }

    /// A launcher and its children, with arguments of launcher_job.py after the number.
    pub(crate) fn launcher(&mut self, children: usize, args: &[&str]) {
        let children = children.to_string();
        let args: Vec<&str> = std::iter::once(children.as_str()).chain(args.iter().copied()).collect();
        self.set_command("launcher_job.py", &args);
    }

    /// A job of several processes that use NCCL, with the mode and further arguments of standin_nccl.py.
    pub(crate) fn nccl(&mut self, ranks: usize, mode: &str, how: Calls, more: &[&str]) {
        let linked = self.standin.add_nccl().display().to_string();
        let (ranks, never) = (ranks.to_string(), self.never().display().to_string());
        let mut args = vec![&*ranks, mode, "--never", &*never];
        args.extend(more);
        if how == Calls::BySymbol {
            args.extend(["--linked", &*linked]);
        }
        self.set_command("standin_nccl.py", &args);
    }

    /// A process of launcher_job.py that is given this file kills itself once it is there.
    pub(crate) fn fatal(&self) -> PathBuf {
        self.standin.path().join("fatal")
    }

    /// While this file is there, the last rank of such a job starts nothing.
    pub(crate) fn never(&self) -> PathBuf {
        self.standin.path().join("never")
    }

    fn todo(&self) -> PathBuf {
        self.standin.path().join("do")
    }

    /// A job of one process that does not use CUDA, with arguments of plain_job.py.
    pub(crate) fn plain(&mut self, args: &[&str]) {
        self.set_command("plain_job.py", args);
    }

    /// A failed restore is tried again after this time: a machine that does not get better is given up.
    pub(crate) fn restarts_after(&mut self, pause: &str) {
        self.set("RESTART_BACKOFF", pause);
    }

    /// For a test that takes longer than others.
    pub(crate) fn may_take(&mut self, limit: Duration) {
        self.deadline = Instant::now() + limit;
    }

    fn set_command(&mut self, script: &str, args: &[&str]) {
        let paths = [job_file(script), self.standin.output()];
        let first = ["python3".to_owned()].into_iter().chain(paths.map(|path| path.display().to_string()));
        self.command = first.chain(args.iter().map(|arg| (*arg).to_owned())).collect();
    }

    /// Has the command started by these words.
    pub(crate) fn below(&mut self, words: &[&str]) {
        self.command.splice(..0, words.iter().map(|word| (*word).to_owned()));
    }

    /// For a job of another user: a Python below a home directory is not for others.
    pub(crate) fn for_another_user(&mut self) {
        self.command[0] = python().unwrap().display().to_string();
    }

    /// A setting by its environment name without REKINDLE_.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.variable(&format!("REKINDLE_{key}"), value);
    }

    /// When a snapshot that failed is tried again: later than what is looked at before.
    pub(crate) fn retry_after(&mut self, pause: &str) {
        self.set("RETRY_AFTER", pause);
    }

    /// Uses `rekindle VERB j` instead of `run` from now on.
    pub(crate) fn instead(&mut self, verb: &str) {
        self.instead = Some(verb.to_owned());
    }

    /// Sets the additional arguments from now on.
    pub(crate) fn flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }

    /// A variable of the environment.
    pub(crate) fn variable(&mut self, name: &str, value: &str) {
        self.lab.set_variable(name, value);
    }

    /// Another command about the job; exit code and standard output.
    pub(crate) fn ask(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.lab.rekindle(args);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }

    /// Sets the shell commands that run instead of CRIU; an empty string restores CRIU.
    pub(crate) fn criu_fault(&self, shell: &str) {
        let path = self.lab.file("criu-fault");
        if shell.is_empty() {
            let _ = fs::remove_file(path);
        } else {
            // In one step: a CRIU may be starting.
            fs::write(path.with_extension("new"), format!("{shell}\n")).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        }
    }

    pub(crate) fn clear(&self, fault: &str) {
        let _ = fs::remove_file(self.standin.path().join(fault));
    }

    pub(crate) fn path(&self) -> &Path {
        self.lab.path()
    }

    /// Starts the supervisor; waits for nothing.
    pub(crate) fn run(&self) -> Supervisor<'_> {
        let mark = self.log().len();
        let flags = self.flags.iter().map(String::as_str);
        let running = match &self.instead {
            Some(verb) => self.lab.run_with(&[verb, "j"], flags),
            None => {
                let head: Vec<&str> = ["run", "--name", "j"].into_iter().chain(flags).chain(["--"]).collect();
                self.lab.run_with(&head, &self.command)
            }
        };
        Supervisor { rig: self, running, mark }
    }

    /// Starts it and waits until the job counts.
    pub(crate) fn start(&self) -> Supervisor<'_> {
        let mut supervisor = self.run();
        supervisor.said("to=\"running\"");
        supervisor.counts();
        supervisor
    }

    pub(crate) fn log(&self) -> String {
        self.lab.log()
    }

    /// The work folders that are mounted, each of a run.
    pub(crate) fn work_folders(&self) -> Vec<PathBuf> {
        self.lab.work_folders()
    }

    pub(crate) fn folder(&self) -> JobFolder {
        self.lab.job()
    }

    /// Every copy of every image, newest first: in memory and in the store.
    pub(crate) fn copies(&self) -> Vec<Image> {
        self.folder().copies().unwrap()
    }

    /// All images, newest first; one that is in memory and in the store as it is in memory.
    pub(crate) fn images(&self) -> Vec<Image> {
        let mut images = self.copies();
        images.dedup_by_key(|image| image.id);
        images
    }

    /// The places in memory that are mounted.
    pub(crate) fn mounted(&self) -> Vec<PathBuf> {
        self.lab.mounted()
    }

    /// Removes the images in memory, as a restart of the machine does.
    pub(crate) fn forget_memory(&self) {
        self.lab.forget_memory();
    }

    pub(crate) fn state(&self) -> Option<Published> {
        self.lab.published()
    }

    /// Every image that is listed is whole, be it in memory or in the store, and nothing else is there.
    pub(crate) fn assert_store_is_whole(&self) {
        for image in self.copies() {
            assert!(image.is_good(), "{:?}\n{}", image.state, self.log());
            let report = image.verify();
            // It may have been the turn of the oldest one to be removed: its manifest goes first, then its parts.
            let is_listed = || self.copies().iter().any(|now| (now.id, &now.dir) == (image.id, &image.dir));
            assert!(report.is_sound() || !is_listed(), "image {}: {report:?}", image.id);
        }
    }

    pub(crate) fn drafts(&self) -> Vec<String> {
        let names = fs::read_dir(self.folder().images_dir()).unwrap().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with(".tmp-"))
            .collect()
    }

    /// The output of each rank.
    fn outputs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.standin.path()).unwrap().flatten().map(|entry| entry.path());
        let is_output = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name == "out.txt" || name.strip_prefix("out.txt.").is_some_and(|n| n.parse::<u32>().is_ok())
        };
        entries.filter(is_output).collect()
    }

    /// Whatever happened, the job counted each number once. For a job that began only once.
    pub(crate) fn assert_sequence(&self) {
        for path in self.outputs() {
            let text = fs::read_to_string(&path).unwrap();
            for (line, expected) in text.lines().zip(1u64..) {
                assert_eq!(line.parse(), Ok(expected), "{} does not go on: {text:?}", path.display());
            }
        }
    }

    /// The processes of the command, as numbered here, whatever state the job is in.
    pub(crate) fn job_pids(&self) -> Vec<i32> {
        let line = self.command[1..].join(" ");
        let is_job = |(_, text): &(i32, String)| !text.contains("--name") && text.contains(&line);
        self.lab.processes().into_iter().filter(is_job).map(|(pid, _)| pid).collect()
    }

    /// Fails unless all that was started is gone soon: at once, on a machine that does nothing else.
    pub(crate) fn assert_nothing_left(&self) {
        self.lab.assert_all_gone();
    }

    /// The CUDA processes, as numbered here.
    pub(crate) fn cuda_pids(&self) -> Vec<i32> {
        let folder = self.standin.path().display().to_string();
        let is_control = |line: &str| line.contains(&folder) && line.ends_with(".ctl");
        let has =
            |pid: &i32| fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.lines().any(is_control));
        // A caller maps it too while it asks.
        let ours = Path::new(env!("CARGO_BIN_EXE_rekindle"));
        let is_caller = |pid: &i32| rekindle_os::process::executable(*pid).as_deref() == Some(ours);
        pids().filter(has).filter(|pid| !is_caller(pid)).collect()
    }

    pub(crate) fn driver(&self) -> Driver {
        self.standin.driver()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "---- log of the supervisor\n{}----", self.log());
        }
    }
}

fn pids() -> impl Iterator<Item = i32> {
    let me = std::process::id();
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(move |pid: &i32| pid.unsigned_abs() != me)
}

/// A running `rekindle run`; killed when dropped.
pub(crate) struct Supervisor<'a> {
    pub(crate) rig: &'a Rig,
    running: Running,
    /// The log was read up to here.
    mark: usize,
}

impl Supervisor<'_> {
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&Rig) -> bool) {
        let deadline = (Instant::now() + LIMIT).min(self.rig.deadline);
        while !done(self.rig) {
            assert_eq!(self.running.status(), None, "the supervisor ended before {what}");
            assert!(Instant::now() < deadline, "waited in vain until {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for a line of the log after the last one that was waited for.
    pub(crate) fn said(&mut self, words: &str) -> String {
        self.said_one_of(&[words])
    }

    /// The same with the first line that has any of these.
    pub(crate) fn said_one_of(&mut self, words: &[&str]) -> String {
        let mut found = None;
        let mark = self.mark;
        self.until(&format!("it says one of {words:?}"), |rig| {
            let log = rig.log();
            let news = &log[mark.min(log.len())..];
            let Some(at) = words.iter().filter_map(|words| news.find(words)).min() else { return false };
            let end = news[at..].find('\n').map(|end| at + end);
            let Some(end) = end else { return false };
            let start = news[..at].rfind('\n').map_or(0, |start| start + 1);
            found = Some((mark + end, news[start..end].to_owned()));
            true
        });
        let (mark, line) = found.unwrap();
        self.mark = mark;
        line
    }

    pub(crate) fn pid(&self) -> u32 {
        self.running.pid().unsigned_abs()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.running.signal(signal);
    }

    /// Asks for a snapshot.
    pub(crate) fn ask(&self) {
        self.signal(Signal::SIGUSR1);
    }

    /// Waits for the next image.
    pub(crate) fn image(&mut self) -> Image {
        let line = self.said("the job was frozen for");
        let id = line.split("image ").nth(1).and_then(|rest| rest.split(':').next()).unwrap();
        let id: ImageId = id.parse().unwrap();
        self.rig.images().into_iter().find(|image| image.id == id).unwrap()
    }

    /// What was logged so far is not waited for.
    pub(crate) fn goes_to_the_end(&mut self) {
        self.mark = self.rig.log().len();
    }

    pub(crate) fn snapshot(&mut self) -> Image {
        self.ask();
        self.image()
    }

    /// Asks for a snapshot that fails; what it says of it.
    pub(crate) fn failing_snapshot(&mut self) -> String {
        self.ask();
        self.said("the snapshot failed")
    }

    /// Waits for an image of the job as it is now. An earlier one of a job that started slowly has neither its GPU
    /// memory nor its open output.
    pub(crate) fn image_from_now(&mut self) -> Image {
        self.goes_to_the_end();
        // One that began earlier may be named only now.
        self.snapshot();
        self.snapshot()
    }

    fn counts_of(rig: &Rig) -> Vec<(PathBuf, u64)> {
        let last = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let number = text.lines().last().and_then(|line| line.parse().ok()).unwrap_or(0);
            (path, number)
        };
        rig.outputs().into_iter().map(last).collect()
    }

    /// Waits until the counter of every rank has moved.
    pub(crate) fn counts(&mut self) {
        let before = Self::counts_of(self.rig);
        self.until("the job counts", |rig| {
            let now = Self::counts_of(rig);
            let went_on = |(path, number): &(PathBuf, u64)| {
                let was = before.iter().find(|(known, _)| known == path).map_or(0, |(_, was)| *was);
                // A restore puts the file back.
                *number != was && *number > 1
            };
            !now.is_empty() && now.iter().all(went_on)
        });
    }

    /// Has a rank of standin_share.py do something; what came of it.
    pub(crate) fn has_rank(&mut self, rank: u32, word: &str) -> String {
        self.has_done(&format!("{rank} {word}"))
    }

    /// Has the job begin something of standin_kept.py, and waits until it does.
    pub(crate) fn begins(&mut self, word: &str) {
        let todo = self.rig.todo();
        fs::write(todo.with_extension("new"), word).unwrap();
        fs::rename(todo.with_extension("new"), &todo).unwrap();
        self.until(&format!("the job begins {word}"), |_| !todo.exists());
    }

    /// Has the job do something; what came of it.
    pub(crate) fn has_done(&mut self, word: &str) -> String {
        let done = self.rig.todo().with_extension("done");
        let before = fs::read_to_string(&done).unwrap_or_default();
        self.begins(word);
        let mut answer = String::new();
        self.until(&format!("the job has done {word}"), |_| {
            answer = fs::read_to_string(&done).unwrap_or_default();
            answer.len() > before.len() && answer.ends_with('\n')
        });
        answer.split_off(before.len())
    }

    /// Waits until so many ranks count: from then on an image has the output of each open, and puts it back.
    pub(crate) fn ranks_count(&mut self, ranks: usize) {
        self.until("all ranks count", |rig| {
            Self::counts_of(rig).iter().filter(|(_, number)| *number > 1).count() == ranks
        });
    }

    /// The job runs on: every CUDA process is running, every rank counts, and nothing was restarted.
    pub(crate) fn assert_unharmed(&mut self, ranks: usize) {
        self.assert_running(ranks);
        self.counts();
        self.rig.assert_sequence();
    }

    /// Every CUDA process is running.
    pub(crate) fn assert_running(&mut self, ranks: usize) {
        let pids = self.rig.cuda_pids();
        assert_eq!(pids.len(), ranks, "CUDA processes {pids:?}");
        for pid in pids {
            let process = Process::with_driver(pid, self.rig.driver()).unwrap();
            // The next snapshot may have begun already, or an attempt that is made again.
            self.until(&format!("process {pid} runs"), |_| process.state().unwrap() == cuda::State::Running);
        }
    }

    /// The process of the command.
    pub(crate) fn main_pid(&mut self) -> i32 {
        let mut pid = None;
        self.until("the job has a process", |rig| {
            pid = rig.cuda_pids().into_iter().find(|pid| inner(*pid) == Some(1001));
            pid.is_some()
        });
        pid.unwrap()
    }

    /// Kills the process of the command.
    pub(crate) fn kill_job(&mut self) {
        kill(self.main_pid(), Signal::SIGKILL);
    }

    /// Waits until there is no draft. An image that is on its way to the store has one; what nobody works on stays.
    pub(crate) fn leaves_no_draft(&mut self) {
        self.until("no draft is left", |rig| rig.drafts().is_empty());
    }

    /// Waits until it ends; its exit code, and None when a signal ended it.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let deadline = (Instant::now() + LIMIT).min(self.rig.deadline);
        loop {
            if let Some(status) = self.running.status() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "waited in vain for the supervisor's end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops it as a service manager does: a last snapshot, nothing left.
    pub(crate) fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        assert_eq!(self.wait(), Some(143), "exit code");
        self.rig.assert_nothing_left();
    }

    /// kill -9.
    pub(crate) fn kill(&mut self) {
        self.running.kill();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        !self.running.runs()
    }
}

/// A process's own number of itself.
pub(crate) fn inner(pid: i32) -> Option<i32> {
    rekindle_os::process::inner_pid(pid)
}
