//! Compiles the reaper, the interposer and CRIU's plugin into OUT_DIR. `launch::reaper`, `launch::interposer` and
//! `launch::plugin` embed them, so that rekindle is one self-contained file.

use std::path::PathBuf;
use std::process::Command;

/// What is compiled: its folder below `native/`, its root, the name of the result, and the flags for rustc.
struct Native {
    folder: &'static str,
    root: &'static str,
    result: &'static str,
    options: &'static [&'static str],
    link: &'static [&'static str],
}

const ABI: Native = Native {
    folder: "abi",
    root: "lib.rs",
    result: "librekindle_abi.rlib",
    options: &["--crate-name=rekindle_abi", "--crate-type=rlib", "-Copt-level=3", "-Crelocation-model=pic"],
    link: &[],
};

const ALL: [Native; 3] = [
    Native {
        folder: "reaper",
        root: "main.rs",
        result: "rekindle-reaper",
        // Static: it depends on nothing that an upgrade can change.
        options: &["--crate-name=rekindle_reaper", "--crate-type=bin", "-Copt-level=s", "-Crelocation-model=static"],
        link: &["-static", "-Wl,-z,noexecstack"],
    },
    Native {
        folder: "preload",
        root: "lib.rs",
        result: "rekindle-preload.so",
        // rustc hides every symbol of such a library but those that are exported by name.
        options: &["--crate-name=rekindle_preload", "--crate-type=cdylib", "-Copt-level=3", "-Crelocation-model=pic"],
        link: &["-Wl,-z,noexecstack", "-Wl,-z,now"],
    },
    Native {
        folder: "plugin",
        root: "lib.rs",
        result: "rekindle-plugin.so",
        options: &["--crate-name=rekindle_plugin", "--crate-type=cdylib", "-Copt-level=s", "-Crelocation-model=pic"],
        link: &["-Wl,-z,noexecstack", "-Wl,-z,now"],
    },
];

fn main() {
    ABI.compile();
    ALL.iter().for_each(Native::compile);
}

impl Native {
    /// No start files, no libc.
    fn compile(&self) {
        let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../native");
        let root = root.canonicalize().expect("native/ is there");
        let source = root.join(self.folder).join("src");
        println!("cargo::rerun-if-changed={}", source.display());
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut command = Command::new(rustc);
        command
            .args(["--edition=2024", "-Cpanic=abort", "-Cdebuginfo=0", "-Cstrip=symbols"])
            .args(self.options)
            .args(["-Clink-arg=-nostdlib", "-Clink-arg=-nostartfiles", "-Clink-arg=-Wl,--build-id=none"])
            .args(self.link.iter().map(|argument| format!("-Clink-arg={argument}")))
            // Build paths stay out of it, so that the same source gives the same hash.
            .arg(format!("--remap-path-prefix={}=.", root.display()))
            .arg("-o")
            .arg(out.join(self.result))
            .arg(source.join(self.root));
        if self.folder != ABI.folder {
            command.arg("--extern").arg(format!("rekindle_abi={}", out.join(ABI.result).display()));
        }
        let status = command.status().expect("rustc runs");
        assert!(status.success(), "native/{} does not compile: see the messages above", self.folder);
    }
}
