//! Images that are not what was written: found by `verify`, refused before CRIU sees them, passed over by a restart.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rekindle_store::chunk::{ChunkMap, Compression};
use rekindle_store::options::Copies;
use rekindle_store::pack::Unread;
use rekindle_store::persist::{Bounds, Packing, Progress, persist};
use rekindle_store::unpack::unpack;
use rekindle_store::{BadWhy, Form, Image, Manifest, Share, State, Writer, check_packs};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, Running, wait_for};

const JOB: &str = "fresh-2";

/// A killed job with two packed images; each has chunks of its own, and they share many.
struct Ground {
    lab: Lab,
    newest: Image,
    /// The pack with what both have, and the one with what only the newer has.
    packs: [PathBuf; 2],
}

impl Ground {
    fn new() -> Option<Ground> {
        let lab = Lab::new()?;
        let mut run = until_after_snapshot(&lab, JOB);
        let first = files(lab.job().packs().dir().path());
        run.snapshot(&lab);
        count_on(&lab, &mut run, 2);
        lab.kill_9(run);
        lab.forget_memory();
        let is_pack = |path: &&PathBuf| path.extension().is_some_and(|suffix| suffix == "pack");
        let all = files(lab.job().packs().dir().path());
        let [shared] = first.iter().filter(is_pack).collect::<Vec<_>>()[..] else { panic!("{first:?}") };
        let [own] = all.iter().filter(is_pack).filter(|path| *path != shared).collect::<Vec<_>>()[..] else {
            panic!("{all:?}")
        };
        let packs = [shared.clone(), own.clone()];
        let newest = lab.images().remove(0);
        assert_eq!(newest.form(), Form::Packed);
        for folder in ["images", "packs"] {
            copy(&lab.store().join("j").join(folder), &lab.file(folder));
        }
        Some(Ground { lab, newest, packs })
    }

    /// All files of the newer image.
    fn image_files(&self) -> Vec<PathBuf> {
        files(self.newest.dir.path())
    }

    /// All is as it was: images, packs, and nothing in memory.
    fn mend(&self) {
        self.lab.forget_memory();
        for folder in ["images", "packs"] {
            copy(&self.lab.file(folder), &self.lab.store().join("j").join(folder));
        }
    }

    fn again(&self) -> Running {
        again(&self.lab)
    }

    /// What is wrong with the images when all that they need is read.
    fn content(&self) -> Vec<String> {
        let report = |image: &Image| image.verify_content(None, 2, &Progress::default(), &|| false).unwrap();
        let reports = self.lab.images().iter().map(report).collect::<Vec<_>>();
        assert!(reports.len() == 2 && reports.iter().all(|report| report.manifest.is_none()));
        reports.iter().flat_map(|report| report.problems().map(ToString::to_string)).collect()
    }

    /// Where in the shared pack a chunk of memory begins that both images have.
    fn common(&self) -> u64 {
        let maps: Vec<ChunkMap> = self.lab.images().iter().map(|image| image.chunk_map().unwrap().unwrap()).collect();
        let has = |map: &ChunkMap, id| map.chunks().any(|(other, _)| other == id);
        let name = self.packs[0].file_stem().unwrap().to_str().unwrap().parse().unwrap();
        let pack = self.lab.job().packs().pack_index(name).unwrap();
        let common = pack.entries().iter().filter(|entry| maps.iter().all(|map| has(map, entry.id)));
        common.max_by_key(|entry| entry.stored_len).unwrap().offset + 64
    }

    /// What is wrong with the packs when all of them are read.
    fn in_packs(&self) -> Vec<PathBuf> {
        let report = check_packs(&self.lab.job(), None, Share::ALL, 2, &Progress::default(), &|| false).unwrap();
        report.problems.into_iter().map(|problem| problem.path).collect()
    }
}

/// The job of [`again`], killed, with two images, and the newer one of them.
pub(crate) fn two_images() -> Option<(Lab, Image)> {
    Ground::new().map(|ground| (ground.lab, ground.newest))
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let done = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

pub(crate) fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &[JOB, lab.path().to_str().unwrap()])
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() { all.extend(files(&entry.path())) } else { all.push(entry.path()) }
    }
    all.sort();
    all
}

