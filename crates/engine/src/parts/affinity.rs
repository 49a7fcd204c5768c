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
    for binding in &manifest.bindings {
        if let Err(why) = bind(binding, &ours, &threads) {
            let (count, processors) = (binding.threads.len(), &binding.processors);
            let (were, run) =
                if count == 1 { ("thread of the job was", "It runs") } else { ("threads of the job were", "They run") };
            tracing::warn!("{count} {were} bound to processors {processors}: {why}. {run} on processors {ours} now");
        }
    }
}

fn bind(binding: &Binding, ours: &Processors, threads: &BTreeMap<i32, i32>) -> Result<(), String> {
    let wanted: Processors = binding.processors.parse().map_err(|error| format!("the image says {error}"))?;
    let Some(here) = wanted.within(ours) else { return Err("rekindle may not use them here".into()) };
    for thread in binding.threads.iter().filter_map(|inner| threads.get(inner)) {
        here.bind(*thread).map_err(|error| error.to_string())?;
    }
    Ok(())
}
