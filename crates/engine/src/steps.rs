//! The runner of a freeze and of a restore: a table of named steps, each with an undo.
//!
//! Invariant: if a step fails, its undo and those of all steps before it run, in reverse order. The failed step is undone
//! too, because it may have done half of its work. Steps that were skipped are not undone. A panic is a failure: without
//! the undo the job would stay stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// One step of work on a state `S`.
pub(crate) struct Step<S, E> {
    name: &'static str,
    cancellable: bool,
    applies: fn(&S) -> bool,
    pub(crate) run: fn(&mut S) -> Result<(), E>,
    undo: fn(&mut S) -> Result<(), String>,
}

impl<S, E> Step<S, E> {
    /// A step that is not cancelled before it begins, and leaves nothing to undo.
    pub(crate) fn new(name: &'static str, run: fn(&mut S) -> Result<(), E>) -> Step<S, E> {
        Step { name, cancellable: false, applies: |_| true, run, undo: |_| Ok(()) }
    }

    /// Checks for a cancellation before the step begins.
    pub(crate) fn cancellable(self) -> Step<S, E> {
        Step { cancellable: true, ..self }
    }

    /// Skips the step if `applies` is false.
    pub(crate) fn only_if(self, applies: fn(&S) -> bool) -> Step<S, E> {
        Step { applies, ..self }
    }

    /// How the step is undone if it or a later one fails. It undoes everything that it can, and returns what it could
    /// not undo.
    pub(crate) fn undo(self, undo: fn(&mut S) -> Result<(), String>) -> Step<S, E> {
        Step { undo, ..self }
    }
}

/// Measures and logs each step.
pub(crate) trait Timer {
    /// Runs the work of one step.
    fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T;
}

/// A fault of rekindle: the work panicked. The message is on standard error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} failed by an error in rekindle (a panic, which is described on standard error): please report it")]
pub struct Panicked(pub String);

/// Runs `work`, which is called `name`.
///
/// # Errors
/// When it panics.
pub fn guarded<T>(name: &str, work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| Panicked(name.to_owned()))
}

/// A step failed, and all steps so far were undone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed<E> {
    /// Why it failed.
    pub(crate) cause: E,
    /// What could not be undone.
    pub(crate) not_undone: Vec<String>,
}

