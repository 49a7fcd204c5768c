//! The ground of an attack on a store: the store, what may not change, and what the attacker brings.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use nix::unistd::User;

use crate::supervisor::{Lab, Running, comes, python, tail};
use crate::sweep::{Seen, copy, look};

/// How long a command may take until it has done its work or has given up: more than it takes with nothing in its way.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);

/// Counts, and says outside the store that it lives. Its file is one that an image has a copy of.
pub(crate) const JOB: &str = "import sys, time
n, data = 0, open('data', 'w+b')
while True:
    n += 1
    data.seek(0)
    data.write(b'%9d' % n)
    data.flush()
    print('n', n, flush=True)
    open(sys.argv[1], 'w').close()
    time.sleep(0.02)";

/// A store with an image of a job that was killed. Nothing of it is in memory.
#[derive(Debug)]
pub(crate) struct Ground {
    pub(crate) lab: Lab,
    pub(crate) command: Vec<String>,
    /// A folder of root's, outside the store.
    pub(crate) outside: PathBuf,
    /// A copy of the store.
    pub(crate) pristine: PathBuf,
    pub(crate) beat: PathBuf,
}

/// How a run ended, or that its job lived.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The job ran, and was killed by the test. What rekindle said until then.
    Lived(String),
    /// rekindle ended with this code, before the job ran.
    Ended(i32, String),
}

/// What came of the beginning of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begun {
    Lives,
    Ended,
    Tries,
}

impl Outcome {
    pub(crate) fn said(&self) -> &str {
        match self {
            Outcome::Lived(said) | Outcome::Ended(_, said) => said,
        }
    }
}

impl Ground {
    /// With a key, and a job of root's.
    pub(crate) fn new() -> Option<Ground> {
        Ground::of("root")
    }

    /// With a key, and a job of this user.
    pub(crate) fn of(user: &str) -> Option<Ground> {
        Ground::made(Lab::new()?, user, true)
    }

    pub(crate) fn made(lab: Lab, user: &str, key: bool) -> Option<Ground> {
        let (theirs, outside) = (lab.file("theirs"), lab.file("outside"));
        fs::create_dir(&theirs).unwrap();
        let mut lab = lab.set_file("job.directory", "theirs").set("restart.max-restarts", "1");
        if user != "root" {
            let user = User::from_name(user).unwrap().unwrap();
            nix::unistd::chown(&theirs, Some(user.uid), Some(user.gid)).unwrap();
            lab = lab.set("job.user", &format!("{:?}", user.name));
        }
        if key {
            fs::write(lab.file("key"), [7; 32]).unwrap();
            mode(&lab.file("key"), 0o600);
            lab = lab.set_file("store.encryption-key", "key");
        }
        let beat = theirs.join("beat");
        let words = [python()?.to_str().unwrap(), "-Sc", JOB, beat.to_str().unwrap()];
        let command = words.map(str::to_owned).to_vec();
        let pristine = lab.file("pristine");
        let ground = Ground { lab, command, outside, pristine, beat };
        ground.make_outside();
        let mut run = ground.lab.run(&ground.command);
        run.job_pid(&ground.lab);
        run.wait_for("the job lives", || ground.beat.exists());
        run.snapshot(&ground.lab);
        ground.lab.kill_9(run);
        ground.lab.forget_memory();
        copy(&ground.lab.store(), &ground.pristine);
        Some(ground)
    }

