//! `rekindle pin` and `tag`: change the user's pins and tags of images.

use serde::Serialize;

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, Misuse, complete};
use rekindle_store::{Change, ImageId, JobName, Place, Tag, Tags};

/// Which image.
#[derive(Debug, clap::Args)]
pub(crate) struct PinArgs {
    /// JOB (its newest good image), JOB/ID, JOB/TAG, JOB/-N or ID
    #[arg(add = complete::images())]
    image: String,
    /// Remove the pin
    #[arg(long)]
    remove: bool,
}

/// Which image, and its tags.
#[derive(Debug, clap::Args)]
pub(crate) struct TagArgs {
    /// JOB (its newest good image), JOB/ID, JOB/TAG, JOB/-N or ID
    #[arg(add = complete::images())]
    image: String,
    /// Tags: 1 to 64 characters from A-Z a-z 0-9 . _ -; not a number, and not "latest"
    #[arg(required = true, value_name = "TAG", add = complete::tags_of_image())]
    tags: Vec<Tag>,
    /// Remove these tags
    #[arg(long)]
    remove: bool,
}

/// The state after the change.
#[derive(Debug, Serialize)]
struct Shown<'a> {
    job: &'a JobName,
    image: ImageId,
    pinned: bool,
    tags: Vec<&'a Tag>,
}

pub(super) fn pin(global: &Global, args: &PinArgs) -> anyhow::Result<Exit> {
    change(global, &args.image, if args.remove { Change::Unpin } else { Change::Pin })
}

pub(super) fn tag(global: &Global, args: &TagArgs) -> anyhow::Result<Exit> {
    let tags = args.tags.clone();
    change(global, &args.image, if args.remove { Change::Untag(tags) } else { Change::Tag(tags) })
}

fn change(global: &Global, text: &str, change: Change) -> anyhow::Result<Exit> {
    let (folder, best) = Finder::with_key(global)?.image(text)?;
    // If there are two copies, the one in the store has the tags.
    let known = folder.known()?.into_iter().find(|known| known.id() == best.id);
    let image = known.as_ref().and_then(|known| known.copy(Place::Stored)).unwrap_or(&best);
    if let Change::Untag(tags) = &change {
        let present = image.tags();
        if let Some(tag) = tags.iter().find(|tag| !present.has(tag)) {
            let theirs = present.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let theirs = if theirs.is_empty() { "it has none".to_owned() } else { format!("its tags are {theirs}") };
            return Err(Misuse(format!("image {}/{} has no tag {tag}: {theirs}", folder.name(), image.id)).into());
        }
    }
    let tags = image.change_tags(change)?;
    match global.format() {
        Format::Json => {
            let tags_shown = tags.iter().collect();
            print_json(&Shown { job: folder.name(), image: image.id, pinned: tags.is_pinned(), tags: tags_shown })?;
        }
        Format::Text => print_text(&format!("{}/{}: {}", folder.name(), image.id, or_none(&tags)))?,
    }
    Ok(Exit::Success)
}

fn or_none(tags: &Tags) -> String {
    match tags.to_string().as_str() {
        "" => "no pin, no tags".to_owned(),
        text => text.to_owned(),
    }
}