/// Runs the steps in their order. `go_on` is the check for a cancellation.
pub(crate) fn run<S, E: From<Panicked>>(
    steps: &[Step<S, E>],
    state: &mut S,
    timer: &mut impl Timer,
    go_on: &dyn Fn() -> Result<(), E>,
) -> Result<(), Failed<E>> {
    let mut begun = Vec::with_capacity(steps.len());
    for step in steps.iter() {
        if !(step.applies)(state) {
            continue;
        }
        begun.push(step);
        let asked = if step.cancellable { go_on() } else { Ok(()) };
        let work = || guarded(step.name, || (step.run)(state)).unwrap_or_else(|panicked| Err(panicked.into()));
        let result = asked.and_then(|()| timer.run(step.name, work));
        if let Err(cause) = result {
            let undo = |step: &&Step<S, E>| {
                let what = || format!("the undo of {}", step.name);
                guarded(&what(), || (step.undo)(state)).unwrap_or_else(|panicked| Err(panicked.to_string())).err()
            };
            let not_undone = begun.iter().rev().filter_map(undo).collect();
            return Err(Failed { cause, not_undone });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calls in their order, the step that fails, and those whose undo fails.
    #[derive(Default)]
    struct State {
        calls: Vec<String>,
        fails: &'static str,
        stuck: Vec<&'static str>,
        panics: Vec<&'static str>,
        without_c: bool,
    }

    impl State {
        fn run(&mut self, name: &'static str) -> Result<(), &'static str> {
            self.calls.push(name.into());
            if self.panics.contains(&name) {
                std::panic::resume_unwind(Box::new(name));
            }
            if self.fails == name { Err(name) } else { Ok(()) }
        }

        fn undo(&mut self, name: &'static str) -> Result<(), String> {
            self.calls.push(format!("-{name}"));
            if self.panics.contains(&"undo") {
                std::panic::resume_unwind(Box::new(name));
            }
            if self.stuck.contains(&name) { Err(format!("{name} is stuck")) } else { Ok(()) }
        }
    }

    impl From<Panicked> for &'static str {
        fn from(_: Panicked) -> &'static str {
            "panicked"
        }
    }

    struct Names(Vec<&'static str>);

    impl Timer for Names {
        fn run<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
            self.0.push(name);
            work()
        }
    }

    fn steps() -> [Step<State, &'static str>; 4] {
        [
            Step::new("a", |s: &mut State| s.run("a")).cancellable().undo(|s| s.undo("a")),
            Step::new("b", |s: &mut State| s.run("b")).undo(|s| s.undo("b")),
            Step::new("c", |s: &mut State| s.run("c")).only_if(|s| !s.without_c).undo(|s| s.undo("c")),
            Step::new("d", |s: &mut State| s.run("d")).cancellable(),
        ]
    }

    fn play(state: &mut State, cancelled: bool) -> (Vec<&'static str>, Result<(), Failed<&'static str>>) {
        let mut names = Names(Vec::new());
        let result = run(&steps(), state, &mut names, &|| if cancelled { Err("cancelled") } else { Ok(()) });
        (names.0, result)
    }

    #[test]
    fn a_step_that_fails_is_undone_and_all_before_it_in_reverse() {
        let undone = ["a -a", "a b -b -a", "a b c -c -b -a", "a b c d -c -b -a"];
        for (fails, calls) in ["a", "b", "c", "d"].into_iter().zip(undone) {
            let mut state = State { fails, ..State::default() };
            let (timed, result) = play(&mut state, false);
            assert_eq!(result, Err(Failed { cause: fails, not_undone: Vec::new() }));
            assert_eq!(state.calls.join(" "), calls);
            assert_eq!(timed.last(), Some(&fails));
        }
        let mut state = State::default();
        assert_eq!(play(&mut state, false), (vec!["a", "b", "c", "d"], Ok(())));
        assert_eq!(state.calls.join(" "), "a b c d");
    }

    #[test]
    fn what_cannot_be_undone_is_told_and_the_others_are_undone_all_the_same() {
        let mut state = State { fails: "d", stuck: vec!["c", "a"], ..State::default() };
        let not_undone = vec!["c is stuck".to_owned(), "a is stuck".to_owned()];
        assert_eq!(play(&mut state, false).1, Err(Failed { cause: "d", not_undone }));
        assert_eq!(state.calls.join(" "), "a b c d -c -b -a");
    }

    #[test]
    fn a_step_that_panics_is_undone_and_so_is_the_rest_if_an_undo_panics() {
        let mut state = State { panics: vec!["b"], ..State::default() };
        assert_eq!(play(&mut state, false).1, Err(Failed { cause: "panicked", not_undone: Vec::new() }));
        assert_eq!(state.calls.join(" "), "a b -b -a");
        let mut state = State { panics: vec!["undo"], fails: "b", ..State::default() };
        let Failed { cause, not_undone } = play(&mut state, false).1.unwrap_err();
        assert_eq!((cause, not_undone.len(), state.calls.join(" ").as_str()), ("b", 2, "a b -b -a"));
        assert!(not_undone[0].contains("the undo of b") && not_undone[1].contains("the undo of a"), "{not_undone:?}");
    }

    #[test]
    fn a_step_that_does_not_apply_is_neither_run_nor_undone() {
        let mut state = State { fails: "d", without_c: true, ..State::default() };
        assert_eq!(play(&mut state, false).0, ["a", "b", "d"]);
        assert_eq!(state.calls.join(" "), "a b d -b -a");
    }

    #[test]
    fn a_cancellation_is_a_failure_before_a_step_that_asks_for_it() {
        let mut state = State::default();
        let (timed, result) = play(&mut state, true);
        assert_eq!((timed, result), (vec![], Err(Failed { cause: "cancelled", not_undone: Vec::new() })));
        assert_eq!(state.calls.join(" "), "-a");
    }
}
