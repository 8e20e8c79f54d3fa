//! Sources in the pool's directory, private data in another.

use perigee_model::ProblemKind;
use perigee_model::volume::{CheckScope, Snapshot, VolumeSource};

use super::*;

struct Dirs {
    pool: tempfile::TempDir,
    private: tempfile::TempDir,
}

impl Dirs {
    fn new() -> Self {
        Self { pool: tempfile::tempdir().unwrap(), private: tempfile::tempdir().unwrap() }
    }

    async fn open(&self, private: bool) -> Result<Arc<Pool>, ProblemKind> {
        let private = private.then(|| self.private.path().to_owned());
        let dir = self.pool.path().to_owned();
        let config = PoolConfig { private, dir, connect: connector() };
        Pool::open(config).await.map_err(|problem| problem.kind)
    }

    fn own_files(&self) -> usize {
        std::fs::read_dir(self.pool.path().join("layers")).unwrap().count()
    }

    fn private_files(&self) -> usize {
        let ours = std::fs::read_dir(self.private.path()).unwrap().next().unwrap().unwrap();
        std::fs::read_dir(ours.path()).unwrap().count()
    }
}

#[tokio::test]
async fn new_heads_go_to_the_private_directory_and_old_layers_stay() {
    let dirs = Dirs::new();
    let pool = dirs.open(false).await.unwrap();
    empty(&pool, "v", 1 << 20).await.write(0, bytes(1, 4096), true).await.unwrap();
    pool.snapshot(&volume_name("v"), Snapshot { image: image_name("s") }).await.unwrap();
    drop(pool);

    let pool = dirs.open(true).await.unwrap();
    let own = dirs.own_files();
    let clone = create("c", None, VolumeSource::Image(image_name("s")));
    pool.create_volume(clone).await.unwrap();
    let device = session(&pool, "c").await;
    device.write(4096, bytes(2, 4096), true).await.unwrap();
    assert_eq!((dirs.own_files(), dirs.private_files()), (own, 3), "data, map and live map");
    assert_eq!(pool.volume_info(&volume_name("c")).await.unwrap().own_bytes, 4096);
    pool.snapshot(&volume_name("c"), Snapshot { image: image_name("t") }).await.unwrap();
    assert_eq!(dirs.private_files(), 2, "a sealed layer stays where it is");
    let expected = [vec![1; 4096], vec![2; 4096]].concat();
    drop((device, pool));

    // The server needs not be told again where the layers are.
    let pool = dirs.open(false).await.unwrap();
    assert_eq!(all(&session(&pool, "c").await).await[..8192], expected);
    let report = pool.check(CheckScope::Pool, Arc::default()).await.unwrap();
    assert_eq!((report.faults, report.leftovers), (vec![], vec![]));
    pool.delete_volume(&volume_name("c")).await.unwrap();
    pool.delete_image(&image_name("t")).await.unwrap();
    assert_eq!(dirs.private_files(), 0);
}

#[tokio::test]
async fn a_directory_that_is_not_mounted_is_missed_before_anything_looks_empty() {
    let dirs = Dirs::new();
    let pool = dirs.open(true).await.unwrap();
    empty(&pool, "v", 1 << 20).await.write(0, bytes(1, 4096), true).await.unwrap();
    drop(pool);
    let (there, away) = (dirs.private.path(), dirs.pool.path().join("away"));
    std::fs::rename(there, &away).unwrap();
    assert_eq!(dirs.open(false).await.err(), Some(ProblemKind::Unavailable));
    std::fs::create_dir(there).unwrap();
    assert_eq!(dirs.open(false).await.err(), Some(ProblemKind::Unavailable), "an empty directory");
    assert_eq!(dirs.open(true).await.err(), Some(ProblemKind::Unavailable), "named again");
    std::fs::remove_dir(there).unwrap();
    std::fs::rename(&away, there).unwrap();
    let pool = dirs.open(false).await.unwrap();
    assert_eq!(session(&pool, "v").await.read(0, 1).await.unwrap()[..], [1]);
}
