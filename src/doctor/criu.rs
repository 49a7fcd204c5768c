//! CRIU: which one `run` would use, and whether it is new enough for this kernel.

use std::path::Path;

use super::Check;
use rekindle_criu::{self as criu, Criu, FindError, Version};

/// The first version without a vulnerability that is known: CVE-2026-18107, in how CRIU works on restartable sequences
/// (rseq(2)).
const SECURE: Version = Version(4, 2, 1);

#[derive(Debug)]
pub(super) struct Facts {
    pub(super) kernel: String,
    pub(super) found: Result<Criu, FindError>,
}

pub(super) fn gather(named: Option<&Path>) -> Facts {
    Facts { kernel: criu::kernel_release(), found: Criu::find(named) }
}

pub(super) fn judge(facts: &Facts) -> Check {
    let name = "criu.version";
    let (wanted, _) = criu::required(&facts.kernel);
    let fix = format!(
        "install a package of rekindle, which contains CRIU, or CRIU {wanted} or newer (package criu), or set criu.path \
        in the configuration or REKINDLE_CRIU in the environment"
    );
    let found = match &facts.found {
        Ok(criu) => {
            let (version, path) = (criu.version, criu.path.display());
            return Check::ok(name, format!("CRIU {version} at {path}; kernel {} needs {wanted}", facts.kernel));
        }
        Err(FindError::None { looked }) => format!("no criu found (searched: {looked})"),
        Err(FindError::Run { path, source }) => format!("cannot run {}: {source}", path.display()),
        Err(FindError::Answer { path, said }) => format!("{} is not CRIU: it printed {said:?}", path.display()),
        Err(FindError::Old { path, found, reason, .. }) => format!("CRIU {found} at {}: {reason}", path.display()),
    };
    Check::missing(name, found, fix)
}

/// CRIU works on processes of users as root. Nothing to say if there is none.
pub(super) fn judge_boundary(facts: &Facts) -> Option<Check> {
    let name = "boundaries.criu";
    let criu = facts.found.as_ref().ok()?;
    let (version, path) = (criu.version, criu.path.display());
    if version >= SECURE {
        return Some(Check::ok(
            name,
            format!("CRIU {version} has no vulnerability that this version of rekindle knows of"),
        ));
    }
    Some(Check::warn(
        name,
        format!(
            "CRIU {version} at {path} has a known vulnerability (CVE-2026-18107, rseq), unless the distribution has fixed it"
        ),
        format!(
            "install a package of rekindle, which contains a newer CRIU, or CRIU {SECURE} or newer (scripts/install-criu.sh), and \
            set criu.path or REKINDLE_CRIU if the old one is still found first"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn judged(kernel: &str, found: Result<Criu, FindError>) -> (State, String, String) {
        let check = judge(&Facts { kernel: kernel.into(), found });
        (check.state, check.found, check.fix.unwrap_or_default())
    }

    #[test]
    fn a_criu_that_is_found_is_ok() {
        let (state, found, _) = judged("6.1.0", Ok(Criu::known("/usr/sbin/criu".into(), Version(4, 2, 1))));
        assert_eq!((state, found.as_str()), (State::Ok, "CRIU 4.2.1 at /usr/sbin/criu; kernel 6.1.0 needs 4.0.0"));
    }

    #[test]
    fn a_criu_with_a_known_vulnerability_works_and_is_warned_of() {
        let facts =
            |version| Facts { kernel: "6.18.0".into(), found: Ok(Criu::known("/usr/sbin/criu".into(), version)) };
        for (version, state) in [
            (Version(4, 0, 0), State::Warn),
            (Version(4, 2, 0), State::Warn),
            (Version(4, 2, 1), State::Ok),
            (Version(4, 3, 0), State::Ok),
        ] {
            let check = judge_boundary(&facts(version)).unwrap();
            assert_eq!((check.check, check.state), ("boundaries.criu", state), "{version}");
            assert_eq!(judge(&facts(version)).state, State::Ok, "{version}");
            let fix = check.fix.unwrap_or_default();
            assert_eq!(
                state == State::Warn,
                check.found.contains("CVE-2026-18107") && fix.contains("CRIU 4.2.1 or newer")
            );
        }
        let none = Facts { kernel: "6.18.0".into(), found: Err(FindError::None { looked: "/a".into() }) };
        assert_eq!(judge_boundary(&none), None);
    }

    #[test]
    fn each_reason_for_none_has_its_words_and_the_fix_names_the_version_for_this_kernel() {
        let source = std::io::Error::from_raw_os_error(libc::EACCES);
        let (wanted, reason) = criu::required("6.18.0");
        for (error, words) in [
            (FindError::None { looked: "/a, /b".into() }, "searched: /a, /b"),
            (FindError::Run { path: "/a".into(), source }, "Permission denied"),
            (FindError::Answer { path: "/a".into(), said: "hello".into() }, "\"hello\""),
            (FindError::Old { path: "/a".into(), found: Version(4, 1, 0), wanted, reason }, "CRIU 4.1.0 at /a"),
        ] {
            let (state, found, fix) = judged("6.18.0", Err(error));
            assert_eq!(state, State::Missing);
            assert!(found.contains(words), "{found}");
            assert!(fix.contains("CRIU 4.2.0 or newer") && fix.contains("REKINDLE_CRIU"), "{fix}");
        }
    }
}
