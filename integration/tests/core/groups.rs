//! Control groups that a job made: it comes back in them, and nobody's rights make them again but its own.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nix::unistd::User;
use rekindle_os::process::children;

use crate::kinds::{count_on, finish};
use crate::supervisor::{LIMIT, Lab, Running, comes, wait_for};

/// A group of the test in each hierarchy that it uses; removed with all below when it goes out of scope.
struct Ground {
    groups: Vec<PathBuf>,
}

/// A setting that each group of the hierarchy has, and that is none of a new group.
fn setting_of(group: &Path) -> (&'static str, &'static str, &'static str) {
    let settings = [
        ("pids.max", "50", "60"),
        ("memory.limit_in_bytes", "268435456", "536870912"),
        ("cgroup.max.descendants", "7", "8"),
    ];
    let found = settings.into_iter().find(|(name, ..)| group.join(name).exists());
    found.unwrap_or_else(|| panic!("{} is not there", group.display()))
}

impl Ground {
    /// None, with the reason, where no groups can be made.
    fn new(name: &str) -> Option<Ground> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let mut ground = Ground { groups: Vec::new() };
        for line in own.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next().unwrap(), fields.next().unwrap());
            let root = match controllers {
                "" if Path::new("/sys/fs/cgroup/unified/cgroup.procs").exists() => "unified",
                "" => "",
                "pids" | "memory" => controllers,
                _ => continue,
            };
            let parent = Path::new("/sys/fs/cgroup").join(root).join(path.trim_start_matches('/'));
            let group = parent.join(format!("rekindle-test-{name}-{}", std::process::id()));
            let made = fs::create_dir(&group);
            let why = format!("no control group can be made: {}: {made:?}", group.display());
            rekindle_testing::needs("groups", made.ok(), &why)?;
            ground.groups.push(group);
        }
        Some(ground)
    }

    /// The groups that the job makes: one in each hierarchy, and one more within it.
    fn jobs(&self) -> Vec<PathBuf> {
        self.groups.iter().map(|group| group.join("job/inner")).collect()
    }

    /// Tells the job of them.
    fn tell(&self, lab: &Path) {
        let mut text = String::new();
        for inner in self.jobs() {
            let (outer, (name, value, _)) = (inner.parent().unwrap(), setting_of(inner.ancestors().nth(2).unwrap()));
            text += &format!("{}\n{} {name} {value}\n", outer.display(), inner.display());
        }
        fs::write(lab.join("groups"), text).unwrap();
    }

    /// Has the supervisor run in the groups of the test.
    fn around(&self, lab: Lab) -> Lab {
        self.groups.iter().fold(lab, |lab, group| lab.within(group))
    }

    fn remove_the_jobs(&self) {
        for inner in self.jobs() {
            // What was killed, also of a rehearsal, leaves a group only when it is gone.
            wait_for("the group is empty", || fs::remove_dir(&inner).is_ok());
            wait_for("its parent is empty", || fs::remove_dir(inner.parent().unwrap()).is_ok());
        }
    }

    /// Waits until each group has what was wanted, and the child is in each.
    fn is_back(&self, lab: &Lab, run: &mut Running) {
        let child = child(lab, run);
        for inner in self.jobs() {
            let (name, value, _) = setting_of(&inner);
            assert_eq!(read(&inner, name), value, "{}", inner.display());
            let procs = read(&inner, "cgroup.procs");
            assert_eq!(
                procs,
                child.to_string(),
                "{}: {}",
                inner.display(),
                fs::read_to_string(format!("/proc/{child}/cgroup")).unwrap()
            );
        }
        assert!(!lab.file("strayed").exists(), "it ran elsewhere: {}", lab.read("strayed"));
        assert!(!run.err().contains("control group"), "{}", run.err());
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        fn remove(group: &Path) -> bool {
            let below = fs::read_dir(group).into_iter().flatten().flatten().filter(|it| it.path().is_dir());
            below.for_each(|it| {
                remove(&it.path());
            });
            fs::remove_dir(group).is_ok() || !group.exists()
        }
        for group in &self.groups {
            comes(LIMIT, || remove(group));
        }
    }
}

fn read(group: &Path, name: &str) -> String {
    fs::read_to_string(group.join(name)).unwrap().trim_end().to_owned()
}

/// The child of the job, as we see it.
fn child(lab: &Lab, run: &mut Running) -> i32 {
    let job = run.job_pid(lab);
    let children = children(job);
    assert_eq!(children.len(), 1, "{children:?}");
    children[0]
}

fn start(lab: &Lab) -> Running {
    lab.python("kinds.py", &["control-groups", lab.path().to_str().unwrap()])
}

