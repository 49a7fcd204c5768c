//! Exit codes, documented for scripts and schedulers in docs/commands.md.

use std::process::ExitCode;

use crate::scheduler::QUEUE_AGAIN;

use rekindle_os::beneath::Unexpected;

/// How `rekindle` itself ends. Values follow sysexits.h and the shell where these define one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Success.
    Success,
    /// A command that checks something found an error (`verify`, `repair`, `cuda`).
    Unsound,
    /// Wrong usage, an unknown job or image.
    Usage,
    /// The job's own exit code, or 128 plus the signal that ended it.
    Job(u8),
    /// There are images and none can be used; the job is not started from the beginning (EX_NOINPUT).
    NoUsableImage,
    /// Something needed is missing: CRIU, rights, driver; or the job has another supervisor (EX_UNAVAILABLE).
    Missing,
    /// Stopped with a new image, to be queued again (EX_TEMPFAIL).
    Requeue,
    /// Stopped, and the last image could not be stored: it is only in memory (EX_IOERR).
    OnlyInMemory,
    /// The configuration is wrong (EX_CONFIG).
    Config,
    /// Rekindle's own failure.
    Internal,
    /// The command was found but cannot be executed.
    NotExecutable,
    /// The command was not found.
    NotFound,
}

impl Exit {
    /// The number of the exit code.
    #[must_use]
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Unsound => 1,
            Exit::Usage => 2,
            Exit::Job(code) => code,
            Exit::Requeue => QUEUE_AGAIN,
            Exit::NoUsableImage => 66,
            Exit::Missing => 69,
            Exit::OnlyInMemory => 74,
            Exit::Config => 78,
            Exit::Internal => 125,
            Exit::NotExecutable => 126,
            Exit::NotFound => 127,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit.code())
    }
}

