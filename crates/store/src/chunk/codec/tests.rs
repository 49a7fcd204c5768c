use super::*;
use proptest::prelude::*;

/// Incompressible bytes, always the same for the same seed.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut output = vec![0; bytes];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut output);
    output
}

fn text(bytes: usize) -> Vec<u8> {
    let lines = (0..).flat_map(|n: u64| format!("{{'step': {n}, 'loss': {}}}\n", n * 7919 % 1000).into_bytes());
    lines.take(bytes).collect()
}

fn coded(wanted: Compression, raw: &[u8]) -> (Codec, usize) {
    let mut scratch = vec![3; 11];
    let (codec, stored) = encode(wanted, raw, &mut scratch);
    let stored = stored.to_vec();
    let mut back = vec![1; 3];
    decode(codec, &stored, raw.len(), &mut back).unwrap();
    assert_eq!(back, raw, "{wanted}");
    (codec, stored.len())
}

#[test]
fn what_saves_is_compressed_and_what_does_not_is_kept_as_it_is() {
    let (noise, text) = (noise(256 << 10, 1), text(256 << 10));
    for (wanted, codec) in [
        (Compression::None, Codec::Raw),
        (Compression::Lz4, Codec::Lz4),
        (Compression::Zstd(1), Codec::Zstd),
        (Compression::Zstd(19), Codec::Zstd),
        (Compression::Auto, Codec::Zstd),
    ] {
        assert_eq!(coded(wanted, &noise), (Codec::Raw, noise.len()), "{wanted}");
        let (found, stored) = coded(wanted, &text);
        assert_eq!(found, codec, "{wanted}");
        assert!(codec == Codec::Raw || stored < text.len() / 2, "{wanted}: {stored}");
    }
    for small in [1, 2, 100, 3 * SAMPLE, 3 * SAMPLE + 1] {
        coded(Compression::Auto, &text[..small]);
        coded(Compression::Lz4, &noise[..small]);
    }
}

#[test]
fn auto_looks_in_three_places() {
    let mut mixed = noise(256 << 10, 2);
    let middle = (mixed.len() - SAMPLE) / 2;
    mixed[middle..middle + SAMPLE].fill(7);
    assert_eq!(coded(Compression::Auto, &mixed).0, Codec::Raw, "4 KiB of 256 are no gain");
    mixed[..128 << 10].fill(7);
    assert_eq!(coded(Compression::Auto, &mixed).0, Codec::Zstd);
}

#[test]
fn a_wrong_length_is_refused_before_anything_is_allocated() {
    let raw = text(10_000);
    for wanted in [Compression::None, Compression::Lz4, Compression::Zstd(3)] {
        let mut scratch = Vec::new();
        let (codec, stored) = encode(wanted, &raw, &mut scratch);
        for raw_len in [1, raw.len() - 1, raw.len() + 1] {
            let mut into = Vec::new();
            let error = decode(codec, stored, raw_len, &mut into).unwrap_err();
            assert!(matches!(error, FormatError::Undecodable(_)), "{wanted} {raw_len}: {error}");
            assert!(into.capacity() <= 2 * raw.len());
        }
        for raw_len in [0, CHUNK_MAX as usize + 1, usize::MAX] {
            let mut into = Vec::new();
            let error = decode(codec, stored, raw_len, &mut into).unwrap_err();
            assert!(matches!(error, FormatError::OutOfBounds { .. }), "{wanted} {raw_len}: {error}");
            assert_eq!(into.capacity(), 0);
        }
        for cut in [0, 1, stored.len() / 2, stored.len() - 1] {
            assert!(decode(codec, &stored[..cut], raw.len(), &mut Vec::new()).is_err(), "{wanted} cut at {cut}");
        }
    }
}