fn until_after_snapshot(lab: &Lab) -> Running {
    let mut run = start(lab);
    run.wait_printed("in its groups");
    count_on(lab, &mut run, 3);
    run.snapshot(lab);
    count_on(lab, &mut run, 3);
    run
}

#[test]
fn a_process_comes_back_in_the_groups_that_it_made() {
    let Some(ground) = Ground::new("crash") else { return };
    let Some(lab) = Lab::new() else { return };
    ground.tell(lab.path());
    let mut run = until_after_snapshot(&lab);
    for _ in 0..2 {
        // Settings are a part of the state, as the content of files is.
        for inner in ground.jobs() {
            let (name, _, other) = setting_of(&inner);
            fs::write(inner.join(name), other).unwrap();
        }
        run.crash(&lab);
        ground.is_back(&lab, &mut run);
        count_on(&lab, &mut run, 3);
        // From an image of the restored job too.
        run.snapshot(&lab);
    }
    finish(&lab, run);
}

#[test]
fn groups_that_are_gone_are_made_again_as_they_were() {
    let Some(ground) = Ground::new("gone") else { return };
    let Some(lab) = Lab::new().map(|lab| ground.around(lab)) else { return };
    ground.tell(lab.path());
    let mut run = start(&lab);
    run.wait_printed("in its groups");
    let nobody = User::from_name("nobody").unwrap().unwrap();
    for inner in ground.jobs() {
        fs::set_permissions(&inner, Permissions::from_mode(0o750)).unwrap();
        for handed in [inner.clone(), inner.join("cgroup.procs")] {
            nix::unistd::chown(&handed, Some(nobody.uid), Some(nobody.gid)).unwrap();
        }
    }
    run.snapshot(&lab);
    lab.kill_9(run);
    ground.remove_the_jobs();
    let mut run = start(&lab);
    run.wait_said("the job was restored from image");
    ground.is_back(&lab, &mut run);
    for inner in ground.jobs() {
        let owner = |path: &Path| {
            let found = fs::metadata(path).unwrap();
            (found.mode() & 0o777, found.uid(), found.gid())
        };
        let (uid, gid) = (nobody.uid.as_raw(), nobody.gid.as_raw());
        assert_eq!(owner(&inner), (0o750, uid, gid));
        assert_eq!(owner(&inner.join("cgroup.procs")), (0o644, uid, gid));
        assert_eq!(owner(inner.parent().unwrap()), (0o755, 0, 0));
    }
    // A last image at a stop has them as well.
    run.signal(nix::sys::signal::Signal::SIGTERM);
    run.ends_with(143);
    lab.assert_all_gone();
    ground.remove_the_jobs();
    let mut run = start(&lab);
    run.wait_said("the job was restored from image");
    ground.is_back(&lab, &mut run);
    finish(&lab, run);
}

/// A process of the test's own.
struct Stranger(Child);

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_group_that_others_use_by_now_is_entered_and_not_changed() {
    let Some(ground) = Ground::new("used") else { return };
    let Some(lab) = Lab::new().map(|lab| ground.around(lab)) else { return };
    ground.tell(lab.path());
    let run = until_after_snapshot(&lab);
    lab.kill_9(run);
    let stranger = Stranger(Command::new("sleep").arg("600").spawn().unwrap());
    for inner in ground.jobs() {
        let (name, _, other) = setting_of(&inner);
        fs::write(inner.join(name), other).unwrap();
        fs::write(inner.join("cgroup.procs"), stranger.0.id().to_string()).unwrap();
    }
    let mut run = start(&lab);
    run.wait_said("the job was restored from image");
    let child = child(&lab, &mut run).to_string();
    for inner in ground.jobs() {
        let (name, _, other) = setting_of(&inner);
        assert_eq!(read(&inner, name), other);
        assert!(read(&inner, "cgroup.procs").lines().any(|pid| pid == child), "{}", inner.display());
    }
    drop(stranger);
    finish(&lab, run);
}

