//! The datagrams of a job's own socket, which anything in the job can send. Whatever comes gets an answer with its id.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle::job_api::protocol::{Datagram, MAX_REQUEST, Request, answer};

fuzz_target!(|bytes: &[u8]| {
    // What is longer does not get as far.
    let bytes = &bytes[..bytes.len().min(MAX_REQUEST)];
    let datagram = Datagram::read(bytes);
    assert_eq!(Datagram::read(bytes), datagram);
    for text in [&datagram.id, &datagram.life].into_iter().flatten() {
        assert!(text.len() <= MAX_REQUEST);
    }
    if let Ok(Request::Hold { holder, .. } | Request::Release { holder }) = &datagram.request {
        assert!(holder.len() <= MAX_REQUEST);
    }
    if let Err(fault) = datagram.request {
        let text = answer(datagram.id.as_deref(), &Err(fault));
        let value: serde_json::Value = serde_json::from_slice(&text).expect("an answer is JSON");
        assert_eq!(value["id"].as_str(), datagram.id.as_deref());
        assert!(value["error"]["message"].is_string());
    }
});
