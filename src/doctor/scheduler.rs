//! How a job that was stopped is queued again.

use super::Check;
use crate::config::{Config, Requeue};
use crate::scheduler::{PRESERVE, Scheduler};

pub(super) fn gather(config: &Config) -> Scheduler {
    Scheduler::find(config.scheduler.profile, |name| std::env::var(name).ok())
}

pub(super) fn judge(scheduler: &Scheduler, requeue: Requeue) -> Option<Check> {
    let name = "scheduler.requeue";
    let job = match requeue {
        Requeue::ExitCode => return None,
        Requeue::Scontrol => scheduler.slurm_job(),
    };
    Some(match job {
        Ok(job) => Check::ok(name, format!("`scontrol requeue {job}` queues the job again")),
        Err(_) => Check::warn(
            name,
            "\"scontrol\", and no job of Slurm is known here: a job that is stopped will not be queued again",
            format!("run rekindle in a job of Slurm. {PRESERVE}"),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Profile;
    use crate::doctor::State;

    #[test]
    fn a_job_that_would_not_be_queued_again_is_told() {
        let judged = |profile, job: Option<&str>, requeue| {
            let of_slurm = |name: &str| job.filter(|_| name == "SLURM_JOB_ID").map(str::to_owned);
            judge(&Scheduler::find(profile, of_slurm), requeue).map(|check| (check.state, check.found))
        };
        assert_eq!(judged(Profile::Auto, None, Requeue::ExitCode), None);
        let (state, found) = judged(Profile::Auto, None, Requeue::Scontrol).unwrap();
        assert!(state == State::Warn && found.contains("will not be queued again"), "{found}");
        let (state, found) = judged(Profile::Auto, Some("7"), Requeue::Scontrol).unwrap();
        assert!(state == State::Ok && found.contains("scontrol requeue 7"), "{found}");
    }
}
