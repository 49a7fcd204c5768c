//! The fuzz targets over their corpus. It shows that they still compile, which no build of rekindle does, and that no
//! input that once told them something new fails today.

// What they take for the crate of libFuzzer is this file.
extern crate self as libfuzzer_sys;

use std::fs;
use std::path::Path;

/// What libFuzzer calls is an ordinary function here.
macro_rules! fuzz_target {
    (|$bytes:ident: &[u8]| $body:block) => {
        pub(crate) fn run($bytes: &[u8]) $body
    };
}
pub(crate) use fuzz_target;

macro_rules! targets {
    ($($name:ident $path:literal),*) => {
        $(
            #[allow(unused_attributes, unused_imports, clippy::cast_possible_truncation, reason = "a target is made as a program of its own")]
            #[path = $path]
            mod $name;
        )*

        /// Each with its function.
        const TARGETS: &[(&str, fn(&[u8]))] = &[$((stringify!($name), $name::run)),*];
    };
}
targets! {
    control "../../fuzz/fuzz_targets/control.rs",
    index "../../fuzz/fuzz_targets/index.rs",
    job_api "../../fuzz/fuzz_targets/job_api.rs",
    manifest "../../fuzz/fuzz_targets/manifest.rs",
    map "../../fuzz/fuzz_targets/map.rs",
    objects "../../fuzz/fuzz_targets/objects.rs",
    pack "../../fuzz/fuzz_targets/pack.rs"
}

#[test]
fn every_target_is_here() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    names.sort();
    let names: Vec<_> = names.iter().map(|path| path.file_stem().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, TARGETS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
}

#[test]
fn no_input_of_the_corpus_fails() {
    for (name, run) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let inputs: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{name}");
        for input in inputs {
            println!("{}", input.display());
            run(&fs::read(&input).unwrap());
        }
    }
}
