//! `[group]`: a job over several machines.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::value::{Malformed, duration};
use rekindle_engine::launch::group::{self as network, VXLAN_PORT};

/// `[group]`: a job over several machines. It is one if `nodes` is not 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Group {
    /// Number of machines; 0: the job runs on this machine only.
    pub(crate) nodes: u32,
    /// The number of this machine in the group, from 0; unset means the scheduler's.
    pub(crate) node_rank: Option<u32>,
    /// Where etcd is.
    pub(crate) coordinator: Coordinator,
    /// A file with the certificates of the authorities of etcd's certificate; unset means those of the system.
    pub(crate) ca: Option<PathBuf>,
    /// A file with the certificate that rekindle shows to etcd.
    pub(crate) certificate: Option<PathBuf>,
    /// A file with its key.
    pub(crate) key: Option<PathBuf>,
    /// The user of etcd.
    pub(crate) user: Option<String>,
    /// A file with the user's password.
    pub(crate) password_file: Option<PathBuf>,
    /// How the machines are joined.
    pub(crate) network: GroupNetwork,
    /// The addresses of the job's network.
    pub(crate) subnet: Subnet,
    /// The address of this machine, to which the others send; unset means the one that reaches the coordinator.
    pub(crate) address: Option<IpAddr>,
    /// How long this machine counts as a member after its last sign of life; whole seconds.
    #[serde(with = "duration")]
    pub(crate) lease: Duration,
    /// How long to wait for machines that are missing.
    #[serde(with = "duration")]
    pub(crate) wait: Duration,
}

impl Default for Group {
    fn default() -> Group {
        Group {
            nodes: 0,
            node_rank: None,
            coordinator: Coordinator::default(),
            ca: None,
            certificate: None,
            key: None,
            user: None,
            password_file: None,
            network: GroupNetwork::default(),
            subnet: Subnet::default(),
            address: None,
            lease: Duration::from_secs(30),
            wait: Duration::from_secs(600),
        }
    }
}

impl Group {
    /// Whether the job is one over several machines.
    #[must_use]
    pub(crate) fn is_on(&self) -> bool {
        self.nodes > 0
    }
}

/// `group.coordinator`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Words", into = "Words")]
pub(crate) enum Coordinator {
    /// The addresses of the members of an etcd.
    Members(Vec<String>),
    /// An etcd that rank 0 starts. The machines share a file with its address and the keys to it; unset means one in
    /// the store.
    Local(Option<PathBuf>),
}

impl Default for Coordinator {
    fn default() -> Coordinator {
        Coordinator::Members(Vec::new())
    }
}

/// One word, or a list of them.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Words {
    One(String),
    Many(Vec<String>),
}

impl TryFrom<Words> for Coordinator {
    type Error = Malformed;

    fn try_from(words: Words) -> Result<Coordinator, Malformed> {
        let words = match words {
            Words::One(word) => vec![word],
            Words::Many(words) => words,
        };
        let local = |word: &String| match word.strip_prefix("local") {
            Some("") => Some(Ok(None)),
            Some(rest) => rest.strip_prefix(':').map(|file| match file.starts_with('/') && !file.ends_with('/') {
                true => Ok(Some(PathBuf::from(file))),
                false => Err(Malformed),
            }),
            None => None,
        };
        match words.iter().find_map(local) {
            Some(file) if words.len() == 1 => Ok(Coordinator::Local(file?)),
            Some(_) => Err(Malformed),
            None => Ok(Coordinator::Members(words)),
        }
    }
}

impl From<Coordinator> for Words {
    fn from(coordinator: Coordinator) -> Words {
        match coordinator {
            Coordinator::Members(members) => Words::Many(members),
            Coordinator::Local(None) => Words::One("local".into()),
            Coordinator::Local(Some(file)) => Words::One(format!("local:{}", file.display())),
        }
    }
}

/// `group.network`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum GroupNetwork {
    /// VXLAN over the network of the machines, to this UDP port.
    Vxlan(u16),
    /// A bridge of this machine, for members that are all on it.
    Bridge(String),
}

impl Default for GroupNetwork {
    fn default() -> GroupNetwork {
        GroupNetwork::Vxlan(VXLAN_PORT)
    }
}

impl FromStr for GroupNetwork {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<GroupNetwork, Malformed> {
        // Names of network devices have at most 15 bytes (IFNAMSIZ).
        let is_name = |name: &&str| (1..=15).contains(&name.len()) && !name.contains(['/', ' ', ':', '\0']);
        match text.split_once(':') {
            None if text == "vxlan" => Ok(GroupNetwork::default()),
            Some(("vxlan", port)) => {
                port.parse().ok().filter(|port| *port != 0).map(GroupNetwork::Vxlan).ok_or(Malformed)
            }
            Some(("bridge", name)) if is_name(&name) => Ok(GroupNetwork::Bridge(name.to_owned())),
            _ => Err(Malformed),
        }
    }
}

impl fmt::Display for GroupNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupNetwork::Vxlan(VXLAN_PORT) => f.write_str("vxlan"),
            GroupNetwork::Vxlan(port) => write!(f, "vxlan:{port}"),
            GroupNetwork::Bridge(name) => write!(f, "bridge:{name}"),
        }
    }
}

/// `group.subnet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Subnet(pub(crate) network::Subnet);

impl FromStr for Subnet {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Subnet, Malformed> {
        text.parse().map(Subnet).map_err(|_| Malformed)
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = Malformed;

            fn try_from(text: String) -> Result<$name, Malformed> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }
    )*};
}

text!(GroupNetwork, Subnet);
