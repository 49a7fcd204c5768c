//! The store without a job, for measurements: makes content, packs folders and unpacks them again. Prints one
//! JSON object for each call.
//!
//! ```text
//! bench-store make noise|weights|heap FILE MIB SEED
//! bench-store change FILE PERCENT SEED
//! bench-store persist STORE NUMBER FOLDER COMPRESSION THREADS [COPIES]
//! bench-store unpack STORE NUMBER INTO
//! bench-store entries STORE PACKS
//! bench-store verify STORE THREADS
//! ```
//!
//! COPIES is 1 or 2.
//!
//! THREADS is a number, or `auto` for what the configuration has by default on this machine.
//!
//! `noise` cannot be made shorter. `weights` are float32 with the distribution of a trained layer (normal, 0.02 wide).
//! `heap` is what the memory of an interpreter looks like, in blocks of 64 KiB: zeros, pointers, text, noise, a quarter
//! each.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use rekindle_os::beneath::Beneath;
use rekindle_store::chunk::{ChunkId, Codec, Compression};
use rekindle_store::options::Copies;
use rekindle_store::pack::{Entry, PackIndex, PackName, Unread};
use rekindle_store::persist::{self, Bounds, Packing, Progress};
use rekindle_store::unpack::{self, unpack};
use rekindle_store::{Access, Image, ImageId, JobFolder, Manifest, Place, Share, State, Store, check_packs};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;
/// Content changes in runs of so many bytes.
const RUN: usize = 2 * MIB;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let answer = match words.as_slice() {
        ["make", kind, file, mib, seed] => make(kind, Path::new(file), mib.parse()?, seed.parse()?)?,
        ["change", file, percent, seed] => change(Path::new(file), percent.parse()?, seed.parse()?)?,
        ["persist", store, number, folder, compression, threads, rest @ ..] => {
            let copies = if *rest == ["2"] { Copies::Two } else { Copies::One };
            let (store, folder) = (Path::new(store), Path::new(folder));
            persist(store, number.parse()?, folder, compression.parse()?, count(threads)?, copies)?
        }
        ["unpack", store, number, into] => out(Path::new(store), number.parse()?, Path::new(into))?,
        ["entries", store, packs] => entries(Path::new(store), packs.parse()?)?,
        ["verify", store, threads] => verify(Path::new(store), count(threads)?)?,
        _ => anyhow::bail!("usage: see the head of integration/bench/store/main.rs"),
    };
    writeln!(io::stdout(), "{answer}")?;
    Ok(())
}

fn count(threads: &str) -> anyhow::Result<usize> {
    Ok(if threads == "auto" { persist::threads() } else { threads.parse()? })
}

fn noise(seed: u64) -> blake3::OutputReader {
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof()
}

fn make(kind: &str, path: &Path, mib: usize, seed: u64) -> anyhow::Result<Value> {
    let mut file = File::create(path)?;
    let mut random = noise(seed);
    let mut block = vec![0; MIB];
    for _ in 0..mib {
        random.fill(&mut block);
        match kind {
            "noise" => {}
            "weights" => weights(&mut block),
            "heap" => heap(&mut block),
            _ => anyhow::bail!("{kind} is none of noise, weights and heap"),
        }
        file.write_all(&block)?;
    }
    Ok(json!({ "bytes": mib * MIB }))
}

/// Two uniform numbers become two normal ones (Box and Muller).
fn weights(block: &mut [u8]) {
    for pair in block.chunks_exact_mut(8) {
        let (low, high) = pair.split_at_mut(4);
        let uniform = |bytes: &[u8]| {
            let number = u32::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default());
            (f64::from(number) + 1.0) / (f64::from(u32::MAX) + 2.0)
        };
        let (radius, angle) = ((-2.0 * uniform(low).ln()).sqrt() * 0.02, uniform(high) * std::f64::consts::TAU);
        #[expect(clippy::cast_possible_truncation, reason = "a weight has this precision")]
        let (a, b) = ((radius * angle.cos()) as f32, (radius * angle.sin()) as f32);
        low.copy_from_slice(&a.to_le_bytes());
        high.copy_from_slice(&b.to_le_bytes());
    }
}

fn heap(block: &mut [u8]) {
    const WORDS: [&str; 8] = ["loss ", "layer.", "weight", "[0.1, ", "epoch=", "\n    return ", "self.", "None, "];
    for piece in block.chunks_exact_mut(4 * (64 << 10)) {
        let (zeros, rest) = piece.split_at_mut(64 << 10);
        let (pointers, rest) = rest.split_at_mut(64 << 10);
        let (text, _) = rest.split_at_mut(64 << 10);
        zeros.fill(0);
        for pointer in pointers.chunks_exact_mut(8) {
            // Objects of 16 bytes in 64 MiB of one arena.
            pointer[0] &= 0xf0;
            pointer[3] &= 0x03;
            pointer[4..].copy_from_slice(&[0x5f, 0x7f, 0, 0]);
        }
        let picks: Vec<u8> = text.to_vec();
        let words = picks.iter().flat_map(|pick| WORDS[usize::from(pick % 8)].bytes());
        text.iter_mut().zip(words).for_each(|(to, from)| *to = from);
    }
}

