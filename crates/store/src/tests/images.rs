//! Images: what `qemu-img` brings in, and what is refused.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use perigee_model::volume::{ImageFormat, ImportImage, VolumeSource};
use perigee_model::{LayerId, ProblemKind};

use super::*;
use crate::images::import::{ImportFrom, Patience};
use crate::images::progress::{Footprint, Silence};
use crate::work::Work;

fn qemu_img(arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).output().expect("qemu-utils is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn import(name: &str, source: &Path) -> ImportImage {
    let source = source.to_str().unwrap().to_owned();
    ImportImage {
        name: image_name(name),
        source,
        layer: None,
        leave_site: Default::default(),
        format: None,
    }
}

/// Data at the start and the end, zeros that take space, and holes; no whole number of blocks.
fn raw_image(path: &Path) -> Vec<u8> {
    let mut image = vec![0; 1_000_448];
    image[..5000].fill(1);
    image[999_000..].fill(2);
    std::fs::write(path, &image).unwrap();
    image
}

#[tokio::test]
async fn a_qcow2_image_reads_as_it_did_and_takes_the_space_of_its_data() {
    let dir = tempfile::tempdir().unwrap();
    let (raw, qcow2) = (dir.path().join("i.raw"), dir.path().join("i.qcow2"));
    let mut expected = raw_image(&raw);
    expected.resize(expected.len().next_multiple_of(4096), 0);
    let (from, to) = (raw.to_str().unwrap(), qcow2.to_str().unwrap());
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", from, to]);

    let pool = open_real(&dir.path().join("pool")).await;
    for (name, source) in [("r", &raw), ("q", &qcow2)] {
        let info = pool.import_image(import(name, source), &Arc::default()).await.unwrap();
        assert_eq!(info.size_bytes, expected.len() as u64);
        assert_eq!(info.allocated_bytes, 4 * 4096, "two blocks at each end");
        assert_eq!(all(&pool.open_image(&image_name(name)).await.unwrap()).await, expected);
    }
    let clone = create("c", Some(2 << 20), VolumeSource::Image(image_name("q")));
    pool.create_volume(clone).await.unwrap();
    expected.resize(2 << 20, 0);
    assert_eq!(all(&session(&pool, "c").await).await, expected);
}

#[tokio::test]
async fn what_is_no_image_of_its_own_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("empty"), "").unwrap();
    std::fs::write(path("notes"), "no disk image\n").unwrap();
    std::fs::write(path("secret"), [9; 4096]).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "secret", &text(&path("backed"))]);
    let with_data_file = format!("data_file={}", text(&path("data")));
    let options = ["-f", "qcow2", "-o", &with_data_file];
    qemu_img(&[&["create", "-q"], &options[..], &[&text(&path("external")), "1M"]].concat());
    let flat = ["-f", "vmdk", "-o", "subformat=monolithicFlat"];
    qemu_img(&[&["create", "-q"], &flat[..], &[&text(&path("flat.vmdk")), "1M"]].concat());
    std::fs::write(path("broken"), [&b"QFI\xfb"[..], &[255; 600]].concat()).unwrap();

    let pool = open_real(&path("pool")).await;
    for (source, kind) in [
        ("missing", ProblemKind::NotFound),
        ("pool", ProblemKind::Invalid),
        ("empty", ProblemKind::Invalid),
        ("notes", ProblemKind::Invalid),
        ("backed", ProblemKind::Invalid),
        ("external", ProblemKind::Invalid),
        ("flat.vmdk", ProblemKind::Invalid),
        ("broken", ProblemKind::Invalid),
    ] {
        let problem =
            pool.import_image(import("i", &path(source)), &Arc::default()).await.unwrap_err();
        assert_eq!(problem.kind, kind, "{source}: {problem}");
    }
    let relative =
        pool.import_image(import("i", Path::new("json:{}")), &Arc::default()).await.unwrap_err();
    assert_eq!(relative.kind, ProblemKind::Invalid);
    assert!(pool.images().await.unwrap().is_empty());
    assert_eq!(std::fs::read_dir(path("pool").join("layers")).unwrap().count(), 0);
}

/// An archive, and one of 128 files that xz makes, are as long as a disk may be. They became images that boot nowhere.
#[tokio::test]
async fn a_packed_image_is_none_unless_it_is_said_to_be_raw() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("disk"), [7; 4096]).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["-C", &text(dir.path()), "-cf", &text(&path("ova")), "disk"]);
    assert!(tar.status().unwrap().success());
    std::fs::write(path("xz"), [&b"\xfd7zXZ\0"[..], &[9; 4090]].concat()).unwrap();
    let pool = open_real(&path("pool")).await;
    for (name, program) in [("ova", "tar"), ("xz", "unxz")] {
        let packed = import("i", &path(name));
        let problem = pool.import_image(packed.clone(), &Arc::default()).await.unwrap_err();
        assert!(problem.next.contains(program), "{problem}");
        let meant =
            ImportImage { name: image_name(name), format: Some(ImageFormat::Raw), ..packed };
        pool.import_image(meant, &Arc::default()).await.unwrap();
    }
}

