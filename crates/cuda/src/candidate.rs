//! A cheap check, without a driver, whether a process may use CUDA.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// Whether process `pid` maps libcuda, or has an NVIDIA device open or mapped.
///
/// False means that it does not use CUDA now. True means that [`super::Process::state`] is to decide: a library that is
/// mapped need not be in use, and a forked child inherits descriptors of CUDA without being a CUDA process.
///
/// # Errors
/// Where `/proc/PID` cannot be read: the process is gone ([`io::ErrorKind::NotFound`]), or belongs to somebody else.
pub fn is_candidate(pid: i32) -> io::Result<bool> {
    let proc = Path::new("/proc").join(pid.to_string());
    if any_map(&proc, |name| is_libcuda(name) || is_device(name))? {
        return Ok(true);
    }
    for entry in fs::read_dir(proc.join("fd"))? {
        // A descriptor may be closed while we look.
        if let Ok(target) = fs::read_link(entry?.path())
            && is_device(&target.to_string_lossy())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn any_map(proc: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<bool> {
    let maps = BufReader::new(File::open(proc.join("maps"))?);
    for line in maps.split(b'\n') {
        let line = line?;
        // The sixth column, and all the rest of the line: file names may hold spaces, and need not be UTF-8.
        let line = String::from_utf8_lossy(&line);
        if line.find('/').is_some_and(|at| wanted(&line[at..])) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_libcuda(path: &str) -> bool {
    // libcudart is linked into every CUDA program and says nothing; an upgraded driver shows as "(deleted)".
    path.rsplit('/').next().is_some_and(|name| name.starts_with("libcuda.so"))
}

fn is_device(path: &str) -> bool {
    path.starts_with("/dev/nvidia")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_mean_cuda() {
        assert!(is_libcuda("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"));
        assert!(is_libcuda("/tmp/with space/libcuda.so.1 (deleted)"));
        assert!(!is_libcuda("/usr/lib/libcudart.so.13"));
        assert!(is_device("/dev/nvidia-uvm"));
        assert!(is_device("/dev/nvidia0"));
        assert!(!is_device("/dev/null"));
    }

    #[test]
    fn this_process_is_none() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(!is_candidate(me).unwrap());
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert_eq!(is_candidate(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
