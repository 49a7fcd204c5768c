//! Which requests are served, and why others are not.

use crate::documents::{Ask, Goal, Then, View};
use crate::images;

/// Whether the leader serves this request, as far as this view tells. A supervisor asks this before it passes a request
/// on, because the leader serves a request or drops it, and answers neither.
///
/// A snapshot or a suspension that is admitted while the job starts, resumes or aborts is served when it runs.
///
/// # Errors
///
/// Why it is not served, in words.
pub fn admits(view: &View, ask: &Ask) -> Result<(), &'static str> {
    let Some(plan) = view.plan.as_ref().map(|plan| &plan.value) else {
        return match ask {
            Ask::Stop { .. } | Ask::StopNow { .. } => Ok(()),
            _ => Err("the group has not begun"),
        };
    };
    match (ask, &plan.goal) {
        (_, Goal::End(_)) => Err("the run is over"),
        // Also if it is being stopped already: the newest time limit counts.
        (Ask::Stop { .. } | Ask::StopNow { .. }, _) => Ok(()),
        _ if matches!(plan.then, Then::Stop { .. }) => Err("the run is being stopped"),
        (Ask::Rewind(to), _) => match view.images.get(to) {
            None => Err("there is no such group image"),
            Some(image) if !images::is_there(view, &image.value) => Err("not all parts of this group image are there"),
            Some(_) => Ok(()),
        },
        (Ask::Resume, Goal::Suspended) => Ok(()),
        (Ask::Resume, _) => Err("the job is not suspended"),
        (Ask::Suspend, Goal::Suspended) => Err("the job is suspended already"),
        (Ask::Snapshot, Goal::Suspended) => Err("the job is suspended"),
        (Ask::Snapshot, Goal::Gather { .. }) => Err("the job does not run: it waits to be started"),
        (Ask::Snapshot, Goal::Prepare(_) | Goal::Pull(_) | Goal::Dump(_)) => Err("a snapshot is being taken"),
        (Ask::Snapshot | Ask::Suspend, _) => Ok(()),
    }
}