/// A pool, and a directory with a disk of random bytes that has holes.
async fn with_disk(mib: usize) -> (tempfile::TempDir, Arc<Pool>, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("disk.raw");
    let mut state = 7_u64;
    let mut disk: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // So few values that they can be compressed.
        b"0123456789abcdef"[(state >> 60) as usize]
    })
    .take(mib << 20)
    .collect();
    disk[1 << 20..2 << 20].fill(0);
    std::fs::write(&raw, &disk).unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    (dir, pool, raw)
}

async fn refused(pool: &Arc<Pool>, source: &Path) -> perigee_model::Problem {
    let imported = pool.import_image(import("i", source), &Arc::default()).await;
    imported.expect_err(&source.display().to_string())
}

/// What was cut off read as zeros, and half a download became an image.
#[tokio::test]
async fn a_file_that_was_cut_off_is_no_image() {
    let (dir, pool, raw) = with_disk(6).await;
    for (format, more) in [
        ("qcow2", &[][..]),
        ("qcow2", &["-c"][..]),
        ("qcow2", &["-o", "extended_l2=on,cluster_size=16k"][..]),
        ("vmdk", &[][..]),
        ("vmdk", &["-o", "subformat=streamOptimized"][..]),
        ("vhdx", &[][..]),
        ("vdi", &[][..]),
    ] {
        let whole = dir.path().join("whole");
        let to = ["-f", "raw", "-O", format, &text(&raw), &text(&whole)];
        qemu_img(&[&["convert"], more, &to[..]].concat());
        let image = std::fs::read(&whole).unwrap();
        let info = pool.import_image(import("i", &whole), &Arc::default()).await.unwrap();
        assert_eq!(info.allocated_bytes, 5 << 20, "{format} {more:?}");
        pool.delete_image(&image_name("i")).await.unwrap();
        let tried = [512, 4096, 300_000, image.len() / 2, image.len() - 150_000];
        for cut in tried {
            let short = dir.path().join("short");
            std::fs::write(&short, &image[..image.len() - cut]).unwrap();
            match pool.import_image(import("i", &short), &Arc::default()).await {
                // Some formats have much at their end that is no part of the disk.
                Ok(made) => {
                    assert_eq!(made.content, info.content, "{format} {more:?}: {cut} are missing");
                    pool.delete_image(&image_name("i")).await.unwrap();
                }
                Err(problem) => {
                    assert_eq!(problem.kind, ProblemKind::Invalid, "{format} {cut}: {problem}");
                    assert!(!problem.why.contains("/proc/"), "{problem}");
                }
            }
        }
    }
}

/// Only the tables say so: the data that is there is whole, and the rest looked empty.
#[tokio::test]
async fn a_qcow2_file_without_its_last_table_is_no_image() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, short) = (dir.path().join("whole"), dir.path().join("short"));
    qemu_img(&["create", "-q", "-f", "qcow2", &text(&whole), "2G"]);
    let mut write = Command::new("qemu-io");
    write.args(["-f", "qcow2", "-c", "write -P 1 0 64k", "-c", "write -P 2 1G 64k"]);
    assert!(write.arg(&whole).stdout(std::process::Stdio::null()).status().unwrap().success());
    let image = std::fs::read(&whole).unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    // The second table and its data are the last two clusters. With half of the table, qemu-img reads it as empty.
    std::fs::write(&short, &image[..image.len() - (64 << 10) - (32 << 10)]).unwrap();
    let problem = refused(&pool, &short).await;
    assert!(problem.why.contains("it was cut off") && problem.why.contains("table"), "{problem}");
    pool.import_image(import("i", &whole), &Arc::default()).await.unwrap();
}