#[derive(Debug, Clone, Copy)]
enum Harm {
    /// The byte there; where there are fewer, the one in the middle.
    Flip(u64),
    /// The last byte.
    FlipLast,
    Cut,
    Delete,
    Grow,
}

/// Somewhere in the middle.
const MIDDLE: Harm = Harm::Flip(u64::MAX);

fn harm(file: &Path, how: Harm) {
    let mut bytes = fs::read(file).unwrap();
    match how {
        Harm::Delete => return fs::remove_file(file).unwrap(),
        Harm::Flip(at) if !bytes.is_empty() => {
            let middle = bytes.len() / 2;
            let at = usize::try_from(at).ok().filter(|at| *at < bytes.len()).unwrap_or(middle);
            bytes[at] ^= 0x10;
        }
        Harm::FlipLast if !bytes.is_empty() => *bytes.last_mut().unwrap() ^= 0x10,
        Harm::Cut if !bytes.is_empty() => bytes.truncate(bytes.len() - 1),
        _ => bytes.push(b'x'),
    }
    fs::write(file, bytes).unwrap();
}

#[test]
fn damage_to_any_file_is_found() {
    let Some(ground) = Ground::new() else { return };
    let Ground { lab, newest, .. } = &ground;
    let name = format!("j/{}", newest.id);
    let verify = || {
        let output = lab.rekindle(&["verify", &name]);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(verify().0, Some(0));
    let mut tried = 0;
    for file in ground.image_files() {
        for how in [MIDDLE, Harm::FlipLast, Harm::Cut, Harm::Delete, Harm::Grow] {
            harm(&file, how);
            let (code, said) = verify();
            assert_eq!(code, Some(1), "{how:?} {}: {said}", file.display());
            let short = file.file_name().unwrap().to_str().unwrap();
            assert!(said.contains(short) || short == "manifest.json" && said.contains("damaged"), "{short}: {said}");
            fs::copy(lab.file("images").join(file.strip_prefix(lab.job().images_dir()).unwrap()), &file).unwrap();
            tried += 1;
        }
    }
    assert_eq!(tried, 10, "a manifest and a chunk map");
    assert_eq!(lab.rekindle(&["verify"]).status.code(), Some(0), "all is well again");
}

/// The header of a pack, that of its first record, the bytes of that, and what is in the middle.
const IN_A_PACK: [Harm; 9] = [
    Harm::Flip(0),
    Harm::Flip(20),
    Harm::Flip(50),
    Harm::Flip(64 + 2),
    Harm::Flip(64 + 20),
    Harm::Flip(64 + 50),
    Harm::Flip(128 + 9),
    MIDDLE,
    Harm::FlipLast,
];
/// The header of an index, an entry, its hash.
const IN_AN_INDEX: [Harm; 4] = [Harm::Flip(2), Harm::Flip(50), Harm::Flip(64 + 40), Harm::FlipLast];
const WHOLE: [Harm; 3] = [Harm::Cut, Harm::Delete, Harm::Grow];

#[test]
fn damage_to_any_pack_is_found() {
    let Some(ground) = Ground::new() else { return };
    assert!(ground.in_packs().is_empty() && ground.content().is_empty());
    for pack in &ground.packs {
        for (file, places) in [(pack.clone(), &IN_A_PACK[..]), (pack.with_extension("idx"), &IN_AN_INDEX[..])] {
            let is_index = file != *pack;
            for how in WHOLE.iter().chain(places) {
                harm(&file, *how);
                assert_eq!(ground.in_packs(), [pack.as_path()], "{how:?} {}", file.display());
                // Whatever an index says, the records say too.
                let content = ground.content();
                let lost = !is_index && !matches!(how, Harm::Grow);
                assert_eq!(!content.is_empty(), lost, "{how:?} {}: {content:?}", file.display());
                let short = file.file_name().unwrap();
                fs::copy(ground.lab.file("packs").join(short), &file).unwrap();
            }
        }
        // That a pack is gone, or not all there, is seen without reading it.
        for how in [Harm::Delete, Harm::Cut] {
            harm(pack, how);
            assert_eq!(ground.lab.rekindle(&["verify"]).status.code(), Some(1), "{how:?} {}", pack.display());
            ground.mend();
        }
    }
    assert!(ground.in_packs().is_empty() && ground.content().is_empty(), "all is well again");
}

fn assert_marked(image: &Image, what: &str) {
    match &image.state {
        State::Bad { mark, .. } => assert_eq!(mark.why, BadWhy::Damaged, "{what}: {}", mark.detail),
        State::Damaged { .. } => assert!(what.contains("manifest.json"), "{what}"),
        State::Good(_) => panic!("{} is not marked: {what}", image.id),
    }
}

#[test]
fn a_restart_passes_over_what_only_the_newest_has_lost() {
    let Some(ground) = Ground::new() else { return };
    let own = &ground.packs[1];
    let of_the_image = ground.image_files().into_iter().flat_map(|file| [(file.clone(), MIDDLE), (file, Harm::Delete)]);
    let of_the_pack =
        [Harm::Flip(20), Harm::Flip(64 + 20), Harm::Flip(128 + 9), Harm::FlipLast, Harm::Cut, Harm::Delete];
    for (file, how) in of_the_image.chain(of_the_pack.map(|how| (own.clone(), how))) {
        let what = format!("{how:?} {}", file.display());
        harm(&file, how);
        let mut run = ground.again();
        run.wait_said("the job was restored from image 000001");
        let is_told = run.err().contains("is newer, but") && run.err().contains("continues from image 000001");
        assert_eq!(is_told, what.contains("manifest.json"), "{what}: {}", run.err());
        ground.lab.kill_9(run);
        assert_marked(&ground.lab.images()[0], &what);
        assert_eq!(ground.lab.good(), [1], "{what}");
        ground.mend();
    }
    let mut run = ground.again();
    run.wait_said("the job was restored from image 000002");
    // Its log was put back to image 1 meanwhile, so there is nothing to count.
    fs::write(ground.lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

/// An older image would lose what the newest has, though nothing may be wrong with that.
#[test]
fn what_is_in_the_place_of_the_newest_image_stops_a_restart() {
    let Some(ground) = Ground::new() else { return };
    type Put = fn(&Path, &Path);
    let folder = ground.newest.dir.path().to_owned();
    let put: [(&Path, Put); 4] = [
        (&folder, |place, away| std::os::unix::fs::symlink(away, place).unwrap()),
        (&folder, |place, _| nix::unistd::mkfifo(place, nix::sys::stat::Mode::S_IRWXU).unwrap()),
        (&folder, |place, _| fs::write(place, "").unwrap()),
        (&folder.join("manifest.json"), |place, away| std::os::unix::fs::symlink(away, place).unwrap()),
    ];
    for (place, put) in put {
        let away = ground.lab.file("away");
        fs::rename(place, &away).unwrap();
        put(place, &away);
        let (_, said) = ground.again().ends_with(78);
        let words = [place.to_str().unwrap(), "and should be a", "rekindle restore j/ID", "remove it"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(!said.contains("the job was restored"), "{said}");
        fs::remove_file(place).unwrap();
        fs::rename(&away, place).unwrap();
        assert_eq!(ground.lab.good(), [2, 1], "{said}");
    }
    let mut run = ground.again();
    run.wait_said("the job was restored from image 000002");
    ground.lab.kill_9(run);
}

#[test]
fn a_restart_does_without_an_index() {
    let Some(ground) = Ground::new() else { return };
    let [shared, own] = ground.packs.each_ref().map(|pack| pack.with_extension("idx"));
    for (n, how) in [Harm::Delete, MIDDLE, Harm::Cut, Harm::Grow].into_iter().enumerate() {
        harm(&own, how);
        if n % 2 == 0 {
            harm(&shared, how);
        }
        let mut run = ground.again();
        run.wait_said("the job was restored from image 000002");
        count_on(&ground.lab, &mut run, 2);
        ground.lab.kill_9(run);
        assert_eq!(ground.lab.good(), [2, 1], "{how:?}");
        ground.mend();
    }
    finish(&ground.lab, ground.again());
}

#[test]
fn what_both_images_have_lost_is_restored_from_neither() {
    let Some(mut ground) = Ground::new() else { return };
    ground.lab = ground.lab.set("restart.cold-start", "\"allow\"");
    let shared = &ground.packs[0];
    for how in [Harm::Flip(20), Harm::Flip(ground.common() + 5), Harm::Delete] {
        harm(shared, how);
        let mut run = ground.again();
        run.wait_said("starting again from the beginning");
        run.wait_printed("n 1\n");
        ground.lab.kill_9(run);
        assert!(!ground.lab.output().contains("WRONG"));
        for image in ground.lab.images() {
            assert_marked(&image, &format!("{how:?}"));
        }
        ground.mend();
    }
    // Nor is it begun anew where that is not wanted.
    harm(shared, Harm::Delete);
    let lab = ground.lab.set("restart.cold-start", "\"never\"");
    let (_, said) = again(&lab).ends_with(125);
    assert!(said.contains("restart.cold-start is \"never\""), "{said}");
    assert!(lab.good().is_empty() && lab.images().len() == 2);
    // Nor over them, by default: not in the run that finds out, and not in the next.
    let lab = lab.without("restart.cold-start");
    for image in lab.images() {
        fs::remove_file(image.dir.join("bad.json")).unwrap();
    }
    for _ in 0..2 {
        let (out, said) = again(&lab).ends_with(66);
        assert!(out.is_empty(), "{out}");
        for command in ["rekindle list j", "rekindle mark --good j/ID", "rekindle restore j/ID", "rekindle run --fresh"]
        {
            assert!(said.contains(command), "{command}: {said}");
        }
        assert!(lab.images().len() == 2);
    }
}

#[test]
fn an_image_that_was_asked_for_by_name_is_not_replaced_by_another() {
    let Some(ground) = Ground::new() else { return };
    harm(&ground.packs[1], MIDDLE);
    let (out, said) = ground.lab.run_with(&["restore", "j/2"], [] as [&str; 0]).ends_with(66);
    assert!(out.is_empty(), "{out}");
    assert!(said.contains("the requested image 000002") && said.contains("cannot be used: "), "{said}");
    assert_eq!(said.matches("is marked as bad").count(), 1, "{said}");
    // A run takes what there is.
    let mut run = ground.again();
    run.wait_said("the job was restored from image 000001");
    finish(&ground.lab, run);
}

fn packing() -> Packing {
    let bounds = Bounds { rate: None, threads: 1 };
    Packing { compression: Compression::Auto, key: None, bounds, copies: Copies::One, unread: Unread::default() }
}

/// Puts plain files in the place of a packed image, as earlier releases wrote them.
fn make_loose(lab: &Lab, image: &Image) -> Image {
    let folder = lab.job();
    let aside = lab.file("aside");
    fs::create_dir(&aside).unwrap();
    unpack(image, &folder, &rekindle_os::beneath::Beneath::at(&aside).unwrap(), None, 2, &Progress::default(), &|| {
        false
    })
    .unwrap();
    fs::remove_dir_all(&image.dir).unwrap();
    fs::rename(&aside, &image.dir).unwrap();
    let mut manifest = Manifest { chunks: None, ..image.manifest().unwrap().clone() };
    for part in &mut manifest.parts {
        part.blake3 = Some(blake3::hash(&fs::read(image.dir.join(part.path.as_str())).unwrap()));
    }
    fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&image.trust).unwrap()).unwrap();
    let loose = Image::load(&image.dir, image.id, &image.trust);
    assert_eq!(loose.form(), Form::Loose);
    let text = fs::read_to_string(loose.dir.join("manifest.json")).unwrap();
    assert!(text.contains("\"version\": 1"), "{text}");
    loose
}

/// A loose image, and a copy of its folder.
fn loose() -> Option<(Lab, Image)> {
    let Ground { lab, newest, .. } = Ground::new()?;
    let newest = make_loose(&lab, &newest);
    copy(newest.dir.path(), &lab.file("copy"));
    Some((lab, newest))
}

#[test]
fn damage_to_any_file_of_a_loose_image_is_found() {
    let Some((lab, newest)) = loose() else { return };
    let name = format!("j/{}", newest.id);
    assert_eq!(lab.rekindle(&["verify", &name]).status.code(), Some(0));
    let mut tried = 0;
    for file in files(newest.dir.path()) {
        for how in [MIDDLE, Harm::Cut, Harm::Delete, Harm::Grow] {
            harm(&file, how);
            let output = lab.rekindle(&["verify", &name]);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(output.status.code(), Some(1), "{how:?} {}: {said}", file.display());
            let short = file.strip_prefix(&newest.dir).unwrap().to_str().unwrap();
            assert!(said.contains(short) || short == "manifest.json" && said.contains("damaged"), "{short}: {said}");
            fs::copy(lab.file("copy").join(short), &file).unwrap();
            tried += 1;
        }
    }
    assert!(tried > 80, "{tried}");
    assert_eq!(lab.rekindle(&["verify"]).status.code(), Some(0), "all is well again");
}

#[test]
fn a_restart_passes_over_damage_to_a_loose_image() {
    let Some((lab, newest)) = loose() else { return };
    let all = files(&lab.file("copy"));
    for (n, file) in all.iter().enumerate().filter(|(n, file)| n % 4 == 0 || file.ends_with("manifest.json")) {
        let short = file.strip_prefix(lab.file("copy")).unwrap();
        let how = [MIDDLE, Harm::Cut, Harm::Delete][n / 4 % 3];
        harm(newest.dir.join(short).path(), how);
        let mut run = again(&lab);
        run.wait_said("the job was restored from image 000001");
        lab.kill_9(run);
        lab.forget_memory();
        assert_marked(&lab.images()[0], &format!("{how:?} {}", short.display()));
        copy(&lab.file("copy"), newest.dir.path());
    }
    // It is restored as it is, and packed then.
    let mut run = again(&lab);
    run.wait_said("the job was restored from image 000002");
    run.wait_for("it is packed", || lab.images()[0].form() == Form::Packed);
    let report = lab.images()[0].verify_content(None, 2, &Progress::default(), &|| false).unwrap();
    assert!(report.is_sound(), "{report:?}");
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

/// CRIU would wait for ever for what is not there, even where the manifest agrees with the cut file.
#[test]
fn a_page_file_cut_short_is_refused_at_once() {
    for form in [Form::Loose, Form::Packed] {
        let Some((lab, newest)) = loose() else { return };
        let pages = files(newest.dir.path()).into_iter().find(|f| f.to_str().unwrap().contains("criu/pages-")).unwrap();
        let length = fs::metadata(&pages).unwrap().len();
        fs::OpenOptions::new().write(true).open(&pages).unwrap().set_len(length / 2).unwrap();
        let name = pages.strip_prefix(&newest.dir).unwrap().to_str().unwrap();
        rewrite(&newest, |manifest| {
            let part = manifest.parts.iter_mut().find(|part| part.path == name).unwrap();
            part.size = length / 2;
            part.blake3 = Some(blake3::hash(&fs::read(&pages).unwrap()));
        });
        let mut forged = lab.images().remove(0);
        if form == Form::Packed {
            let folder = lab.job();
            let lock = folder.lock().unwrap();
            forged = persist(&forged, &folder, &lock, &packing(), &Progress::default(), &|| false).unwrap();
            drop(lock);
            // A child of another test may hold it until it executes its program.
            wait_for("the lock is free", || folder.writer().unwrap() == Writer::Nobody);
        }
        assert!(forged.verify().is_sound() && forged.form() == form);
        let mut run = again(&lab);
        run.wait_said("its page map says");
        run.wait_said("the job was restored from image 000001");
        assert!(!lab.processes().iter().any(|(_, line)| line.contains("swrk")), "{:?}", lab.processes());
        finish(&lab, run);
    }
}

fn rewrite(image: &Image, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = image.manifest().unwrap().clone();
    change(&mut manifest);
    fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
}

#[test]
fn an_image_of_a_newer_criu_is_refused_by_name() {
    let Some(Ground { lab, newest, .. }) = Ground::new() else { return };
    rewrite(&newest, |manifest| manifest.criu = "99.1".into());
    let (_, said) = again(&lab).ends_with(69);
    assert!(said.contains("CRIU: the image has 99.1.0") && said.contains("install CRIU 99.1.0 or newer"), "{said}");
    assert_eq!(lab.good(), [2, 1], "it is as good as it was");
}

#[test]
fn a_manifest_from_the_future_is_left_alone() {
    let Some(Ground { lab, newest, .. }) = Ground::new() else { return };
    // The chunks of a removed image are swept at once, where that is safe.
    let mut lab = lab.set("snapshot.rehearse", "\"1day\"");
    lab.set_variable("REKINDLE_TEST_SWEEP_AFTER", "0s");
    let file = newest.dir.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    let newer = text.replacen("\"version\": 2", "\"version\": 7", 1);
    assert_ne!(newer, text);
    fs::write(&file, newer).unwrap();
    let listed = lab.rekindle(&["list", "j"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("version 7"), "{listed:?}");
    let mut run = again(&lab);
    run.wait_said("the job was restored from image 000001");
    run.snapshot(&lab);
    // Until then the first image is the newest that was restored, and stays.
    run.wait_said("was restored in a rehearsal");
    for _ in 0..3 {
        run.snapshot(&lab);
    }
    assert!(newest.dir.is_dir(), "rotation does not touch what it cannot read");
    assert!(!lab.good().contains(&1), "it does its work");
    finish(&lab, run);
    // Nor what that needs of the packs.
    fs::write(&file, text).unwrap();
    let report = newest.verify_content(None, 2, &Progress::default(), &|| false).unwrap();
    assert!(report.is_sound(), "{report:?}");
}

#[test]
fn no_usable_image_and_no_beginning_wanted() {
    let Some(Ground { lab, newest, .. }) = Ground::new() else { return };
    let lab = lab.set("restart.cold-start", "\"never\"");
    for image in lab.images() {
        harm(image.dir.join("manifest.json").path(), MIDDLE);
    }
    let (out, said) = again(&lab).ends_with(66);
    assert!(out.is_empty() && said.contains("restart.cold-start") && said.contains("--fresh"), "{said}");
    let lab = lab.without("restart.cold-start");
    assert_eq!(again(&lab).ends_with(66).0, "", "nor by default");
    assert!(newest.dir.is_dir());
    let lab = lab.set("restart.cold-start", "\"allow\"");
    fs::write(lab.file("finish"), "").unwrap();
    let (out, said) = again(&lab).ends_with(0);
    assert!(out.contains("n 1\n") && said.contains("no image of the interrupted run can be used"), "{said}");
}

#[test]
fn leftovers_are_swept_and_nothing_else() {
    let Some(Ground { lab, .. }) = Ground::new() else { return };
    let images = lab.job().images_dir();
    fs::create_dir_all(images.join(".tmp-000009-20261120T132205Z/criu")).unwrap();
    fs::write(images.join(".tmp-000009-20261120T132205Z/criu/pages-1.img"), "x").unwrap();
    fs::create_dir(images.join(".del-000008-20261120T132205Z")).unwrap();
    fs::create_dir(images.join("notes")).unwrap();
    let mut run = again(&lab);
    run.wait_said("a remnant of an interrupted run");
    run.wait_said("the job was restored from image 000002");
    let left: Vec<String> =
        fs::read_dir(images).unwrap().flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    assert!(left.contains(&"notes".into()) && !left.iter().any(|name| name.starts_with('.')), "{left:?}");
    finish(&lab, run);
}

#[test]
fn a_store_that_others_can_write_is_refused() {
    let Some(Ground { lab, .. }) = Ground::new() else { return };
    for folder in [lab.store(), lab.job().path().to_path_buf()] {
        let before = fs::metadata(&folder).unwrap().permissions();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let (code, _, said) = again(&lab).finish(crate::supervisor::LIMIT);
        assert!(code != 0 && said.contains("can be written by others") && said.contains("chmod"), "{code} {said}");
        fs::set_permissions(&folder, before).unwrap();
    }
    assert_eq!(lab.good(), [2, 1]);
}
