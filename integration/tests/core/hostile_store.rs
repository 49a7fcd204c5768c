//! Whoever can write the store, and has no key, gains nothing from a rekindle that is root.
//!
//! The attacker is another client of the file server, or whoever made the backup that was put back: everything below
//! the folder of the store may be anything. `store.encryption-key` is set, and the attacker does not know the key. Root
//! follows no link there, loads no library from there, and waits for nothing there; and what an attacker has put there
//! is not the fault of the images.

mod ground;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::stat::Mode;
use nix::unistd::{User, mkfifo};

pub(crate) use ground::{Begun, Cases, Ground, Library, Outside, Tmpfs};
use ground::{FRESH, Outcome, RUN, WITHIN, is_run, mode, remove};

use crate::supervisor::{Lab, python, tail};
use crate::sweep::copy;

/// CRIU loads every library in the folder of its plugins as root, and before it reads anything.
#[test]
fn no_library_in_the_store_is_loaded() {
    let mut cases = Cases::default();
    for user in ["root", "nobody"] {
        let Some(ground) = Ground::of(user) else { return };
        let library = Library::compile(&ground.lab);
        let plant = || {
            for folder in ["", "scratch", "scratch/plugins", "bin", "log", "images", "packs"] {
                let folder = ground.there(folder);
                fs::create_dir_all(&folder).unwrap();
                fs::copy(&library.file, folder.join("x.so")).unwrap();
                fs::copy(&library.file, folder.join("cuda_plugin.so")).unwrap();
            }
        };
        plant();
        let (mut run, lives) = ground.begin(RUN);
        cases.add(&format!("{user}, the restore"), || assert_eq!(library.take_loads(), "", "{}", run.err()));
        assert!(lives, "{user}: {}", run.err());
        run.wait_said("the job was restored from");
        plant();
        let taken = ground.snapshot(&mut run);
        cases.add(&format!("{user}, the snapshot"), || assert_eq!(library.take_loads(), "", "{}", run.err()));
        assert!(taken, "{user}: {}", run.err());
        ground.lab.kill_9(run);
    }
}

/// It proves something that nothing was loaded: another program loads it.
#[test]
fn the_library_says_that_it_was_loaded() {
    let Some(lab) = Lab::new() else { return };
    let library = Library::compile(&lab);
    let load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])";
    let done = Command::new(python().unwrap()).args(["-Sc", load]).arg(&library.file).status().unwrap();
    let loads = library.take_loads();
    assert!(done.success() && loads.starts_with("loaded by process "), "{loads}");
}

/// Root can enter every folder. The job's user names the one it starts in, and may replace it.
#[test]
fn a_job_starts_in_no_folder_that_is_closed_to_its_user() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.max-restarts", "3").set("restart.backoff", "\"0s\"");
    let lab = lab.set_file("job.directory", "theirs/here");
    let nobody = User::from_name("nobody").unwrap().unwrap();
    let (theirs, home) = (lab.file("theirs"), lab.file("home"));
    fs::create_dir_all(theirs.join("here")).unwrap();
    fs::create_dir_all(home.join("open")).unwrap();
    fs::write(home.join("open/data"), "another user's").unwrap();
    for (path, bits) in [("open/data", 0o644), ("open", 0o755), ("", 0o700)] {
        mode(&home.join(path), bits);
        nix::unistd::chown(&home.join(path), Some(1.into()), Some(1.into())).unwrap();
    }
    for path in [&theirs, &theirs.join("here")] {
        nix::unistd::chown(path, Some(nobody.uid), Some(nobody.gid)).unwrap();
    }
    let secret = home.join("open/data").display().to_string();
    let attack = format!(
        "cat {secret} && exit 3; cat data 2> /dev/null && exit 4; cd ..; mv here aside; ln -s {} here; exit 9",
        home.join("open").display()
    );
    let (code, out, said) = lab.run(["sh", "-c", &attack]).finish(WITHIN);
    assert!(!out.contains("another user's") && code != 4, "{code}: {out}\n{said}");
    assert_eq!(code, 69, "{said}");
    let here = theirs.join("here").display().to_string();
    assert!(said.contains(&here) && said.contains("Permission denied"), "{said}");
}