/// Changes that share of a file, in runs that lie all over it.
fn change(path: &Path, percent: usize, seed: u64) -> anyhow::Result<Value> {
    let file = File::options().write(true).open(path)?;
    let runs = usize::try_from(file.metadata()?.len())? / RUN;
    let wanted = (runs * percent).div_ceil(100);
    let (mut random, mut bytes) = (noise(seed), vec![0; RUN]);
    for n in 0..wanted {
        random.fill(&mut bytes);
        let offset = (n * runs / wanted) * RUN;
        file.write_all_at(&bytes, u64::try_from(offset)?)?;
    }
    Ok(json!({ "bytes": wanted * RUN }))
}

fn job(store: &Path) -> anyhow::Result<JobFolder> {
    Ok(Store::open(store, Access::Write)?.create_job(&"bench".parse()?)?)
}

fn id(number: u32) -> ImageId {
    ImageId::new(number, chrono::DateTime::UNIX_EPOCH)
}

/// The folder as an image in memory.
fn image(folder: &Path, number: u32) -> anyhow::Result<Image> {
    let mut parts = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().into_string().ok().context("a name that is not UTF-8")?;
        if name != "manifest.json" {
            parts.push(json!({ "path": name, "size": entry.metadata()?.len() }));
        }
    }
    let bytes: u64 = parts.iter().filter_map(|part| part["size"].as_u64()).sum();
    let manifest: Manifest = serde_json::from_value(json!({
        "id": id(number).to_string(), "job": "bench", "lineage": "bench", "taken": "2026-01-01T00:00:00Z",
        "reason": "request", "command": ["bench"], "directory": "/", "user": null,
        "host": { "name": "", "boot_id": "", "kernel": "", "arch": "", "cpu_model": "", "cpu_flags": [] },
        "rekindle": env!("CARGO_PKG_VERSION"), "criu": "4.2", "driver": null, "gpus": [],
        "tree": {
            "root": 1, "job": 2, "processes": [], "ids": [1, 2], "cuda": [],
            "cuda_threads": {},
        },
        "open_files": [], "saved_links": [], "recreate": [], "tcp": "close", "phases": [], "freeze_us": 0,
        "bytes": bytes, "parts": parts,
    }))?;
    fs::write(folder.join("manifest.json"), manifest.to_bytes(&Default::default())?)?;
    let state = State::Good(Box::new(manifest));
    Ok(Image { id: id(number), dir: Beneath::at(folder)?, state, place: Place::Staged, trust: Default::default() })
}

fn persist(
    store: &Path,
    number: u32,
    folder: &Path,
    compression: Compression,
    threads: usize,
    copies: Copies,
) -> anyhow::Result<Value> {
    let job = job(store)?;
    let lock = job.lock()?;
    let image = image(folder, number)?;
    let bounds = Bounds { rate: None, threads };
    let packing = Packing { compression, key: None, bounds, copies, unread: Unread::default() };
    let progress = Progress::default();
    let began = Instant::now();
    let stored = persist::persist(&image, &job, &lock, &packing, &progress, &|| false)?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(stored.is_good(), "the image is not good: {stored:?}");
    Ok(json!({ "seconds": seconds, "bytes": progress.bytes().1, "stored": progress.written(), "peak_kib": peak()? }))
}

fn out(store: &Path, number: u32, into: &Path) -> anyhow::Result<Value> {
    let job = job(store)?;
    let image = job.images()?.into_iter().find(|image| image.id == id(number)).context("there is no such image")?;
    let progress = Progress::default();
    let began = Instant::now();
    unpack(&image, &job, &Beneath::at(into)?, None, unpack::threads(), &progress, &|| false)?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(json!({ "seconds": seconds, "bytes": progress.bytes().0, "peak_kib": peak()? }))
}

/// Adds packs to a job of the store, each as full as packs are, as far as their indexes say; behind their headers the
/// packs themselves are holes.
fn entries(store: &Path, packs: u32) -> anyhow::Result<Value> {
    const CHUNK: u32 = 256 << 10;
    const RECORDS: u32 = 1023;
    let job = job(store)?;
    let first = job.packs().names()?.into_iter().next().context("the job has no pack yet")?;
    let mut header = [0; 64];
    File::open(job.packs().pack_path(first))?.read_exact_at(&mut header, 0)?;
    for pack in 0..packs {
        let name = PackName::random()?;
        let mut random = noise(u64::from(pack));
        let entry = |n: u32| {
            let mut id = [0; 32];
            random.fill(&mut id);
            let offset = 64 + u64::from(n) * u64::from(64 + CHUNK);
            Entry { id: ChunkId::new(id), offset, raw_len: CHUNK, stored_len: CHUNK, codec: Codec::Raw }
        };
        let entries: Vec<Entry> = (0..RECORDS).map(entry).collect();
        let length = entries.last().map_or(64, Entry::end);
        let file = File::create(job.packs().pack_path(name))?;
        file.write_all_at(&header, 0)?;
        file.set_len(length)?;
        fs::write(job.packs().index_path(name), PackIndex::new(length, entries).to_bytes())?;
    }
    Ok(json!({ "entries": u64::from(packs) * u64::from(RECORDS) }))
}

fn verify(store: &Path, threads: usize) -> anyhow::Result<Value> {
    let job = job(store)?;
    let began = Instant::now();
    let report = check_packs(&job, None, Share::ALL, threads, &Progress::default(), &|| false)?;
    let seconds = began.elapsed().as_secs_f64();
    ensure!(report.is_sound(), "{report:?}");
    Ok(json!({ "seconds": seconds, "bytes": report.bytes, "peak_kib": peak()? }))
}

/// The most memory that this process had.
fn peak() -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
