//! What is read from the disk, and how often.

use std::process::{Child, Command, Stdio};

use perigee_model::ImageName;
use perigee_model::volume::{CheckReport, CheckScope, ImageInfo, ImportImage};

use crate::server::{MIB, Server, run, sample, until};

const SIZE: u64 = 64 * MIB;
const CLIENTS: usize = 16;

/// The page cache, through which all clones of an image read one file, reads a page once however
/// many wait for it. The kernel counts what the server's process has caused to be read.
#[tokio::test(flavor = "multi_thread")]
async fn clones_that_read_a_cold_image_at_once_read_it_from_the_disk_once() {
    let server = Server::start().await;
    let file = server.pool.with_extension("raw").display().to_string();
    std::fs::write(&file, sample(SIZE)).expect("a file");
    let name = ImageName::new("golden").expect("a name");
    let request = ImportImage {
        name,
        source: file,
        layer: None,
        leave_site: Default::default(),
        format: None,
    };
    let image: ImageInfo =
        server.control.post_long("/v1/images", &request, |_| {}).await.expect("an image");
    until("its checksums, which are made of all of it", async || {
        let report = server.control.post_long("/v1/check", &CheckScope::Pool, |_| {}).await;
        report.is_ok_and(|report: CheckReport| report.without_checksums.is_empty())
    })
    .await;
    for n in 0..CLIENTS {
        server.clone_image(&format!("c{n}"), "golden").await;
    }
    let data = server.pool.join(format!("layers/{}.data", image.layer)).display().to_string();
    run(&["sync", &data]);
    run(&["dd", &format!("if={data}"), "iflag=nocache", "count=0"]);
    let before = server.read_bytes();
    let clients: Vec<Child> = (0..CLIENTS)
        .map(|n| {
            Command::new("timeout")
                .args(["60", "nbdcopy", "--no-extents", &server.uri(&format!("c{n}")), "null:"])
                .stdout(Stdio::null())
                .spawn()
                .expect("nbdcopy")
        })
        .collect();
    for mut client in clients {
        until("the clients to end", async || client.try_wait().expect("its state").is_some()).await;
        assert!(client.wait().expect("its end").success());
    }
    let read_bytes = server.read_bytes() - before;
    if read_bytes == 0 {
        return eprintln!("skipped: this filesystem has no disk below it");
    }
    // The hole in the middle is on no disk.
    assert!(read_bytes <= SIZE, "{read_bytes} bytes for an image of {SIZE}");
}
