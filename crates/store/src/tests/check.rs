//! Damage is found and named, and nothing else is called damage.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use perigee_model::LayerId;
use perigee_model::volume::{
    ByteRange, CheckReport, CheckScope, FaultKind, Snapshot, VolumeSource,
};

use super::*;
use crate::Work;

/// A pool with image `s`, its volume `v` and its clone `c`; blocks 3 and 40 of `s` are data.
struct Bench {
    dir: tempfile::TempDir,
    pool: Arc<Pool>,
    sealed: LayerId,
}

impl Bench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pool = open_real(dir.path()).await;
        let device = empty(&pool, "v", 64 * 4096).await;
        device.write(3 * 4096, bytes(1, 4096), false).await.unwrap();
        device.write(40 * 4096, bytes(2, 4096), false).await.unwrap();
        let request = Snapshot { image: image_name("s") };
        let sealed = pool.snapshot(&volume_name("v"), request).await.unwrap().layer;
        let clone = create("c", None, VolumeSource::Image(image_name("s")));
        pool.create_volume(clone).await.unwrap();
        Self { dir, pool, sealed }
    }

    fn path(&self, kind: &str) -> PathBuf {
        self.dir.path().join("layers").join(format!("{}.{kind}", self.sealed))
    }

    fn make_checksums(&self) {
        let (row, _) = self
            .pool
            .catalog
            .layers()
            .unwrap()
            .into_iter()
            .find(|(r, _)| r.id == self.sealed)
            .unwrap();
        self.pool.make_checksums(&row, &Work::default()).unwrap();
    }

    fn damage(&self, kind: &str, offset: u64, length: usize) {
        let file = std::fs::File::options().write(true).open(self.path(kind)).unwrap();
        file.write_all_at(&vec![0x5a; length], offset).unwrap();
    }

    async fn check(&self, scope: CheckScope) -> CheckReport {
        self.pool.check(scope, Arc::new(Work::default())).await.unwrap()
    }
}

fn kinds(report: &CheckReport) -> Vec<FaultKind> {
    report.faults.iter().map(|fault| fault.kind).collect()
}

#[tokio::test]
async fn a_sound_pool_is_called_sound_with_and_without_checksums() {
    let bench = Bench::new().await;
    let report = bench.check(CheckScope::Pool).await;
    assert_eq!(
        (&kinds(&report)[..], &report.without_checksums[..]),
        (&[][..], &[bench.sealed][..])
    );
    bench.make_checksums();
    let report = bench.check(CheckScope::Pool).await;
    assert_eq!((&kinds(&report)[..], &report.without_checksums[..]), (&[][..], &[][..]));
    assert_eq!((report.layers, report.compared_bytes), (3, 2 * 4096));
    assert_eq!(report.leftovers, Vec::<String>::new());
}

#[tokio::test]
async fn changed_data_are_named_with_the_layer_the_bytes_and_who_uses_them() {
    let bench = Bench::new().await;
    bench.make_checksums();
    bench.damage("data", 40 * 4096 + 100, 1);
    let report = bench.check(CheckScope::Volume(volume_name("c"))).await;
    assert_eq!(kinds(&report), [FaultKind::Data]);
    let fault = &report.faults[0];
    assert_eq!(fault.layer, Some(bench.sealed));
    let chunk = ByteRange { offset: 2 * 65536, length_bytes: 65536 };
    assert_eq!(fault.range, Some(chunk));
    assert_eq!((fault.users, fault.used_by.join(" ")), (3, "image s volume c volume v".to_owned()));
    assert_eq!(kinds(&bench.check(CheckScope::Image(image_name("s"))).await), [FaultKind::Data]);
}

#[tokio::test]
async fn bytes_of_blocks_that_are_no_data_do_not_matter() {
    let bench = Bench::new().await;
    bench.make_checksums();
    bench.damage("data", 4 * 4096, 4096);
    assert_eq!(kinds(&bench.check(CheckScope::Pool).await), []);
}

#[tokio::test]
async fn a_map_page_with_two_damaged_copies_is_named() {
    let bench = Bench::new().await;
    bench.make_checksums();
    bench.damage("map", 4096 + 50, 4096);
    let report = bench.check(CheckScope::Pool).await;
    assert_eq!(kinds(&report), [FaultKind::Map]);
    assert_eq!(report.faults[0].range, Some(ByteRange { offset: 0, length_bytes: 64 * 4096 }));
    assert!(report.faults[0].what.contains("page 0"), "{:?}", report.faults[0]);
}

/// The map alone takes it for a torn write, and goes back to what was before.
#[tokio::test]
async fn rot_of_the_current_copy_of_a_map_page_is_found_by_the_checksums() {
    let bench = Bench::new().await;
    bench.make_checksums();
    // The first flush writes copy B.
    bench.damage("map", 2 * 4096 + 50, 1);
    let report = bench.check(CheckScope::Pool).await;
    assert!(!report.faults.is_empty(), "the states of before are not believed");
}

#[tokio::test]
async fn damaged_sums_are_no_damaged_data() {
    let bench = Bench::new().await;
    bench.make_checksums();
    bench.damage("sum", 4096 + 100, 1);
    assert_eq!(kinds(&bench.check(CheckScope::Pool).await), [FaultKind::Checksums]);
}

#[tokio::test]
async fn sums_that_were_never_finished_are_made_anew() {
    let bench = Bench::new().await;
    std::fs::write(bench.path("sum"), vec![0; 8192]).unwrap();
    let report = bench.check(CheckScope::Pool).await;
    assert_eq!((kinds(&report), report.without_checksums), (vec![], vec![bench.sealed]));
    bench.make_checksums();
    assert_eq!(bench.check(CheckScope::Pool).await.without_checksums, []);
}

#[tokio::test]
async fn a_missing_file_and_one_too_many_are_told_apart() {
    let bench = Bench::new().await;
    std::fs::remove_file(bench.path("data")).unwrap();
    let stray = bench.dir.path().join("layers").join("stray");
    std::fs::write(stray, "nobody's").unwrap();
    let report = bench.check(CheckScope::Pool).await;
    assert_eq!(kinds(&report), [FaultKind::Missing]);
    assert_eq!(report.leftovers, ["stray"]);
}

#[tokio::test]
async fn work_that_nobody_waits_for_stops() {
    let bench = Bench::new().await;
    bench.make_checksums();
    let work = Arc::new(Work::default());
    work.stop();
    let problem = bench.pool.check(CheckScope::Pool, work).await.unwrap_err();
    assert!(problem.why.contains("interrupted"), "{problem}");
}

#[tokio::test]
async fn the_keeper_makes_sums_of_what_is_sealed_while_it_runs() {
    let bench = Bench::new().await;
    let keeper = tokio::spawn(Arc::clone(&bench.pool).keep());
    let request = Snapshot { image: image_name("t") };
    bench.pool.snapshot(&volume_name("v"), request).await.unwrap();
    let begun = std::time::Instant::now();
    while !bench.check(CheckScope::Pool).await.without_checksums.is_empty() {
        assert!(begun.elapsed().as_secs() < 30, "waited 30 s for the checksums of both layers");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    keeper.abort();
}
