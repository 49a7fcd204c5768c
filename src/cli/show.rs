//! `rekindle show`: all that is known of an image.

use chrono::Local;

use super::list::{milliseconds, size};
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, job_args};
use crate::store::{Image, Manifest, State};

pub(super) fn show(global: &Global, text: &str) -> anyhow::Result<Exit> {
    let (_, image) = job_args::image(&global.open_store()?, text)?;
    match (global.format(), image.manifest()) {
        (Format::Json, Some(manifest)) => print_json(manifest)?,
        (_, Some(manifest)) => print_text(&describe(&image, manifest))?,
        (_, None) => {
            let State::Damaged { why } = &image.state else { return Ok(Exit::Unsound) };
            print_text(&format!("{}  damaged: {why}", image.id))?;
            return Ok(Exit::Unsound);
        }
    }
    Ok(Exit::Success)
}

fn describe(image: &Image, m: &Manifest) -> String {
    let state = match &image.state {
        State::Bad { mark, .. } => format!("bad since {}: {}: {}", mark.when, mark.why, mark.detail),
        _ => "good".into(),
    };
    let mut lines: Vec<(&str, String)> = vec![
        ("image", m.id.to_string()),
        ("job", m.job.to_string()),
        ("state", state),
        ("taken", m.taken.with_timezone(&Local).to_rfc3339()),
        ("lineage", m.lineage.clone()),
        ("folder", image.dir.display().to_string()),
        ("command", m.command.join(" ")),
        ("directory", m.directory.display().to_string()),
        ("user", m.user.clone().unwrap_or_else(|| "the supervisor's".into())),
        ("host", format!("{} ({}, kernel {})", m.host.name, m.host.cpu_model, m.host.kernel)),
        ("made by", format!("rekindle {}, CRIU {}", m.rekindle, m.criu)),
        ("size", size(m.bytes)),
        ("freeze", milliseconds(m.freeze_us)),
    ];
    lines.extend(m.phases.iter().map(|p| ("phase", format!("{:<10} {:>12}", p.phase, milliseconds(p.took_us)))));
    if let Some(driver) = &m.driver {
        lines.push(("driver", driver.clone()));
    }
    lines.extend(m.gpus.iter().map(|gpu| ("gpu", format!("{} {}", gpu.name, gpu.uuid))));
    lines.extend(m.tree.processes.iter().map(|p| {
        let cuda = if m.tree.cuda.contains(&p.pid) { " (CUDA)" } else { "" };
        ("process", format!("{} {}{cuda}", p.pid, p.name))
    }));
    lines.extend(m.open_files.iter().map(|f| ("open file", format!("{} ({} bytes)", f.path.display(), f.size))));
    let text: Vec<String> = lines.iter().map(|(key, value)| format!("{key:<10} {value}")).collect();
    text.join("\n")
}
