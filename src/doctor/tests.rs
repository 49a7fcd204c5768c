use super::*;

fn facts() -> Facts {
    gather(&Config::default(), Some("/nowhere/criu".into()))
}

#[test]
fn without_criu_run_does_not_work_and_every_complaint_has_a_fix() {
    let report = judge(&facts(), &Config::default());
    assert!(!report.run_works);
    let criu = report.checks.iter().find(|check| check.check == "criu.version").unwrap();
    assert_eq!(criu.state, State::Missing);
    for check in &report.checks {
        assert_eq!(check.fix.is_some(), check.state >= State::Warn, "{check:?}");
        assert!(!check.found.is_empty(), "{check:?}");
    }
}

#[test]
fn every_check_has_a_name_of_its_own() {
    let report = judge(&facts(), &Config::default());
    let names: std::collections::BTreeSet<&str> = report.checks.iter().map(|check| check.check).collect();
    assert_eq!(names.len(), report.checks.len());
}

#[test]
fn run_works_when_nothing_is_missing_whatever_is_warned_of() {
    let mut facts = facts();
    let path = PathBuf::from("/usr/sbin/criu");
    facts.criu.found = Ok(rekindle_criu::Criu::known(path, rekindle_criu::Version(9, 0, 0)));
    facts.trial = trial::worked();
    facts.rights.euid = 0;
    facts.rights.seccomp = rights::Seccomp::Filtered;
    facts.store.folder = store::Folder::NotYet;
    facts.store.writable = true;
    facts.store.file_system = None;
    let report = judge(&facts, &Config::default());
    assert!(report.run_works, "{report:#?}");
    assert!(report.counts.warn > 0 && report.counts.missing == 0);
    facts.trial = trial::Outcome::Failed { step: "dump", why: "no".into(), hint: None };
    assert!(!judge(&facts, &Config::default()).run_works);
}
