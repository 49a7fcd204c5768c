//! Files as the libraries of jobs write them: LMDB, numpy, TensorBoard, and the shared memory of Open MPI.

use std::path::{Path, PathBuf};

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, job_file, python};

/// The Python of `scripts/deps.sh stacks`. Says SKIP where it is not there, or fails where it must be.
fn environment() -> Option<PathBuf> {
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join(".deps/stacks/bin/python");
    rekindle_testing::needs(
        "stacks",
        Some(found).filter(|found| found.is_file()),
        "scripts/deps.sh stacks installs what this needs",
    )
}

fn job(lab: &Lab, python: &Path, kind: &str) -> Vec<String> {
    [python, &job_file("stacks.py"), Path::new(kind), lab.path()].iter().map(|it| it.display().to_string()).collect()
}

fn goes_on(lab: &Lab, mut run: Running) {
    count_on(lab, &mut run, 5);
    for _ in 0..3 {
        run.snapshot(lab);
        count_on(lab, &mut run, 20);
        run.crash(lab);
        count_on(lab, &mut run, 5);
    }
    finish(lab, run);
}

fn comes_back(kind: &str) {
    let Some((python, lab)) = environment().zip(Lab::new()) else { return };
    let run = lab.run(job(&lab, &python, kind));
    goes_on(&lab, run);
}

#[test]
fn an_lmdb_database() {
    comes_back("lmdb");
}

#[test]
fn an_lmdb_database_that_is_written_by_its_mapping() {
    comes_back("lmdb-mapped");
}

#[test]
fn an_array_of_numpy() {
    comes_back("memmap");
}

#[test]
fn events_of_tensorboard_in_a_tracked_folder() {
    let Some((python, lab)) = environment().zip(Lab::new()) else { return };
    let tracked = format!("[{:?}]", lab.file("events"));
    let lab = lab.set("files.track", &tracked);
    let run = lab.run(job(&lab, &python, "tensorboard"));
    goes_on(&lab, run);
}

#[test]
fn open_mpi_with_shared_memory() {
    let Some((_, lab)) = environment().zip(Lab::new()) else { return };
    let Some(python) = python() else { return };
    // Shared memory between the ranks, and no call into the memory of another process, which a container may forbid.
    let mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", "--mca", "btl", "self,vader"];
    let copies = ["--mca", "btl_vader_single_copy_mechanism", "none"];
    let command = [mpi.as_slice(), &copies].concat().into_iter().map(str::to_owned);
    let run = lab.run(command.chain(job(&lab, python, "mpi")).collect::<Vec<_>>());
    goes_on(&lab, run);
}
