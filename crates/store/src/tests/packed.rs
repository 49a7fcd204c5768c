//! What a manifest says about how an image is stored.

use super::super::chunk::{ChunkId, ChunkMap, Extent};
use super::super::format::ReadError;
use super::super::image::Form;
use super::super::manifest::Chunks;
use super::*;

/// Adds a packed image with one part.
fn place(home: &Home, chunks: impl FnOnce(Chunks) -> Option<Chunks>) -> Image {
    let id = home.folder.next_id(at(5)).unwrap();
    let dir = home.image_path(&id.to_string());
    fs::create_dir(&dir).unwrap();
    let extents = vec![Extent::Chunk { id: ChunkId::new([1; 32]), len: 7 }, Extent::Zero { len: 9 }];
    let bytes = ChunkMap { parts: vec![extents] }.to_bytes();
    fs::write(dir.join("chunks"), &bytes).unwrap();
    let parts = vec![Part { path: "criu/pages-1.img".into(), size: 16, blake3: None }];
    let chunks = chunks(Chunks { blake3: blake3::hash(&bytes), extents: 2, stored: 7 });
    let manifest = Manifest { id, job: home.folder.name().clone(), parts, chunks, ..manifest() };
    fs::write(dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
    Image::load(&dir, id, &Default::default())
}

#[test]
fn a_packed_image_needs_no_hash_of_its_parts_and_has_a_map() {
    let home = Home::new();
    let image = place(&home, Some);
    assert_eq!((image.is_good(), image.form()), (true, Form::Packed));
    let map = image.chunk_map().unwrap().unwrap();
    assert_eq!(map.chunks().collect::<Vec<_>>(), [(ChunkId::new([1; 32]), 7)]);
}

#[test]
fn a_loose_image_has_no_map() {
    let home = Home::new();
    let image = home.publish(0);
    assert_eq!((image.form(), image.chunk_map().unwrap()), (Form::Loose, None));
    let unhashed = place(&home, |_| None);
    let State::Damaged { why } = &unhashed.state else { panic!("{unhashed:?}") };
    assert!(why.detail.contains("no checksum"), "{why}");
    assert_eq!(unhashed.form(), Form::Loose);
}

#[test]
fn a_map_that_the_manifest_does_not_tell_of_is_refused() {
    let home = Home::new();
    let image = place(&home, |chunks| Some(Chunks { extents: 3, ..chunks }));
    assert!(matches!(image.chunk_map(), Err(ReadError::Format { .. })));
    let image = place(&home, |chunks| Some(Chunks { blake3: blake3::hash(b"other"), ..chunks }));
    assert!(matches!(image.chunk_map(), Err(ReadError::Format { .. })));
    fs::remove_file(image.dir.join("chunks")).unwrap();
    assert!(matches!(image.chunk_map(), Err(ReadError::Read { .. })));
}
