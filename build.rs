//! Compiles the reaper, the interposer and CRIU's plugin and leaves them in OUT_DIR, where `launch::reaper`,
//! `launch::interposer` and `snapshot::devices` embed them: rekindle is one self-contained file.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    compile(
        "reaper/src",
        "main.rs",
        "rekindle-reaper",
        // Static: it depends on nothing that an upgrade can change.
        &["--crate-name=rekindle_reaper", "--crate-type=bin", "-Copt-level=s", "-Crelocation-model=static"],
        &["-static", "-Wl,-z,noexecstack"],
    );
    compile(
        "preload/src",
        "lib.rs",
        "rekindle-preload.so",
        // rustc hides every symbol of such a library but those that are exported by name.
        &["--crate-name=rekindle_preload", "--crate-type=cdylib", "-Copt-level=3", "-Crelocation-model=pic"],
        &["-Wl,-z,noexecstack", "-Wl,-z,now"],
    );
    compile(
        "plugin/src",
        "lib.rs",
        "rekindle-plugin.so",
        &["--crate-name=rekindle_plugin", "--crate-type=cdylib", "-Copt-level=s", "-Crelocation-model=pic"],
        &["-Wl,-z,noexecstack", "-Wl,-z,now"],
    );
}

/// Compiles `folder`/`root` to the file `name`. No start files, no libc.
fn compile(folder: &str, root: &str, name: &str, options: &[&str], link: &[&str]) {
    println!("cargo::rerun-if-changed={folder}");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition=2024", "-Cpanic=abort", "-Cdebuginfo=0", "-Cstrip=symbols"])
        .args(options)
        .args(["-Clink-arg=-nostdlib", "-Clink-arg=-nostartfiles", "-Clink-arg=-Wl,--build-id=none"])
        .args(link.iter().map(|argument| format!("-Clink-arg={argument}")))
        // Build paths stay out of it, so that the same source gives the same hash.
        .arg(format!("--remap-path-prefix={}=.", std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()))
        .arg("-o")
        .arg(&out)
        .arg(PathBuf::from(folder).join(root))
        .status()
        .expect("rustc runs");
    assert!(status.success(), "{folder} does not compile: see the messages above");
}