/// What must come of something in the store that is not what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// rekindle refuses to run.
    Refused,
    /// Or it does not use that place at all, or replaces what is there, and runs.
    RefusedOrRuns,
}

/// Checks what rekindle made of it: nothing outside the store has changed, and it says what is wrong.
fn judge(ground: &Ground, outcome: &Outcome, wanted: Wanted, name: &str, words: [&str; 2]) {
    match outcome {
        Outcome::Lived(said) => assert!(wanted == Wanted::RefusedOrRuns, "{name}: the job runs\n{}", tail(said)),
        Outcome::Ended(code, said) => {
            let there = ground.there(name).display().to_string();
            assert_eq!(*code, 78, "{name}: {}", tail(said));
            assert!(said.contains(&there), "{there} is not named: {}", tail(said));
            assert!(words.iter().all(|word| said.contains(word)), "{name}: no {words:?} in {}", tail(said));
            let advice = ["emove", "elete", "move it", "Move it"];
            assert!(advice.iter().any(|word| said.contains(word)), "{name}: it does not say what to do: {said}");
        }
    }
}

/// Plants something at each of these names, and runs the job in both ways.
fn each(names: &[&str], wanted: Wanted, words: [&str; 2], plant: impl Fn(&Ground, &Path)) {
    let Some(ground) = Ground::new() else { return };
    let mut cases = Cases::default();
    for (name, head) in names.iter().flat_map(|name| [(name, RUN), (name, FRESH)]) {
        cases.add(&format!("{name} {head:?}"), || {
            ground.reset();
            plant(&ground, &ground.emptied(name));
            let outside = Outside::at([ground.outside.as_path()]);
            let outcome = ground.run(head);
            outside.assert_untouched(name, outcome.said());
            judge(&ground, &outcome, wanted, name, words);
            ground.mend(name);
            ground.assert_good(name);
        });
    }
}

const LINK_FOR_FILE: [&str; 2] = ["a symbolic link", "a regular file"];
const LINK_FOR_FOLDER: [&str; 2] = ["a symbolic link", "a folder"];

#[test]
fn output_goes_into_no_file_that_a_link_names() {
    each(&["log/stdout.log", "log/stderr.log"], Wanted::Refused, LINK_FOR_FILE, |ground, path| {
        symlink(ground.outside.join("secret"), path).unwrap();
    });
}

/// Nor is a file made where a link leads that leads nowhere.
#[test]
fn output_makes_no_file_that_a_link_names() {
    each(&["log/stdout.log", "log/stderr.log"], Wanted::Refused, LINK_FOR_FILE, |ground, path| {
        symlink(ground.outside.join("new"), path).unwrap();
    });
}

#[test]
fn events_go_into_no_file_that_a_link_names() {
    each(&["log/events.jsonl"], Wanted::Refused, LINK_FOR_FILE, |ground, path| {
        symlink(ground.outside.join("secret"), path).unwrap();
    });
}

/// A backup made with `cp -al` is no attack, but its files are the same: nothing may be changed in place.
#[test]
fn output_and_events_go_into_no_file_that_has_another_name() {
    let mut cases = Cases::default();
    for user in ["root", "nobody"] {
        let Some(ground) = Ground::of(user) else { return };
        for name in ["log/stdout.log", "log/stderr.log", "log/events.jsonl"] {
            for head in [RUN, FRESH] {
                cases.add(&format!("{user} {name} {head:?}"), || {
                    ground.reset();
                    let path = ground.emptied(name);
                    fs::hard_link(ground.outside.join("secret"), &path).unwrap();
                    let outside = Outside::at([ground.outside.as_path()]);
                    let outcome = ground.run(head);
                    outside.assert_untouched(name, outcome.said());
                    if let Outcome::Ended(code, said) = &outcome {
                        assert!(*code == 78 && said.contains(path.to_str().unwrap()), "{code}: {said}");
                    }
                    ground.mend(name);
                    ground.assert_good(name);
                });
            }
        }
    }
}

