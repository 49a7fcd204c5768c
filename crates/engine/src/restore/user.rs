//! Checks that an image belongs to the job's user.

use crate::launch::identity::{self, Identity};
use rekindle_store::{ImageId, Manifest};

/// An image was taken of the job as another user than it is to run as now.
#[derive(Debug, thiserror::Error)]
#[error(
    "image {id} was taken while the job ran as user {then}, and {now}. Set job.user to {then}, or pass --accept-user {then} to restore it as user {then}. `rekindle run --fresh` starts the job from the beginning. The image is kept"
)]
pub struct OtherUser {
    pub(crate) id: ImageId,
    /// The user at the snapshot.
    pub(crate) then: String,
    /// The user now, in words.
    now: String,
}

/// Checks that the image belongs to the user that the job is to run as; `None` is the supervisor's user. Users are
/// compared by number: a name may mean another account on another machine.
///
/// # Errors
/// If the users differ; the error names both and says what to do.
pub fn check_user(manifest: &Manifest, user: Option<&Identity>) -> Result<(), OtherUser> {
    let own = nix::unistd::geteuid().as_raw();
    let wanted = user.map_or(own, |user| user.uid);
    // An image of an earlier version has only the user's name, and not even that for the supervisor's user.
    let then = match (&manifest.rights, &manifest.user) {
        (Some(rights), _) => Some(rights.uid),
        (None, Some(name)) => identity::lookup(name).ok().map(|user| user.uid),
        (None, None) => Some(own),
    };
    if then == Some(wanted) {
        return Ok(());
    }
    // The image's user name may be another account on this machine.
    let known =
        manifest.user.clone().filter(|name| then.is_none() || identity::lookup(name).ok().map(|u| u.uid) == then);
    let then = known.unwrap_or_else(|| then.map_or_else(|| "unknown".to_owned(), identity::name_of));
    let now = match user {
        Some(user) => format!("job.user is {} ({wanted})", user.name),
        None => format!("job.user is not set (that is {})", identity::name_of(own)),
    };
    Err(OtherUser { id: manifest.id, then, now })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::manifest as sample_manifest;
    use rekindle_store::manifest::JobRights;

    fn image(user: Option<&str>, uid: Option<u32>) -> Manifest {
        let rights = |uid| JobRights { uid, groups: vec![], no_new_privileges: false, filtered: false };
        Manifest { user: user.map(str::to_owned), rights: uid.map(rights), ..sample_manifest() }
    }

    #[test]
    fn users_are_compared_by_number() {
        let nobody = identity::lookup("nobody").unwrap();
        let own = nix::unistd::geteuid().as_raw();
        for (manifest, user) in [
            (image(Some("nobody"), None), Some(&nobody)),
            (image(Some("nobody"), Some(nobody.uid)), Some(&nobody)),
            (image(Some("called otherwise"), Some(nobody.uid)), Some(&nobody)),
            (image(None, None), None),
            (image(None, Some(own)), None),
        ] {
            check_user(&manifest, user).unwrap();
        }
        for (manifest, user, then) in [
            (image(None, None), Some(&nobody), None),
            (image(None, Some(0)), Some(&nobody), Some("root")),
            // A user id 0 in the image is root, whatever its name: the number counts.
            (image(Some("nobody"), Some(0)), Some(&nobody), Some("root")),
            (image(Some("nobody"), None), None, Some("nobody")),
            (image(Some("no such user"), None), Some(&nobody), Some("no such user")),
            (image(Some("no such user"), Some(4_000_000)), Some(&nobody), Some("4000000")),
        ] {
            let error = check_user(&manifest, user).unwrap_err();
            assert!(then.is_none_or(|then| error.then == then), "{error}");
            assert!(error.to_string().contains("--accept-user"), "{error}");
        }
    }
}
