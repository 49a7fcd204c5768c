//! Errors of the driver, with advice.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::code;
use super::function::Function;
use super::version::DriverVersion;
use crate::reasons;

/// Result of the calls of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call of the CUDA driver failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libcuda.so.1 cannot be loaded, and no NVIDIA kernel module is loaded either.
    #[error("needs NVIDIA driver 570 or newer, and no NVIDIA driver is installed")]
    NoDriver(#[source] libloading::Error),
    /// The kernel module is loaded but libcuda.so.1 cannot be.
    #[error(
        "needs NVIDIA driver 570 or newer: driver {installed} is installed but its libcuda.so.1 cannot be loaded; install \
         the driver's compute libraries (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )]
    NoLibrary {
        /// The version of the kernel module.
        installed: DriverVersion,
        /// The loader's message.
        source: libloading::Error,
    },
    /// The installed driver does not have the function.
    #[error("needs NVIDIA driver {} or newer, found {}", function.since(), found(installed.as_ref()))]
    TooOld {
        /// The missing function.
        function: Function,
        /// The version of the kernel module, if known.
        installed: Option<DriverVersion>,
    },
    /// GPU pairs were given to a driver that ignores them.
    #[error("restoring to another GPU needs NVIDIA driver 580 or newer, found {}", found(installed.as_ref()))]
    NoMapping {
        /// The version of the kernel module, if known.
        installed: Option<DriverVersion>,
    },
    /// There are more pairs than the driver can count.
    #[error("{0} GPU pairs are more than the driver accepts")]
    TooManyPairs(usize),
    /// Zero and negative numbers are not pids of processes.
    #[error("{0} is not a process: a pid is greater than 0")]
    InvalidPid(i32),
    /// There is no such process.
    #[error("there is no process {0}")]
    NoProcess(i32),
    /// The number is the id of a thread. Some functions of the driver accept it, which is misleading.
    #[error("{tid} is a thread of process {pid}: use the pid {pid}")]
    ThreadId {
        /// The thread id.
        tid: i32,
        /// The process that the thread belongs to.
        pid: i32,
    },
    /// `/proc` of the process could not be read.
    #[error("read /proc/{pid}/status")]
    ReadStatus {
        /// The process.
        pid: i32,
        /// The cause.
        source: io::Error,
    },
    /// A timeout that the driver cannot express.
    #[error("a lock timeout of {0:?} is out of range: it must be more than 0 (0 waits for ever) and at most 49 days")]
    Timeout(Duration),
    /// The driver reported a state that this version does not know.
    #[error("process {pid} is in CUDA state {value}, which this version of rekindle does not know: use a newer one")]
    UnknownState {
        /// The process.
        pid: i32,
        /// `CUprocessState`.
        value: i32,
    },
    /// The driver's thread cannot run while the others are stopped.
    #[error("cannot run only thread {tid} of process {pid} (is a debugger attached?)")]
    Thread {
        /// The process.
        pid: i32,
        /// The thread.
        tid: i32,
        /// The cause.
        source: io::Error,
    },
    /// Threads of the process run that must not run yet.
    #[error(
        "process {0} ended or was resumed before its GPU memory was restored. Does another program send it SIGCONT?"
    )]
    Runs(i32),
    /// The process was locked or checkpointed by somebody else.
    #[error(
        "process {pid} is {state}, not running: another tool or the job itself has suspended it, so rekindle leaves it as it is; if \
         none is using it, resume it with `rekindle cuda restore` and `rekindle cuda unlock --pid {pid}`"
    )]
    Busy {
        /// The process.
        pid: i32,
        /// Its state.
        state: super::State,
    },
    /// A call of the driver failed.
    #[error("{}({pid}) failed with {name} ({code}){}", function.symbol(), hint(*function, *pid, *code))]
    Call {
        /// The process.
        pid: i32,
        /// The function that failed.
        function: Function,
        /// `CUresult`, see [`super::code`].
        code: i32,
        /// The name of the code, for example `CUDA_ERROR_NOT_READY`.
        name: String,
    },
}

impl Error {
    /// The `CUresult` of a failed call.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self {
            Error::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// A lock timed out: the process continues, and the lock may be tried again.
    #[must_use]
    pub fn is_not_ready(&self) -> bool {
        self.code() == Some(code::NOT_READY)
    }

    /// The process was in another state than the call needs, and still is.
    #[must_use]
    pub fn is_illegal_state(&self) -> bool {
        self.code() == Some(code::ILLEGAL_STATE)
    }

    /// The process is alive but has no CUDA state. Some drivers return `INVALID_VALUE` for a query of such a process; a
    /// query has no other argument that could be wrong.
    #[must_use]
    pub fn is_not_cuda(&self) -> bool {
        match self {
            Error::Call { code: code::NOT_INITIALIZED, .. } => true,
            Error::Call { code: code::INVALID_VALUE, function, .. } => {
                matches!(function, Function::GetState | Function::GetRestoreThreadId)
            }
            _ => false,
        }
    }

    /// A restore was given GPU pairs that the driver does not accept, or that name a missing GPU.
    #[must_use]
    pub fn names_no_gpu(&self) -> bool {
        match self {
            Error::Call { function: Function::Restore, code, .. } => {
                matches!(*code, code::INVALID_VALUE | code::NO_DEVICE | code::INVALID_DEVICE)
            }
            _ => false,
        }
    }

