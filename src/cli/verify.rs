//! `rekindle verify`: checks that images are complete, and on request that every byte is intact. Without a flag it
//! checks the structure of packed images: the manifest, the chunk map, a place for every chunk, the indexes, and the
//! lengths of the packs. Images share packs, so for a whole job each pack is read once. An image in memory has no
//! checksums before it is stored, so only its sizes are checked.

use serde::Serialize;

use super::find::{self, Finder, Refused};
use super::list::no_images;
use super::output::{Column, Format, complain, print_json, print_note, print_table, print_text, terminal_width};
use super::{Exit, Global, Misuse, complete, progress};
use crate::config::{self, Config};
use rekindle_base::chain;
use rekindle_store::chunk::Key;
use rekindle_store::persist;
use rekindle_store::{Form, Image, JobFolder, JobName, PackReport, PacksReport, Place, Report, Share, check_packs};

/// What to check, and how much of it to read.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// JOB, JOB/ID, JOB/TAG, JOB/-N or ID; by default everything
    #[arg(add = complete::images())]
    image: Option<String>,
    /// Also read all content and compare every byte with its checksum
    #[arg(long)]
    read_data: bool,
    /// Read this share of the packs, chosen at random each time, such as 10%
    #[arg(long, value_name = "PERCENT", value_parser = share, conflicts_with = "read_data")]
    read_data_subset: Option<Share>,
}

fn share(text: &str) -> Result<Share, String> {
    let percent = text.strip_suffix('%').unwrap_or(text).trim_end().parse().ok().filter(|percent| *percent > 0);
    percent.and_then(Share::percent).ok_or_else(|| "must be a whole number from 1% to 100%".to_owned())
}

/// The result for an image.
#[derive(Debug, Serialize)]
struct ImageRow {
    job: JobName,
    sound: bool,
    /// Whether its content was read, or only its structure checked.
    read: bool,
    #[serde(flatten)]
    report: Report,
}

/// The result for the packs of a job.
#[derive(Debug, Serialize)]
struct PacksRow {
    job: JobName,
    sound: bool,
    #[serde(flatten)]
    report: PacksReport,
}

#[derive(Debug, Default, Serialize)]
struct Found {
    images: Vec<ImageRow>,
    packs: Vec<PacksRow>,
}

pub(super) fn verify(global: &Global, args: &VerifyArgs) -> anyhow::Result<Exit> {
    let Config { store: config, replica, .. } = global.settings(global.overrides())?;
    let from_there = if replica.url.is_some() { ", from the replica if possible" } else { "" };
    let finder = Finder::with_key(global)?;
    let (chosen, mut refused) = chosen(&finder, args.image.as_deref())?;
    let is_empty = matches!(&chosen, Chosen::Jobs(folders) if folders.is_empty()) && refused.is_empty();
    if is_empty && global.format() == Format::Text {
        print_text(&find::no_jobs(&finder))?;
        return Ok(Exit::Success);
    }
    if let Chosen::Jobs(folders) = &chosen
        && let [folder] = &folders[..]
        && args.image.is_some()
        && global.format() == Format::Text
        && folder.known()?.is_empty()
    {
        print_text(&no_images(folder.name()))?;
        return Ok(Exit::Success);
    }
    let share = match (args.read_data, args.read_data_subset) {
        (true, _) => Share::ALL,
        (false, Some(_)) if matches!(chosen, Chosen::One(..)) => {
            let words =
                "--read-data-subset reads packs, which the images of a job share: give a job, or use --read-data";
            return Err(Misuse(words.to_owned()).into());
        }
        (false, share) => share.unwrap_or(Share::NONE),
    };
    let reading = Reading { share, key: key(&config, share)?, threads: persist::threads() };
    let mut found = Found::default();
    match chosen {
        Chosen::One(one) => found.images.extend(reading.image(&one.0, &one.1)?),
        Chosen::Jobs(folders) => {
            for folder in folders {
                match reading.job(&folder, &mut found) {
                    Err(error) if args.image.is_none() => {
                        let (job, store) = (folder.name().clone(), folder.store().to_owned());
                        refused.push(Refused { job, store, error });
                    }
                    read => read?,
                }
            }
        }
    }
    print(global.format(), &found)?;
    let images = found.images.iter().filter(|row| !row.sound).map(|row| &row.job);
    let mut unsound: Vec<&JobName> =
        images.chain(found.packs.iter().filter(|row| !row.sound).map(|row| &row.job)).collect();
    unsound.dedup();
    unsound.sort();
    unsound.dedup();
    for job in &unsound {
        complain(&format!(
            "job {job}: `rekindle repair --dry-run {job}` shows which images lost content, and `rekindle repair \
            {job}` repairs what it can{from_there}"
        ));
    }
    if unsound.is_empty() {
        return Refused::end(refused).map(|()| Exit::Success);
    }
    refused.iter().for_each(|refused| complain(&chain(refused.error.as_ref())));
    Ok(Exit::Unsound)
}

/// The key of encrypted packs. Not needed if no content is read.
fn key(config: &config::Store, share: Share) -> anyhow::Result<Option<Key>> {
    match &config.encryption_key {
        Some(_) if share != Share::NONE => Ok(config.trust()?.key().cloned()),
        _ => Ok(None),
    }
}

enum Chosen {
    One(Box<(JobFolder, Image)>),
    Jobs(Vec<JobFolder>),
}