/// open(2) of a FIFO waits for the other end, and nobody has it.
#[test]
fn nobody_waits_for_a_fifo_among_the_output() {
    let names = ["log/stdout.log", "log/stderr.log", "log/events.jsonl"];
    each(&names, Wanted::Refused, ["a FIFO", "a regular file"], |_, path| mkfifo(path, Mode::S_IRWXU).unwrap());
}

/// What is read of the job and its images, too. Each command ends, and says what is wrong.
#[test]
fn nobody_waits_for_a_fifo_elsewhere() {
    let Some(ground) = Ground::new() else { return };
    let image = format!("images/{}", ground.lab.images()[0].id);
    let pack = ground.lab.job().packs().names().unwrap()[0];
    let pack = ["pack", "idx", "gone"].map(|kind| format!("packs/{pack}.{kind}"));
    let of_image = ["manifest.json", "bad.json", "tags.json", "chunks"].map(|name| format!("{image}/{name}"));
    let of_job = ["lock", "job.json", "state.json", "result.json", "proven.json", "evidence.json"].map(str::to_owned);
    let mut cases = Cases::default();
    for name in of_job.into_iter().chain(of_image).chain(pack) {
        ground.reset();
        mkfifo(&ground.emptied(&name), Mode::S_IRWXU).unwrap();
        let commands: [&[&str]; 6] =
            [&["list", "j"], &["status"], &["verify", "--read-data"], &["prune"], &["repair"], &["rm", "--yes", "j"]];
        for command in commands {
            cases.add(&format!("{command:?} with the FIFO {name}"), || drop(ground.call(command)));
        }
        cases.add(&format!("run with the FIFO {name}"), || {
            ground.reset();
            mkfifo(&ground.emptied(&name), Mode::S_IRWXU).unwrap();
            ground.run(RUN);
        });
    }
}

/// CRIU writes its log and its figures under names that are always the same.
#[test]
fn criu_writes_no_file_through_a_link() {
    let mut cases = Cases::default();
    for user in ["root", "nobody"] {
        let Some(ground) = Ground::of(user) else { return };
        let names = ["stats-dump", "stats-restore", "dump.log", "restore.log", "criu.log", "seized", "irmap-cache"];
        let outside = Outside::at([ground.outside.as_path()]);
        let plant = || {
            for name in names {
                symlink(ground.outside.join("secret"), ground.emptied(&format!("scratch/{name}"))).unwrap();
            }
        };
        plant();
        let (mut run, lives) = ground.begin(RUN);
        cases.add(&format!("{user}, the restore"), || outside.assert_untouched("", &run.err()));
        let outside = Outside::at([ground.outside.as_path()]);
        if lives {
            plant();
            ground.snapshot(&mut run);
            cases.add(&format!("{user}, the snapshot"), || outside.assert_untouched("", &run.err()));
            ground.lab.kill_9(run);
        } else {
            let (code, _, said) = run.finish(WITHIN);
            let scratch = ground.there("scratch").display().to_string();
            let is_told = code == 78 && said.contains(&scratch) && said.contains("a symbolic link");
            cases.add(&format!("{user} is told"), || assert!(is_told, "{code}: {said}"));
        }
        ground.assert_good(user);
    }
}

/// What frees memory, or takes it over.
const FREEING: [&[&str]; 6] =
    [&["prune"], &["prune", "--discard-memory"], &["rm", "--yes", "j"], &["rm", "--yes", "--force", "j"], RUN, FRESH];

