//! What this release was tried with: the newest versions of CRIU, the kernel and the NVIDIA driver.
//!
//! Newer ones usually work. Because nobody has seen that yet, they are named at the start of a run, and evidence about
//! images counts only once an image was rehearsed or restored under them ([`rekindle_store::Shown`]).

use rekindle_criu::{self as criu, Version};
use rekindle_cuda::installed;

/// The newest versions that all tests of this release passed with. To be raised with each release, after they did.
const TRIED: Versions = Versions { criu: Version(4, 2, 1), kernel: (6, 18), driver: Some(580) };

/// Versions, as far as they count here: a stable release of a kernel, or of a branch of the driver, is not another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Versions {
    criu: Version,
    kernel: (u32, u32),
    driver: Option<u32>,
}

/// The versions that are newer than those that this release was tried with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Untried {
    /// The same text for the same versions, such as "CRIU 4.3.0 and kernel 6.19".
    pub(crate) versions: String,
    /// The newest ones that were tried, in the same order.
    pub(crate) tried: String,
}

/// What is newer on this machine, with this CRIU; `None` if nothing is.
pub(crate) fn untried(criu: Version) -> Option<Untried> {
    let driver = installed().map(|driver| driver.major());
    // A kernel whose name has no version counts as tried.
    newer(Versions { criu, kernel: numbers(&criu::kernel_release()).unwrap_or_default(), driver })
}

fn newer(here: Versions) -> Option<Untried> {
    let kernel = |(major, minor): (u32, u32)| format!("kernel {major}.{minor}");
    let driver = |driver: Option<u32>| driver.map_or_else(String::new, |driver| format!("NVIDIA driver {driver}"));
    let each = [
        (here.criu > TRIED.criu, format!("CRIU {}", here.criu), format!("CRIU {}", TRIED.criu)),
        (here.kernel > TRIED.kernel, kernel(here.kernel), kernel(TRIED.kernel)),
        (here.driver > TRIED.driver, driver(here.driver), driver(TRIED.driver)),
    ];
    let (versions, tried): (Vec<_>, Vec<_>) =
        each.into_iter().filter(|(is_newer, ..)| *is_newer).map(|(_, here, tried)| (here, tried)).unzip();
    (!versions.is_empty()).then(|| Untried { versions: listed(&versions), tried: listed(&tried) })
}

/// "a", "a and b", "a, b and c".
fn listed(words: &[String]) -> String {
    match words {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        words => words.concat(),
    }
}

/// The first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_newer_is_named_and_nothing_else() {
        let of = |criu, kernel, driver| newer(Versions { criu, kernel, driver }).map(|it| (it.versions, it.tried));
        let told = |here: &str, tried: &str| Some((here.to_owned(), tried.to_owned()));
        assert_eq!(of(TRIED.criu, TRIED.kernel, TRIED.driver), None);
        assert_eq!(of(Version(4, 2, 0), (6, 1), None), None, "older ones, and no GPU");
        assert_eq!(of(Version(4, 3, 0), (6, 18), None), told("CRIU 4.3.0", "CRIU 4.2.1"));
        assert_eq!(
            of(Version(5, 0, 0), (7, 0), Some(590)),
            told("CRIU 5.0.0, kernel 7.0 and NVIDIA driver 590", "CRIU 4.2.1, kernel 6.18 and NVIDIA driver 580")
        );
        assert_eq!(of(TRIED.criu, (6, 19), Some(580)), told("kernel 6.19", "kernel 6.18"));
    }

    #[test]
    fn the_documents_name_the_same_versions() {
        let Versions { criu, kernel: (major, minor), driver } = TRIED;
        let words = format!("(CRIU {criu}, Linux {major}.{minor}, driver {})", driver.unwrap());
        assert!(include_str!("../../docs/trees.md").contains(&words), "{words}");
    }

    #[test]
    fn a_stable_release_is_no_other_version() {
        assert_eq!(numbers("6.18.44-rt1+deb13"), Some((6, 18)));
        assert_eq!(numbers("7"), Some((7, 0)));
        assert_eq!(numbers("next"), None);
    }
}
