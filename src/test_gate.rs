//! What a unit test needs of the machine: without it the test says SKIP and why, and fails where the environment says
//! that it must be there (`REKINDLE_TEST_REQUIRE=root,criu`).

/// Whether a gate is met.
pub(crate) fn require(what: &str, met: bool, why: &str) -> bool {
    let required = std::env::var("REKINDLE_TEST_REQUIRE").is_ok_and(|all| all.split(',').any(|it| it == what));
    assert!(met || !required, "REKINDLE_TEST_REQUIRE wants {what}: {why}");
    if !met {
        eprintln!("SKIP: {why}");
    }
    met
}

/// Whether this is root.
pub(crate) fn root() -> bool {
    require("root", nix::unistd::geteuid().is_root(), "needs root")
}
