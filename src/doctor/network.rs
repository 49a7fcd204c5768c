//! Requirements of the job's network, if it is not the machine's.

use std::path::PathBuf;

use super::Check;
use crate::config::{Config, NetworkMode};
use rekindle_engine::launch::uplink::{self, Missing};

/// The program of the uplink; `None` without an uplink.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) uplink: Option<Result<PathBuf, Missing>>,
}

pub(super) fn gather(config: &Config) -> Facts {
    Facts { uplink: (config.network.mode == NetworkMode::Uplink).then(uplink::find) }
}

pub(super) fn judge(facts: &Facts) -> Option<Check> {
    let name = "network.mode";
    let program = uplink::PROGRAM;
    Some(match facts.uplink.as_ref()? {
        Ok(path) => Check::ok(name, format!("{program} at {}", path.display())),
        Err(Missing::Program) => Check::missing(
            name,
            format!("network.mode = \"uplink\", but no {program} in PATH"),
            format!("install it (Debian, Ubuntu, Fedora: package {program}), or set network.mode = \"private\""),
        ),
        Err(Missing::Device) => Check::missing(
            name,
            format!("network.mode = \"uplink\", but {program} finds no /dev/net/tun"),
            "run modprobe tun, or add it to the container (Docker: --device /dev/net/tun)",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn an_uplink_counts_only_where_it_is_wanted() {
        assert!(judge(&gather(&Config::default())).is_none());
        let judged = |uplink| judge(&Facts { uplink: Some(uplink) }).unwrap();
        assert_eq!(judged(Ok("/usr/bin/slirp4netns".into())).state, State::Ok);
        for (missing, fix) in [(Missing::Program, "package slirp4netns"), (Missing::Device, "modprobe tun")] {
            let check = judged(Err(missing));
            assert_eq!(check.state, State::Missing);
            assert!(check.fix.unwrap().contains(fix));
        }
    }
}
