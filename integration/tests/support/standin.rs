//! The stand-in libcuda, built once and installed for one job, and the job that uses it.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rekindle_cuda::{Driver, Process};

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The built stand-in, `libstandin_cuda.so`.
pub(crate) fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("standin-cuda").join("libstandin_cuda.so"))
}

/// The built stand-in for NCCL.
fn nccl_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("standin-nccl").join("libstandin_nccl.so"))
}

/// Cargo builds no cdylib for a test of another package, so this asks it. The folder of what was built.
fn build(package: &str) -> PathBuf {
    // target/debug/deps/cuda-0123456789abcdef
    let test = std::env::current_exe().unwrap();
    let target = test.ancestors().nth(3).unwrap();
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", package, "--target-dir"])
        .arg(target)
        .current_dir(root())
        .status()
        .unwrap();
    assert!(built.success(), "{package} does not build");
    target.join("debug")
}

/// Compiles a source of integration/jobs as an object without start files.
#[allow(dead_code, reason = "each test binary uses a part")]
pub(crate) fn compile(source: &str, to: &Path, options: &[&str]) {
    let source = root().join("integration/jobs").join(source);
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut compile = Command::new(rustc);
    compile.args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "-Anon_upper_case_globals"]);
    compile.args(["-Anon_snake_case", "-Clink-arg=-nostartfiles", "-Copt-level=1"]).args(options).arg("-o");
    assert!(compile.arg(to).arg(source).status().unwrap().success());
}

/// A folder with a `libcuda.so.1` and the control files and faults of one job.
#[derive(Debug)]
pub(crate) struct Standin {
    folder: tempfile::TempDir,
}

impl Standin {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("standin-cuda-").tempdir().unwrap();
        // A job may run as another user.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::copy(library(), folder.path().join("libcuda.so.1")).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The file that the job writes its counter to.
    pub(crate) fn output(&self) -> PathBuf {
        self.path().join("out.txt")
    }

    /// The stand-in as a driver.
    pub(crate) fn driver(&self) -> Driver {
        Driver::open(self.path().join("libcuda.so.1")).unwrap()
    }

    /// Has NVML there too.
    #[allow(dead_code, reason = "each test binary uses a part")]
    pub(crate) fn add_nvml(&self) {
        fs::copy(library(), self.path().join("libnvidia-ml.so.1")).unwrap();
    }

    /// Has NCCL there too; the library that is linked to it, for jobs that call it by symbol.
    #[allow(dead_code, reason = "each test binary uses a part")]
    pub(crate) fn add_nccl(&self) -> PathBuf {
        let (nccl, linked) = (self.path().join("libnccl.so.2"), self.path().join("linked.so"));
        fs::copy(nccl_library(), &nccl).unwrap();
        let link = format!("-Clink-arg={}", nccl.display());
        compile("linked_to_libnccl.rs", &linked, &["-Clink-arg=-nostdlib", &link]);
        linked
    }

    /// The GPUs from now on, one a line; the stand-in's documentation has the words.
    #[allow(dead_code, reason = "each test binary uses a part")]
    pub(crate) fn gpus(&self, lines: &str) {
        // In one step: a job may be looking.
        fs::write(self.path().join("gpus.new"), lines).unwrap();
        fs::rename(self.path().join("gpus.new"), self.path().join("gpus")).unwrap();
    }

    /// Asks for a fault; the stand-in's documentation lists them.
    pub(crate) fn fault(&self, name: &str, text: &str) {
        // Not truncated first: a call that is held reads it all the time, and an empty file is no fault.
        let draft = self.path().join(format!(".{name}.draft"));
        fs::write(&draft, text).unwrap();
        fs::rename(draft, self.path().join(name)).unwrap();
    }

    /// Lets `command` find the stand-in as its libcuda.
    pub(crate) fn install<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.variables())
    }

    /// The variables by which a program finds it.
    pub(crate) fn variables(&self) -> [(&str, &str); 2] {
        ["LD_LIBRARY_PATH", "STANDIN_CUDA_DIR"].map(|name| (name, self.path().to_str().unwrap()))
    }

    /// The command line of the job.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("python3");
        command.arg(root().join("integration/jobs/standin_job.py")).arg(self.output()).args(args);
        self.install(&mut command);
        command
    }

    /// Starts the job and waits until it counts.
    pub(crate) fn start(&self, args: &[&str]) -> Job {
        self.spawn(self.command(args).stdin(Stdio::null()))
    }

    /// Like `start`, by way of another program that then is the child, and with no descriptor of ours: `setsid` for
    /// CRIU, which takes only a session leader, or `unshare`.
    pub(crate) fn start_wrapped(&self, wrapper: &[&str], args: &[&str]) -> Job {
        let job = self.command(args);
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(job.get_program()).args(job.get_args());
        let log = fs::File::create(self.path().join("log")).unwrap();
        self.spawn(self.install(&mut command).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log))
    }

    /// Starts `command`, which is the job, and waits until it counts.
    pub(crate) fn spawn(&self, command: &mut Command) -> Job {
        let child = command.spawn().unwrap();
        let mut job = Job { child, output: self.output() };
        let before = job.count();
        wait_for("the job counts", || {
            assert_eq!(job.child.try_wait().unwrap(), None, "the job ended at once");
            job.count() > before
        });
        job
    }
}

/// A running job; killed when dropped.
#[derive(Debug)]
pub(crate) struct Job {
    child: Child,
    output: PathBuf,
}

impl Job {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn process(&self, driver: &Driver) -> Process {
        Process::with_driver(self.pid(), driver.clone()).unwrap()
    }

    /// The last whole line of its output; 0 before the first.
    pub(crate) fn count(&self) -> u64 {
        let text = fs::read_to_string(&self.output).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().last().map_or(0, |line| line.parse().unwrap())
    }

    /// Fails unless the counter moves on.
    pub(crate) fn assert_counts(&mut self) {
        let before = self.count();
        wait_for("the counter moves", || {
            assert_eq!(self.child.try_wait().unwrap(), None, "the job ended");
            self.count() > before + 1
        });
    }

    /// Fails if the counter moves on. What a round does behind its last call may be under way, and ends.
    pub(crate) fn assert_stands(&self) {
        let before = self.count();
        std::thread::sleep(Duration::from_millis(500));
        assert!(self.count() <= before + 1, "the job goes on");
    }

    pub(crate) fn kill(&mut self) -> ExitStatus {
        let _ = self.child.kill();
        self.child.wait().unwrap()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits at most 150 s: far above what anything takes on an idle machine.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(150);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