#[test]
fn a_group_that_the_user_may_not_make_is_not_made() {
    let Some(ground) = Ground::new("user") else { return };
    let Some(lab) = Lab::new().map(|lab| ground.around(lab)) else { return };
    let lab = lab.set("job.user", "\"nobody\"").set("restart.cold-start", "\"never\"");
    let nobody = User::from_name("nobody").unwrap().unwrap();
    let give = |path: &Path| nix::unistd::chown(path, Some(nobody.uid), Some(nobody.gid)).unwrap();
    let theirs = lab.file("theirs");
    fs::create_dir(&theirs).unwrap();
    give(&theirs);
    ground.tell(&theirs);
    for group in &ground.groups {
        // To move a process from there to below, cgroup v2 asks for it.
        give(&group.join("cgroup.procs"));
        fs::create_dir(group.join("job")).unwrap();
        give(&group.join("job"));
        give(&group.join("job/cgroup.procs"));
    }
    let command = lab.python_command("kinds.py", &["control-groups", theirs.to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("in its groups");
    run.job_pid(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    ground.remove_the_jobs();

    let mut run = lab.run(&command);
    run.wait_said("the job was restored from image");
    count_on(&lab, &mut run, 3);
    let stays = "is in the supervisor's control group and not in \"job/inner\"";
    // One line for each.
    run.wait_said_times(stays, ground.groups.len());
    let said = run.err();
    assert!(said.contains("Permission denied") && said.contains("allow user nobody to do that"), "{said}");
    assert!(ground.groups.iter().all(|group| !group.join("job").exists()), "{said}");

    // Where the user may make groups, they are the user's own.
    ground.groups.iter().for_each(|group| give(group));
    for _ in 0..2 {
        run.crash(&lab);
        let child = child(&lab, &mut run).to_string();
        for inner in ground.jobs() {
            let (name, value, other) = setting_of(&inner);
            assert_eq!((read(&inner, name).as_str(), &read(&inner, "cgroup.procs")), (value, &child));
            assert_eq!(fs::metadata(&inner).unwrap().uid(), nobody.uid.as_raw());
            // The next time it is there, and not as it was.
            fs::write(inner.join(name), other).unwrap();
        }
    }
    fs::write(theirs.join("finish"), "").unwrap();
    let (_, said) = run.ends_with(0);
    assert_eq!(said.matches(stays).count(), ground.groups.len(), "no more of it: {said}");
}

#[test]
fn a_group_of_threads_is_named_and_not_in_the_image() {
    let Some(ground) = Ground::new("threads") else { return };
    let Some(lab) = Lab::new().map(|lab| ground.around(lab)) else { return };
    let two = ground.groups.iter().find(|group| group.join("cgroup.type").exists());
    let Some(two) = rekindle_testing::needs("groups", two, "cgroup v2 is not here") else { return };
    let inner = two.join("job/inner");
    let text = format!("{}\n{} cgroup.type threaded\n", inner.parent().unwrap().display(), inner.display());
    fs::write(lab.file("groups"), text).unwrap();
    let mut run = until_after_snapshot(&lab);
    run.wait_said("the control group \"job/inner\" is not in the image");
    run.wait_said("it is a threaded control group");
    run.crash(&lab);
    let pid = child(&lab, &mut run);
    assert!(read(two, "cgroup.procs").lines().any(|line| line == pid.to_string()), "it is in the supervisor's group");
    finish(&lab, run);
}

/// An image from elsewhere names a group that is not below the supervisor's.
#[test]
fn a_path_that_leads_out_of_the_supervisors_group_is_refused() {
    let Some(ground) = Ground::new("forged") else { return };
    let Some(lab) = Lab::new().map(|lab| ground.around(lab)) else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    ground.tell(lab.path());
    let run = until_after_snapshot(&lab);
    lab.kill_9(run);
    lab.forget_memory();
    ground.remove_the_jobs();
    let file = lab.images()[0].dir.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    let (_, body) = text.split_once("\"manifest\": ").unwrap();
    let body = body.strip_suffix('}').unwrap().trim_end();
    let version = &text[text.find("\"version\": ").unwrap()..];
    let version = version.split(',').next().unwrap();
    for (path, refused) in [("../rekindle-test-escaped", true), ("/rekindle-test-escaped", true), ("job/inner", false)]
    {
        let body = body.replace("\"job/inner\"", &format!("{path:?}"));
        assert_eq!(refused, !text.contains(&body));
        let hash = blake3::hash(body.as_bytes());
        let forged = format!(r#"{{"format":"rekindle-image",{version},"blake3":"{hash}","manifest":{body}}}"#);
        fs::write(&file, forged).unwrap();
        if refused {
            let (_, said) = start(&lab).ends_with(66);
            let state = format!("{:?}", lab.images()[0].state);
            assert!(state.contains("is not a valid path of a control group"), "{state}");
            let beside = ground.groups.iter().map(|group| group.with_file_name("rekindle-test-escaped"));
            assert!(beside.into_iter().all(|group| !group.exists()), "{said}");
        } else {
            let mut run = start(&lab);
            run.wait_said("the job was restored from image");
            ground.is_back(&lab, &mut run);
            finish(&lab, run);
            return;
        }
    }
}
