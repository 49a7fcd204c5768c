//! Where the coordinator is: an etcd that others run, one that this supervisor runs (rank 0 of a group without
//! another), or the one of rank 0, which a file names.
//!
//! Rank 0 keeps the data and the keys of its etcd in its job's folder. So a supervisor that is started again, or that
//! takes the place with the same store, continues with the same data. With another store its etcd is a new one: the
//! members tell it which parts of group images they have, and so it learns what the old one knew.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rekindle_etcd::{Client, Error, Handout, Local, LocalOptions, Options};
use rekindle_group::Plan;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable::Place;
use rekindle_store::JobName;

use super::keys::{self, Mirror};

/// The program.
const ETCD: &str = "etcd";
/// Time limit for the first answer of an etcd of our own.
const START: Duration = Duration::from_secs(30);
/// How often the others are looked for at the end of the run, or a file that is not there yet.
const LOOK: Duration = Duration::from_millis(200);

/// Where the coordinator is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Coordinator {
    /// An etcd that others run. It is waited for without a limit.
    Given(Options),
    /// The etcd of this supervisor, and how long to wait for it.
    Own(Options, Duration),
    /// The etcd of rank 0, whose address and keys are in this file, and how long to wait for it.
    File(AddressFile, Duration),
}

/// The file in which rank 0 writes the address of its etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressFile {
    /// In the store that all share.
    InStore(Beneath),
    /// Where the configuration says.
    Given(PathBuf),
}

impl Place for AddressFile {
    fn place(&self) -> io::Result<Cow<'_, Beneath>> {
        match self {
            AddressFile::InStore(place) => place.place(),
            AddressFile::Given(path) => path.place(),
        }
    }
}

impl AsRef<Path> for AddressFile {
    fn as_ref(&self) -> &Path {
        match self {
            AddressFile::InStore(place) => place.path(),
            AddressFile::Given(path) => path,
        }
    }
}

impl AddressFile {
    fn display(&self) -> std::path::Display<'_> {
        self.as_ref().display()
    }
}

impl Coordinator {
    /// How to reach it now.
    ///
    /// # Errors
    /// If the file is not there, or cannot be used.
    pub(super) fn options(&self) -> Result<Options, Error> {
        match self {
            Coordinator::Given(options) | Coordinator::Own(options, _) => Ok(options.clone()),
            Coordinator::File(path, _) => Ok(read(path)?.options("/")),
        }
    }

    /// Whether another try to connect or to join may succeed. The address in a file may be that of an earlier run, where
    /// something else listens now: rank 0 replaces the file. A lease may be over before its first key is written, and the next
    /// try gets another one.
    pub(super) fn may_pass(&self, error: &Error) -> bool {
        let passes = error.may_pass() || error.lease_is_gone();
        passes || matches!(self, Coordinator::File(..)) && !matches!(error, Error::Local(_))
    }

    /// Whether it is another one than the one with these options.
    pub(super) fn has_moved(&self, options: &Options) -> bool {
        let Coordinator::File(..) = self else { return false };
        self.options().is_ok_and(|now| now.endpoints != options.endpoints || now.ca != options.ca)
    }

    /// The plan of a group, for a machine that is no member of it. None also if the coordinator does not answer.
    pub(crate) fn plan(&self, group: &JobName) -> Option<Plan> {
        let prefix = keys::prefix(group);
        let client = Client::connect(&Options { prefix: prefix.clone(), ..self.options().ok()? }).ok()?;
        let mut mirror = Mirror::new(&prefix);
        mirror.set(client.get(&prefix).ok()?).ok()?;
        mirror.view.plan.map(|plan| plan.value.clone())
    }

    /// How long to wait for it.
    pub(super) fn patience(&self) -> Option<Duration> {
        match self {
            Coordinator::Given(_) => None,
            Coordinator::Own(_, limit) | Coordinator::File(_, limit) => Some(*limit),
        }
    }
}

fn read(path: &AddressFile) -> Result<Handout, Error> {
    Handout::read(path)?.ok_or_else(|| Error::Unreachable {
        tried: format!("there is no file {} with its address", path.display()),
        help: "Start rank 0. If it runs, its store is not the one of this machine: name a file that all machines see, \
               --coordinator local:FILE, or the addresses of an etcd",
    })
}

/// The file of rank 0 did not appear in time.
#[derive(Debug, thiserror::Error)]
#[error("rank 0 of the group did not start in time: {0}")]
pub(crate) struct NoFirst(Error);

