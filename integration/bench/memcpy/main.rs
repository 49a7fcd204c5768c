//! Measures how much the interposer slows a job's memcpy and speeds up the driver's. Prints one JSON object.
//!
//! ```text
//! bench-memcpy LIBSTANDIN_CUDA.so [MIB]
//! ```
//!
//! `memcpy`: nanoseconds a call by size, with and without the interposer: the least of rounds that alternate between
//! two processes. `driver`: GB/s (10^9 bytes) out of staging buffers into a region of MIB, 512 by default, and back, as
//! the stand-in libcuda copies: `plain` into its own mapping without the interposer, `landing` into a landing file with
//! it, with the number of threads that it chooses on this machine and with two. The second of two passes counts.
#![allow(unsafe_code, reason = "calls of C functions, which are what is measured")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use rekindle_abi::variables;
use rekindle_engine::launch::interposer;
use serde_json::{Value, json};

const SIZES: [usize; 8] = [64, 256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
const ROUNDS: usize = 8;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let answer = match words.as_slice() {
        ["memcpy"] => memcpy(),
        ["driver", library, bytes] => driver(library, bytes.parse()?)?,
        [library] => compare(Path::new(library), 512 << 20)?,
        [library, mib] => compare(Path::new(library), mib.parse::<usize>()? << 20)?,
        _ => anyhow::bail!("usage: bench-memcpy LIBSTANDIN_CUDA.so [MIB]"),
    };
    writeln!(io::stdout(), "{answer}")?;
    Ok(())
}

/// Runs itself in other processes, with and without the interposer.
fn compare(library: &Path, bytes: usize) -> anyhow::Result<Value> {
    let folder = tempfile::tempdir()?;
    let libcuda = folder.path().join("libcuda.so.1");
    std::fs::copy(library, &libcuda).with_context(|| format!("cannot copy {}", library.display()))?;
    let landing = tempfile::tempdir_in("/dev/shm")?;
    let preload = interposer::preload_value(&interposer::unpack(folder.path())?, None)?;
    let plain = || Command::new("/proc/self/exe");
    let with = || {
        let mut command = plain();
        command.env("LD_PRELOAD", &preload).env(variables::LANDING, landing.path());
        command
    };

    let mut least: [BTreeMap<usize, f64>; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (mut command, least) in [plain(), with()].into_iter().zip(&mut least) {
            let found: BTreeMap<usize, f64> = serde_json::from_value(answer(command.arg("memcpy"))?)?;
            for (size, time) in found {
                let known = least.entry(size).or_insert(time);
                *known = known.min(time);
            }
        }
    }
    let [without, interposed] = least;
    let args = ["driver".to_owned(), libcuda.display().to_string(), bytes.to_string()];
    let driver = |mut command: Command| answer(command.args(&args));
    let mut two = with();
    two.env(variables::COPY_THREADS, "2");
    Ok(json!({
        "memcpy": {"unit": "ns", "without": without, "with": interposed},
        "driver": {
            "unit": "GB/s", "bytes": bytes,
            "plain": driver(plain())?, "landing": driver(with())?, "landing-2-threads": driver(two)?,
        },
    }))
}

fn answer(command: &mut Command) -> anyhow::Result<Value> {
    let output = command.output()?;
    ensure!(output.status.success(), "a measurement failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Nanoseconds a call, by size.
fn memcpy() -> Value {
    let mut target = vec![1_u8; 1 << 20];
    let source = vec![2_u8; 1 << 20];
    // Called through a pointer, so that the compiler cannot do it itself.
    let call: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void =
        std::hint::black_box(libc::memcpy);
    let mut least = BTreeMap::new();
    for size in SIZES {
        // About 2 ms a round.
        let calls = 100_000_000 / (size + 2000) / 10;
        for _ in 0..20 {
            let began = Instant::now();
            for _ in 0..calls {
                // SAFETY: both vectors are as long as the largest size.
                unsafe { call(target.as_mut_ptr().cast(), source.as_ptr().cast(), size) };
            }
            let time = began.elapsed().as_secs_f64() * 1e9 / f64::from(u32::try_from(calls).unwrap_or(u32::MAX));
            let known = least.entry(size.to_string()).or_insert(time);
            *known = time.min(*known);
        }
    }
    json!(least)
}

/// GB/s out and in.
fn driver(library: &str, bytes: usize) -> anyhow::Result<Value> {
    // SAFETY: the stand-in does nothing when it is loaded.
    let library = unsafe { libloading::Library::new(library) }?;
    // SAFETY: its documented signature.
    let map = unsafe { library.get::<unsafe extern "C" fn(usize) -> usize>("standin_map") }?;
    // SAFETY: its documented signature.
    let rate = unsafe { library.get::<unsafe extern "C" fn(usize, usize, *mut [u64; 2]) -> i32>("standin_copy_rate") }?;
    let landing =
        std::env::var_os(variables::LANDING).map(|folder| Path::new(&folder).join(std::process::id().to_string()));
    if let Some(file) = &landing {
        std::fs::write(file, "")?;
    }
    // SAFETY: a new mapping.
    let region = unsafe { map(bytes) };
    ensure!(region != 0, "no memory");
    let mut took = [0; 2];
    for _ in 0..2 {
        // SAFETY: the mapping, and room for the answer.
        let code = unsafe { rate(region, bytes, &raw mut took) };
        ensure!(code == 0, "the copy failed with {code}");
    }
    if let Some(file) = landing {
        let landed = std::fs::read_to_string("/proc/self/maps")?.contains(&file.display().to_string());
        std::fs::remove_file(file)?;
        ensure!(landed, "the mapping did not land");
    }
    let per_second =
        |nanoseconds: u64| f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX)) * 1024.0 / nanoseconds as f64;
    Ok(json!({"out": per_second(took[0]), "in": per_second(took[1])}))
}