/// What to add to an error: what to do if others put something in the store, if a user has no right to the store and root
/// has, or if the store is full.
pub(crate) fn hint(error: &(dyn std::error::Error + 'static)) -> String {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    let mut chain = std::iter::successors(Some(error), |error| error.source());
    if let Some(unexpected) = chain.clone().find_map(unexpected) {
        let advice = unexpected.advice();
        // The store's errors say it themselves.
        let is_said = rekindle_base::chain(error).contains(&advice);
        let advice = if is_said { String::new() } else { format!(". What to do: {advice}") };
        return advice + ". Check who can write to the store";
    }
    if chain.clone().any(is_refused) {
        return ". Use sudo if the job was started with it".to_owned();
    }
    match chain.find_map(kind_in_store) {
        Some(StorageFull | QuotaExceeded) => {
            ". Free space there (`rekindle prune` removes images that no rule keeps), or choose another folder with --store"
        }
        _ => "",
    }
    .to_owned()
}

/// Something in the store that is not what it should be.
fn unexpected<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a Unexpected> {
    cause.downcast_ref().and_then(Unexpected::in_error)
}

/// Whether the kernel refuses the store to this user.
fn is_refused(cause: &(dyn std::error::Error + 'static)) -> bool {
    kind_in_store(cause) == Some(std::io::ErrorKind::PermissionDenied) && !nix::unistd::geteuid().is_root()
}

/// The kernel's answer to an access to the store.
fn kind_in_store(cause: &(dyn std::error::Error + 'static)) -> Option<std::io::ErrorKind> {
    use rekindle_store::Error as E;
    match cause.downcast_ref::<E>()? {
        E::Read { source, .. }
        | E::Create { source, .. }
        | E::Write { source, .. }
        | E::Lock { source, .. }
        | E::Remove { source, .. } => Some(source.kind()),
        _ => None,
    }
}

/// The exit code for an error. A store that cannot be one is the mistake of who named it: `--store`, or the
/// configuration.
pub(crate) fn of_error(error: &anyhow::Error, is_store_typed: bool) -> Exit {
    use crate::{config, control};
    use rekindle_engine::{launch, restore};
    use rekindle_store as store;
    // Others changed what only we should change: somebody must look at it before anything goes on.
    if error.chain().any(|cause| unexpected(cause).is_some()) {
        return Exit::Config;
    }
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<super::config::Error>() {
            return error.exit();
        }
        if let Some(error) = cause.downcast_ref::<config::Error>() {
            return if error.is_usage() { Exit::Usage } else { Exit::Config };
        }
        if cause.is::<launch::identity::Error>()
            || cause.is::<store::chunk::KeyError>()
            || cause.is::<restore::OtherUser>()
            || cause.is::<super::trust::Refused>()
            || cause.is::<super::trust::WrongKey>()
            || cause.is::<super::trust::KeyLeftOut>()
            || cause.is::<super::replica::Refused>()
            || cause.is::<super::run::DeadlineTooEarly>()
            || cause.is::<super::run::Obstructed>()
            || cause.is::<crate::group::NoOwnAddress>()
            || matches!(cause.downcast_ref(), Some(launch::group::Error::Underlay(_)))
        {
            return Exit::Config;
        }
        if cause.is::<rekindle_criu::FindError>()
            || cause.is::<launch::uplink::Missing>()
            || cause.is::<super::run::NoRights>()
            || cause.is::<super::run::CannotRestore>()
            || cause.is::<rekindle_etcd::Error>()
            || cause.is::<super::replica::Unknown>()
            || cause.is::<super::replica::NotFetched>()
            || cause.is::<super::AnothersJob>()
        {
            return Exit::Missing;
        }
        match cause.downcast_ref::<launch::work::Error>() {
            Some(launch::work::Error::InUse { .. }) => return Exit::Missing,
            // snapshot.staging-directory has to change, or the rights there.
            Some(
                launch::work::Error::NotRoots { .. }
                | launch::work::Error::Foreign(_)
                | launch::work::Error::Unusable(_),
            ) => return Exit::Config,
            _ => {}
        }
        if cause.is::<super::run::NoUsableImage>() {
            return Exit::NoUsableImage;
        }
        if let Some(error) = cause.downcast_ref::<launch::ProgramError>() {
            return match error {
                launch::ProgramError::NotFound(_) => Exit::NotFound,
                launch::ProgramError::NotExecutable { .. } => Exit::NotExecutable,
            };
        }
        if let Some(error) = cause.downcast_ref::<control::client::Error>() {
            use control::client::Error as E;
            return match error {
                E::Fault(fault) if fault.code == control::protocol::Code::Refused => Exit::Usage,
                E::Fault(_) => Exit::Unsound,
                E::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => Exit::Missing,
                _ => Exit::Internal,
            };
        }
        if cause.is::<super::Misuse>() || cause.is::<store::NameError>() {
            return Exit::Usage;
        }
        if is_refused(cause) {
            return Exit::Missing;
        }
        if let Some(error) = cause.downcast_ref::<store::Error>() {
            use store::Error as E;
            return match error {
                E::UnknownJob { .. }
                | E::UnknownImage { .. }
                | E::AmbiguousImage { .. }
                | E::NoGoodImage { .. }
                | E::NoNthImage { .. }
                | E::NotStored(_)
                | E::TooManyTags(_)
                | E::NoStore(_) => Exit::Usage,
                E::NotAFolder(_) if is_store_typed => Exit::Usage,
                E::UntrustedRecord { .. } | E::NotAFolder(_) | E::OthersCanWrite(_) | E::OtherOwner { .. } => {
                    Exit::Config
                }
                // Not a failure of ours: the job is not available here while it has another supervisor.
                E::Supervised { .. } | E::PerhapsSupervised { .. } => Exit::Missing,
                _ => Exit::Internal,
            };
        }
    }
    Exit::Internal
}

#[cfg(test)]
mod tests {
    use std::io::{Error as IoError, ErrorKind};

    use super::*;

    #[test]
    fn a_full_store_is_told_with_what_to_do() {
        let error = |kind| {
            let source = IoError::from(kind);
            anyhow::Error::from(rekindle_store::Error::Write { path: "/s/j/lock".into(), source })
        };
        assert!(hint(error(ErrorKind::StorageFull).as_ref()).contains("`rekindle prune`"));
        assert_eq!(hint(error(ErrorKind::NotFound).as_ref()), "");
        assert_eq!(of_error(&error(ErrorKind::StorageFull), false), Exit::Internal);
    }

    #[test]
    fn what_others_put_in_the_store_is_told_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("stdout.log");
        std::os::unix::fs::symlink("/etc/crontab", &log).unwrap();
        let source = || rekindle_os::beneath::Beneath::at(&log).unwrap().append(0o600).unwrap_err();
        let of_output = rekindle_engine::launch::output::Files::create(dir.path(), Default::default()).unwrap_err();
        let of_store = rekindle_store::Error::Write { path: log.clone(), source: source() };
        for error in [of_output.into(), of_store.into(), anyhow::Error::from(source()).context("cannot write")] {
            assert_eq!(of_error(&error, false), Exit::Config, "{error:?}");
            let said = rekindle_base::chain(error.as_ref()) + &hint(error.as_ref());
            assert_eq!(said.matches("remove it").count(), 1, "{said}");
            assert!(said.ends_with("Check who can write to the store"), "{said}");
            assert!(said.contains("/stdout.log is a symbolic link, and should be a regular file"), "{said}");
        }
        assert_eq!(of_error(&IoError::from(ErrorKind::InvalidInput).into(), false), Exit::Internal);
    }

    #[test]
    fn what_others_put_into_the_store_is_told_with_where_and_what_to_do() {
        let link = rekindle_os::beneath::Unexpected {
            path: "/s/j/images".into(),
            is: "a symbolic link".into(),
            want: "a folder",
        };
        let error = rekindle_store::Error::Read { path: "/s/j/images".into(), source: link.into() };
        let error = anyhow::Error::from(error).context("listing");
        assert_eq!(of_error(&error, false), Exit::Config);
        let told = format!("{error:#}");
        assert!(told.ends_with("/s/j/images is a symbolic link, and should be a folder"), "{told}");
        assert!(told.contains("remove it") && told.contains("rekindle repair"), "{told}");
    }

    #[test]
    fn what_has_another_owner_is_told_once_with_what_to_do() {
        let there = || {
            IoError::from(Unexpected {
                path: "/s/j/job.json".into(),
                is: "the property of user 1234".into(),
                want: "root's",
            })
        };
        let of_store = rekindle_store::Error::Read { path: "/s/j/job.json".into(), source: there() };
        for error in [of_store.into(), anyhow::Error::from(there()).context("cannot read")] {
            let said = rekindle_base::chain(error.as_ref()) + &hint(error.as_ref());
            assert_eq!(said.matches("`chown root /s/j/job.json`").count(), 1, "{said}");
            assert!(!said.contains("emove it"), "{said}");
        }
    }

    #[test]
    fn a_work_folder_that_cannot_be_used_is_a_matter_of_the_configuration() {
        use rekindle_engine::launch::work::Error;
        let (path, why) = (std::path::PathBuf::from("/base"), "is in /base, which others can write".to_owned());
        let of = |error: Error| of_error(&anyhow::Error::from(error).context("starting"), false);
        assert_eq!(of(Error::NotRoots { path: path.clone(), why }), Exit::Config);
        assert_eq!(of(Error::Foreign(path.clone())), Exit::Config);
        assert_eq!(of(Error::InUse { path: path.clone(), owner: "job j".into() }), Exit::Missing);
        let source = ErrorKind::NotFound.into();
        assert_eq!(of(Error::Io { what: "open", path, source }), Exit::Internal);
    }
}
