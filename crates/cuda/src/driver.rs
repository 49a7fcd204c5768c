//! libcuda.so.1, loaded at run time and never unloaded.
#![allow(unsafe_code, reason = "calls of the CUDA driver; each block says why it is sound")]

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, OnceLock};

use libloading::Library;

use super::code;
use super::error::{self, Error, Result};
use super::ffi::{ErrorTextFn, GetVersionFn, ProcessFn};
use super::function::Function;
use super::version::{self, DriverVersion};

/// The loaded driver library. A clone refers to the same library.
#[derive(Clone)]
pub struct Driver {
    // Never closed: libcuda starts threads and registers exit handlers once it is in use.
    library: Arc<ManuallyDrop<Library>>,
}

impl Driver {
    /// The driver of this machine: `libcuda.so.1`, wherever the loader finds it. Loaded once; a failure is not
    /// remembered, so a driver that is installed later is found.
    ///
    /// # Errors
    /// [`Error::NoDriver`] or [`Error::NoLibrary`].
    pub fn load() -> Result<Self> {
        static LOADED: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = LOADED.get() {
            return Ok(driver.clone());
        }
        let driver = Self::open("libcuda.so.1")?;
        Ok(LOADED.get_or_init(|| driver).clone())
    }

    /// Loads a driver library from this path.
    ///
    /// # Errors
    /// [`Error::NoDriver`] or [`Error::NoLibrary`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let name: &OsStr = path.as_ref().as_os_str();
        // SAFETY: loading runs the initialisers of NVIDIA's library, which have no preconditions; a program that is
        // linked with CUDA runs the same ones before main.
        let library = unsafe { Library::new(name) };
        let library = library.map_err(|source| match version::installed() {
            Some(installed) => Error::NoLibrary { installed, source },
            None => Error::NoDriver(source),
        })?;
        Ok(Self { library: Arc::new(ManuallyDrop::new(library)) })
    }

    /// The version of the installed driver, for example `580.159.04`; its major version decides which functions exist.
    /// `None` if no kernel module reports it.
    #[must_use]
    pub fn version(&self) -> Option<DriverVersion> {
        version::installed()
    }

    /// The newest CUDA version that the library supports, as 1000 * major + 10 * minor (13000 came with driver 580).
    #[must_use]
    pub fn cuda_version(&self) -> Option<i32> {
        let get_version: GetVersionFn = self.symbol("cuDriverGetVersion")?;
        let mut version: c_int = 0;
        // SAFETY: the function writes one int; it needs no cuInit (documented).
        let code = unsafe { get_version(&raw mut version) };
        (code == code::SUCCESS).then_some(version)
    }

    /// Whether the library has the function.
    #[must_use]
    pub fn supports(&self, function: Function) -> bool {
        self.symbol::<*const c_void>(function.symbol()).is_some()
    }

    /// Refuses GPU pairs on a driver before 580, which ignores the bytes with the pairs: it would restore the process
    /// to its old GPU, or fail half way.
    pub(super) fn check_mapping(&self) -> Result<()> {
        let installed = version::installed();
        let old_module = installed.as_ref().is_some_and(|version| version.major() < 580);
        let old_library = self.cuda_version().is_some_and(|version| version < 13_000);
        if old_module || old_library { Err(Error::NoMapping { installed }) } else { Ok(()) }
    }

    /// Calls `function` with `pid` and an argument of the type that cuda.h declares for it.
    ///
    /// `cuInit` is not called, here or anywhere: of the checkpoint functions only those with custom storage need it in
    /// the caller (cuda.h of CUDA 13.5, `cuCheckpointProcessCheckpoint`), and it would open the devices in this
    /// process. So error 3 is about the process `pid`, never about the caller.
    ///
    /// # Safety
    /// `argument` must be what cuda.h declares for `function`, valid for reads and writes, or null where it may be.
    pub(super) unsafe fn call(&self, function: Function, pid: i32, argument: *mut c_void) -> Result<()> {
        let call: ProcessFn = self
            .symbol(function.symbol())
            .ok_or_else(|| Error::TooOld { function, installed: version::installed() })?;
        // SAFETY: the caller vouches for the argument; the driver takes calls from any thread.
        let code = unsafe { call(pid, argument) };
        if code == code::SUCCESS {
            Ok(())
        } else {
            Err(Error::Call { pid, function, code, name: self.error_name(code) })
        }
    }

    fn error_name(&self, code: i32) -> String {
        let Some(get_name) = self.symbol::<ErrorTextFn>("cuGetErrorName") else { return error::name(code).to_owned() };
        let mut text = ptr::null();
        // SAFETY: the function writes one pointer; it needs no cuInit.
        let found = unsafe { get_name(code, &raw mut text) };
        if found != code::SUCCESS || text.is_null() {
            return error::name(code).to_owned();
        }
        // SAFETY: on success the pointer is to a static, NUL-terminated string of the library, which stays loaded.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }

    /// The symbol of this name, if the library has it. `T` must be its type.
    pub(super) fn symbol<T: Copy>(&self, name: &str) -> Option<T> {
        // SAFETY: every caller in this crate names the type that cuda.h declares for the symbol.
        let symbol = unsafe { self.library.get::<T>(name) };
        symbol.ok().map(|symbol| *symbol)
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("cuda_version", &self.cuda_version()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_no_driver() {
        let error = Driver::open("/nowhere/libcuda.so.1").unwrap_err();
        assert!(error.is_missing());
        let text = error.to_string();
        assert!(text.starts_with("needs NVIDIA driver 570 or newer"), "{text}");
    }

    #[test]
    fn a_library_without_the_function_is_too_old() {
        // Any library without these symbols.
        let driver = Driver::open("libc.so.6").unwrap();
        assert!(Function::ALL.iter().all(|function| !driver.supports(*function)));
        // SAFETY: the function is not there, so nothing is called.
        let error = unsafe { driver.call(Function::Lock, 1, ptr::null_mut()) }.unwrap_err();
        assert!(matches!(error, Error::TooOld { function: Function::Lock, .. }), "{error:?}");
        assert!(error.to_string().starts_with("needs NVIDIA driver 570 or newer, found "), "{error}");
        assert_eq!(driver.cuda_version(), None);
    }
}
