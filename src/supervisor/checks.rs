//! What is known of whether images can be restored: proofs by the life of the job, rehearsals beside it, and a search of the
//! store for damage. None of it touches the job.

use std::sync::{Arc, mpsc};
use std::time::Instant;

use super::proof::{Proofs, counts};
use super::rehearse::Rehearsals;
use super::state::State;
use super::verify::Verifier;
use super::{Message, Setup};
use rekindle_os::spawn::Ended;

/// The three.
pub(super) struct Checks {
    pub(super) proofs: Proofs,
    pub(super) rehearsals: Rehearsals,
    verifier: Option<Verifier>,
}

impl Checks {
    pub(super) fn new(setup: &Setup) -> Checks {
        let rehearsals = Rehearsals::new(setup.config.snapshot.rehearse.limit());
        Checks { proofs: Proofs::default(), rehearsals, verifier: None }
    }

    /// Starts the search of the store.
    pub(super) fn open(&mut self, setup: &Arc<Setup>, sender: &mpsc::Sender<Message>) {
        self.verifier = Verifier::start(setup, sender);
    }

    /// Writes down what is proven by now.
    pub(super) fn note_proofs(&mut self, setup: &Setup, state: &State, ended: Option<Ended>, now: Instant) {
        if counts(state, ended) {
            self.proofs.note(setup, now);
        }
    }

    /// Lets the store be searched, or not.
    pub(super) fn allow_verifier(&self, state: &State, is_idle: bool) {
        self.verifier.iter().for_each(|verifier| verifier.allow(state, is_idle));
    }

    /// The run ends: what is under way is called off.
    pub(super) fn close(&mut self) {
        self.verifier.take().into_iter().for_each(Verifier::close);
        self.rehearsals.close();
    }

    pub(super) fn next_wake(&self, setup: &Setup) -> Option<Instant> {
        let proofs = self.proofs.next_wake(setup.config.restart.min_uptime);
        proofs.into_iter().chain(self.rehearsals.next_wake()).min()
    }
}
