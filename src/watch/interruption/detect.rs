//! Which cloud this machine is in, by its firmware's tables (DMI). Nothing is sent.

use std::fs;
use std::path::Path;

use rekindle_base::notice::Cloud;

/// The folder in which the kernel shows them.
pub(crate) const DMI: &str = "/sys/class/dmi/id";

/// Azure's tag; its machines otherwise look like any machine of Hyper-V.
const AZURE: &str = "7783-7084-3265-9085-8269-3286-77";

/// The cloud, if it is one of those that announce interruptions.
#[must_use]
pub(crate) fn cloud(dmi: &Path) -> Option<Cloud> {
    let read = |name: &str| fs::read_to_string(dmi.join(name)).unwrap_or_default().trim().to_owned();
    let (vendor, product) = (read("sys_vendor"), read("product_name"));
    match vendor.as_str() {
        "Amazon EC2" => Some(Cloud::Aws),
        // Older types of machines run on Xen.
        "Xen" if read("bios_version").ends_with(".amazon") => Some(Cloud::Aws),
        // Laptops have the same vendor.
        "Google" if product == "Google Compute Engine" => Some(Cloud::Google),
        "Microsoft Corporation" if read("chassis_asset_tag") == AZURE => Some(Cloud::Azure),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_machines_of_a_cloud_are_told_as_such() {
        for (files, found) in [
            (vec![("sys_vendor", "Amazon EC2"), ("product_name", "p5.48xlarge")], Some(Cloud::Aws)),
            (vec![("sys_vendor", "Xen"), ("bios_version", "4.11.amazon")], Some(Cloud::Aws)),
            (vec![("sys_vendor", "Xen"), ("bios_version", "4.17")], None),
            (vec![("sys_vendor", "Google"), ("product_name", "Google Compute Engine")], Some(Cloud::Google)),
            (vec![("sys_vendor", "Google"), ("product_name", "Eve")], None),
            (vec![("sys_vendor", "Microsoft Corporation"), ("chassis_asset_tag", AZURE)], Some(Cloud::Azure)),
            (vec![("sys_vendor", "Microsoft Corporation"), ("chassis_asset_tag", "0000")], None),
            (vec![("sys_vendor", "QEMU"), ("product_name", "Standard PC")], None),
            (vec![("sys_vendor", "QEMU"), ("chassis_asset_tag", AZURE)], None),
            (vec![], None),
        ] {
            let dmi = tempfile::tempdir().unwrap();
            for (name, text) in &files {
                // The kernel ends each with a line break.
                fs::write(dmi.path().join(name), format!("{text}\n")).unwrap();
            }
            assert_eq!(cloud(dmi.path()), found, "{files:?}");
        }
    }
}