#[tokio::test]
async fn a_vhd_of_fixed_size_is_imported_without_its_footer() {
    let (dir, pool, raw) = with_disk(4).await;
    let vhd = dir.path().join("disk.vhd");
    let fixed = ["-O", "vpc", "-o", "subformat=fixed,force_size=on"];
    qemu_img(&[&["convert", "-f", "raw"], &fixed[..], &[&text(&raw), &text(&vhd)]].concat());
    let info = pool.import_image(import("i", &vhd), &Arc::default()).await.unwrap();
    assert_eq!(info.size_bytes, 4 << 20);
    assert!(info.note.contains("VHD") && info.note.contains("--image-format raw"), "{}", info.note);
    let read = all(&pool.open_image(&image_name("i")).await.unwrap()).await;
    assert!(read == std::fs::read(&raw).unwrap());
    // A footer that describes another disk.
    pool.delete_image(&image_name("i")).await.unwrap();
    let mut bytes = std::fs::read(&vhd).unwrap();
    bytes.splice(0..0, vec![5; 1 << 20]);
    std::fs::write(&vhd, bytes).unwrap();
    let problem = refused(&pool, &vhd).await;
    assert!(problem.next.contains("--image-format vhd"), "{problem}");
}

#[tokio::test]
async fn what_a_disk_is_that_nobody_can_use_is_said_and_how_it_can_be_imported() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let pool = open_real(&path("pool")).await;
    let mut luks = vec![0; 1 << 20];
    luks[..6].copy_from_slice(b"LUKS\xba\xbe");
    std::fs::write(path("luks"), luks).unwrap();
    let mut dmg = vec![3; 1 << 20];
    dmg[(1 << 20) - 512..][..4].copy_from_slice(b"koly");
    std::fs::write(path("dmg"), dmg).unwrap();
    let flat = ["-f", "vmdk", "-o", "subformat=monolithicFlat"];
    qemu_img(&[&["create", "-q"], &flat[..], &[&text(&path("disk.vmdk")), "1M"]].concat());
    std::fs::remove_file(path("disk-flat.vmdk")).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow", &text(&path("qcow")), "1M"]);
    std::fs::write(path("small"), [7; 1024]).unwrap();
    for (name, why, next) in [
        ("luks", "LUKS", "--image-format raw"),
        ("dmg", "DMG", "--image-format raw"),
        ("disk.vmdk", "\"disk-flat.vmdk\"", "qemu-img convert"),
        ("qcow", "its format is qcow", "qemu-img convert"),
        ("small", "4 KiB", "truncate"),
    ] {
        let problem = refused(&pool, &path(name)).await;
        assert!(problem.why.contains(why) && problem.next.contains(next), "{name}: {problem}");
    }
    let meant = ImportImage { format: Some(ImageFormat::Raw), ..import("i", &path("luks")) };
    pool.import_image(meant, &Arc::default()).await.unwrap();
}

/// Both became other disks in silence: longer ones, and ones without partitions.
#[tokio::test]
async fn what_a_guest_sees_of_a_disk_that_is_not_of_our_blocks_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    let source = dir.path().join("disk");
    let mut disk = vec![0; (1 << 20) + 512];
    disk[4096..4104].copy_from_slice(b"EFI PART");
    std::fs::write(&source, &disk).unwrap();
    let info = pool.import_image(import("i", &source), &Arc::default()).await.unwrap();
    assert_eq!(info.size_bytes, (1 << 20) + 4096);
    assert!(info.note.contains("the disk has 1049088 bytes"), "{}", info.note);
    assert!(info.note.contains("sectors of 4096 bytes"), "{}", info.note);
    disk.truncate(1 << 20);
    disk[512..520].copy_from_slice(b"EFI PART");
    std::fs::write(&source, &disk).unwrap();
    let info = pool.import_image(import("j", &source), &Arc::default()).await.unwrap();
    assert_eq!(info.note, "");
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_same_layer_twice_is_one_and_a_taken_name_is_a_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("i.raw");
    raw_image(&source);
    let pool = open_real(&dir.path().join("pool")).await;
    let layer = LayerId(Uuid::from_u128(42));
    let request = ImportImage { layer: Some(layer), ..import("i", &source) };
    let first = pool.import_image(request.clone(), &Arc::default()).await.unwrap();
    assert_eq!(first.layer, layer);
    let again = pool.import_image(request.clone(), &Arc::default()).await.unwrap();
    assert_eq!(again.layer, first.layer);
    let other_layer = pool.import_image(import("i", &source), &Arc::default()).await.unwrap_err();
    assert_eq!(other_layer.kind, ProblemKind::Conflict);
    let other_name = ImportImage { name: image_name("j"), ..request };
    assert_eq!(
        pool.import_image(other_name, &Arc::default()).await.unwrap_err().kind,
        ProblemKind::Conflict
    );
}

/// A process that is killed when this is dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Blocks of QEMU behind an NBD address.
fn export(blocks: &[&str]) -> (Started, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port},max-connections=0");
    let mut command = Command::new("qemu-storage-daemon");
    command.args(blocks).args(["--nbd-server", &server]);
    command.args(["--export", "nbd,id=e,node-name=blocks,name=disk"]);
    let daemon = Started(command.spawn().expect("qemu-storage-daemon is there"));
    let deadline = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "waited 60 s for the NBD server");
        std::thread::sleep(Duration::from_millis(20));
    }
    (daemon, format!("nbd://127.0.0.1:{port}/disk"))
}