/// What to check, and the jobs that cannot be checked.
fn chosen(finder: &Finder, text: Option<&str>) -> anyhow::Result<(Chosen, Vec<Refused>)> {
    let one = |one| Chosen::One(Box::new(one));
    let chosen = match text {
        None => {
            let (folders, refused) = finder.jobs()?.all(finder);
            return Ok((Chosen::Jobs(folders), refused));
        }
        Some(text) if text.contains('/') => finder.image(text).map(one)?,
        Some(text) => match finder.only_job(text) {
            Ok(folder) => Chosen::Jobs(vec![folder]),
            // It may be the id of an image.
            Err(_) => finder.image(text).map(one)?,
        },
    };
    Ok((chosen, Vec::new()))
}

struct Reading {
    share: Share,
    key: Option<Key>,
    threads: usize,
}

impl Reading {
    fn job(&self, folder: &JobFolder, found: &mut Found) -> anyhow::Result<()> {
        let job = folder.name();
        for known in folder.known()? {
            let image = known.copy(Place::Stored).unwrap_or_else(|| known.best());
            found.images.extend(row(folder, image, image.verify(), image.form() == Form::Loose));
        }
        let what = format!("reading packs of {job}");
        let report = progress::shown(&what, |progress| {
            check_packs(folder, self.key.as_ref(), self.share, self.threads, progress, &|| false)
        })?;
        // Nothing is reported for a job without packs.
        if report.packs > 0 || !report.is_sound() {
            found.packs.push(PacksRow { job: job.clone(), sound: report.is_sound(), report });
        }
        Ok(())
    }

    fn image(&self, folder: &JobFolder, best: &Image) -> anyhow::Result<Option<ImageRow>> {
        // If there are two copies, the one in the store.
        let known = folder.known()?.into_iter().find(|known| known.id() == best.id);
        let image = known.as_ref().and_then(|known| known.copy(Place::Stored)).unwrap_or(best);
        if self.share == Share::NONE || image.form() == Form::Loose {
            return Ok(row(folder, image, image.verify(), image.form() == Form::Loose));
        }
        let what = format!("reading {}", image.id);
        let report = progress::shown(&what, |progress| {
            image.verify_content(self.key.as_ref(), self.threads, progress, &|| false)
        })?;
        Ok(row(folder, image, report, true))
    }
}

/// `None` if the image was replaced or removed in the meantime: that is no damage.
fn row(folder: &JobFolder, image: &Image, report: Report, read: bool) -> Option<ImageRow> {
    let is_there = || match image.place {
        Place::Staged | Place::Slot => folder.staged().iter().any(|other| other.id == image.id),
        Place::Stored => image.dir.is_there(),
    };
    let sound = report.is_sound();
    (sound || is_there()).then(|| ImageRow { job: folder.name().clone(), sound, read, report })
}

fn print(format: Format, found: &Found) -> anyhow::Result<()> {
    if format == Format::Json {
        return Ok(print_json(found)?);
    }
    let images = found.images.iter().map(|row| vec![row.job.to_string(), row.report.image.to_string(), of_image(row)]);
    let packs = found.packs.iter().flat_map(|row| {
        let cells = |what: String, finding| vec![row.job.to_string(), what, finding];
        let all = std::iter::once(cells("packs".to_owned(), of_packs(&row.report)));
        all.chain(row.report.problems.iter().map(move |pack| {
            let name = pack.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            cells(name, of_pack(pack))
        }))
    });
    let rows: Vec<Vec<String>> = images.chain(packs).collect();
    let columns = [Column::whole("JOB"), Column::whole("IMAGE"), Column::short("FINDING")];
    print_table(format, &columns, rows.iter().cloned(), &())?;
    if terminal_width().is_some() {
        // A finding must not be cut.
        let unsound = rows.iter().filter_map(|row| Some((row.get(1)?, row.get(2).filter(|it| !it.starts_with("ok"))?)));
        unsound.into_iter().try_for_each(|(what, finding)| print_note(what, finding))?;
    }
    Ok(())
}

fn of_image(ImageRow { report, read, .. }: &ImageRow) -> String {
    if let Some(damage) = &report.manifest {
        return format!("{}: {damage}", damage.kind.word());
    }
    let problems: Vec<String> = report.problems().map(ToString::to_string).collect();
    match (problems.is_empty(), report.place, read) {
        (false, ..) => problems.join("; "),
        (true, Place::Stored | Place::Slot, true) => format!("ok, {} files, every byte", report.parts.len()),
        (true, Place::Stored | Place::Slot, false) => format!("ok, {} files, all in the packs", report.parts.len()),
        (true, Place::Staged, _) => {
            format!("ok, sizes of {} files in memory; checksums exist only after it is stored", report.parts.len())
        }
    }
}

fn of_pack(pack: &PackReport) -> String {
    let counts = [(pack.chunks, "damaged"), (pack.unreadable, "unreadable")];
    let counts = counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} chunks {what}"));
    let counts = counts.collect::<Vec<_>>().join(", ");
    let counts = if counts.is_empty() { counts } else { format!("{counts}, the first: ") };
    let elsewhere = match pack.elsewhere {
        0 => String::new(),
        count => format!("; another pack has {count} of them intact"),
    };
    format!("{counts}{}{elsewhere}", pack.why)
}

fn of_packs(report: &PacksReport) -> String {
    let state = if report.is_sound() { "ok" } else { "damaged" };
    match report.read {
        0 => format!("{state}, {} packs; --read-data checks their content", report.packs),
        read => format!(
            "{state}, read {read} of {} packs, {} in {} chunks",
            report.packs,
            rekindle_base::units::size(report.bytes),
            report.chunks
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_whole_number_of_per_cent() {
        assert_eq!(share("10%").ok(), Share::percent(10));
        assert_eq!(share("100").ok(), Some(Share::ALL));
        for wrong in ["", "%", "0%", "101%", "-1%", "1.5%", "300%", "all"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}
