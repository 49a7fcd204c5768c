//! Exit codes, documented for scripts and schedulers in docs/commands.md.

use std::process::ExitCode;

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
    /// Stopped with a new image, to be queued again: the code that the scheduler expects, EX_TEMPFAIL without one.
    Requeue(u8),
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
            Exit::Job(code) | Exit::Requeue(code) => code,
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

/// What to add to an error: a user has no right to the store, and root has.
pub(crate) fn forgotten_sudo(error: &anyhow::Error) -> &'static str {
    match error.chain().any(is_refused) {
        true => ". Use sudo if the job was started with it",
        false => "",
    }
}

/// Whether the kernel refuses the store to this user.
fn is_refused(cause: &(dyn std::error::Error + 'static)) -> bool {
    use rekindle_store::Error as E;
    let source = match cause.downcast_ref::<E>() {
        Some(
            E::Read { source, .. }
            | E::CreateStore { source, .. }
            | E::Create { source, .. }
            | E::Write { source, .. }
            | E::Lock { source, .. }
            | E::Remove { source, .. },
        ) => source,
        _ => return false,
    };
    source.kind() == std::io::ErrorKind::PermissionDenied && !nix::unistd::geteuid().is_root()
}

/// The exit code for an error. A store that cannot be one is the mistake of who named it: `--store`, or the
/// configuration.
pub(crate) fn of_error(error: &anyhow::Error, is_store_typed: bool) -> Exit {
    use crate::{config, control};
    use rekindle_engine::{launch, restore};
    use rekindle_store as store;
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
        {
            return Exit::Config;
        }
        if cause.is::<rekindle_criu::FindError>()
            || cause.is::<launch::uplink::Missing>()
            || cause.is::<super::run::NoRights>()
            || cause.is::<super::replica::Unknown>()
            || cause.is::<super::replica::NotBrought>()
            || cause.is::<super::AnothersJob>()
        {
            return Exit::Missing;
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
