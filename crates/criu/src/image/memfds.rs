//! Memory that has a file without a place in the file system (memfd_create(2)), by the names that programs gave it.

use super::{Error, Records};
use crate::proto::MemfdEntry;
use rekindle_os::beneath::Beneath;

const MEMFD: u32 = 0x4845_3499;

/// The names of all memfds that a process of the image has open or mapped.
///
/// # Errors
/// When the image file is damaged.
pub fn memfd_names(dir: &Beneath) -> Result<Vec<String>, Error> {
    let path = dir.join("memfd.img");
    // Without any there is no file.
    if !path.is_there() {
        return Ok(Vec::new());
    }
    let all: Vec<MemfdEntry> = Records::open(path, MEMFD)?.all()?;
    Ok(all.into_iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::*;

    #[test]
    fn names_are_read_and_damage_is_told() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(memfd_names(&beneath(dir.path())).unwrap(), Vec::<String>::new());
        // Of CRIU 4.2, for a mapping of one page.
        let image = b"\x19CVT\x994EH\x25\0\0\0\n\x0frekindle-cuinit\x10\0\x18\0\x20\x80\x20\
                      \x28\x82\xbe\x9c\x01\x30\0\x38\x01\x48\xff\x83\x02";
        std::fs::write(dir.path().join("memfd.img"), image).unwrap();
        assert_eq!(memfd_names(&beneath(dir.path())).unwrap(), ["rekindle-cuinit"]);
        std::fs::write(dir.path().join("memfd.img"), &image[..image.len() - 1]).unwrap();
        assert!(memfd_names(&beneath(dir.path())).is_err());
    }
}