#[test]
fn no_tmpfs_is_unmounted_that_is_not_the_jobs() {
    let Some(ground) = Ground::new() else { return };
    let mut cases = Cases::default();
    for args in FREEING {
        let tmpfs = Tmpfs::mount(ground.lab.file("roots-memory"));
        let outside = Outside::at([ground.outside.as_path(), &tmpfs.0]);
        cases.add(&format!("{args:?}"), || {
            ground.reset();
            symlink(&tmpfs.0, ground.emptied("staging")).unwrap();
            let said = if is_run(args) {
                let outcome = ground.run(args);
                judge(&ground, &outcome, Wanted::RefusedOrRuns, "staging", ["a symbolic link", ""]);
                outcome.said().to_owned()
            } else {
                ground.call(args).1
            };
            assert!(tmpfs.is_mounted(), "it was unmounted: {said}");
            outside.assert_untouched("", &said);
        });
    }
}

/// A job whose removal was begun is removed by whoever comes next.
#[test]
fn no_tmpfs_is_unmounted_for_a_job_that_is_half_removed() {
    let Some(ground) = Ground::new() else { return };
    let mut cases = Cases::default();
    let doomed = ground.lab.store().join(".del-j");
    for args in [&["rm", "--yes", "j"][..], RUN] {
        for is_link in [false, true] {
            let tmpfs = Tmpfs::mount(ground.lab.file("roots-memory"));
            let outside = Outside::at([ground.outside.as_path(), &tmpfs.0]);
            cases.add(&format!("{args:?}, the folder is a link: {is_link}"), || {
                ground.reset();
                if is_link {
                    symlink(ground.outside.join("folder"), &doomed).unwrap();
                } else {
                    fs::create_dir(&doomed).unwrap();
                    symlink(&tmpfs.0, doomed.join("staging")).unwrap();
                }
                let said = ground.run_or_call(args);
                assert!(tmpfs.is_mounted(), "it was unmounted: {said}");
                outside.assert_untouched("", &said);
            });
        }
    }
}

/// The area of a job that runs, with its newest image, is named by another job's link.
#[test]
fn the_memory_of_another_job_stays() {
    let Some(ground) = Ground::new() else { return };
    let mut cases = Cases::default();
    for args in FREEING {
        cases.add(&format!("{args:?}"), || {
            ground.reset();
            let mut other = ground.lab.run_with(&["run", "--name", "k", "--"], ["sleep", "1000"]);
            // Its area is there before it runs.
            other.wait_for("job k runs", || {
                let text = fs::read_to_string(ground.lab.store().join("k/state.json")).unwrap_or_default();
                text.contains("\"running\"")
            });
            assert!(ground.snapshot(&mut other), "{}", other.err());
            let is_of_k =
                |area: &PathBuf| area.file_name().is_some_and(|name| name.to_string_lossy().starts_with("k-"));
            let area = ground.lab.mounted().into_iter().find(is_of_k).unwrap();
            let is_whole = || (0..2).any(|slot| area.join(format!("slots/{slot}/manifest.json")).exists());
            let is_mounted = || rekindle_testing::mounts_below(&area).contains(&area);
            assert!(is_mounted() && is_whole(), "{}", other.err());
            symlink(&area, ground.emptied("staging")).unwrap();
            let said = if is_run(args) { ground.run_beside(args) } else { ground.call(args).1 };
            assert!(is_mounted(), "it was unmounted: {said}");
            assert!(is_whole(), "its image was removed: {said}");
            assert!(ground.snapshot(&mut other), "{}\n{said}", other.err());
            ground.lab.kill_9(other);
        });
    }
}

