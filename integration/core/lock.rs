//! One supervisor a job, also where the kernel's lock does not reach the other one.

use std::fs;
use std::time::Duration;

use rekindle::store::{HEARTBEAT, Writer};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab};

#[test]
fn a_supervisor_that_was_taken_over_stops_and_touches_nothing() {
    let Some(lab) = Lab::new() else { return };
    let run = until_after_snapshot(&lab, "plain");
    let file = lab.job().path().join("lock");
    let mut holder: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(holder["pid"], run.pid());
    holder["host"] = "elsewhere".into();
    holder["boot_id"] = "another".into();
    let other = serde_json::to_vec(&holder).unwrap();
    fs::write(&file, &other).unwrap();
    let record = fs::read(lab.job().path().join("job.json")).unwrap();
    let (code, _, said) = run.finish(HEARTBEAT + LIMIT + Duration::from_secs(5));
    assert!(
        code == 125 && said.contains("was taken over by pid") && said.contains("on host elsewhere"),
        "{code} {said}"
    );
    lab.assert_all_gone();
    assert_eq!(fs::read(&file).unwrap(), other, "the name is that of the other one");
    assert_eq!(fs::read(lab.job().path().join("job.json")).unwrap(), record);

    // That one has just given a sign of life, as far as the file says.
    let again = |lab: &Lab| lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let (_, said) = again(&lab).ends_with(125);
    assert!(said.contains("may be supervised by pid") && said.contains("by hand"), "{said}");
    assert!(matches!(lab.job().writer().unwrap(), Writer::Known(holder) if holder.host == "elsewhere"));
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(600);
    fs::File::options().write(true).open(&file).unwrap().set_modified(long_ago).unwrap();
    let mut run = again(&lab);
    run.wait_said("it is taken for dead");
    run.wait_said("the job is back from image 000001");
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    assert_eq!(fs::read(&file).unwrap(), b"", "a supervisor that ends empties it");
}
