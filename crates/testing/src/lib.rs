//! Helpers for the tests of all crates: gates that report what a machine lacks, and faults at each point of a protocol.

pub mod keys;
pub mod metadata;
pub mod points;
pub mod random;
pub mod threads;

/// The manifest of an image, for tests that change one thing in it.
pub const MANIFEST: &str = include_str!("manifest.json");

/// Whether a gate is met. If it is not, the test prints SKIP and the reason, and fails if the environment requires the
/// gate (`REKINDLE_TEST_REQUIRE=root,criu`).
///
/// # Panics
/// If it is required and not met.
#[must_use]
pub fn require(what: &str, met: bool, why: &str) -> bool {
    let required = std::env::var("REKINDLE_TEST_REQUIRE").is_ok_and(|all| all.split(',').any(|it| it == what));
    assert!(met || !required, "REKINDLE_TEST_REQUIRE requires {what}: {why}");
    if !met {
        eprintln!("SKIP: {why}");
    }
    met
}

/// A requirement of a test, if it was found; `why` says what is missing and how to get it.
///
/// # Panics
/// If it is required and was not found.
#[must_use]
pub fn needs<T>(what: &str, found: Option<T>, why: &str) -> Option<T> {
    let _ = require(what, found.is_some(), why);
    found
}

/// Whether this process is root.
#[must_use]
pub fn root() -> bool {
    require("root", nix::unistd::geteuid().is_root(), "this needs root")
}

/// The CRIU to test with, if there is one.
#[must_use]
pub fn criu() -> Option<std::path::PathBuf> {
    needs("criu", std::env::var_os("REKINDLE_CRIU").map(Into::into), "REKINDLE_CRIU names no CRIU")
}

/// Makes an executable file with this text. By another process: a child that another test forks meanwhile would hold our
/// descriptor for a moment, and a file that is open for writing cannot be executed (ETXTBSY).
///
/// # Panics
/// If it cannot be made.
pub fn program(path: &std::path::Path, text: &str) {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    let write = || {
        std::fs::write(&draft, text)?;
        let done = std::process::Command::new("install")
            .args(["-m", "755"])
            .args([draft.as_os_str(), path.as_os_str()])
            .status()?;
        std::fs::remove_file(&draft)?;
        Ok::<_, std::io::Error>(done.success())
    };
    let made = write();
    assert!(matches!(made, Ok(true)), "{}: {made:?}", path.display());
}

/// What is mounted below this folder. A folder with mounts is not removed.
#[must_use]
pub fn mounts_below(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(std::path::PathBuf::from);
    points.filter(|point| point.starts_with(folder)).collect()
}
