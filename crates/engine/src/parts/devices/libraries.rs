//! NVIDIA's libraries beside CUDA that a process has mapped: they tell why it has devices open, and what helps.

/// A library, by the beginning of its file name.
#[derive(Debug, PartialEq, Eq)]
struct Library {
    file: &'static str,
    /// What programs use it for.
    is: &'static str,
    /// What to do about it.
    advice: &'static str,
}

const RENDER: &str = "let it render in software (MuJoCo: MUJOCO_GL=osmesa)";
const OPENCL: &str = "libnvidia-opencl.so";

/// In the driver (580) for x86-64. Those that CUDA itself loads (libnvidia-ptxjitcompiler, libnvidia-nvvm) say nothing.
const KNOWN: &[Library] = &[
    Library { file: OPENCL, is: "OpenCL", advice: "let it use CUDA or the CPU instead of OpenCL" },
    Library { file: "libnvidia-encode.so", is: "NVENC", advice: "let it encode on the CPU" },
    Library { file: "libnvcuvid.so", is: "NVDEC", advice: "let it decode on the CPU" },
    Library { file: "libnvidia-opticalflow.so", is: "optical flow", advice: "let it run without optical flow" },
    Library { file: "libnvoptix.so", is: "OptiX", advice: RENDER },
    Library { file: "libEGL_nvidia.so", is: "OpenGL", advice: RENDER },
    // Vulkan's driver is in it too.
    Library { file: "libGLX_nvidia.so", is: "OpenGL or Vulkan", advice: RENDER },
    Library { file: "libnvidia-glcore.so", is: "OpenGL", advice: RENDER },
    Library { file: "libnvidia-eglcore.so", is: "OpenGL", advice: RENDER },
];

/// hwloc's plugin that asks OpenCL for its devices ([`crate::launch::hwloc`]).
const HWLOC: &str = "hwloc_opencl.so";

/// Those that a process has mapped.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Libraries {
    found: Vec<(&'static Library, String)>,
    has_hwloc: bool,
}

impl Libraries {
    /// Of process `pid`, as we see it; none where that cannot be read.
    pub(super) fn of(pid: i32) -> Libraries {
        let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        Libraries::find(&String::from_utf8_lossy(&maps))
    }

    pub(super) fn find(maps: &str) -> Libraries {
        let mut libraries = Libraries::default();
        // The sixth column is a path, in which there may be spaces.
        for path in maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])) {
            let path = path.strip_suffix(" (deleted)").unwrap_or(path);
            let name = path.rsplit('/').next().unwrap_or_default();
            libraries.has_hwloc |= name == HWLOC;
            let known = KNOWN.iter().find(|library| name.starts_with(library.file));
            if let Some(library) = known.filter(|known| libraries.found.iter().all(|(found, _)| found != known)) {
                libraries.found.push((library, name.to_owned()));
            }
        }
        libraries
    }

    /// Whether OpenCL is there and nothing else.
    pub(super) fn is_opencl_alone(&self) -> bool {
        matches!(&*self.found, [(library, _)] if library.file == OPENCL)
    }

    /// How the process uses the GPU, and what helps, for a sentence.
    pub(super) fn words(&self) -> (String, String) {
        if self.found.is_empty() {
            return ("without CUDA (OpenGL, NVENC)".into(), String::new());
        }
        let each = self.found.iter().map(|(library, name)| format!("{} ({name})", library.is));
        let mut advice: Vec<&str> = self.found.iter().map(|(library, _)| library.advice).collect();
        advice.dedup();
        let advice = match self.has_hwloc && self.is_opencl_alone() {
            true => {
                "set HWLOC_COMPONENTS=-opencl in the job's environment, because hwloc (Open MPI) has opened it".into()
            }
            false => advice.join(", and "),
        };
        (format!("without CUDA, by {}", each.collect::<Vec<_>>().join(" or ")), format!(": {advice}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[&str]) -> Libraries {
        let line = |file: &&str| format!("7f0000000000-7f0000001000 r-xp 00000000 fe:00 77   {file}\n");
        Libraries::find(&files.iter().map(line).collect::<String>())
    }

    #[test]
    fn each_is_found_once_by_its_name() {
        let lib = "/usr/lib/x86_64-linux-gnu";
        let opencl = format!("{lib}/libnvidia-opencl.so.580.159.04");
        let found =
            of(&[&opencl, &opencl, "/dev/nvidia0", "/opt/a b/libnvidia-encode.so.1 (deleted)", "/lib/libc.so.6"]);
        assert_eq!(
            found.words().0,
            "without CUDA, by OpenCL (libnvidia-opencl.so.580.159.04) or NVENC (libnvidia-encode.so.1)"
        );
        assert!(!found.is_opencl_alone() && of(&[&opencl]).is_opencl_alone() && !of(&[]).is_opencl_alone());
        assert_eq!(of(&["/lib/libOpenCL.so.1", "/lib/libcuda.so.1", "/lib/libnvidia-ml.so.1"]), Libraries::default());
        assert_eq!(Libraries::of(i32::MAX), Libraries::default());
    }

    #[test]
    fn the_advice_fits_what_was_found() {
        let opencl = "/lib/libnvidia-opencl.so.1";
        assert_eq!(of(&[]).words(), ("without CUDA (OpenGL, NVENC)".into(), String::new()));
        assert!(of(&[opencl]).words().1.contains("instead of OpenCL"));
        let hwloc = "/usr/lib/x86_64-linux-gnu/hwloc/hwloc_opencl.so";
        assert!(of(&[hwloc, opencl]).words().1.contains("set HWLOC_COMPONENTS=-opencl"));
        let gl = of(&["/lib/libnvidia-eglcore.so.580", "/lib/libEGL_nvidia.so.0"]);
        assert_eq!(gl.words().1, format!(": {RENDER}"), "said once");
    }
}