/// Folders of the store that are links to folders elsewhere, with all that should be in them.
#[test]
fn nothing_is_written_or_removed_through_a_linked_folder() {
    let Some(ground) = Ground::new() else { return };
    let elsewhere = ground.lab.file("elsewhere");
    let mut cases = Cases::default();
    // CRIU's own folder and the programs need not be in the store.
    let folders = [("log", Wanted::Refused), ("packs", Wanted::Refused), ("images", Wanted::Refused)];
    let folders = folders.into_iter().chain([("bin", Wanted::RefusedOrRuns), ("scratch", Wanted::RefusedOrRuns)]);
    for (name, wanted) in folders {
        let commands: [&[&str]; 7] =
            [RUN, FRESH, &["prune"], &["repair"], &["verify"], &["list", "j"], &["rm", "--yes", "j"]];
        for args in commands {
            cases.add(&format!("{name} {args:?}"), || {
                ground.reset();
                remove(&elsewhere);
                copy(&ground.outside.join("folder"), &elsewhere);
                let there = ground.there(name);
                if there.is_dir() {
                    copy(&there.join("."), &elsewhere);
                }
                symlink(&elsewhere, ground.emptied(name)).unwrap();
                let outside = Outside::at([elsewhere.as_path(), &ground.outside]);
                let said = if is_run(args) {
                    let outcome = ground.run(args);
                    outside.assert_untouched("", outcome.said());
                    judge(&ground, &outcome, wanted, name, LINK_FOR_FOLDER);
                    outcome.said().to_owned()
                } else {
                    ground.call(args).1
                };
                outside.assert_untouched("", &said);
                if args[0] != "rm" {
                    ground.mend(name);
                    ground.assert_good(name);
                }
            });
        }
    }
}

/// The slots of an image that is dumped to the disk.
#[test]
fn nothing_is_written_or_removed_through_linked_slots() {
    let Some(lab) = Lab::new() else { return };
    let Some(ground) = Ground::made(lab.set("snapshot.staging", "\"store\""), "root", true) else { return };
    let elsewhere = ground.outside.join("folder");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut cases = Cases::default();
    for name in ["slots", "slots/0", "slots/1", "slots/0/spool", "slots/0/gpu", "slots/0/criu", "slots/boot"] {
        for args in [RUN, &["prune"], &["rm", "--yes", "j"]] {
            cases.add(&format!("{name} {args:?}"), || {
                ground.reset();
                ground.make_outside();
                fs::write(elsewhere.join("boot"), boot.trim_end()).unwrap();
                let outside = Outside::at([ground.outside.as_path()]);
                let target = if name.ends_with("boot") { elsewhere.join("boot") } else { elsewhere.clone() };
                symlink(target, ground.emptied_slot(name)).unwrap();
                let said = if is_run(args) { ground.run_with_snapshots(args) } else { ground.call(args).1 };
                outside.assert_untouched("", &said);
            });
        }
    }
}

/// Files that rekindle replaces, reads or locks.
#[test]
fn nothing_is_written_through_a_linked_file() {
    let Some(ground) = Ground::new() else { return };
    let image = format!("images/{}", ground.lab.images()[0].id);
    let of_image = ["manifest.json", "bad.json", "tags.json", "chunks"].map(|name| format!("{image}/{name}"));
    let of_job = ["lock", "job.json", "state.json", "result.json", "proven.json", "evidence.json"].map(str::to_owned);
    let more = ["state.json.tmp", ".tmp-state.json", "log/stdout.log.1", "log/events.jsonl.1"].map(str::to_owned);
    let mut cases = Cases::default();
    let (copied, secret) = (ground.outside.join("copied"), ground.outside.join("secret"));
    for name in of_job.into_iter().chain(of_image).chain(more) {
        let pristine = ground.pristine.join("j").join(&name);
        for planted in [Planted::Link, Planted::LinkToExpected, Planted::HardLink, Planted::HardLinkToExpected] {
            let is_expected = matches!(planted, Planted::LinkToExpected | Planted::HardLinkToExpected);
            // In folders of images nothing is changed in place.
            let is_hard = matches!(planted, Planted::HardLink | Planted::HardLinkToExpected);
            if is_expected && !pristine.is_file() || is_hard && name.contains('/') {
                continue;
            }
            ground.reset();
            let commands: [&[&str]; 6] =
                [&["tag", "j/1", "one"], &["pin", "j/1"], &["repair"], &["prune"], RUN, &["rm", "--yes", "j"]];
            for args in commands {
                cases.add(&format!("{name} {args:?}, {planted:?}"), || {
                    remove(&copied);
                    fs::copy(if is_expected { &pristine } else { &secret }, &copied).unwrap();
                    mode(&copied, 0o640);
                    let outside = Outside::at([ground.outside.as_path()]);
                    let path = ground.emptied(&name);
                    match planted {
                        Planted::Link | Planted::LinkToExpected => symlink(&copied, path).unwrap(),
                        Planted::HardLink | Planted::HardLinkToExpected => fs::hard_link(&copied, path).unwrap(),
                    }
                    let said = ground.run_or_call(args);
                    outside.assert_untouched("", &said);
                });
            }
        }
    }
}