    /// Things of root's, as if nothing had happened: a file longer than any output here, and a folder with files that
    /// look like leftovers.
    pub(crate) fn make_outside(&self) {
        let folder = &self.outside;
        remove(folder);
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("secret"), "root's secret\n".repeat(1 << 14)).unwrap();
        mode(&folder.join("secret"), 0o600);
        fs::create_dir(folder.join("folder")).unwrap();
        for name in [".tmp-mine", ".tmp-stdout.log-1-1", ".del-mine", "secret", "boot"] {
            fs::write(folder.join("folder").join(name), "root's").unwrap();
            mode(&folder.join("folder").join(name), 0o600);
        }
        fs::create_dir_all(folder.join("folder/.tmp-folder/within")).unwrap();
        mode(&folder.join("folder"), 0o755);
        mode(folder, 0o755);
    }

    /// A file in the job's folder of the store.
    pub(crate) fn there(&self, name: &str) -> PathBuf {
        self.lab.store().join("j").join(name)
    }

    /// The store as it was.
    pub(crate) fn reset(&self) {
        self.lab.assert_all_gone();
        self.lab.forget_memory();
        while let Some(point) = rekindle_testing::mounts_below(&self.lab.store()).pop() {
            umount2(&point, MntFlags::MNT_DETACH).unwrap();
        }
        fs::remove_dir_all(self.lab.store()).unwrap();
        copy(&self.pristine, &self.lab.store());
    }

    /// Puts one entry of the job's folder back to what it was.
    pub(crate) fn mend(&self, name: &str) {
        let (there, was) = (self.there(name), self.pristine.join("j").join(name));
        remove(&there);
        if fs::symlink_metadata(&was).is_ok() {
            copy(&was, &there);
        }
    }

    /// The same in slots of this boot, whose folders are closed as they should be.
    pub(crate) fn emptied_slot(&self, name: &str) -> PathBuf {
        let path = self.emptied(name);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        for folder in path.ancestors().skip(1).take_while(|folder| *folder != self.there("")) {
            mode(folder, 0o700);
        }
        if self.there("slots").is_dir() && !name.ends_with("boot") {
            fs::write(self.there("slots/boot"), boot.trim_end()).unwrap();
        }
        path
    }

    /// Removes what is at this name, if there is something, and answers where it was.
    pub(crate) fn emptied(&self, name: &str) -> PathBuf {
        let there = self.there(name);
        remove(&there);
        fs::create_dir_all(there.parent().unwrap()).unwrap();
        there
    }

    /// Runs the job until it lives or rekindle has ended. Whether it lives.
    pub(crate) fn begin(&self, head: &[&str]) -> (Running, bool) {
        let (mut run, begun) = self.begin_or_try(head);
        assert!(begun != Begun::Tries, "{head:?} neither runs the job nor gives up: {}", tail(&run.err()));
        let lives = begun == Begun::Lives && run.runs();
        (run, lives)
    }

    /// The same. It may also be that rekindle waits for a store that cannot be read, for minutes: it may be back soon.
    pub(crate) fn begin_or_try(&self, head: &[&str]) -> (Running, Begun) {
        const TRIES: usize = 20;
        let _ = fs::remove_file(&self.beat);
        let mut run = self.lab.run_with(head, &self.command);
        let said = run.said_so_far();
        let mut begun = None;
        let is_over = comes(WITHIN, || {
            let tries = || said().matches("WARN continuing from image ").count() >= TRIES;
            begun = match () {
                () if !run.runs() => Some(Begun::Ended),
                () if self.beat.exists() => Some(Begun::Lives),
                () if tries() => Some(Begun::Tries),
                () => None,
            };
            begun.is_some()
        });
        assert!(is_over, "{head:?} neither runs the job nor gives up: {}", tail(&run.err()));
        (run, begun.unwrap())
    }

    /// The same, and kills it.
    pub(crate) fn run(&self, head: &[&str]) -> Outcome {
        let (mut run, lives) = self.begin(head);
        if lives {
            run.kill();
            self.lab.assert_all_gone();
            return Outcome::Lived(run.err());
        }
        let (code, _, said) = run.finish(WITHIN);
        self.lab.assert_all_gone();
        Outcome::Ended(code, said)
    }

    /// Runs another command: its exit code, and what it said.
    pub(crate) fn call(&self, args: &[&str]) -> (i32, String) {
        let (code, _, said) = self.call_for_output(args);
        (code, said)
    }

    /// The same, with its output before what it said.
    pub(crate) fn call_for_output(&self, args: &[&str]) -> (i32, String, String) {
        let mut run = self.lab.run_with(args, [""; 0]);
        assert!(comes(WITHIN, || !run.runs()), "{args:?} does not end within {WITHIN:?}: {}", tail(&run.err()));
        let (code, out, said) = run.finish(WITHIN);
        assert!(!said.contains("panicked"), "{args:?}: {said}");
        (code, out, said)
    }

    /// Runs the job or another command. Answers what was said.
    pub(crate) fn run_or_call(&self, args: &[&str]) -> String {
        if is_run(args) { self.run(args).said().to_owned() } else { self.call(args).1 }
    }

    /// Takes a snapshot. Whether there is a new image; it may fail, and then the job is still there.
    pub(crate) fn snapshot(&self, run: &mut Running) -> bool {
        const ENDS: [&str; 4] =
            ["the job was frozen for", "the snapshot failed", "snapshot was cancelled", "no snapshot was taken"];
        let said = run.said_so_far();
        let count = || ENDS.map(|words| said().matches(words).count());
        let before = count();
        run.signal(Signal::SIGUSR1);
        let is_over = comes(WITHIN, || count() != before || !run.runs());
        assert!(is_over, "the snapshot neither succeeds nor fails: {}", tail(&said()));
        count()[0] > before[0]
    }

    /// The job's images are what they were: the attacker's work is not the fault of any.
    pub(crate) fn assert_good(&self, what: &str) {
        let good = self.lab.good();
        assert!(good.contains(&1), "{what}: {good:?}");
        assert!(!self.there("images").read_dir().unwrap().flatten().any(|it| it.path().join("bad.json").exists()));
    }
}

/// Cases of one test. The others are tried, too, when one fails.
#[derive(Debug, Default)]
pub(crate) struct Cases(Vec<String>);

