//! Servers that write to files which they have closed, and that several processes share: PostgreSQL and Redis, from
//! Debian's packages.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::supervisor::{Lab, Running, numbers, tail};

/// A lab with a folder of that user's. Says SKIP where `program` is not there, or fails where it must be.
fn lab(program: Option<PathBuf>, user: &str) -> Option<(Lab, PathBuf)> {
    let lab = Lab::new()?;
    let found = program.zip(nix::unistd::User::from_name(user).unwrap());
    let why = format!("the server or its user {user} is missing; scripts/deps.sh databases installs them");
    let (program, user) = rekindle_testing::needs("databases", found, &why)?;
    let folder = lab.file("data");
    fs::create_dir(&folder).unwrap();
    nix::unistd::chown(&folder, Some(user.uid), Some(user.gid)).unwrap();
    let lab = lab.set("job.user", &format!("{:?}", user.name)).set("restart.backoff", "\"100ms\"");
    Some((lab, program))
}

fn postgres() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    versions.map(|version| version.path().join("bin")).find(|bin| bin.join("pgbench").exists())
}

/// These work for seconds between two numbers, beside other tests.
const PATIENCE: Duration = Duration::from_secs(300);

fn count_on(lab: &Lab, run: &mut Running, by: usize) {
    let before = numbers(&lab.output()).len();
    run.job_pid(lab);
    let comes = crate::supervisor::comes(PATIENCE, || numbers(&lab.output()).len() >= before + by || !run.runs());
    assert!(comes && run.runs(), "{}\n{}", tail(&run.out()), tail(&run.err()));
}

/// A client may be about to connect just then: the snapshot is tried again by itself.
fn snapshot(lab: &Lab, run: &mut Running) -> u32 {
    let newest = || lab.images().first().map_or(0, |image| image.id.sequence());
    let before = newest();
    run.signal(nix::sys::signal::Signal::SIGUSR1);
    run.wait_for("a new image is there", || {
        newest() > before && lab.published().is_some_and(|p| p.state.as_str() == "running" && p.persisting.is_none())
    });
    newest()
}

fn goes_on(lab: &Lab, mut run: Running) {
    count_on(lab, &mut run, 2);
    for _ in 0..3 {
        let id = snapshot(lab, &mut run);
        count_on(lab, &mut run, 3);
        run.crash(lab);
        run.wait_said(&format!("restored from image {id:06}-"));
        count_on(lab, &mut run, 1);
    }
    fs::write(lab.file("data").join("finish"), "").unwrap();
    let (code, out, said) = run.finish(PATIENCE);
    assert_eq!(code, 0, "--- output\n{}\n--- messages\n{}", tail(&out), tail(&said));
    assert!(lab.output().ends_with("done\n"), "{}", tail(&lab.output()));
}

#[test]
fn a_postgresql_server_larger_than_its_buffers() {
    let Some((lab, programs)) = lab(postgres(), "postgres") else { return };
    let folder = lab.file("data");
    let command = lab.python_command("postgres_job.py", &[programs.to_str().unwrap(), folder.to_str().unwrap(), "5"]);
    let run = lab.run(command);
    goes_on(&lab, run);
}

fn redis(kind: &str) {
    // The server is this program under another name (package redis-tools), without a service beside it.
    let program = PathBuf::from("/usr/bin/redis-check-rdb");
    let Some((lab, found)) = lab(program.exists().then_some(program), "nobody") else { return };
    let folder = lab.file("data");
    let program = lab.file("redis-server");
    std::os::unix::fs::symlink(found, &program).unwrap();
    let command = lab.python_command("redis_job.py", &[program.to_str().unwrap(), folder.to_str().unwrap(), kind]);
    let run = lab.run(command);
    goes_on(&lab, run);
}

#[test]
fn a_redis_server_with_an_append_only_file() {
    redis("aof");
}

#[test]
fn a_redis_server_that_saves_its_database_anew_all_the_time() {
    redis("rdb");
}
