//! Compiles the reaper and leaves it in OUT_DIR, where `launch::reaper` embeds it: rekindle is one self-contained file.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=reaper/src");
    let source = PathBuf::from("reaper/src/main.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("rekindle-reaper");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-name=rekindle_reaper", "--crate-type=bin"])
        .args(["-Copt-level=s", "-Cpanic=abort", "-Cdebuginfo=0", "-Cstrip=symbols", "-Crelocation-model=static"])
        // Static, no start files, no libc. Build paths stay out of it, so that the same source gives the same hash.
        .args(["-Clink-arg=-nostdlib", "-Clink-arg=-nostartfiles", "-Clink-arg=-static"])
        .args(["-Clink-arg=-Wl,--build-id=none", "-Clink-arg=-Wl,-z,noexecstack"])
        .arg(format!("--remap-path-prefix={}=.", std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()))
        .arg("-o")
        .arg(&out)
        .arg(&source)
        .status()
        .expect("rustc runs");
    assert!(status.success(), "the reaper does not compile: see the messages above");
}
