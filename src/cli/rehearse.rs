//! `rekindle rehearse`: started by a supervisor to rehearse a restore beside its job. Reads the request from standard
//! input and writes the result to standard output, both as JSON.

use std::io::Read;

use super::Exit;
use super::output;
use rekindle_engine::restore::rehearsal::{self, Script};

pub(super) fn rehearse() -> anyhow::Result<Exit> {
    let mut text = String::new();
    std::io::stdin().take(1 << 20).read_to_string(&mut text)?;
    let script: Script = serde_json::from_str(&text)?;
    output::print_text(&serde_json::to_string(&rehearsal::play(&script))?)?;
    Ok(Exit::Success)
}
