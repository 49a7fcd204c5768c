//! `objects.json` of an image, which anybody can write who can write the store. What was read is written as it was, and
//! compared with anything without harm.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use rekindle_objects::{Record, compare};

/// A job with objects of many kinds.
static JOB: LazyLock<Record> = LazyLock::new(|| {
    let bytes = include_bytes!("../corpus/objects/job");
    Record::parse(bytes).expect("it is whole")
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(record) = Record::parse(bytes) else { return };
    let written = record.to_bytes().expect("every record can be written");
    assert_eq!(Record::parse(&written).expect("what was written can be read"), record);
    let _ = record.kinds();
    for difference in compare(&record, &JOB) {
        assert!(difference.to_string().len() < 2000);
    }
});
