//! A copy whose source is gone goes on from another host that has the same layer.

use perigee_model::volume::ContentDigest;

use super::*;
use crate::tests::copies::contents::digest;

const ALL: u64 = (BLOCKS * BLOCK) as u64;

/// A pool that reaches the same layer at two hosts, `there:1` and `other:1`.
struct Two {
    dir: tempfile::TempDir,
    files: Arc<SimFiles>,
    homes: [Arc<Home>; 2],
    pool: Arc<Pool>,
}

impl Two {
    async fn copied(keep: Keep) -> Self {
        let two = Self::of([Home::new(), Home::new()]);
        two.copy("there:1", keep).await.unwrap();
        two
    }

    fn of(homes: [Arc<Home>; 2]) -> Self {
        let (dir, files) = (tempfile::tempdir().unwrap(), Arc::default());
        let pool = open_two(&dir, &files, &homes);
        Self { dir, files, homes, pool }
    }

    /// The first host has changed the image, where it has data and where it has none.
    fn with_a_liar() -> Self {
        let mut liar = Home::new();
        let inside = Arc::get_mut(&mut liar).unwrap();
        inside.bytes[3 * BLOCK] ^= 1;
        inside.bytes[HOLE.start * BLOCK..HOLE.end * BLOCK].fill(66);
        Self::of([liar, Home::new()])
    }

    async fn copy(&self, from: &str, keep: Keep) -> Result<ImageInfo, perigee_model::Problem> {
        self.copy_of(from, keep, None).await
    }

    async fn copy_of(
        &self,
        from: &str,
        keep: Keep,
        content: Option<ContentDigest>,
    ) -> Result<ImageInfo, perigee_model::Problem> {
        let layer = Some(LayerId(Uuid::from_u128(77)));
        let request = CopyImage { content, nbd_addr: from.to_owned(), export: None, keep, layer };
        self.pool.copy_image(&image_name("i"), request).await
    }

    async fn fill(&self) -> Result<ImageInfo, perigee_model::Problem> {
        self.pool.fill_image(&image_name("i"), Arc::default()).await
    }

    /// Whom the copy refuses, whether it is not clear whom, and how much is missing.
    async fn state(&self) -> (bool, bool, u64) {
        self.pool.settle_copies().await;
        let remote = self.pool.image_info(&image_name("i")).await.unwrap().remote.unwrap();
        (remote.refused, remote.unclear, remote.missing_bytes)
    }

    /// The server is killed.
    fn restart(self) -> Self {
        let Self { dir, files, homes, pool } = self;
        drop(pool);
        let pool = open_two(&dir, &files, &homes);
        Self { dir, files, homes, pool }
    }

    async fn clone_it(&self, name: &str) -> Arc<dyn Device> {
        let source = VolumeSource::Image(image_name("i"));
        self.pool.create_volume(create(name, None, source)).await.unwrap();
        session(&self.pool, name).await
    }

    /// The first host is gone for good.
    fn lose_the_first(&self) {
        self.homes[0].away.store(true, Ordering::SeqCst);
    }
}

