//! Multicast groups of sockets.
//!
//! The kernel shows the groups of a network namespace (/proc/PID/net/igmp and igmp6), but not which socket is in which. A
//! socket answers for one group (`MCAST_MSFILTER`, ip(7)). So each is asked for each group of its namespace.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rekindle_os::sockopt;

/// The groups of the network namespace that a process is in. They are read when the first socket is asked: most processes
/// have none that could be in one.
#[derive(Debug)]
pub(crate) struct Groups {
    pid: i32,
    /// The number and name of the device, and the group.
    all: OnceLock<Vec<(u32, String, IpAddr)>>,
}

impl Groups {
    pub(crate) fn of(pid: i32) -> Groups {
        Groups { pid, all: OnceLock::new() }
    }

    fn all(&self) -> &[(u32, String, IpAddr)] {
        self.all.get_or_init(|| {
            let file =
                |name: &str| std::fs::read_to_string(format!("/proc/{}/net/{name}", self.pid)).unwrap_or_default();
            of_ipv4(&file("igmp")).into_iter().chain(of_ipv6(&file("igmp6"))).collect()
        })
    }

    /// The groups that a socket is in, a line for each: `239.1.2.3 on lo`, with the senders that it listens to, or not.
    pub(crate) fn of_socket(&self, socket: &impl AsFd, is_ipv6: bool) -> Vec<String> {
        let asked = self.all().iter().filter(|(_, _, group)| group.is_ipv4() || is_ipv6);
        let mut lines: Vec<String> = asked
            .filter_map(|(index, device, group)| {
                let senders = ask(socket, *index, *group)?;
                Some(Membership { group: *group, device: device.clone(), senders }.to_string())
            })
            .collect();
        lines.sort_unstable();
        lines
    }
}

/// A line for each device, and then one for each group: the address as hexadecimal digits of a number, and who uses it.
fn of_ipv4(table: &str) -> Vec<(u32, String, IpAddr)> {
    let (mut device, mut found) = (None, Vec::new());
    for line in table.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match (line.starts_with('\t'), &words[..]) {
            (false, [index, name, ..]) => {
                device = index.parse::<u32>().ok().map(|index| (index, name.trim_end_matches(':').to_owned()));
            }
            (true, [group, users, ..]) => {
                let Some((index, name)) = &device else { continue };
                let Ok(group) = u32::from_str_radix(group, 16) else { continue };
                let group = Ipv4Addr::from(group.to_ne_bytes());
                if group != Ipv4Addr::new(224, 0, 0, 1) || *users != "1" {
                    found.push((*index, name.clone(), group.into()));
                }
            }
            _ => {}
        }
    }
    found
}

/// `1    lo              ff020000000000000000000000001234     1 00000004 0`
fn of_ipv6(table: &str) -> Vec<(u32, String, IpAddr)> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [index, name, group, users, ..] = words[..] else { return None };
        let group = Ipv6Addr::from(u128::from_str_radix(group, 16).ok()?);
        // Those that each device is in.
        let is_everybody = matches!(group.segments(), [0xff01 | 0xff02, 0, 0, 0, 0, 0, 0, 1]) && users == "1";
        (!is_everybody).then_some((index.parse().ok()?, name.to_owned(), IpAddr::V6(group)))
    };
    table.lines().filter_map(line).collect()
}

/// Whose datagrams of a group a socket gets.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Senders {
    All,
    Only(Vec<IpAddr>),
    AllBut(Vec<IpAddr>),
}

/// A group that a socket is in.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Membership {
    group: IpAddr,
    device: String,
    senders: Senders,
}

impl std::fmt::Display for Membership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.group, self.device)?;
        let (words, senders) = match &self.senders {
            Senders::All => return Ok(()),
            Senders::Only(senders) => (" from", senders),
            Senders::AllBut(senders) => (" not from", senders),
        };
        f.write_str(words)?;
        senders.iter().try_for_each(|sender| write!(f, " {sender}"))
    }
}

impl Membership {
    fn parse(line: &str) -> Option<Membership> {
        let mut words = line.split(' ');
        let group = words.next()?.parse().ok()?;
        let device = words.next().filter(|word| *word == "on").and_then(|_| words.next())?.to_owned();
        let kind = words.next();
        let is_but = kind == Some("not") && words.next() == Some("from");
        let senders = words.map(|word| word.parse().ok()).collect::<Option<Vec<IpAddr>>>()?;
        let senders = match kind {
            None => Senders::All,
            Some("from") => Senders::Only(senders),
            Some(_) if is_but => Senders::AllBut(senders),
            Some(_) => return None,
        };
        Some(Membership { group, device, senders })
    }

    /// Anybody may join a group.
    fn join(&self, socket: &impl AsFd) -> Option<()> {
        let index = sockopt::interface_index(socket, &self.device).ok()?;
        let level = level(self.group);
        let set = |name: i32, sender: Option<&IpAddr>| {
            let mut request = request(index, self.group);
            request.extend(sender.iter().flat_map(|sender| address(**sender)));
            sockopt::set(socket, level, name, &request).ok()
        };
        match &self.senders {
            Senders::All => set(JOIN_GROUP, None),
            Senders::Only(senders) => senders.iter().try_for_each(|sender| set(JOIN_SOURCE_GROUP, Some(sender))),
            Senders::AllBut(senders) => {
                set(JOIN_GROUP, None)?;
                senders.iter().try_for_each(|sender| set(BLOCK_SOURCE, Some(sender)))
            }
        }
    }
}

/// Joins the groups of `then` that are not among those of `now`.
pub(crate) fn join(socket: &impl AsFd, then: &str, now: Option<&str>) -> Option<()> {
    let is_new = |line: &&str| now.is_none_or(|now| now.lines().all(|other| other != *line));
    then.lines().filter(is_new).try_for_each(|line| Membership::parse(line)?.join(socket))
}

