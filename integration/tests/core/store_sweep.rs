//! One who can write the store and changes everything there, at random moments, while rekindle works on it.
//!
//! Each round does one thing with a copy of the same store, with another seed. Whatever the attacker does: nothing of
//! root's outside the store changes owner, mode, content or mount, no library is loaded from there, every command ends,
//! and one that fails says why. `REKINDLE_SWEEP=1000` runs so many rounds for each kind of job, `REKINDLE_SWEEP_SEED=N`
//! begins with that seed; a failing one is printed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::hostile_store::{Begun, Cases, Ground, Library, Outside, Tmpfs};
use crate::supervisor::{Lab, Running, comes, job_file, python, tail};
use crate::sweep::number;

/// For each kind of job. A thousand take an hour.
const ROUNDS: u64 = 30;

/// What a round does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// Restores the job, takes a snapshot and stores it.
    Restore,
    /// The same from the beginning.
    Fresh,
    /// Restores the job, takes a snapshot, and waits until its restore was rehearsed.
    Rehearse,
    /// A command, again and again.
    Command(&'static [&'static str]),
}

const WORK: [Work; 12] = [
    Work::Restore,
    Work::Restore,
    Work::Restore,
    Work::Fresh,
    Work::Fresh,
    Work::Rehearse,
    Work::Command(&["prune", "--discard-memory"]),
    Work::Command(&["rm", "--yes", "--force", "j"]),
    Work::Command(&["repair"]),
    Work::Command(&["verify", "--read-data"]),
    Work::Command(&["list", "j"]),
    Work::Command(&["status"]),
];

/// The attacker, at work.
struct Mutator {
    child: Child,
    said: BufReader<ChildStdout>,
    /// Before anything else began.
    first: String,
}

impl Mutator {
    /// Returns once it begins.
    fn begin(ground: &Ground, library: &Library, seed: u64, seconds: &str) -> Mutator {
        let mut mutate = Command::new(python().unwrap());
        mutate.arg("-S").arg(job_file("mutate_store.py"));
        mutate.args([&ground.there(""), &ground.outside, &library.file]).args([&seed.to_string(), seconds]);
        let mut child = mutate.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        while !first.ends_with("ready\n") {
            assert_ne!(said.read_line(&mut first).unwrap(), 0, "it ended: {first}");
        }
        Mutator { child, said, first }
    }

