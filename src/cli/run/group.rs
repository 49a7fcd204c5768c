//! What a member of a group needs: its rank, the coordinator, its address, and the settings of the protocol.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::time::Duration;

use super::variable;
use crate::cli::Misuse;
use crate::config::{self, Config, Group, GroupNetwork, Interval, SizeLimit};
use crate::group::{
    AddressFile, Coordinator, Identity, KnownNames, Layout, Node, OwnEtcd, Underlay, own_address, wait_for_address,
};
use crate::policy;
use crate::scheduler::Scheduler;
use crate::supervisor::GroupMember;
use crate::variables;
use rekindle_base::interval::FIRST;
use rekindle_criu::Criu;
use rekindle_engine::launch::group::{DEVICE, Subnet, largest_packet};
use rekindle_engine::launch::work::WorkFolder;
use rekindle_engine::launch::{JobSpec, host, identity};
use rekindle_group::{ColdStart, Limits, Options, Rank, Restart};
use rekindle_store::{JobFolder, JobName};

/// A member ends its job when this part of the lease is left.
const FENCE_PART: u32 = 3;
/// What a step may take beyond the time limits that the member itself keeps.
const SLACK: Duration = Duration::from_secs(30);
/// Until the last part of a stop is stored.
const STORE: Duration = Duration::from_secs(3600);

/// The member of a group that this run is, before its folder is opened.
pub(super) struct Place {
    name: JobName,
    rank: Rank,
}

impl Place {
    /// None if the job runs on this machine only.
    pub(super) fn of(config: &Config, group: Option<JobName>, scheduler: &Scheduler) -> anyhow::Result<Option<Place>> {
        if !config.group.is_on() {
            return Ok(None);
        }
        let Some(name) = group else {
            let text = "a group needs a name that is the same on all machines: use --name, or set job.name";
            return Err(Misuse(text.into()).into());
        };
        let Some(rank) = config.group.node_rank.or_else(|| scheduler.node_rank()) else {
            let text =
                "the number of this machine in the group is not known: use --node-rank, from 0 (group.node-rank)";
            return Err(Misuse(text.into()).into());
        };
        if rank >= config.group.nodes {
            let text = format!("--node-rank {rank}: must be below the number of machines, {}", config.group.nodes);
            return Err(Misuse(text).into());
        }
        Ok(Some(Place { name, rank: Rank(rank) }))
    }

    /// The name of this member's job in its store: the store may be shared by all members.
    pub(super) fn job(&self) -> anyhow::Result<JobName> {
        Ok(format!("{}.{}", self.name, self.rank.0).parse()?)
    }

    /// The lineage of all images of the group: any member may restore a part that another machine has taken.
    pub(super) fn lineage(&self) -> String {
        format!("group-{}", self.name)
    }

    /// Keeps all images, because the group decides which are removed. Returns how many the group keeps.
    pub(super) fn keep_all(config: &mut Config) -> usize {
        let keep = usize::try_from(config.store.keep_last).unwrap_or(usize::MAX);
        config.store.keep_last = u32::MAX;
        config.store.max_total_size = SizeLimit::Unlimited;
        keep.max(1)
    }

    /// Tells the job its place, and NCCL and gloo the network, unless the user has said something else.
    pub(super) fn tell_job(&self, config: &Config, spec: &mut JobSpec) {
        let subnet = config.group.subnet.0;
        let ours = [
            (variables::GROUP_SIZE, config.group.nodes.to_string()),
            (variables::GROUP_RANK, self.rank.0.to_string()),
            (variables::GROUP_OWN, subnet.address(self.rank.0).to_string()),
            (variables::GROUP_FIRST, subnet.address(0).to_string()),
        ];
        for (name, value) in ours {
            spec.environment.insert(name.into(), value.into());
        }
        let mut unsaid = Vec::new();
        for (name, value) in [("NCCL_SOCKET_IFNAME", DEVICE), ("GLOO_SOCKET_IFNAME", DEVICE), ("NCCL_IB_DISABLE", "1")]
        {
            spec.environment.entry(name.into()).or_insert_with(|| {
                unsaid.push(format!("{name}={value}"));
                value.into()
            });
        }
        if !unsaid.is_empty() {
            tracing::info!(
                "{} for the job: it is connected by the group's network, whose connections are part of its images; \
                InfiniBand is not used",
                unsaid.join(" ")
            );
        }
    }