/// Of linux/in.h, for IPv4 and IPv6.
const JOIN_GROUP: i32 = 42;
const BLOCK_SOURCE: i32 = 43;
const JOIN_SOURCE_GROUP: i32 = 46;
const FILTER: i32 = 48;

/// The size of a struct sockaddr_storage.
const ADDRESS: usize = 128;
/// Where the mode is in a struct group_filter, behind it how many addresses there are, and then these.
const MODE: usize = 8 + ADDRESS;
const COUNT: usize = MODE + 4;
const SENDERS: usize = COUNT + 4;
/// `MCAST_INCLUDE`: only these senders.
const ONLY: u32 = 1;
/// How many senders are read. A socket may have 10 of IPv4 and 64 of IPv6, unless root allows more
/// (net.ipv4.igmp_max_msf, net.ipv6.mld_max_msf).
const MOST: u32 = 64;

fn level(group: IpAddr) -> i32 {
    if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 }
}

/// A struct group_req: the device, and the group behind four bytes of padding.
fn request(index: u32, group: IpAddr) -> Vec<u8> {
    let mut bytes = index.to_ne_bytes().to_vec();
    bytes.resize(8, 0);
    bytes.extend(address(group));
    bytes
}

/// A struct sockaddr_storage: the family, the port, and the address, before which IPv6 has four bytes of its own.
fn address(of: IpAddr) -> Vec<u8> {
    let family = |family: i32| u16::try_from(family).unwrap_or_default().to_ne_bytes();
    let mut bytes = match of {
        IpAddr::V4(of) => [&family(libc::AF_INET)[..], &[0; 2], &of.octets()].concat(),
        IpAddr::V6(of) => [&family(libc::AF_INET6)[..], &[0; 6], &of.octets()].concat(),
    };
    bytes.resize(ADDRESS, 0);
    bytes
}

fn read_address(bytes: &[u8]) -> Option<IpAddr> {
    let family = u16::from_ne_bytes(*bytes.first_chunk()?);
    match i32::from(family) {
        libc::AF_INET => Some(IpAddr::from(*bytes.get(4..)?.first_chunk::<4>()?)),
        libc::AF_INET6 => Some(IpAddr::from(*bytes.get(8..)?.first_chunk::<16>()?)),
        _ => None,
    }
}

/// Whose datagrams of a group a socket gets; `None` if it is not in the group.
fn ask(socket: &impl AsFd, index: u32, group: IpAddr) -> Option<Senders> {
    let mut filter = request(index, group);
    filter.extend(0_u32.to_ne_bytes());
    filter.extend(MOST.to_ne_bytes());
    filter.resize(SENDERS + usize::try_from(MOST).ok()? * ADDRESS, 0);
    sockopt::get(socket, level(group), FILTER, &mut filter).ok()?;
    let number = |at: usize| Some(u32::from_ne_bytes(*filter.get(at..)?.first_chunk()?));
    let count = usize::try_from(number(COUNT)?.min(MOST)).ok()?;
    let senders = filter.get(SENDERS..)?.chunks_exact(ADDRESS).take(count).filter_map(read_address);
    let mut senders: Vec<IpAddr> = senders.collect();
    senders.sort_unstable();
    Some(match number(MODE)? {
        ONLY => Senders::Only(senders),
        _ if senders.is_empty() => Senders::All,
        _ => Senders::AllBut(senders),
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_tables_of_the_kernel_are_read() {
        let table = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                     1\tlo        :     2      V3\n\t\t\t\t030201EF     1 0:00000000\t\t0\n\
                     \t\t\t\t010000E0     1 0:00000000\t\t0\n\
                     4\teth0      :     1      V3\n\t\t\t\t010000E0     2 0:00000000\t\t0\n";
        let group = |text: &str| text.parse::<IpAddr>().unwrap();
        let lo = || "lo".to_owned();
        assert_eq!(of_ipv4(table), [(1, lo(), group("239.1.2.3")), (4, "eth0".into(), group("224.0.0.1"))]);
        let table = "1    lo              ff020000000000000000000000001234     1 00000004 0\n\
                     1    lo              ff020000000000000000000000000001     1 0000000C 0\n";
        assert_eq!(of_ipv6(table), [(1, lo(), group("ff02::1234"))]);
    }

    #[test]
    fn what_is_written_is_read() {
        for line in ["239.1.2.3 on lo", "232.1.1.1 on eth0 from 10.0.0.1 10.0.0.2", "ff02::1 on e not from fe80::1"] {
            assert_eq!(Membership::parse(line).unwrap().to_string(), line);
        }
        for odd in ["", "239.1.2.3", "239.1.2.3 on", "239.1.2.3 in lo", "x on lo", "239.1.2.3 on lo not 10.0.0.1"] {
            assert_eq!(Membership::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_socket_is_in_the_groups_that_it_has_joined() {
        let wanted = "232.77.1.1 on lo from 10.0.0.1 10.0.0.2\n239.77.1.1 on lo\n239.77.1.2 on lo not from 10.0.0.3";
        let (socket, other) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        join(&socket, "239.77.1.1 on lo", None).unwrap();
        let pid = std::process::id().cast_signed();
        assert_eq!(Groups::of(pid).of_socket(&socket, false), ["239.77.1.1 on lo"]);
        join(&socket, wanted, Some("239.77.1.1 on lo")).unwrap();
        assert_eq!(Groups::of(pid).of_socket(&socket, false).join("\n"), wanted);
        assert_eq!(Groups::of(pid).of_socket(&other, false), [""; 0]);
        assert_eq!(join(&other, "239.77.1.1 on no-such-device", None), None);
    }
}
