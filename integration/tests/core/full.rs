//! A store without a free byte.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::memory::{SmallStore, pin_all};
use crate::supervisor::Lab;

/// Leaves no byte. What is written beside it may be replaced just then, which gives some back.
fn fill_up(store: &SmallStore) {
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_secs(1) {
        if store.free() > 0 {
            store.fill_up_to(0);
            last = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Not even the record of the end has room. Whoever queues the job again or restarts it goes by the exit code.
#[test]
fn a_store_without_a_free_byte_does_not_hide_how_the_run_ended() {
    let Some(lab) = Lab::new() else { return };
    let store = SmallStore::mount(&lab, 64);
    // It prints nothing: its output would have no room.
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done", lab.file("done").display());
    let begin = || {
        let mut run = lab.run(["sh", "-c", &script]);
        run.job_pid(&lab);
        run.snapshot(&lab);
        pin_all(&lab);
        fill_up(&store);
        run
    };
    let run = begin();
    let stopped = lab.rekindle(&["stop", "j"]);
    let (_, said) = run.ends_with(74);
    assert!(said.contains("cannot record how the run ended"), "{said}");
    assert_eq!(stopped.status.code(), Some(74), "{stopped:?}");
    assert!(String::from_utf8_lossy(&stopped.stdout).contains("is only in memory"), "{stopped:?}");
    store.clear();
    let run = begin();
    run.signal(Signal::SIGUSR2);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("is only in memory"), "{said}");
    store.clear();
    let run = begin();
    fs::write(lab.file("done"), "").unwrap();
    run.ends_with(0);
    store.clear();
    drop(store);
}