    /// The driver, a function of it, or the right to use it on this process is missing on this machine.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        match self {
            Error::NoDriver(_) | Error::NoLibrary { .. } | Error::TooOld { .. } | Error::NoMapping { .. } => true,
            Error::Call { code: code::STUB_LIBRARY, .. } => true,
            Error::Call { code: code::OPERATING_SYSTEM, pid, .. } => exists(*pid) && !can_trace(),
            _ => false,
        }
    }
}

fn found(installed: Option<&DriverVersion>) -> String {
    installed.map_or_else(|| "an older one".to_owned(), ToString::to_string)
}

fn exists(pid: i32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Whether this process holds `CAP_SYS_PTRACE` (bit 19), which root has unless it was taken away.
fn can_trace() -> bool {
    rekindle_os::rights::has(19)
}

/// The meaning of a code for these functions, measured on driver 580 unless it is documented.
fn hint(function: Function, pid: i32, code: i32) -> String {
    match (code, function) {
        (code::NOT_SUPPORTED, function) if function != Function::Restore => reasons::of(pid),
        _ => fixed_hint(function, pid, code).to_owned(),
    }
}

fn fixed_hint(function: Function, pid: i32, code: i32) -> &'static str {
    match (code, function) {
        (code::INVALID_VALUE, Function::Restore) => ": the GPU pairs must name every GPU that the process used",
        (code::INVALID_VALUE, Function::GetState | Function::GetRestoreThreadId) => {
            ": the process does not use CUDA, or has not initialised it yet"
        }
        (code::OUT_OF_MEMORY, Function::Restore) => {
            ": the GPU has too little free memory; free some, kill the process and restore its image again"
        }
        (code::OUT_OF_MEMORY, _) => ": the host needs as much free memory as the process has on the GPU",
        (code::NOT_INITIALIZED, _) => ": the process does not use CUDA, or has not initialised it yet",
        (code::STUB_LIBRARY, _) => ": libcuda.so.1 is the toolkit's stub; put the driver's own library first",
        (code::OPERATING_SYSTEM, _) if !exists(pid) => ": the process is gone",
        (code::OPERATING_SYSTEM, _) if !can_trace() => ": needs root or CAP_SYS_PTRACE",
        (code::OPERATING_SYSTEM, _) => ": the process is ending or traced, or its CUDA threads do not answer",
        (code::ILLEGAL_STATE, Function::Lock) => ": only a running process can be locked",
        (code::ILLEGAL_STATE, Function::Checkpoint) => ": only a locked process can be checkpointed",
        (code::ILLEGAL_STATE, Function::Restore) => ": only a checkpointed process can be restored",
        (code::ILLEGAL_STATE, Function::Unlock) => ": only a locked process can be unlocked; restore it first",
        (code::NOT_READY, Function::Lock) => {
            ": its GPU work did not pause in time and the process continues; try again, with all processes of the job at once"
        }
        (code::NOT_SUPPORTED, Function::Restore) => {
            ": it has memory of another process mapped (CUDA IPC, NCCL over NVLink: set NCCL_P2P_DISABLE=1 and \
             NCCL_CUMEM_HOST_ENABLE=0); it cannot continue: kill it"
        }
        _ => "",
    }
}

/// Names of the codes with hints above, for a driver that cannot be asked.
pub(super) fn name(code: i32) -> &'static str {
    match code {
        code::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        code::NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
        code::STUB_LIBRARY => "CUDA_ERROR_STUB_LIBRARY",
        code::OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
        code::ILLEGAL_STATE => "CUDA_ERROR_ILLEGAL_STATE",
        code::NOT_READY => "CUDA_ERROR_NOT_READY",
        code::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
        _ => "an error unknown to rekindle",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(function: Function, code: i32) -> Error {
        let pid = i32::try_from(std::process::id()).unwrap();
        Error::Call { pid, function, code, name: name(code).to_owned() }
    }

    #[test]
    fn an_old_driver_is_named() {
        let installed = DriverVersion::parse("535.104");
        let error = Error::TooOld { function: Function::Lock, installed: installed.clone() };
        assert_eq!(error.to_string(), "needs NVIDIA driver 570 or newer, found 535.104");
        assert!(error.is_missing());
        let error = Error::NoMapping { installed };
        assert_eq!(error.to_string(), "restoring to another GPU needs NVIDIA driver 580 or newer, found 535.104");
    }

    #[test]
    fn a_failed_call_names_function_pid_code_and_what_to_do() {
        let error = call(Function::Lock, code::NOT_READY);
        let text = error.to_string();
        let start = format!("cuCheckpointProcessLock({}) failed with CUDA_ERROR_NOT_READY (600): ", std::process::id());
        assert!(text.starts_with(&start), "{text}");
        assert!(error.is_not_ready() && !error.is_not_cuda() && !error.is_missing());
        let gone = Error::Call { pid: i32::MAX, function: Function::Lock, code: 304, name: String::new() };
        assert!(gone.to_string().ends_with("the process is gone") && !gone.is_missing());
    }

    #[test]
    fn not_a_cuda_process_has_two_codes_for_a_question_and_one_for_an_action() {
        assert!(call(Function::GetState, 3).is_not_cuda());
        assert!(call(Function::GetState, 1).is_not_cuda());
        assert!(call(Function::Restore, 3).is_not_cuda());
        assert!(!call(Function::Restore, 1).is_not_cuda());
        assert!(!call(Function::GetState, 304).is_not_cuda());
    }
}
