//! What is tried before a job begins: whether CRIU dumps and restores a job on this machine, and whether this release knows
//! its versions. Otherwise images might be taken for weeks that nothing can restore.

use crate::config::Config;
use crate::doctor::{self, Check, State, Untried};
use rekindle_base::chain;
use rekindle_criu::Criu;
use rekindle_engine::launch::work::WorkFolder;
use rekindle_store::{JobFolder, WriterLock};

/// The trial of CRIU failed, twice.
#[derive(Debug, thiserror::Error)]
#[error(
    "CRIU cannot dump and restore even a small job here, so no image would be of use: {found}. To fix it: {fix}. `rekindle \
    doctor` checks the rest, too. With snapshot.rehearse = \"off\" this is not tried"
)]
pub(crate) struct CannotRestore {
    found: String,
    fix: String,
}

/// Refuses the run or warns, as `rekindle doctor` would. Who turns rehearsals off does not want to try restores.
pub(super) fn try_criu(config: &Config, criu: &Criu, work: &WorkFolder) -> Result<(), CannotRestore> {
    if config.snapshot.rehearse.limit().is_none() {
        return Ok(());
    }
    judged(doctor::try_criu(criu, work.path()))
}

fn judged(check: Check) -> Result<(), CannotRestore> {
    let Check { state, found, fix, .. } = check;
    match state {
        State::Missing => return Err(CannotRestore { found, fix: fix.unwrap_or_default() }),
        State::Ok => tracing::debug!("{found}"),
        State::NotHere | State::Warn => {
            tracing::warn!("whether CRIU can restore a job on this machine is unknown: {found}")
        }
    }
    Ok(())
}

/// Names versions that are newer than those that this release was tried with. With them the images count as taken until a
/// rehearsal or a restore has succeeded.
pub(super) fn name_untried(criu: &Criu, folder: &JobFolder, lock: &WriterLock) {
    let untried = doctor::untried(criu.version);
    if let Err(error) = folder.note_untried(lock, untried.as_ref().map(|it| it.versions.as_str())) {
        tracing::warn!("cannot record which versions are new: {}", chain(&error));
    }
    if let Some(Untried { versions, tried }) = untried {
        tracing::warn!(
            "this version of rekindle was not tried with {versions}, only up to {tried}. Images count as taken until one is \
            rehearsed or restored"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_refused_where_doctor_would_and_the_fix_is_told() {
        let check = |state, fix: Option<&str>| Check {
            check: "criu.trial",
            state,
            found: "restore failed: no".into(),
            fix: fix.map(str::to_owned),
        };
        for state in [State::Ok, State::NotHere, State::Warn] {
            assert!(judged(check(state, None)).is_ok(), "{state:?}");
        }
        let error = judged(check(State::Missing, Some("do that"))).unwrap_err().to_string();
        assert!(error.contains("restore failed: no. To fix it: do that. `rekindle doctor`"), "{error}");
    }
}