#[test]
fn compressions_have_one_text_each_and_levels_a_range() {
    for (text, compression, written) in [
        ("auto", Compression::Auto, "auto"),
        ("none", Compression::None, "none"),
        ("lz4", Compression::Lz4, "lz4"),
        ("zstd", Compression::Zstd(3), "zstd:3"),
        ("zstd:-7", Compression::Zstd(-7), "zstd:-7"),
        ("zstd:0", Compression::Zstd(0), "zstd:0"),
        ("zstd:19", Compression::Zstd(19), "zstd:19"),
    ] {
        assert_eq!((text.parse(), compression.to_string().as_str()), (Ok(compression), written));
        assert_eq!(written.parse(), Ok(compression));
    }
    for text in ["", "ZSTD", "zstd:", "zstd:20", "zstd:-8", "zstd:+3", "zstd:3.0", "zstd: 3", "lz4:1", "gzip", ":3"] {
        assert_eq!(text.parse::<Compression>(), Err(Malformed), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_come_back(raw in prop::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 1..40_000), level in Compression::LEVELS) {
        for wanted in [Compression::None, Compression::Lz4, Compression::Zstd(level % 6 + 1), Compression::Auto] {
            coded(wanted, &raw);
        }
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(stored: Vec<u8>, raw_len in 0_usize..100_000) {
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
            let mut into = Vec::new();
            if decode(codec, &stored, raw_len, &mut into).is_ok() {
                prop_assert_eq!(into.len(), raw_len);
            }
        }
    }
}

/// Measurements for choosing: `cargo test --release --lib measured -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measured() {
    let bytes = 64 << 20;
    let uniform = noise(2 * bytes, 3);
    // Box and Muller: two uniform numbers make a normal one.
    let normal = |piece: &[u8]| {
        let number = |at: usize| u32::from_le_bytes(piece[at..at + 4].try_into().unwrap());
        let (one, two) = ((f64::from(number(0)) + 1.0) / 4_294_967_296.0, f64::from(number(4)) / 4_294_967_296.0);
        let value = (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * two).cos() * 0.02;
        value.to_string().parse::<f32>().unwrap().to_le_bytes()
    };
    let weights: Vec<u8> = uniform.chunks_exact(8).flat_map(normal).collect();
    let mut heap = text(bytes);
    heap.chunks_exact_mut(64).for_each(|object| {
        let (head, _) = object.split_at_mut(16);
        head[..8].copy_from_slice(&3_u64.to_le_bytes());
        head[8..].copy_from_slice(&0x7f12_3456_7890_u64.to_le_bytes());
    });
    for (name, data) in [("random", &uniform[..bytes]), ("float32 weights", &weights), ("heap", &heap)] {
        for wanted in
            [Compression::None, Compression::Lz4, Compression::Zstd(1), Compression::Zstd(3), Compression::Auto]
        {
            let (mut stored, mut encoded, mut decoded) = (0, f64::MAX, f64::MAX);
            // The machine has other users: take the best of several.
            for _ in 0..5 {
                let (mut scratch, mut kept, mut into) = (Vec::new(), Vec::new(), Vec::new());
                let mut took = std::time::Duration::ZERO;
                for raw in data.chunks(crate::chunk::CHUNK) {
                    let began = std::time::Instant::now();
                    let (codec, bytes) = encode(wanted, raw, &mut scratch);
                    took += began.elapsed();
                    kept.push((codec, bytes.to_vec(), raw.len()));
                }
                encoded = took.as_secs_f64().min(encoded);
                stored = kept.iter().map(|(_, bytes, _)| bytes.len()).sum();
                let began = std::time::Instant::now();
                for (codec, bytes, raw_len) in &kept {
                    decode(*codec, bytes, *raw_len, &mut into).unwrap();
                }
                decoded = began.elapsed().as_secs_f64().min(decoded);
            }
            let mib = data.len() as f64 / 1048576.0;
            let share = 100.0 * stored as f64 / data.len() as f64;
            eprintln!(
                "{name:16} {wanted:7} {share:6.1} % {:7.0} MiB/s in {:7.0} MiB/s out",
                mib / encoded,
                mib / decoded
            );
        }
    }
}

#[test]
fn auto_compresses_weights_although_nothing_in_them_is_there_twice() {
    // A sum of twelve uniform numbers is nearly normal.
    let numbers = noise(12 * 2 * (64 << 10), 5);
    let weight = |bytes: &[u8]| {
        let sum: f64 = bytes.chunks(2).map(|two| f64::from(u16::from_le_bytes([two[0], two[1]])) / 65536.0).sum();
        ((sum - 6.0) * 0.02).to_string().parse::<f32>().unwrap().to_le_bytes()
    };
    let weights: Vec<u8> = numbers.chunks(24).flat_map(weight).collect();
    assert_eq!(weights.len(), 256 << 10);
    assert_eq!(coded(Compression::Lz4, &weights).0, Codec::Raw);
    let (codec, stored) = coded(Compression::Auto, &weights);
    assert!(codec == Codec::Zstd && stored < 250_000, "{codec:?} {stored}");
}
