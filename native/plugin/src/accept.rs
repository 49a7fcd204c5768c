//! The list of accepted devices: `c195 c507 c10:229 b7:0` means all character devices of the majors 195 and 507, the
//! one of major 10 and minor 229, and the block device of major 7 and minor 0. Anything that cannot be parsed names
//! nothing.

/// A device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// `b'c'` or `b'b'`, as ls(1) shows it.
    pub(crate) kind: u8,
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// Whether the list names the device.
pub(crate) fn names(list: &[u8], device: Device) -> bool {
    list.split(|byte| *byte == b' ').any(|entry| matches(entry, device) == Some(true))
}

fn matches(entry: &[u8], device: Device) -> Option<bool> {
    let (kind, numbers) = entry.split_first()?;
    let mut numbers = numbers.split(|byte| *byte == b':');
    let major = number(numbers.next()?)?;
    let minor = match numbers.next() {
        Some(minor) => Some(number(minor)?),
        None => None,
    };
    if numbers.next().is_some() {
        return None;
    }
    Some(*kind == device.kind && major == device.major && minor.is_none_or(|minor| minor == device.minor))
}

/// A decimal number, without a sign.
pub(crate) fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u32, |number, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit <= 9)?;
        number.checked_mul(10)?.checked_add(u32::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: u8, major: u32, minor: u32) -> Device {
        Device { kind, major, minor }
    }

    #[test]
    fn what_is_named_is_accepted_and_nothing_else() {
        let list = b"c195 c507 c10:229 b7:0";
        for (kind, major, minor) in [(b'c', 195, 0), (b'c', 195, 255), (b'c', 507, 1), (b'c', 10, 229), (b'b', 7, 0)] {
            assert!(names(list, device(kind, major, minor)), "{} {major}:{minor}", char::from(kind));
        }
        for (kind, major, minor) in
            [(b'b', 195, 0), (b'c', 19, 5), (b'c', 10, 232), (b'c', 7, 0), (b'b', 7, 1), (b'c', 1, 3)]
        {
            assert!(!names(list, device(kind, major, minor)), "{} {major}:{minor}", char::from(kind));
        }
    }

    #[test]
    fn what_can_not_be_read_names_nothing() {
        for list in [
            &b""[..],
            b" ",
            b"c",
            b"c:",
            b"c1:",
            b"c:3",
            b"c1:3:",
            b"c1:3:5",
            b"1:3",
            b"c+1",
            b"c1:-3",
            b"c1,3",
            b"c4294967297",
            b"\xff1:3",
        ] {
            assert!(!names(list, device(b'c', 1, 3)), "{list:?}");
        }
        assert!(names(b"c4294967297  c1:x c1", device(b'c', 1, 3)), "the rest of the list counts");
    }
}
