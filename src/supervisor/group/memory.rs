//! What a machine remembers of its group between two supervisors.

use serde::{Deserialize, Serialize};

use crate::group::Membership;
use crate::supervisor::Setup;
use rekindle_group::{Epoch, Incarnation, Machine, Rewound};
use rekindle_os::beneath::Beneath;
use rekindle_os::{durable, process};
use rekindle_store::JobFolder;

/// Maximum size of the file. Ours have less than a kilobyte.
const MAX_BYTES: u64 = 1 << 20;

/// What this machine remembers of the group: `group.json` in the job's folder.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Memory {
    /// The last epoch that ran here.
    pub(super) epoch: u64,
    /// The last membership,
    #[serde(default)]
    membership: Option<u64>,
    /// and the boot of the machine in which it began.
    #[serde(default)]
    boot: String,
    /// Group images before this one are not used: the job has started from the beginning since.
    #[serde(default)]
    pub(super) floor: u64,
    /// What rewinds have abandoned.
    #[serde(default)]
    pub(super) rewound: Option<Rewound>,
}

impl Memory {
    pub(super) fn file(folder: &JobFolder) -> Beneath {
        folder.dir().join("group.json")
    }

    /// Without the file, no epoch has run here.
    pub(super) fn read(file: &Beneath) -> std::io::Result<Memory> {
        match file.content(MAX_BYTES) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Memory::default()),
            Err(error) => Err(error),
        }
    }

    /// The membership of a supervisor that was killed. We have the lock of the job's folder, and the kernel ends a job
    /// with its supervisor. After a restart of the machine, or on another one, nothing is certain: the store may be
    /// shared.
    pub(super) fn former(&self) -> Option<Incarnation> {
        let boot = process::boot_id().ok().filter(|boot| !boot.is_empty() && *boot == self.boot);
        boot.and(self.membership).map(Incarnation)
    }

    fn write(&self, file: &Beneath) -> std::io::Result<()> {
        durable::replace_file(file, &serde_json::to_vec(self)?, 0o600)
    }
}

/// Records what the next supervisor must know.
pub(super) fn remember(
    setup: &Setup,
    epoch: Epoch,
    membership: Option<&Membership>,
    machine: &Machine,
) -> std::io::Result<()> {
    let membership = membership.map(|membership| membership.incarnation().0);
    let (boot, rewound) = (process::boot_id().unwrap_or_default(), machine.rewound().cloned());
    let memory = Memory { epoch: epoch.0, membership, boot, floor: machine.floor().0, rewound };
    memory.write(&Memory::file(&setup.folder))
}
