//! The record: plain data, in which pids and ids of threads are those that the job sees.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The values of the items of one object, by the name that an item has in [`crate::table`].
pub type Items = BTreeMap<String, String>;

/// What the kernel had of a job at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    /// The kernel, as `uname -r` prints it.
    pub kernel: String,
    /// The version of CRIU.
    pub criu: String,
    /// The processes, by pid.
    pub processes: Vec<Process>,
    /// The names of each file that is mapped and has several: CRIU gives it one of them in all processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<BTreeSet<String>>,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Process {
    /// Its pid.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// What its threads have together.
    pub items: Items,
    /// Its threads, by id.
    pub threads: Vec<Thread>,
    /// Its descriptors, by number.
    pub descriptors: Vec<Descriptor>,
    /// Its memory, by address. Neighbours that differ in nothing are one.
    pub mappings: Vec<Mapping>,
}

/// A thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Thread {
    /// Its id.
    pub tid: i32,
    /// What it has of its own.
    pub items: Items,
}

/// An open descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Descriptor {
    /// Its number.
    pub number: i32,
    /// What it is, and what that has.
    pub items: Items,
}

/// A range of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Mapping {
    /// The first address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// Protection, and whether it is shared: `rw-p`.
    pub access: String,
    /// The offset in its file.
    pub offset: u64,
    /// The file, or what the kernel calls it.
    pub name: String,
    /// Which of [`Record::names`] are those of the file, if it has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<usize>,
}

impl Record {
    /// The kinds of objects in it: what a restore of another job need not have shown. Each is a few words.
    #[must_use]
    pub fn kinds(&self) -> BTreeSet<String> {
        let mut kinds = BTreeSet::new();
        for process in &self.processes {
            let of_process = ["timers", "terminal"].into_iter().filter(|item| process.items.contains_key(*item));
            kinds.extend(of_process.map(ToOwned::to_owned));
            kinds.extend(process.mappings.iter().filter_map(Mapping::kind));
            kinds.extend(process.descriptors.iter().filter_map(|descriptor| {
                let part = |item: &str| descriptor.items.get(item).map(String::as_str);
                let parts = ["kind", "family", "type", "protocol", "state"].into_iter().filter_map(part);
                Some(parts.collect::<Vec<_>>().join(" ")).filter(|kind| !kind.is_empty())
            }));
            let policies = process.threads.iter().filter_map(|thread| thread.items.get("scheduling"));
            kinds.extend(
                policies
                    .filter(|policy| !policy.starts_with("other"))
                    .map(|policy| format!("scheduling {}", policy.split_whitespace().next().unwrap_or_default())),
            );
        }
        kinds
    }
}

/// The mark of what is not in an image on purpose, as an item or the name of a mapping: something else is in its place.
pub(crate) const LEFT_OUT: &str = "left-out";
/// Marks a connection that the image has closed on purpose.
pub(crate) const CLOSED_IN_IMAGE: &str = "closed-in-image";

impl Descriptor {
    /// It is not in the image: only that something is there is compared.
    pub fn leave_out(&mut self) {
        self.items = Items::from([(LEFT_OUT.to_owned(), "yes".to_owned())]);
    }

    /// Notes that the image closes this connection of TCP, unless it has it: `has` gets the addresses of its two ends.
    pub fn is_closed_unless(&mut self, has: impl Fn(SocketAddr, SocketAddr) -> bool) {
        let item = |name: &str| self.items.get(name).map(String::as_str);
        let end = |name: &str| {
            let address: SocketAddr = item(name)?.parse().ok()?;
            Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
        };
        let is_connection = item("protocol") == Some("6") && item("state") == Some("connected");
        let is_kept = end("address").zip(end("peer")).is_some_and(|(local, remote)| has(local, remote));
        if is_connection && !is_kept {
            self.items.insert(CLOSED_IN_IMAGE.to_owned(), "yes".to_owned());
        }
    }
}

impl Mapping {
    /// It is not in the image: what is there is not compared.
    pub fn leave_out(&mut self) {
        LEFT_OUT.clone_into(&mut self.name);
    }

    fn kind(&self) -> Option<String> {
        let name = self.name.split('/').nth(1).filter(|_| self.name.ends_with("(deleted)"));
        match name {
            // memfd:NAME, SYSV0000, dev/zero: the name of a file says nothing about its kind.
            Some(name) if name.starts_with("memfd:") => Some("mapped memfd".into()),
            Some(name) if name.starts_with("SYSV") => Some("mapped System V memory".into()),
            Some("dev") => Some("shared memory without a name".into()),
            Some(_) => Some("mapped deleted file".into()),
            None if self.name.starts_with('/') && self.access.ends_with('s') => Some("shared mapping of a file".into()),
            None => None,
        }
    }
}
