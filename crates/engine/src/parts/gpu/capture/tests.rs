use std::io::Write;
use std::process::{Command, Stdio};

use super::*;

fn answer(code: i32) -> Result<State, cuda::Error> {
    Err(cuda::Error::Call { pid: 7, function: cuda::Function::GetState, code, name: String::new() })
}

#[test]
fn a_process_with_another_program_is_gone_and_one_that_does_not_answer_lost() {
    let (not_cuda, no_answer) = (answer(3), answer(304));
    for before in [GpuState::Running, GpuState::Locked] {
        assert_eq!(before.after(&not_cuda, false), GpuState::Gone);
        assert_eq!(before.after(&no_answer, false), GpuState::Lost);
        assert_eq!(before.after(&no_answer, true), GpuState::Gone);
        assert_eq!(before.after(&Ok(State::Running), false), GpuState::Running, "it uses CUDA again");
    }
    assert_eq!(GpuState::Checkpointed.after(&not_cuda, false), GpuState::Lost, "its memory is not there");
    assert_eq!(GpuState::Running.after(&Ok(State::Failed), false), GpuState::Lost);
}

#[test]
fn another_program_is_noticed() {
    let mut child = Command::new("sh");
    let child = child.args(["-c", "read line; exec sleep 60"]).stdin(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let pid = child.id().cast_signed();
    let until = |what: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !what() {
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // The kernel sets the name first, and the stack a moment later.
    let has_stack = || process::stack_start(pid).is_some_and(|stack| stack != 0);
    until(&|| process::name(pid).as_deref() == Some("sh") && has_stack());
    let stack = process::stack_start(pid);
    assert!(!runs_another(pid, stack, pid) && runs_another(pid, stack, i32::MAX));
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    until(&|| process::name(pid).as_deref() == Some("sleep"));
    let is_noticed = runs_another(pid, stack, pid);
    child.kill().unwrap();
    let _ = child.wait();
    assert!(is_noticed);
}

#[test]
fn a_message_has_tenths_of_seconds() {
    let said = |ms| format!("{:?}", in_tenths(Duration::from_millis(ms)));
    assert_eq!([4911, 5000, 4950, 1].map(said), ["4.9s", "5s", "5s", "100ms"]);
}

#[test]
fn attempts_to_lock_share_a_budget_and_none_has_no_time() {
    let began = Instant::now();
    let seconds = Duration::from_secs;
    let budget = Budget { began, limit: seconds(10), timeout: seconds(4) };
    let steps = [0, 5, 7, 10, 20].map(|after| budget.step(began + seconds(after)));
    let moment = Duration::from_millis(1);
    assert_eq!(steps, [seconds(4), seconds(4), seconds(3), moment, moment]);
    assert_eq!([0, 9, 10, 11].map(|after| budget.is_spent(began + seconds(after))), [false, false, true, true]);
}