    fn works(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end, when it has undone its mounts. Answers its changes.
    fn end(mut self) -> String {
        let mut changes = std::mem::take(&mut self.first);
        self.said.read_to_string(&mut changes).unwrap();
        assert!(self.child.wait().unwrap().success(), "{changes}");
        changes
    }
}

impl Drop for Mutator {
    fn drop(&mut self) {
        // It ends by itself, when its mounts are undone.
        let _ = self.child.wait();
    }
}

/// Fails unless a command that failed says why.
fn assert_says_why(code: i32, said: &str) -> Option<String> {
    assert!(!said.contains("panicked") && !said.contains("gave no reason"), "{code}: {}", tail(said));
    if code == 0 {
        return None;
    }
    let reason = |line: &str| {
        let reason = line.split_once(" ERROR ").map(|(_, why)| why).or_else(|| line.strip_prefix("rekindle: "))?;
        Some(reason.to_owned())
    };
    let reasons: Vec<String> = said.lines().filter_map(reason).collect();
    // What is told without a path: how many images are damaged, how often the job died, and whose lock it is.
    let known = ["is damaged", "are damaged", "lost content", "restart", "no job", "was taken over", "is running"];
    let tells = |why: &String| why.contains('/') || known.iter().any(|words| why.contains(words));
    let told = reasons.iter().find(|why| tells(why));
    Some(told.unwrap_or_else(|| panic!("{code}, and it does not say why: {}", tail(said))).clone())
}

/// Waits for the end of what a snapshot leads to: its image is stored or rehearsed. It may fail, and then is not tried
/// again in time.
fn awaits(run: &mut Running, words: &str) {
    let said = run.said_so_far();
    comes(Duration::from_secs(5), || said().contains(words) || !run.runs());
}

/// Does the work of a round. Answers how it ended, and what was said.
fn work(ground: &Ground, work: Work, mutator: &mut Mutator) -> (Option<String>, String) {
    let head: &[&str] = match work {
        Work::Command(args) => {
            let (mut why, mut all) = (None, String::new());
            loop {
                let (code, out, said) = ground.call_for_output(args);
                // What a check finds is its output.
                let found = out.lines().last().filter(|_| code == 1 && said.is_empty()).map(str::to_owned);
                why = found.or_else(|| assert_says_why(code, &said)).or(why);
                all.push_str(&said);
                if !mutator.works() {
                    return (why, all);
                }
            }
        }
        Work::Fresh => &["run", "--fresh", "--name", "j", "--"],
        Work::Restore | Work::Rehearse => &["run", "--name", "j", "--"],
    };
    let (mut run, begun) = ground.begin_or_try(head);
    if begun == Begun::Lives && run.runs() && ground.snapshot(&mut run) {
        awaits(&mut run, if work == Work::Rehearse { "rehears" } else { " was stored in " });
    }
    let why = if run.runs() {
        run.kill();
        (begun == Begun::Tries).then(|| "it waits for the store".to_owned())
    } else {
        let code = run.status().unwrap().code().unwrap_or(-1);
        assert_says_why(code, &run.err())
    };
    ground.lab.assert_all_gone();
    (why, run.err())
}

/// The rounds for jobs of this user, with a key and without.
fn sweep(user: &str) {
    let made = |key| {
        let lab = Lab::new()?.set("snapshot.rehearse", "\"1s\"").set("restart.restore-timeout", "\"10s\"");
        let lab = lab.set("store.keep-last", "1").set("snapshot.freeze-limit", "\"10s\"");
        let ground = Ground::made(lab, user, key)?;
        let library = Library::compile(&ground.lab);
        Some((library, ground))
    };
    let (Some(with), Some(without)) = (made(true), made(false)) else { return };
    let mut grounds = [with, without];
    let first = number("REKINDLE_SWEEP_SEED").unwrap_or_else(|| u64::from(std::process::id()) * 1_000_000);
    let mut cases = Cases::default();
    let (mut done, mut reasons) = (BTreeMap::<Work, [u32; 2]>::new(), BTreeMap::<String, u32>::new());
    for seed in first..first + number("REKINDLE_SWEEP").unwrap_or(ROUNDS) {
        // The seed decides everything, whatever rounds were before. Each kind of work comes up, each time with another
        // of the other choices.
        let choice = |of: u64, count: u64| {
            seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(u32::try_from(of).unwrap()) % count
        };
        let what = WORK[usize::try_from(choice(17, 12)).unwrap()];
        let (library, ground) = &mut grounds[usize::try_from(choice(31, 2)).unwrap()];
        let staging = ["ram", "store"][usize::try_from(choice(43, 2)).unwrap()];
        ground.lab.set_variable("REKINDLE_SNAPSHOT_STAGING", staging);
        cases.add(&format!("seed {seed}, {what:?}, {staging}"), || {
            ground.reset();
            ground.make_outside();
            let tmpfs = Tmpfs::mount(ground.outside.join("memory"));
            let outside = Outside::at([ground.outside.as_path()]);
            let seconds = if matches!(what, Work::Command(_)) { "0.5" } else { "1.5" };
            let mut mutator = Mutator::begin(ground, library, seed, seconds);
            let worked = catch_unwind(AssertUnwindSafe(|| work(ground, what, &mut mutator)));
            let changes = mutator.end();
            // What fails within the work does not know its seed.
            let (why, said) = worked.unwrap_or_else(|why| {
                eprintln!("seed {seed}, {what:?}, {staging}\n{changes}");
                resume_unwind(why)
            });
            let shown = || format!("seed {seed}, {what:?}, {staging}\n{changes}\n{}", tail(&said));
            assert_eq!(library.take_loads(), "", "{}", shown());
            assert!(tmpfs.is_mounted(), "a tmpfs of root's was unmounted: {}", shown());
            assert!(outside.changes().is_empty(), "changed: {:?}: {}", outside.changes(), shown());
            done.entry(what).or_default()[usize::from(why.is_some())] += 1;
            if let Some(why) = why {
                *reasons.entry(why.replace(ground.lab.path().to_str().unwrap(), "")).or_default() += 1;
            }
        });
    }
    eprintln!("{user}: {done:#?} succeeded and failed; why: {reasons:#?}");
    for (_, ground) in &grounds {
        assert!(rekindle_testing::mounts_below(&ground.lab.store()).is_empty());
        fs::remove_dir_all(ground.lab.store()).unwrap();
    }
}

#[test]
fn whatever_is_changed_in_the_store_of_a_job_of_root() {
    sweep("root");
}

#[test]
fn whatever_is_changed_in_the_store_of_a_job_of_another_user() {
    sweep("nobody");
}