impl Cases {
    pub(crate) fn add(&mut self, what: &str, case: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(case)) {
            let why = panic.downcast_ref::<String>().and_then(|why| why.lines().next()).unwrap_or_default();
            self.0.push(format!("{what}: {why}"));
        }
    }
}

impl Drop for Cases {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.0.is_empty(), "{} cases failed: {:#?}", self.0.len(), self.0);
        }
    }
}

/// The two ways to start: one restores, the other does not.
pub(crate) const RUN: &[&str] = &["run", "--name", "j", "--"];
pub(crate) const FRESH: &[&str] = &["run", "--fresh", "--name", "j", "--"];

pub(crate) fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub(crate) fn remove(path: &Path) {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// What may not change.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) before: Seen,
}

impl Outside {
    pub(crate) fn at<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Outside {
        let machine = ["/etc/passwd", "/etc/shadow", "/etc/hosts", "/etc/cron.d", "/dev/null"].map(Path::new);
        let paths: Vec<PathBuf> = paths.into_iter().chain(machine).map(Path::to_owned).collect();
        let before = Outside::seen(&paths);
        Outside { paths, before }
    }

    pub(crate) fn seen(paths: &[PathBuf]) -> Seen {
        let mut seen = Seen::new();
        paths.iter().for_each(|path| look(path, &mut seen));
        seen
    }

    /// The paths whose owner, mode or content changed, which are new or gone.
    pub(crate) fn changes(&self) -> Vec<PathBuf> {
        let now = Outside::seen(&self.paths);
        let changed = self.before.iter().filter(|(path, what)| now.get(*path) != Some(what)).map(|(path, _)| path);
        let new = now.keys().filter(|path| !self.before.contains_key(*path));
        changed.chain(new).cloned().collect()
    }

    pub(crate) fn assert_untouched(&self, what: &str, said: &str) {
        let changes = self.changes();
        assert!(changes.is_empty(), "{what}: rekindle changed {changes:?}\n{}", tail(said));
    }
}

/// A shared object that says it was loaded: whatever a process does with it later, this is done when it is loaded.
pub(crate) struct Library {
    pub(crate) file: PathBuf,
    pub(crate) marker: PathBuf,
}

impl Library {
    pub(crate) fn compile(lab: &Lab) -> Library {
        // It needs no version of the C library: what loads it may have another.
        const SOURCE: &str = "int open(const char *, int, ...); int dprintf(int, const char *, ...); int getpid(void);
            __attribute__((constructor)) static void loaded(void) {
                dprintf(open(MARKER, 02101, 0666), \"loaded by process %d\\n\", getpid());
            }";
        let folder = lab.file("loaded");
        fs::create_dir(&folder).unwrap();
        mode(&folder, 0o777);
        let (source, file, marker) = (lab.file("library.c"), lab.file("library.so"), folder.join("marker"));
        fs::write(&source, SOURCE).unwrap();
        let define = format!("-DMARKER=\"{}\"", marker.display());
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-nostdlib", "-o"]).args([&file, &source]).arg(define);
        // rustc needs it, too.
        let done = cc.output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Library { file, marker }
    }

    /// Which processes have loaded it since this was asked.
    pub(crate) fn take_loads(&self) -> String {
        let loads = fs::read_to_string(&self.marker).unwrap_or_default();
        let _ = fs::remove_file(&self.marker);
        loads
    }
}

/// A tmpfs that is nobody's staging area, unmounted when this goes.
pub(crate) struct Tmpfs(pub(crate) PathBuf);

impl Tmpfs {
    /// With a file in it.
    pub(crate) fn mount(path: PathBuf) -> Tmpfs {
        fs::create_dir(&path).unwrap();
        mount(Some("roots"), &path, Some("tmpfs"), MsFlags::empty(), Some("mode=0700,size=1m")).unwrap();
        fs::write(path.join("secret"), "root's").unwrap();
        Tmpfs(path)
    }

    pub(crate) fn is_mounted(&self) -> bool {
        rekindle_testing::mounts_below(&self.0).contains(&self.0)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Already unmounted, where the test fails for that.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

pub(crate) fn is_run(args: &[&str]) -> bool {
    args.contains(&"--name")
}

impl Ground {
    /// Runs the job, and takes a snapshot in each slot.
    pub(crate) fn run_with_snapshots(&self, head: &[&str]) -> String {
        let (mut run, lives) = self.begin(head);
        for _ in 0..2 {
            if lives && run.runs() {
                self.snapshot(&mut run);
            }
        }
        run.kill();
        self.lab.assert_all_gone();
        run.err()
    }

    /// As [`Ground::run`], while another job of the lab runs.
    pub(crate) fn run_beside(&self, head: &[&str]) -> String {
        let (mut run, _) = self.begin(head);
        run.kill();
        run.err()
    }
}