/// A disk that answers no read.
fn stalled() -> (Started, String) {
    let disk = "null-co,node-name=blocks,size=67108864,read-zeroes=off,latency-ns=1000000000000";
    export(&["--blockdev", disk])
}

fn from(source: String) -> ImportImage {
    ImportImage {
        name: image_name("i"),
        source,
        layer: None,
        leave_site: Default::default(),
        format: None,
    }
}

fn seconds(info: u64, progress: u64) -> Patience {
    let [info, progress] = [info, progress].map(Duration::from_secs);
    Patience { info, progress }
}

#[tokio::test]
async fn an_import_whose_source_answers_nothing_ends_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    let black_hole = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("nbd://{}/disk", black_hole.local_addr().unwrap());
    let (_daemon, stalled) = stalled();
    for (source, patience) in [(silent, seconds(1, 600)), (stalled, seconds(600, 1))] {
        let work = Arc::default();
        let import =
            pool.import_within(patience, from(source.clone()), ImportFrom::open_any, &work);
        let problem = import.await.unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Unavailable, "{problem}");
        assert!(problem.what.contains(&source), "{problem}");
        assert!(problem.why.contains("has sent nothing for 1 s"), "{problem}");
        assert!(problem.next.contains("check that the source answers"), "{problem}");
    }
}

#[test]
fn an_import_that_makes_progress_has_no_limit() {
    let begun = Instant::now();
    let minutes = |minutes: u64| begun + Duration::from_secs(60 * minutes);
    let mut silence = Silence::new(begun);
    for minute in 1..=600_u64 {
        // It writes, or reads zeros, which takes only time of the CPU.
        let (written_bytes, cpu_ns) = (minute / 2 * 4096, minute.div_ceil(2));
        let changed = Footprint { written_bytes, cpu_ns };
        assert_eq!(silence.after(changed, minutes(minute)), Duration::ZERO);
    }
    let same = || Footprint { written_bytes: 300 * 4096, cpu_ns: 300 };
    assert_eq!(silence.after(same(), minutes(604)), Duration::from_secs(4 * 60));
    assert_eq!(silence.after(same(), minutes(605)), Duration::from_secs(5 * 60));
}

#[test]
fn a_program_that_only_computes_makes_progress() {
    let busy = Started(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap());
    let seen = || Footprint::of(Some(busy.0.id()), None);
    let (first, begun) = (seen(), Instant::now());
    while seen() == first {
        assert!(begun.elapsed() < Duration::from_secs(60), "no time of the CPU is seen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
async fn the_progress_of_an_import_is_seen_while_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    let raw = dir.path().join("i.raw");
    std::fs::write(&raw, vec![7; 24 << 20]).unwrap();
    let file = format!("file,node-name=file,filename={}", text(&raw));
    let group = "throttle-group,id=slow,x-bps-total=4194304";
    let slow = "throttle,node-name=blocks,throttle-group=slow,file=file";
    let (_daemon, source) = export(&["--object", group, "--blockdev", &file, "--blockdev", slow]);
    let work = Arc::<Work>::default();
    let import = pool.import_image(from(source), &work);
    let mut import = std::pin::pin!(import);
    let mut seen = false;
    let info = loop {
        match tokio::time::timeout(Duration::from_millis(50), &mut import).await {
            Ok(info) => break info.unwrap(),
            Err(_) => seen |= work.progress().done_bytes > 0,
        }
    };
    assert!(seen, "nothing was seen before it ended");
    assert_eq!(info.allocated_bytes, 24 << 20);
}

#[tokio::test]
async fn deleting_an_image_that_is_being_imported_ends_the_import() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open_real(&dir.path().join("pool")).await;
    let (_daemon, source) = stalled();
    let importing = Arc::clone(&pool);
    let import =
        tokio::spawn(async move { importing.import_image(from(source), &Arc::default()).await });
    let layers = dir.path().join("pool/layers");
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::read_dir(&layers).unwrap().count() == 0 {
        assert!(Instant::now() < deadline, "waited 60 s for the import to begin");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    pool.delete_image(&image_name("i")).await.unwrap();
    let problem = import.await.unwrap().unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Conflict, "{problem}");
    assert!(problem.why.contains("the image was deleted"), "{problem}");
    assert_eq!(std::fs::read_dir(&layers).unwrap().count(), 0, "nothing is left");
    let again = pool.delete_image(&image_name("i")).await.unwrap_err();
    assert_eq!(again.kind, ProblemKind::NotFound);
}
