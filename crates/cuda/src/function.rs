//! The functions of the driver that take and restore checkpoints.

/// The checkpoint functions of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Function {
    /// `cuCheckpointProcessGetState`
    GetState,
    /// `cuCheckpointProcessGetRestoreThreadId`
    GetRestoreThreadId,
    /// `cuCheckpointProcessLock`
    Lock,
    /// `cuCheckpointProcessCheckpoint`
    Checkpoint,
    /// `cuCheckpointProcessRestore`
    Restore,
    /// `cuCheckpointProcessUnlock`
    Unlock,
    /// `cuCheckpointOperationComplete`, for custom storage
    OperationComplete,
}

impl Function {
    /// All of them.
    pub const ALL: [Function; 7] = [
        Function::GetState,
        Function::GetRestoreThreadId,
        Function::Lock,
        Function::Checkpoint,
        Function::Restore,
        Function::Unlock,
        Function::OperationComplete,
    ];

    /// Its name in libcuda.so.1.
    #[must_use]
    pub fn symbol(self) -> &'static str {
        match self {
            Function::GetState => "cuCheckpointProcessGetState",
            Function::GetRestoreThreadId => "cuCheckpointProcessGetRestoreThreadId",
            Function::Lock => "cuCheckpointProcessLock",
            Function::Checkpoint => "cuCheckpointProcessCheckpoint",
            Function::Restore => "cuCheckpointProcessRestore",
            Function::Unlock => "cuCheckpointProcessUnlock",
            Function::OperationComplete => "cuCheckpointOperationComplete",
        }
    }

    /// The first driver with this function, by major version.
    #[must_use]
    pub fn since(self) -> u32 {
        match self {
            Function::OperationComplete => 615,
            _ => 570,
        }
    }
}
