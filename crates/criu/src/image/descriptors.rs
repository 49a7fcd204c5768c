//! The descriptors of each process.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::devices::images;
use super::{Error, FDINFO, IDS, Records};
use crate::proto::{FdinfoEntry, KobjIds};

/// The numbers of the descriptors that each process of the image has, by its pid as it sees itself.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn descriptors(dir: &Path) -> Result<BTreeMap<i32, BTreeSet<i32>>, Error> {
    let pids = images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok());
    let of = |pid| Ok((pid, table_of(dir, pid)?.into_iter().map(|entry| entry.fd.cast_signed()).collect()));
    pids.map(of).collect()
}

/// The descriptors of a process.
pub(super) fn table_of(dir: &Path, pid: i32) -> Result<Vec<FdinfoEntry>, Error> {
    let ids: Option<KobjIds> = Records::open(dir.join(format!("ids-{pid}.img")), IDS)?.next()?;
    let table = ids.map(|ids| dir.join(format!("fdinfo-{}.img", ids.files))).filter(|table| table.exists());
    table.map_or(Ok(Vec::new()), |table| Records::open(table, FDINFO)?.all())
}