/// Waits for the address of the etcd of rank 0. It may be one of an earlier run.
///
/// # Errors
/// If there is no file after the time limit, or it cannot be used.
pub(crate) fn wait_for_address(path: &AddressFile, limit: Duration) -> anyhow::Result<Vec<String>> {
    let (end, mut is_said) = (Instant::now() + limit, false);
    loop {
        match read(path) {
            Ok(handout) => return Ok(handout.endpoints),
            Err(error) if error.may_pass() && Instant::now() >= end => return Err(NoFirst(error).into()),
            Err(error) if error.may_pass() => {
                if !std::mem::replace(&mut is_said, true) {
                    tracing::info!("waiting for rank 0, which writes the address of its etcd to {}", path.display());
                }
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The etcd of this supervisor. It ends when this is dropped, and with this process.
pub struct OwnEtcd {
    local: Local,
    file: AddressFile,
}

impl fmt::Debug for OwnEtcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnEtcd").field("file", &self.file).finish_non_exhaustive()
    }
}

impl OwnEtcd {
    /// Starts it with its data in `folder`, and writes the file for the others.
    ///
    /// # Errors
    /// If it is not installed, does not start, or the file cannot be written.
    pub(crate) fn start(folder: Beneath, file: AddressFile, address: IpAddr) -> Result<OwnEtcd, Error> {
        let options = LocalOptions {
            program: ETCD.into(),
            folder,
            // Any free port; the same one as before if it is free.
            listen: SocketAddr::new(address, 0),
            host: address.to_string(),
            start_timeout: START,
        };
        let local = Local::start(&options)?;
        local.handout().write(&file)?;
        tracing::info!(
            "the group's etcd runs at {}; the other machines find its address in {}",
            local.handout().endpoints.concat(),
            file.display()
        );
        Ok(OwnEtcd { local, file })
    }

    /// How to reach it.
    #[must_use]
    pub(crate) fn options(&self) -> Options {
        self.local.handout().options("/")
    }

    /// Waits until the others have left, so that they learn of the end of the run; gives up after `limit`, or when
    /// `hurries` says so. Then removes the file: nobody may wait for this etcd.
    pub(crate) fn see_off(&self, group: &JobName, limit: Duration, mut hurries: impl FnMut() -> bool) {
        let prefix = keys::prefix(group);
        let members = format!("{prefix}members/");
        let end = Instant::now() + limit;
        let Ok(client) = Client::connect(&Options { prefix, ..self.options() }) else { return };
        let mut is_said = false;
        while client.get(&members).is_ok_and(|state| !state.entries.is_empty()) {
            if Instant::now() >= end || hurries() {
                tracing::warn!("other machines have not left the group, and their etcd ends now");
                break;
            }
            if !std::mem::replace(&mut is_said, true) {
                tracing::info!("waiting for the other machines to leave the group: its etcd runs here");
            }
            std::thread::sleep(LOOK);
        }
        if let Err(error) = self.file.place().and_then(|file| file.remove_file()) {
            tracing::debug!("cannot remove {}: {error}", self.file.display());
        }
    }
}

/// This machine has no address, or several, and it is not clear which one the others reach.
#[derive(Debug, thiserror::Error)]
#[error("cannot find the address at which the other machines reach this one ({0}). Set group.address")]
pub(crate) struct NoOwnAddress(String);

/// The address of this machine for the others: that of the default route, or the only one.
///
/// # Errors
/// If there is none, or several.
pub(crate) fn own_address() -> Result<IpAddr, NoOwnAddress> {
    if let Some(address) = towards_all() {
        return Ok(address);
    }
    let failed = |error: &dyn fmt::Display| NoOwnAddress(error.to_string());
    let all = nix::ifaddrs::getifaddrs().map_err(|error| failed(&error))?;
    let of_v4 = |it: nix::ifaddrs::InterfaceAddress| Some(it.address?.as_sockaddr_in()?.ip());
    let usable = |ip: &Ipv4Addr| !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified();
    let found: Vec<Ipv4Addr> = all.filter_map(of_v4).filter(usable).collect();
    match found[..] {
        [address] => Ok(address.into()),
        [] => Err(failed(&"it has none")),
        _ => Err(failed(&found.iter().map(Ipv4Addr::to_string).collect::<Vec<_>>().join(", "))),
    }
}

/// The address of the default route. No packet is sent: the destination is one that nobody has (RFC 5737).
fn towards_all() -> Option<IpAddr> {
    let look = || -> io::Result<IpAddr> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect("192.0.2.1:9")?;
        Ok(socket.local_addr()?.ip())
    };
    look().ok().filter(|address| !address.is_loopback() && !address.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_not_there_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = AddressFile::Given(folder.path().join("coordinator.json"));
        let error = wait_for_address(&file, Duration::ZERO).unwrap_err().to_string();
        for part in ["rank 0", "coordinator.json", "local:FILE"] {
            assert!(error.contains(part), "{error}");
        }
        // It may appear, and the one of an earlier run may lead to something else.
        let coordinator = Coordinator::File(file, Duration::ZERO);
        assert!(coordinator.may_pass(&coordinator.options().unwrap_err()));
        let wrong = Error::OtherCluster { endpoint: String::new(), found: 1, expected: 2 };
        assert!(coordinator.may_pass(&wrong));
        assert!(!Coordinator::Given(Options::new(["http://h:1"], "/")).may_pass(&wrong));
    }

    #[test]
    fn a_lease_that_is_over_at_once_is_asked_for_again() {
        let coordinator = Coordinator::Given(Options::new(["http://h:1"], "/"));
        assert!(coordinator.may_pass(&Error::LeaseGone));
        assert!(!Error::LeaseGone.may_pass(), "a write of that lease is in vain");
    }

    #[test]
    fn a_file_that_others_can_write_is_refused_at_once() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("coordinator.json");
        std::fs::write(&file, "{}").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = wait_for_address(&AddressFile::Given(file), Duration::from_secs(60)).unwrap_err().to_string();
        assert!(error.contains("mode 666"), "{error}");
    }
}