/// What is in the place of a file: another name of root's, whose content is something else or what rekindle expects.
#[derive(Debug, Clone, Copy)]
enum Planted {
    Link,
    LinkToExpected,
    HardLink,
    HardLinkToExpected,
}

/// Plants links in the slots of the job, as soon as there is a folder for them and before CRIU makes its files.
struct Planter {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Planter {
    fn begin(plant: impl Fn() + Send + 'static) -> Planter {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            while !stopped.load(Ordering::Relaxed) {
                plant();
                std::thread::yield_now();
            }
        };
        Planter { stop, thread: Some(std::thread::spawn(work)) }
    }
}

impl Drop for Planter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Snapshots of a job whose images are dumped to the disk of the store, while the attacker is at work there.
fn dump_while(plant: impl Fn(&Path, &Path, &[String]) + Send + Clone + 'static) {
    let mut cases = Cases::default();
    for user in ["root", "nobody"] {
        let Some(lab) = Lab::new() else { return };
        let Some(ground) = Ground::made(lab.set("snapshot.staging", "\"store\""), user, true) else { return };
        let manifest = ground.lab.images()[0].manifest().unwrap().clone();
        assert!(manifest.parts.iter().any(|part| part.path.starts_with("files/")), "{:?}", manifest.parts);
        let more = ["criu/dump.log", "criu/stats-dump", "dump.log", "manifest.json"];
        let names = manifest.parts.iter().map(|part| part.path.as_str()).chain(more).map(str::to_owned);
        let names: Vec<String> = names.collect();
        let targets = ground.outside.join("targets");
        for name in &names {
            fs::create_dir_all(targets.join(name).parent().unwrap()).unwrap();
            fs::write(targets.join(name), "root's").unwrap();
        }
        let outside = Outside::at([ground.outside.as_path()]);
        let (mut run, lives) = ground.begin(RUN);
        assert!(lives, "{}", run.err());
        let (slots, plant) = (ground.there("slots"), plant.clone());
        let planter = Planter::begin(move || {
            for slot in ["0", "1"] {
                plant(&slots.join(slot), &targets, &names);
            }
        });
        for _ in 0..6 {
            if run.runs() {
                ground.snapshot(&mut run);
            }
        }
        drop(planter);
        cases.add(user, || outside.assert_untouched("", &run.err()));
        run.kill();
        ground.lab.assert_all_gone();
    }
}

#[test]
fn a_dump_to_the_store_is_written_through_no_link() {
    dump_while(|slot, targets, names| {
        for name in names {
            let _ = symlink(targets.join(name), slot.join(name));
        }
    });
}

#[test]
fn a_dump_to_the_store_is_written_into_no_other_folder() {
    dump_while(|slot, targets, _| {
        for name in ["criu", "files"] {
            let (folder, aside) = (slot.join(name), slot.join(format!("{name}-aside")));
            if fs::symlink_metadata(&folder).is_ok_and(|meta| meta.is_dir()) && fs::rename(&folder, &aside).is_ok() {
                let _ = symlink(targets.join(name), &folder);
            }
        }
    });
}
