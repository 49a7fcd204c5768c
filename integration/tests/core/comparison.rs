//! A restored job is compared with what it was, object by object: what CRIU loses is put back, and what it changes is
//! found.

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, criu, job_file, kill};

fn started(lab: &Lab) -> Running {
    let mut run = lab.python("objects.py", &[lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

/// Options of sockets, priorities, and what else CRIU 4.2 does not save.
fn what_criu_loses_is_put_back(kills: usize) {
    let Some(lab) = Lab::new().map(|lab| lab.set("restart.max-restarts", "1000")) else { return };
    let mut run = started(&lab);
    for _ in 0..kills {
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        run.snapshot(&lab);
    }
    let output = lab.output();
    let changed: Vec<&str> = output.lines().filter(|line| line.starts_with("changed")).collect();
    assert_eq!(changed, [""; 0]);
    // Datagrams of UDP are lost, as on a network.
    let log = lab.log();
    let is_told = |line: &&str| line.contains("not as before the restore") && !line.contains("(datagrams)");
    assert_eq!(log.lines().filter(is_told).collect::<Vec<_>>(), [""; 0]);
    assert!(!log.contains("not compared: "), "all threads have answered: {log}");
    finish(&lab, run);
}

#[test]
fn a_job_with_objects_of_all_kinds_is_what_it_was() {
    what_criu_loses_is_put_back(2);
}

#[test]
#[ignore = "takes minutes"]
fn a_job_with_objects_of_all_kinds_is_what_it_was_after_two_hundred_kills() {
    what_criu_loses_is_put_back(200);
}

/// A laboratory whose CRIU changes the image before it restores it, once the file "lie" is there. It writes what it has
/// changed to that file.
fn with_a_liar(compare: &str) -> Option<Lab> {
    let lab = Lab::new()?;
    let (flag, images, real) = (lab.file("lie"), lab.memory(), criu());
    let lie = job_file("lie.py");
    let script = format!(
        "#!/bin/sh\nimages=$(dirname \"$(find {images} -name inventory.img | head -n 1)\")\n\
         [ ! -e {flag} ] || /usr/bin/python3 {lie} \"$images\" >{flag}\nexec {real} \"$@\"\n",
        images = images.display(),
        flag = flag.display(),
        lie = lie.display(),
        real = real.display(),
    );
    lab.script("liar", &script);
    let lab = lab.set_file("criu.path", "liar");
    Some(lab.set("log.level", "\"debug\"").set("restart.compare", &format!("{compare:?}")))
}

/// What was changed: the items that are to be found, and those that are put back.
struct Lies {
    found: Vec<String>,
    put_back: Vec<String>,
}

impl Lies {
    fn of(lab: &Lab, run: &mut Running) -> Lies {
        std::fs::write(lab.file("lie"), "").unwrap();
        kill(run.job_pid(lab), Signal::SIGKILL);
        run.wait_for("CRIU has changed the image", || lab.read("lie").contains("caught-signals"));
        let lies = lab.read("lie");
        let those =
            |what: &str| lies.lines().filter_map(|line| line.strip_prefix(what)).map(ToOwned::to_owned).collect();
        let lies = Lies { found: those("found "), put_back: those("put back ") };
        assert!(lies.found.len() >= 53 && lies.put_back.len() >= 10, "{:?} {:?}", lies.found, lies.put_back);
        lies
    }

    fn are_told(&self, run: &mut Running) {
        for item in &self.found {
            run.wait_said(&format!("not as before the restore ({item})"));
        }
    }
}

#[test]
fn a_criu_that_lies_is_found_out() {
    let Some(lab) = with_a_liar("on") else { return };
    let mut run = started(&lab);
    let lies = Lies::of(&lab, &mut run);
    run.wait_said("CRIU reports success, but the restored job is not what it was");
    run.wait_said("is not marked as bad");
    lies.are_told(&mut run);
    lab.kill_9(run);
}

#[test]
fn a_job_runs_in_spite_of_differences_if_they_are_only_to_be_told() {
    let Some(lab) = with_a_liar("tell") else { return };
    let mut run = started(&lab);
    let lies = Lies::of(&lab, &mut run);
    lies.are_told(&mut run);
    run.wait_said("the job was restored from ");
    count_on(&lab, &mut run, 5);
    for item in lies.put_back {
        assert!(!lab.log().contains(&format!("({item})")), "{item} is put back: {}", lab.log());
    }
    assert!(!lab.output().contains("changed "), "{}", lab.output());
    lab.kill_9(run);
}

#[test]
fn an_image_without_a_record_is_restored_unless_one_is_required() {
    for (required, says) in [(false, "is not compared with what it was"), (true, "restart.compare is \"required\"")] {
        let Some(mut lab) = Lab::new() else { return };
        if required {
            lab = lab.set("restart.compare", "\"required\"");
        }
        let mut run = started(&lab);
        // Of the same size, so that it is not damaged as a part.
        let path = lab.job().staged().pop().unwrap().dir.path().join("objects.json");
        let record = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, record.replace("rekindle-objects", "rekindle-objecte")).unwrap();
        kill(run.job_pid(&lab), Signal::SIGKILL);
        run.wait_said(says);
        if required {
            lab.kill_9(run);
        } else {
            count_on(&lab, &mut run, 5);
            finish(&lab, run);
        }
    }
}

/// Something changes the job while it stands still for an image.
#[test]
fn a_snapshot_that_changes_the_job_is_told() {
    let Some(lab) = Lab::new() else { return };
    let (flag, real) = (lab.file("meddle"), criu());
    // In the job's PID namespace, as CRIU.
    let meddle = format!(
        "n=0; while kill -0 $1; do n=$((n + 1)); prlimit --pid \"$(cat {flag})\" --core=$n:; done",
        flag = flag.display()
    );
    let script = format!(
        "#!/bin/sh\n[ ! -e {flag} ] || setsid -f sh -c '{meddle}' meddle $$ >/dev/null 2>&1 </dev/null\nexec {real} \"$@\"\n",
        flag = flag.display(),
        real = real.display(),
    );
    lab.script("meddler", &script);
    let lab = lab.set_file("criu.path", "meddler");
    let mut run = started(&lab);
    assert!(!lab.log().contains("has changed the running job"), "{}", lab.log());
    let job = rekindle_os::process::inner_pid(run.job_pid(&lab)).unwrap();
    std::fs::write(&flag, job.to_string()).unwrap();
    run.snapshot(&lab);
    run.wait_said(&format!("the snapshot has changed the running job (limits): process {job}"));
    std::fs::remove_file(&flag).unwrap();
    finish(&lab, run);
}
