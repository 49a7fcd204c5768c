//! CRIU: which one `run` would use, and whether it is new enough for this kernel.

use std::path::Path;

use super::Check;
use rekindle_criu::{self as criu, Criu, FindError};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;
    use rekindle_criu::Version;

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
