use std::process::{Child, Command, Stdio};

use super::*;

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A job that CRIU restored after a reboot has a clock of its own.
#[test]
fn the_gate_is_closed_by_the_clock_of_the_process() {
    if !rekindle_testing::root() {
        return;
    }
    let ahead = Duration::from_secs(1_000_000);
    let script = ["--time", "--monotonic", "1000000", "--fork", "--kill-child", "sleep", "60"];
    let unshare = Killed(Command::new("unshare").args(script).stdin(Stdio::null()).spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(10);
    let pid = loop {
        if let [child] = process::children(unshare.0.id().cast_signed())[..]
            && process::name(child).as_deref() == Some("sleep")
        {
            break child;
        }
        assert!(Instant::now() < deadline, "unshare starts nothing");
        std::thread::sleep(Duration::from_millis(5));
    };
    let ours = now_in(i32::try_from(std::process::id()).unwrap());
    let difference = now_in(pid).checked_sub(ours).unwrap();
    assert!(difference >= ahead && difference < ahead + Duration::from_secs(10), "{difference:?}");
}

#[test]
fn without_time_namespaces_all_have_one_clock() {
    // No such process: nothing to be read.
    assert_eq!(offset(i32::MAX), 0);
    let before = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap());
    let now = now_in(i32::try_from(std::process::id()).unwrap());
    assert!(now >= before && now < before + Duration::from_secs(10));
}
