//! CRIU is killed with -9, as the OOM killer does: at once beside a stopped child of its own, after each of its first
//! forks, and at random moments. The job runs on or is back from its newest image, and the snapshot is there.
//!
//! `REKINDLE_TEST_CRIU_KILLS=500` kills it so many times at random moments, `REKINDLE_TEST_CRIU_KILLS_SEED=N` begins with that
//! seed.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rekindle_os::process;
use rekindle_testing::random::Random;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, comes, criu, kill};

/// A lab whose CRIU waits at a gate, if that is closed, or does what `fault` says. A rehearsal has its own view of files, so
/// its CRIU waits at no gate. The time limits are above the tests' own: who waits for them fails.
fn lab(fault: &str) -> Option<Lab> {
    let lab = Lab::new()?.set_file("criu.path", "criu").set("restart.backoff", "\"10m\"");
    let lab = lab.set("store.keep-last", "3");
    let lab = ["snapshot.freeze-limit", "restart.restore-timeout"]
        .into_iter()
        .fold(lab.variable("REKINDLE_RETRY_AFTER", "10m"), |lab, key| lab.set(key, "\"10m\""));
    nix::unistd::mkfifo(&lab.file("gate"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    lab.script(
        "criu",
        &format!(
            "case \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
             read score < /proc/self/oom_score_adj\n\
             if [ $score != 1000 ] && rm {folder}/closed 2>/dev/null; then read line < {folder}/gate; fi\n\
             if [ -e {folder}/fault ]; then rm {folder}/fault\n{fault}\nfi\nexec {real} \"$@\"",
            real = criu().display(),
            folder = lab.path().display(),
        ),
    );
    Some(lab)
}

/// The fault of a CRIU that is killed in a check of the kernel: its child is stopped, and has all its descriptors.
const BESIDE_A_CHILD: &str = "sh -c 'kill -STOP $$' $0 &\n\
     until grep -q '^State:.T' /proc/$!/status; do :; done\nkill -9 $$";

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("kinds.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

/// Processes that run the lab's CRIU, and what it has started.
fn criu_processes(lab: &Lab) -> Vec<(i32, String)> {
    let criu = lab.file("criu").display().to_string();
    lab.processes().into_iter().filter(|(_, line)| line.contains("swrk") || line.contains(&criu)).collect()
}

fn assert_nothing_of_criu_stays(lab: &Lab) {
    assert!(comes(crate::supervisor::LIMIT, || criu_processes(lab).is_empty()), "{:?}", criu_processes(lab));
}

fn events(lab: &Lab, kind: &str) -> usize {
    let text = fs::read_to_string(lab.store().join("j/log/events.jsonl")).unwrap_or_default();
    text.matches(&format!("\"event\":\"{kind}\"")).count()
}

fn restarts(lab: &Lab) -> u32 {
    lab.published().unwrap().restarts
}

#[test]
fn a_snapshot_on_request_comes_although_criu_is_killed_beside_a_child() {
    let Some(lab) = lab(BESIDE_A_CHILD) else { return };
    let mut run = start(&lab, "plain");
    fs::write(lab.file("fault"), "").unwrap();
    let answer = lab.rekindle(&["snapshot", "j"]);
    assert!(answer.status.success(), "{answer:?}\n{}", run.err());
    let said = run.err();
    let words = "CRIU was killed (signal SIGKILL)";
    assert!(
        said.contains(words) && said.contains("The job runs on, and the snapshot is tried again at once"),
        "{said}"
    );
    assert!(!said.contains("snapshot failed") && !said.contains("may be frozen"), "{said}");
    run.wait_for("it is stored", || lab.good() == [1]);
    assert_eq!(restarts(&lab), 0);
    assert_nothing_of_criu_stays(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn the_same_image_is_restored_at_once_although_criu_is_killed_beside_a_child() {
    let Some(lab) = lab(BESIDE_A_CHILD) else { return };
    let mut run = start(&lab, "plain");
    run.snapshot(&lab);
    run.snapshot(&lab);
    fs::write(lab.file("fault"), "").unwrap();
    let pid = run.job_pid(&lab);
    kill(pid, Signal::SIGKILL);
    run.wait_said("The job is restored from the same image at once");
    run.wait_said("the job was restored from image 000002");
    assert_eq!(lab.good(), [2, 1]);
    assert_nothing_of_criu_stays(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn a_rehearsal_whose_criu_is_killed_beside_a_child_says_nothing_about_the_image() {
    let Some(lab) = lab(BESIDE_A_CHILD).map(|lab| lab.set("snapshot.rehearse", "\"1s\"")) else { return };
    let mut run = start(&lab, "plain");
    run.snapshot(&lab);
    fs::write(lab.file("fault"), "").unwrap();
    run.wait_said("was not rehearsed: CRIU was killed (signal SIGKILL)");
    // Its own CRIU could remove it only in its view.
    fs::remove_file(lab.file("fault")).unwrap();
    run.wait_for("the next one", || events(&lab, "rehearsed") > 0);
    assert_eq!((events(&lab, "rehearsal-failed"), restarts(&lab)), (0, 0));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
    lab.assert_all_gone();
}

/// A CRIU that will be killed.
struct Victim {
    pid: i32,
    pidfd: OwnedFd,
}

/// Has the next CRIU wait.
fn close_gate(lab: &Lab) {
    fs::write(lab.file("closed"), "").unwrap();
}

/// Lets it go on. It may not have come to the gate yet, and it may have been ended there.
fn open_gate(lab: &Lab, waiting: &Victim) {
    let gate = lab.file("gate");
    let open = || File::options().write(true).custom_flags(nix::libc::O_NONBLOCK).open(&gate);
    let mut opened = open();
    while opened.is_err() && !waiting.has_ended(PollTimeout::ZERO) {
        opened = open();
    }
    if let Ok(mut gate) = opened {
        let _ = gate.write_all(b"\n");
    }
}

/// Waits for a CRIU at the gate.
fn at_the_gate(lab: &Lab, run: &mut Running) -> Victim {
    let mut found = None;
    let here = |line: &str| line.starts_with("/bin/sh") && line.contains("swrk");
    run.wait_closely("CRIU waits at the gate", || {
        found = victim(lab, here, false);
        found.is_some() && !lab.file("closed").exists()
    });
    found.unwrap()
}

/// A CRIU whose command line is so, of a rehearsal or not: its processes are to be killed before all others.
fn victim(lab: &Lab, here: impl Fn(&str) -> bool, rehearses: bool) -> Option<Victim> {
    let (pid, _) = lab.processes().into_iter().find(|(pid, line)| {
        let score = process::text(*pid, "oom_score_adj").unwrap_or_default();
        here(line) && rehearses == (score.trim() == "1000")
    })?;
    Some(Victim { pid, pidfd: process::open_pidfd(pid).ok()? })
}

impl Victim {
    fn has_ended(&self, wait: PollTimeout) -> bool {
        poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], wait).unwrap() > 0
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
    }

    /// Kills it right after it has started its `number`th child. Whether it has started so many.
    fn kill_after_fork(&self, lab: &Lab, number: usize) -> bool {
        let children = File::open(format!("/proc/{0}/task/{0}/children", self.pid)).unwrap();
        let watch = || {
            // Some children live for less than a millisecond.
            process::be_prompt();
            let (mut last, mut now, mut count) = (Vec::new(), [0; 256], 0);
            open_gate(lab, self);
            while let Ok(length) = children.read_at(&mut now, 0) {
                let text = now.get(..length).unwrap();
                if text.is_empty() && self.has_ended(PollTimeout::ZERO) {
                    return false;
                }
                if text.is_empty() || text == last {
                    continue;
                }
                last = text.to_vec();
                count += 1;
                if count == number {
                    self.kill();
                    return true;
                }
            }
            false
        };
        std::thread::scope(|scope| scope.spawn(watch).join().unwrap())
    }

    /// Kills it after this time, if it has not ended.
    fn kill_after(&self, time: Duration) -> bool {
        let ended = self.has_ended(PollTimeout::try_from(time).unwrap());
        self.kill();
        !ended
    }
}

/// Up to the forks in which it examines the kernel, and some of its work. Its wrapper may make some, too.
const FORKS: usize = 16;

#[test]
fn a_dump_whose_criu_is_killed_after_any_of_its_first_forks_is_made_again() {
    let Some(lab) = lab("") else { return };
    let mut run = start(&lab, "plain");
    let mut killed = 0;
    for number in 1..=FORKS {
        close_gate(&lab);
        run.signal(Signal::SIGUSR1);
        let before = lab.good().first().copied().unwrap_or_default();
        killed += usize::from(at_the_gate(&lab, &mut run).kill_after_fork(&lab, number));
        run.wait_for("the image is there", || lab.good().first().is_some_and(|newest| *newest > before));
        count_on(&lab, &mut run, 2);
    }
    assert!(killed > 3, "{killed}");
    assert_nothing_of_criu_stays(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn a_restore_whose_criu_is_killed_after_any_of_its_first_forks_is_made_again() {
    let Some(lab) = lab("") else { return };
    let lab = lab.set("restart.backoff", "\"1ms\"");
    let lab = lab.set("restart.max-restarts", "1000");
    let mut run = start(&lab, "plain");
    run.snapshot(&lab);
    let newest = run.snapshot(&lab);
    let mut killed = 0;
    for number in 1..=FORKS {
        let (pid, before) = (run.job_pid(&lab), restarts(&lab));
        close_gate(&lab);
        kill(pid, Signal::SIGKILL);
        killed += usize::from(at_the_gate(&lab, &mut run).kill_after_fork(&lab, number));
        run.wait_for("the job is back", || restarts(&lab) > before);
        assert_ne!(run.job_pid(&lab), pid);
        count_on(&lab, &mut run, 2);
    }
    assert!(killed > 3, "{killed}");
    let said = run.err();
    assert_eq!(said.matches("the job was restored from image 000001").count(), 0, "{said}");
    assert_eq!(lab.good(), [newest, newest - 1]);
    assert_nothing_of_criu_stays(&lab);
    finish(&lab, run);
}

/// The images that the job was restored from.
fn restored(said: &str) -> Vec<u32> {
    let images = said.split("the job was restored from image ").skip(1);
    images.filter_map(|rest| rest.split('-').next()?.parse().ok()).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// What CRIU is doing when it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Dump,
    Restore,
    Rehearsal,
}

#[test]
fn criu_is_killed_at_random_moments() {
    let kinds = ["plain", "mixed", "ghost"];
    let each = number("REKINDLE_TEST_CRIU_KILLS").unwrap_or(12).div_ceil(kinds.len() as u64);
    let seed = number("REKINDLE_TEST_CRIU_KILLS_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("REKINDLE_TEST_CRIU_KILLS_SEED={seed}");
    let mut random = Random::new(seed);
    let (mut rounds, mut longest) =
        ([[0; 2]; 3], [(Duration::ZERO, String::new()), Default::default(), Default::default()]);
    let mut spans = [Duration::from_millis(150); 3];
    for kind in kinds {
        let Some(lab) = lab("") else { return };
        let lab = lab.set("restart.backoff", "\"1ms\"");
        let lab = lab.set("restart.max-restarts", "10000").set("snapshot.rehearse", "\"1s\"");
        let mut run = start(&lab, kind);
        run.snapshot(&lab);
        let mut left = each;
        while left > 0 {
            let work = random.pick(&[Work::Dump, Work::Dump, Work::Restore, Work::Rehearsal]);
            let (pid, before, newest) = (run.job_pid(&lab), restarts(&lab), lab.good()[0]);
            let restores = restored(&run.err()).len();
            let victim = match work {
                Work::Dump => {
                    close_gate(&lab);
                    run.signal(Signal::SIGUSR1);
                    at_the_gate(&lab, &mut run)
                }
                Work::Restore => {
                    close_gate(&lab);
                    kill(pid, Signal::SIGKILL);
                    at_the_gate(&lab, &mut run)
                }
                Work::Rehearsal => {
                    let mut found = None;
                    run.wait_closely("a rehearsal", || {
                        found = victim(&lab, |line| line.contains("swrk"), true);
                        found.is_some()
                    });
                    found.unwrap()
                }
            };
            if work != Work::Rehearsal {
                open_gate(&lab, &victim);
            }
            // About as long as it works, which depends on the machine: some of the kills come too late.
            let span = &mut spans[work as usize];
            let after = random.time(Duration::ZERO, *span);
            let was_killed = victim.kill_after(after);
            *span = if was_killed { span.mul_f64(1.1) } else { span.mul_f64(0.8) };
            let began = Instant::now();
            match work {
                // What a process of the job was just doing for CRIU can end it: then it is restored.
                Work::Dump => {
                    run.wait_for("the image, or the job is back", || lab.good()[0] > newest || restarts(&lab) > before)
                }
                Work::Restore => {
                    let said = run.said_so_far();
                    run.wait_for("it is back", || restarts(&lab) > before && restored(&said()).len() > restores);
                    let image = restored(&said()).last().copied();
                    assert!(image >= Some(newest), "{image:?} instead of {newest}: {}", run.err());
                }
                Work::Rehearsal => {}
            }
            count_on(&lab, &mut run, 1);
            let took = (began.elapsed(), format!("{kind}, {work:?}, killed after {after:?}: {was_killed}"));
            left -= u64::from(was_killed);
            rounds[work as usize][usize::from(was_killed)] += 1;
            let longest = &mut longest[work as usize];
            *longest = std::mem::take(longest).max(took);
        }
        // Whatever CRIU has left in the job does not hinder a later snapshot, nor a restore from it.
        let newest = lab.good()[0];
        run.wait_for("a snapshot succeeds", || {
            lab.rekindle(&["snapshot", "j"]).status.success() && lab.good()[0] > newest
        });
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        run.snapshot(&lab);
        let said = run.err();
        for words in ["may be frozen", "is marked as bad", "starting again from the beginning", "did not finish within"]
        {
            assert!(!said.contains(words), "{said}");
        }
        assert_nothing_of_criu_stays(&lab);
        let left = leftovers(lab.path());
        assert!(left.is_empty(), "{left:?}");
        finish(&lab, run);
    }
    eprintln!("rounds of dumps, restores, rehearsals (too late, killed): {rounds:?}; the longest: {longest:?}");
}

/// Files of CRIU beside those of the job.
fn leftovers(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".ghost") || name.starts_with("link_remap.")).collect()
}
