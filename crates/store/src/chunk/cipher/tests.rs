use super::*;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};

use rekindle_testing::root;

fn write(dir: &Path, bytes: &[u8], mode: u32) -> PathBuf {
    let path = dir.join("key");
    let _ = fs::remove_file(&path);
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn a_key_is_32_bytes_or_64_digits() {
    let dir = tempfile::tempdir().unwrap();
    let raw: [u8; 32] = std::array::from_fn(|n| u8::try_from(n * 7).unwrap());
    let digits = blake3::Hash::from_bytes(raw).to_hex();
    let id = Key::new(&raw).id();
    for text in [&raw[..], digits.as_bytes(), format!("{digits}\n").as_bytes(), digits.to_uppercase().as_bytes()] {
        assert_eq!(Key::read(&write(dir.path(), text, 0o600)).unwrap().id(), id);
    }
    assert_eq!(Key::read(&write(dir.path(), &raw, 0o400)).unwrap().id(), id);
    let almost = format!("+{}", &digits[1..]);
    for wrong in [&b""[..], &raw[1..], &[1; 33], &digits.as_bytes()[1..], &[b'x'; 64], almost.as_bytes(), &[b'0'; 4096]]
    {
        let error = Key::read(&write(dir.path(), wrong, 0o600)).unwrap_err();
        assert!(matches!(error, KeyError::NoKey { .. }), "{error}");
        assert!(error.to_string().contains("64 hex digits"), "{error}");
    }
}

#[test]
fn a_key_that_others_can_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [0o640, 0o604, 0o620, 0o602, 0o644] {
        let path = write(dir.path(), &[1; 32], mode);
        let error = Key::read(&path).unwrap_err();
        assert!(matches!(error, KeyError::OthersCanRead { .. }), "{error}");
        assert!(error.to_string().contains(&format!("chmod 600 '{}'", path.display())), "{error}");
    }
    let path = write(dir.path(), &[1; 32], 0o600);
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    for path in [link, dir.path().to_owned(), dir.path().join("none")] {
        let error = Key::read(&path).unwrap_err();
        assert!(matches!(error, KeyError::Read { .. }), "{error}");
        assert!(error.to_string().contains("/dev/urandom"), "{error}");
    }
    if root() {
        chown(&path, Some(12345), None).unwrap();
        let error = Key::read(&path).unwrap_err();
        assert!(matches!(error, KeyError::OtherOwner { owner: 12345, .. }), "{error}");
    }
}

#[test]
fn a_key_is_never_shown() {
    let key = Key::new(&[0xab; 32]);
    assert_eq!(format!("{key:?}"), "Key { .. }");
}

#[test]
fn keys_and_uses_have_nothing_in_common() {
    let (one, two) = (Key::new(&[1; 32]), Key::new(&[2; 32]));
    assert_ne!(one.id(), two.id());
    assert_ne!(one.chunk_id(b"x"), two.chunk_id(b"x"));
    assert_ne!(chunk_id(Some(&one), b"x"), chunk_id(None, b"x"));
    assert_ne!(*one.names, *one.seals);
    assert_ne!(one.names[..16], one.id());
}

/// Stores must be readable for ever: these values are from the documentation of the format.
#[test]
fn the_derivation_is_fixed() {
    let key = Key::new(&[0; 32]);
    let names = blake3::derive_key("rekindle 2026 store: names of chunks", &[0; 32]);
    assert_eq!(key.chunk_id(b"abc"), blake3::keyed_hash(&names, b"abc").into());
    assert_eq!(key.id(), blake3::derive_key("rekindle 2026 store: id of the key", &[0; 32])[..16]);
    let mut bytes = b"head".to_vec();
    bytes.extend(b"secret");
    key.seal(b"bound", &mut bytes, 4).unwrap();
    assert_eq!((&bytes[..4], bytes.len()), (&b"head"[..], 4 + 6 + SEAL));
    let seals = blake3::derive_key("rekindle 2026 store: sealing of chunks", &[0; 32]);
    use chacha20poly1305::aead::{Aead, Payload};
    let nonce = XNonce::try_from(&bytes[4..28]).unwrap();
    let payload = Payload { msg: &bytes[28..], aad: b"bound" };
    assert_eq!(XChaCha20Poly1305::new(&seals.into()).decrypt(&nonce, payload).unwrap(), b"secret");
}

#[test]
fn any_other_bit_is_found() {
    let key = Key::new(&[5; 32]);
    let mut sealed = b"some content".to_vec();
    key.seal(b"bound", &mut sealed, 0).unwrap();
    assert_eq!(key.open(b"bound", &mut sealed.clone()).unwrap(), b"some content");
    for bit in 0..sealed.len() * 8 {
        let mut other = sealed.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(key.open(b"bound", &mut other), Err(FormatError::Unsealed), "bit {bit}");
    }
    for cut in 0..sealed.len() {
        assert_eq!(key.open(b"bound", &mut sealed.clone()[..cut]), Err(FormatError::Unsealed), "cut at {cut}");
    }
    assert_eq!(key.open(b"other", &mut sealed.clone()), Err(FormatError::Unsealed));
    assert_eq!(Key::new(&[6; 32]).open(b"bound", &mut sealed.clone()), Err(FormatError::Unsealed));
    let mut again = b"some content".to_vec();
    key.seal(b"bound", &mut again, 0).unwrap();
    assert_ne!(again, sealed, "a nonce is used once");
}
