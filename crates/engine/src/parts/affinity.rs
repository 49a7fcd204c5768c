//! Threads that the job has bound to processors (taskset, mpirun, OpenMP). CRIU does not save that.
//!
//! Threads on the same processors as we are not bound: after a restore they are again where we are, which may be others.

use std::collections::BTreeMap;

use rekindle_os::affinity::Processors;
use rekindle_os::process;
use rekindle_store::Manifest;
use rekindle_store::manifest::Binding;

/// The bound threads of these processes, which are stopped.
pub(crate) fn capture(tree: &[i32]) -> Vec<Binding> {
    let Ok(ours) = Processors::of(0) else { return Vec::new() };
    let mut bound: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for thread in tree.iter().flat_map(|pid| process::threads(*pid)) {
        let Some(own) = Processors::of(thread).ok().filter(|own| *own != ours) else { continue };
        let Some(inner) = process::inner_pid(thread) else { continue };
        bound.entry(own.to_string()).or_default().push(inner);
    }
    bound.into_iter().map(|(processors, threads)| Binding { processors, threads }).collect()
}

/// Binds them again, before they run. Only to processors that we may use: a scheduler can have given us others. A failure
/// does not prevent the job from running, and is reported.
pub(crate) fn put_back(root: i32, manifest: &Manifest) {
    if manifest.bindings.is_empty() {
        return;
    }
    let ours = match Processors::of(0) {
        Ok(ours) => ours,
        Err(error) => return tracing::warn!("the job's threads are not bound to processors again: {error}"),
    };
    let threads = process::tree(root).into_iter().flat_map(process::threads);
    let threads: BTreeMap<i32, i32> =
        threads.filter_map(|thread| Some((process::inner_pid(thread)?, thread))).collect();
    for Binding { processors, threads: bound } in &manifest.bindings {
        let wanted: Processors = match processors.parse() {
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::warn!("threads of the job are not bound to processors again: the image has {error}");
                continue;
            }
        };
        let bound = bound.iter().filter_map(|inner| threads.get(inner).copied());
        if let Err(why) = bind(bound, &wanted, &ours) {
            tracing::warn!(
                "threads of the job were bound to processors {wanted}: {why}. They run on processors {ours} now"
            );
        }
    }
}

fn bind(mut threads: impl Iterator<Item = i32>, wanted: &Processors, ours: &Processors) -> Result<(), String> {
    let here = wanted.within(ours).ok_or("rekindle may not use them here")?;
    threads.try_for_each(|thread| here.bind(thread)).map_err(|error| error.to_string())
}
