//! The user that a job runs as.

use nix::unistd::{Gid, User};

use rekindle_criu::FileRights;

/// A user, its group and all its other groups.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub(crate) gid: u32,
    /// Supplementary group ids.
    pub(crate) groups: Vec<u32>,
    /// The home directory, for HOME.
    pub home: std::path::PathBuf,
    /// The name, for USER and LOGNAME.
    pub name: String,
}

impl Identity {
    /// The rights over files, which CRIU gets too; `None` if the job is root.
    #[must_use]
    pub fn file_rights(&self) -> Option<FileRights<'_>> {
        (self.uid != 0).then_some(FileRights { uid: self.uid, gid: self.gid, groups: &self.groups })
    }
}

/// Why there is no such user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user database does not know it.
    #[error("job.user = {0:?}: no such user on this machine")]
    Unknown(String),
    /// The user database cannot be read.
    #[error("cannot look up user {name:?}")]
    Lookup {
        /// The name.
        name: String,
        /// The C library's answer.
        #[source]
        source: nix::Error,
    },
}

/// Looks a user up by name or number, with all groups.
///
/// # Errors
/// When there is no such user.
pub fn lookup(name: &str) -> Result<Identity, Error> {
    let failed = |source| Error::Lookup { name: name.into(), source };
    let by_name = User::from_name(name).map_err(failed)?;
    let user = match (by_name, name.parse::<u32>()) {
        (Some(user), _) => Some(user),
        (None, Ok(uid)) => User::from_uid(uid.into()).map_err(failed)?,
        (None, Err(_)) => None,
    };
    let user = user.ok_or_else(|| Error::Unknown(name.into()))?;
    let c_name = std::ffi::CString::new(user.name.as_str()).map_err(|_| Error::Unknown(name.into()))?;
    let groups = nix::unistd::getgrouplist(&c_name, user.gid).map_err(failed)?;
    Ok(Identity {
        uid: user.uid.as_raw(),
        gid: user.gid.as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
        home: user.dir,
        name: user.name,
    })
}

/// The name of a user for messages, or its number if the user database does not know it.
pub(crate) fn name_of(uid: u32) -> String {
    let user = User::from_uid(uid.into()).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_name_and_number() {
        let root = lookup("root").unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert_eq!(lookup("0").unwrap(), root);
        assert!(lookup("nobody").unwrap().uid > 0);
        assert!(matches!(lookup("no such user"), Err(Error::Unknown(_))));
    }
}