fn open_two(dir: &tempfile::TempDir, files: &Arc<SimFiles>, homes: &[Arc<Home>; 2]) -> Arc<Pool> {
    let homes = homes.clone();
    let connect = move |nbd_addr: String, export: String| -> BoxFuture<'static, _> {
        let [there, other] = homes.clone();
        let home = match nbd_addr.as_str() {
            "there:1" if !there.away.load(Ordering::SeqCst) => Some(there),
            "other:1" => Some(other),
            _ => None,
        };
        let hides = |home: &Arc<Home>| home.hides_checksums.load(Ordering::SeqCst);
        let hidden = home.as_ref().is_some_and(hides);
        Box::pin(async move {
            let found = home.map(|home| home as Arc<dyn Device>);
            let found = found.ok_or_else(|| Problem::unavailable("can't connect", nbd_addr))?;
            let is_sums = export.ends_with("@sums");
            match is_sums {
                true if hidden => Err(Problem::unavailable("checksums", "it does not say them")),
                true => Err(Problem::not_found("checksums", "it has none")),
                false => Ok(found),
            }
        })
    };
    let connect = Connector { patience: Duration::from_secs(120), connect: Arc::new(connect) };
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
    Pool::open_with(config, Arc::clone(files) as _, Uuid::from_u128(1)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_source_is_gone_goes_on_from_another_host() {
    for keep in [Keep::All, Keep::Read, Keep::Never] {
        let two = Two::copied(keep).await;
        let device = two.clone_it("c").await;
        read(&device, 0).await.unwrap();
        two.pool.settle_copies().await;
        two.lose_the_first();
        assert!(matches!(read(&device, 1).await, Err(IoError::Unreachable(_))), "{keep}");
        let info = two.copy("other:1", keep).await.unwrap();
        assert_eq!(info.remote.as_ref().map(|remote| remote.nbd_addr.as_str()), Some("other:1"));
        assert!(all(&device).await == two.homes[0].content(), "{keep}");
        assert_eq!(two.homes[1].reads()[0], u32::from(keep == Keep::Never), "it was kept: {keep}");
        if keep == Keep::All {
            let info = two.pool.fill_image(&image_name("i"), Arc::default()).await.unwrap();
            assert_eq!(info.remote, None);
            // A late request for a copy that is complete changes nothing.
            assert_eq!(two.copy("other:1", keep).await.unwrap().remote, None);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_waits_for_a_source_is_answered_by_the_next_one() {
    let two = Two::copied(Keep::Read).await;
    let device = two.clone_it("c").await;
    let held = two.homes[0].gate.acquire_many(1000).await.unwrap();
    let waiting = tokio::spawn({
        let device = Arc::clone(&device);
        async move { read(&device, 1).await }
    });
    while two.homes[0].asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    two.copy("other:1", Keep::Read).await.unwrap();
    let content = two.homes[0].content();
    assert_eq!(waiting.await.unwrap().unwrap()[..], content[BLOCK..2 * BLOCK]);
    drop(held);
    assert_eq!(two.homes[0].reads(), vec![0; BLOCKS]);
}

#[tokio::test(start_paused = true)]
async fn a_read_of_a_source_that_never_answers_fails() {
    let two = Two::copied(Keep::Read).await;
    let device = two.clone_it("c").await;
    let _held = two.homes[0].gate.acquire_many(1000).await.unwrap();
    let failed = read(&device, 1).await.unwrap_err();
    assert!(failed.to_string().contains("did not answer in 180 s"), "{failed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_say_which_layer_it_has_is_not_read() {
    let two = Two::copied(Keep::Read).await;
    let mut nameless = Home::new();
    Arc::get_mut(&mut nameless).unwrap().layer = None;
    let Two { dir, files, pool, .. } = two;
    drop(pool);
    let mut connect = reach(nameless.clone());
    connect.patience = Duration::from_millis(50);
    let config = PoolConfig { private: None, dir: dir.path().to_owned(), connect };
    let pool = Pool::open_with(config, Arc::clone(&files) as _, Uuid::from_u128(1)).unwrap();
    let image = pool.open_image(&image_name("i")).await.unwrap();
    let refused = read(&image, 1).await.unwrap_err();
    assert!(refused.to_string().contains("does not say that it is layer"), "{refused}");
    assert_eq!(nameless.reads(), vec![0; BLOCKS]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_goes_on_from_the_last_source() {
    let two = Two::copied(Keep::Read).await;
    drop(two.clone_it("c").await);
    two.copy("other:1", Keep::Read).await.unwrap();
    two.lose_the_first();
    let Two { dir, files, homes, pool } = two;
    drop(pool);
    let pool = open_two(&dir, &files, &homes);
    assert!(all(&session(&pool, "c").await).await == homes[0].content());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_never_goes_on_from_another_layer_of_its_name() {
    let (dir, files) = (tempfile::tempdir().unwrap(), Arc::default());
    let mut other = Home::new();
    Arc::get_mut(&mut other).unwrap().layer = Some(LayerId(Uuid::from_u128(78)));
    let homes = [Home::new(), other];
    let pool = open_two(&dir, &files, &homes);
    let two = Two { dir, files, homes, pool };
    two.copy("there:1", Keep::Read).await.unwrap();
    let device = two.clone_it("c").await;
    let refused = two.copy("other:1", Keep::Read).await.unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict, "{refused}");
    assert!(all(&device).await == two.homes[0].content());
    assert_eq!(two.homes[1].reads(), vec![0; BLOCKS]);
}

/// Until now, the host from which the rest came was blamed for what the first one had given.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_is_not_blamed_for_what_another_one_gave_and_gives_the_image_in_the_end() {
    for is_refused_first in [false, true] {
        let two = Two::with_a_liar();
        let right = Some(digest(&two.homes[1].content()));
        two.copy_of("there:1", Keep::All, right).await.unwrap();
        let device = two.clone_it("c").await;
        if is_refused_first {
            two.fill().await.expect_err("the first host gives something else");
            assert_eq!(two.state().await, (true, false, ALL), "and it is clear who did");
        }
        for block in [3, HOLE.start] {
            assert_ne!(
                read(&device, block).await.unwrap(),
                two.homes[1].content()[block * BLOCK..][..BLOCK]
            );
        }
        drop(device);
        two.pool.settle_copies().await;
        let two = two.restart();
        two.copy_of("other:1", Keep::All, right).await.unwrap();
        let failed = two.fill().await.expect_err("what the first host gave is still there");
        assert_eq!(failed.kind, ProblemKind::Conflict, "{failed}");
        assert_eq!(two.state().await, (false, false, ALL), "nobody is blamed");
        let filled = two.fill().await.expect("now all of it is of one host");
        assert_eq!((filled.remote, filled.content), (None, right));
        assert!(all(&session(&two.pool, "c").await).await == two.homes[1].content());
    }
}

/// Until now, such a copy kept what had come, and was read again every half a minute.
#[tokio::test(start_paused = true)]
async fn a_source_that_does_not_say_its_checksums_does_not_keep_its_content_in_use() {
    let two = Two::with_a_liar();
    two.homes[0].hides_checksums.store(true, Ordering::SeqCst);
    let right = Some(digest(&two.homes[1].content()));
    two.copy_of("there:1", Keep::All, right).await.unwrap();
    let background = tokio::spawn(Arc::clone(&two.pool).fill_copies(u64::MAX));
    for _ in 0..3600 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if two.state().await.1 {
            break;
        }
    }
    assert_eq!(
        two.state().await,
        (false, true, ALL),
        "it is dropped, and goes on from there never"
    );
    let reads = two.homes[0].reads();
    assert!(reads.iter().all(|reads| *reads <= 3), "it was tried a few times: {reads:?}");
    two.copy_of("other:1", Keep::All, right).await.unwrap();
    while two.pool.image_info(&image_name("i")).await.unwrap().remote.is_some() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    background.abort();
    assert_eq!(two.pool.image_info(&image_name("i")).await.unwrap().content, right);
}

/// Until now, a copy with one possible source was never completed, also when what was wrong there was mended.
#[tokio::test(start_paused = true)]
async fn the_only_source_of_an_unclear_copy_is_tried_again_more_and_more_seldom() {
    const DAY_S: u64 = 24 * 3600;
    const LOOK_S: u64 = 600;
    let two = Two::with_a_liar();
    two.homes[0].hides_checksums.store(true, Ordering::SeqCst);
    let right = Some(digest(&two.homes[1].content()));
    two.copy_of("there:1", Keep::All, right).await.unwrap();
    let background = tokio::spawn(Arc::clone(&two.pool).fill_copies(u64::MAX));
    // As the controller does it, which knows of no other source.
    for _ in 0..DAY_S / LOOK_S {
        tokio::time::sleep(Duration::from_secs(LOOK_S)).await;
        if two.state().await.1 {
            two.copy_of("there:1", Keep::All, right).await.unwrap();
        }
    }
    let reads = two.homes[0].reads();
    assert!((5..=20).contains(&reads[0]), "it was tried a few times a day: {reads:?}");
    while !two.state().await.1 {
        tokio::time::sleep(Duration::from_secs(LOOK_S)).await;
    }
    background.abort();
    drop(background.await);
    // A server that starts with a source that was mended.
    let Two { dir, files, pool, .. } = two;
    drop(pool);
    let homes = [Home::new(), Home::new()];
    let pool = open_two(&dir, &files, &homes);
    let two = Two { dir, files, homes, pool };
    two.copy_of("there:1", Keep::All, right).await.unwrap();
    let filled = two.fill().await.expect("it is the image's content");
    assert_eq!((filled.remote, filled.content), (None, right));
}

/// Until now, the other host was blamed for it, and all that had come was dropped.
#[tokio::test(start_paused = true)]
async fn a_disk_here_that_can_t_be_read_is_no_fault_of_the_other_host() {
    let two = Two::of([Home::new(), Home::new()]);
    let right = Some(digest(&two.homes[0].content()));
    let info = two.copy_of("there:1", Keep::All, right).await.unwrap();
    read(&two.pool.open_image(&image_name("i")).await.unwrap(), 0).await.unwrap();
    two.pool.settle_copies().await;
    let data = two.files.file(&data_name(info.layer));
    data.unreadable.store(true, Ordering::SeqCst);
    let background = tokio::spawn(Arc::clone(&two.pool).fill_copies(u64::MAX));
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let (refused, unclear, _) = two.state().await;
    assert!(!refused && !unclear);
    let reads = data.reads.load(Ordering::SeqCst);
    assert!((1..20).contains(&reads), "it is not read every half a minute: {reads}");
    data.unreadable.store(false, Ordering::SeqCst);
    while two.pool.image_info(&image_name("i")).await.unwrap().remote.is_some() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    background.abort();
    assert_eq!(two.pool.image_info(&image_name("i")).await.unwrap().content, right);
    let expected: Vec<u32> = (0..BLOCKS).map(|n| u32::from(!HOLE.contains(&n))).collect();
    assert_eq!(two.homes[0].reads(), expected, "nothing was dropped");
}