    /// The file with the address of the etcd of rank 0: in its folder, in the store that all share.
    fn address_file(&self, folder: &JobFolder) -> anyhow::Result<AddressFile> {
        let of_first = Place { name: self.name.clone(), rank: Rank(0) }.job()?;
        let of_first = folder.dir().with_file_name(of_first.as_str());
        Ok(AddressFile::InStore(of_first.join("coordinator.json")))
    }

    /// Starts the group's etcd if this is rank 0, else waits for its address.
    fn local(
        &self,
        of: &Group,
        folder: &JobFolder,
        file: AddressFile,
    ) -> anyhow::Result<(Coordinator, IpAddr, Option<OwnEtcd>)> {
        if self.rank != Rank(0) {
            let endpoints = wait_for_address(&file, of.wait)?;
            let address = address(of, &endpoints)?;
            return Ok((Coordinator::File(file, of.wait), address, None));
        }
        let address = of.address.map_or_else(own_address, Ok)?;
        let own = OwnEtcd::start(folder.dir().join("etcd"), file, address)?;
        Ok((Coordinator::Own(own.options(), of.wait), address, Some(own)))
    }

    /// The member.
    pub(super) fn member(
        self,
        config: &Config,
        folder: &JobFolder,
        work: &WorkFolder,
        criu: &Criu,
        keep: usize,
        (is_fresh, uses_replica): (bool, bool),
    ) -> anyhow::Result<GroupMember> {
        let of = &config.group;
        let (coordinator, address, own) = match &of.coordinator {
            config::Coordinator::Members(members) => {
                let address = address(of, members)?;
                (Coordinator::Given(of.etcd(members)), address, None)
            }
            config::Coordinator::Local(file) => {
                let file =
                    file.clone().map_or_else(|| self.address_file(folder), |file| Ok(AddressFile::Given(file)))?;
                self.local(of, folder, file)?
            }
        };
        let subnet: Subnet = of.subnet.0;
        // Before anything is started: the network could not be made.
        let packet = match &of.network {
            GroupNetwork::Vxlan(_) => Some(largest_packet(address)?),
            GroupNetwork::Bridge(_) => None,
        };
        let user = config.job.user.as_deref().map(identity::lookup).transpose()?;
        let node = Node {
            host: host::describe().name,
            address,
            rekindle: env!("CARGO_PKG_VERSION").into(),
            criu: criu.version.to_string(),
            driver: rekindle_cuda::nvml::GpuInventory::of_kernel_module().driver,
            size: of.nodes,
            subnet: subnet.to_string(),
            lease_s: of.lease.as_secs(),
            network: of.network.to_string(),
            packet,
            user: user.map_or(0, |user| user.uid),
        };
        let layout = Layout {
            group: self.name.clone(),
            rank: self.rank,
            size: of.nodes,
            subnet,
            underlay: match &of.network {
                GroupNetwork::Vxlan(port) => Underlay::Vxlan(*port),
                GroupNetwork::Bridge(name) => Underlay::Bridge(name.clone()),
            },
            address,
            directory: work.bin(),
            known: KnownNames { host: host::describe().name, nodes: Scheduler::node_names(&variable) },
        };
        let options = Options { leases_end_early: leases_end_early(&coordinator), ..options(config, self.rank, keep) };
        let identity = Identity { group: self.name, rank: self.rank, node, lease: of.lease, former: None };
        Ok(GroupMember { coordinator, own, identity, options, layout, is_fresh, uses_replica })
    }
}

/// Whether the coordinator may end a lease too early. What is unknown may be so: then the others wait longer after a
/// machine is lost.
fn leases_end_early(coordinator: &Coordinator) -> bool {
    let Coordinator::Given(options) = coordinator else {
        // It has one member.
        return false;
    };
    let answer = rekindle_etcd::may_end_leases_early(options);
    match &answer {
        Ok(false) => {}
        Ok(true) => tracing::info!(
            "etcd before 3.4.31 and 3.5.13 may end leases too early (etcd#15247): after a machine is lost, the others \
            wait for the time of a lease (group.lease) longer"
        ),
        Err(error) => tracing::debug!("it is unknown whether etcd may end leases too early: {error}"),
    }
    answer.unwrap_or(true)
}

/// The settings of the protocol. All members must have the same.
fn options(config: &Config, rank: Rank, keep: usize) -> Options {
    let (snapshot, restart) = (&config.snapshot, &config.restart);
    Options {
        rank,
        size: config.group.nodes,
        limits: Limits {
            wait: config.group.wait,
            start: restart.restore_timeout + SLACK,
            prepare: snapshot.lock_timeout() + snapshot.stop_limit() + SLACK,
            dump: snapshot.freeze_limit + SLACK,
            store: STORE,
        },
        interval: match snapshot.interval {
            Interval::Every(interval) => Some(interval),
            // It is chosen from what all members report.
            Interval::Auto => Some(FIRST),
            Interval::Off => None,
        },
        retry_after: snapshot.retry_after,
        retry_max: snapshot.longest_retry(),
        restart: Restart {
            min_uptime: restart.min_uptime,
            backoff: restart.backoff,
            max_backoff: restart.longest_backoff(),
            max_restarts: restart.max_restarts,
            window: policy::WINDOW,
            healthy_uptime: policy::HEALTHY_UPTIME,
            early_deaths: policy::EARLY_DEATHS,
            cold_start: match restart.cold_start {
                config::ColdStart::NoImages => ColdStart::NoImages,
                config::ColdStart::Allow => ColdStart::Allow,
                config::ColdStart::Never => ColdStart::Never,
            },
        },
        keep,
        replicates: config.replica.url.is_some(),
        lease: config.group.lease,
        fence: config.group.lease / FENCE_PART,
        // What is certain if nobody was asked.
        leases_end_early: true,
    }
}

/// The coordinator's address cannot be used to find out this machine's.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot find the address at which the other machines reach this one: {coordinator} is not reached ({source}). Set \
    group.address"
)]
pub(crate) struct NoAddress {
    coordinator: String,
    source: std::io::Error,
}

/// This machine's address for the others, if the coordinator is at this address.
fn address(of: &Group, coordinator: &[String]) -> anyhow::Result<IpAddr> {
    if let Some(address) = of.address {
        return Ok(address);
    }
    let address = address_towards(coordinator)?;
    // The coordinator is on this machine, or its name leads to this machine here: Debian has 127.0.1.1 for it in /etc/hosts.
    // All machines of a bridge are this one.
    let is_ours_alone = address.is_loopback() || address.is_unspecified();
    match of.network {
        GroupNetwork::Vxlan(_) if is_ours_alone => Ok(own_address()?),
        GroupNetwork::Vxlan(_) | GroupNetwork::Bridge(_) => Ok(address),
    }
}

/// The address from which this machine reaches the coordinator. No packet is sent for that.
fn address_towards(coordinator: &[String]) -> anyhow::Result<IpAddr> {
    let coordinator = coordinator.first().cloned().unwrap_or_default();
    let place = coordinator.split_once("://").map_or(coordinator.as_str(), |(_, place)| place).trim_end_matches('/');
    let look = || {
        let to = place.to_socket_addrs()?.next().ok_or(std::io::ErrorKind::NotFound)?;
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        Ok(socket.local_addr()?.ip())
    };
    look().map_err(|source| NoAddress { coordinator: coordinator.clone(), source }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coordinator_on_this_machine_does_not_make_the_address_one_that_only_this_machine_has() {
        let coordinator = ["http://127.0.0.1:2379".to_owned()];
        assert!(address_towards(&coordinator).unwrap().is_loopback());
        let mut of = Group { network: GroupNetwork::default(), ..Group::default() };
        match address(&of, &coordinator) {
            Ok(address) => assert!(!address.is_loopback() && !address.is_unspecified(), "{address}"),
            Err(error) => assert!(error.to_string().contains("Set group.address"), "{error}"),
        }
        of.network = GroupNetwork::Bridge("br0".into());
        assert!(address(&of, &coordinator).unwrap().is_loopback(), "all are here");
        of.address = Some([192, 0, 2, 7].into());
        assert_eq!(address(&of, &coordinator).unwrap(), IpAddr::from([192, 0, 2, 7]));
    }
}
