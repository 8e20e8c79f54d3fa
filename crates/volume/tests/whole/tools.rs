//! What users' programs do with an export.

use perigee_http::Client;
use perigee_model::volume::{
    BlockProbe, ExportStats, ImageInfo, ImportImage, ProbeBlocks, Snapshot, TracedRequest,
};
use perigee_model::{ImageName, ProblemKind};
use serde_json::Value;

use crate::server::{MIB, Server, assert_io, run, said, sample, try_run};

fn image_name(name: &str) -> ImageName {
    ImageName::new(name).expect("a name")
}

async fn import(server: &Server, name: &str, source: &str) -> ImageInfo {
    let request = ImportImage {
        format: None,
        name: image_name(name),
        source: source.into(),
        layer: None,
        leave_site: Default::default(),
    };
    server.control.post_long("/v1/images", &request, |_| {}).await.expect("an image")
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_img_reads_an_image_and_its_clone_and_fills_a_volume() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(8 * MIB)).expect("a file");
    import(&server, "sample", &file).await;
    server.clone_image("copy", "sample").await;
    server.create("filled", 8 * MIB).await;

    let info = run(&["qemu-img", "info", "--output=json", &server.uri("image:sample")]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["virtual-size"], 8 * MIB);
    for export in [server.uri("image:sample"), server.uri("copy"), server.tcp_uri("copy")] {
        run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &export]);
    }
    let filled = server.uri("filled");
    run(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &server.uri("copy"), &filled]);
    run(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &file, &filled]);
    let out = dir.path().join("out.qcow2").display().to_string();
    run(&["qemu-img", "convert", "-f", "raw", "-O", "qcow2", &filled, &out]);
    run(&["qemu-img", "compare", "-F", "raw", &out, &file]);
    let map = run(&["qemu-img", "map", "--output=json", &filled]);
    let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
    let hole = map.iter().find(|extent| extent["start"] == 2 * MIB).expect("the hole's extent");
    assert_eq!((&hole["zero"], &hole["length"]), (&true.into(), &(2 * MIB).into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_io_writes_zeroes_discards_and_reads_back() {
    let server = Server::start().await;
    server.create("data", 16 * MIB).await;
    assert_io(&server.qemu_io(
        "data",
        &[
            "write -P 0xab 1000 70000",
            "write -f -P 0xcd 1M 1M",
            "write -z 64k 4096",
            "write -z -u 1M 64k",
            "discard 1536k 64k",
            "aio_write -P 0x11 4M 2M",
            "aio_write -P 0x22 8M 3M",
            "aio_flush",
            "flush",
        ],
    ));
    assert_io(&server.qemu_io(
        "data",
        &[
            "read -P 0 0 1000",
            "read -P 0xab 1000 64536",
            "read -P 0 64k 4096",
            "read -P 0xab 69632 1368",
            "read -P 0 1M 64k",
            "read -P 0xcd 1088k 448k",
            "read -P 0 1536k 64k",
            "read -P 0xcd 1600k 448k",
            "read -P 0x11 4M 2M",
            "read -P 0x22 8M 3M",
        ],
    ));
    let beyond = server.qemu_io("data", &["read 15M 2M"]);
    assert!(said(&beyond).contains("failed"), "{beyond:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_takes_no_write() {
    let server = Server::start().await;
    server.create("data", MIB).await;
    let request = Snapshot { image: image_name("kept") };
    let image: ImageInfo =
        server.control.post("/v1/volumes/data/snapshot", &request).await.expect("a snapshot");
    assert_eq!(image.size_bytes, MIB);
    let refused = server.qemu_io("image:kept", &["write 0 4k"]);
    assert!(said(&refused).contains("Permission denied"), "{refused:?}");
    assert_io(&server.qemu_io("data", &["write -P 1 0 4k"]));
    run(&["qemu-io", "-r", "-f", "raw", "-c", "read -P 0 0 1M", &server.uri("image:kept")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn libnbd_s_tools_list_describe_and_copy() {
    let server = Server::start().await;
    server.create("data", 8 * MIB).await;
    server.create("other", 8 * MIB).await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    let back = dir.path().join("back.raw").display().to_string();
    std::fs::write(&file, sample(8 * MIB)).expect("a file");

    run(&["nbdcopy", "--flush", &file, &server.uri("data")]);
    run(&["nbdcopy", &server.uri("data"), &server.tcp_uri("other")]);
    run(&["nbdcopy", "--synchronous", &server.uri("other"), &back]);
    run(&["cmp", &file, &back]);

    let list = run(&["nbdinfo", "--list", "--json", &server.uri("")]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let names: Vec<&str> = list["exports"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|export| export["export-name"].as_str())
        .collect();
    assert_eq!(names, ["data", "other"]);

    let info = run(&["nbdinfo", "--json", &server.uri("data")]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!((&info["protocol"], &info["structured"]), (&"newstyle-fixed".into(), &true.into()));
    let export = &info["exports"][0];
    for able in ["can_multi_conn", "can_flush", "can_fua", "can_trim", "can_zero", "can_df"] {
        assert_eq!(export[able], true, "{able}");
    }
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    let map = run(&["nbdinfo", "--map", "--json", &server.uri("data")]);
    let map: Vec<Value> = serde_json::from_str(&map).expect("JSON");
    assert!(
        map.iter().any(|e| e["offset"] == 2 * MIB && e["description"] == "hole,zero"),
        "{map:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_tells_where_its_blocks_come_from() {
    let server = Server::start().await;
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("sample.raw").display().to_string();
    std::fs::write(&file, sample(8 * MIB)).expect("a file");
    import(&server, "sample", &file).await;
    server.clone_image("copy", "sample").await;
    assert_io(&server.qemu_io("copy", &["write 1M 64k", "write -z 6M 1M"]));
    let origins = ["nbdinfo", "--map=perigee:origin", "--json", &server.uri("copy")];
    let map: Vec<Value> = serde_json::from_str(&run(&origins)).expect("JSON");
    let runs: Vec<(u64, u64)> = map
        .iter()
        .map(|run| (run["offset"].as_u64().expect("bytes"), run["type"].as_u64().expect("flags")))
        .collect();
    let (source, head, nobody) = (2, 1, 0);
    let want = [
        (0, source),
        (MIB, head),
        (MIB + 65536, source),
        (2 * MIB, nobody),
        (4 * MIB, source),
        (6 * MIB, nobody),
        (7 * MIB, source),
    ];
    assert_eq!(runs, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn fio_verifies_what_it_wrote() {
    let server = Server::start().await;
    server.create("data", 64 * MIB).await;
    if !run(&["fio", "--enghelp"]).lines().any(|line| line.trim() == "nbd") {
        eprintln!("skipped: this fio has no nbd engine");
        return;
    }
    let uri = format!("--uri={}", server.uri("data"));
    let fio = ["fio", "--name=verify", "--ioengine=nbd", &uri, "--rw=randwrite", "--iodepth=32"];
    let verify = [
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--fsync=64",
        "--output-format=terse",
    ];
    // Parts of blocks, so that neighbours in flight share one; then many blocks at once.
    for size in [["--bs=1536", "--size=6m"], ["--bs=64k", "--size=48m"]] {
        run(&[&fio[..], &size[..], &verify[..]].concat());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_can_be_deleted_as_soon_as_its_client_has_ended() {
    let server = Server::start().await;
    for _ in 0..5 {
        server.create("data", MIB).await;
        assert_io(&server.qemu_io("data", &["write 0 64k"]));
        server.control.delete("/v1/volumes/data").await.expect("a deletion");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_export_is_refused_with_what_there_is() {
    let server = Server::start().await;
    server.create("data", MIB).await;
    let refused = try_run(&["qemu-img", "info", &server.uri("dat")]);
    assert!(!refused.status.success());
    assert!(said(&refused).contains("this server has: data"), "{refused:?}");
    let refused = try_run(&["qemu-img", "info", &server.tcp_uri("dat")]);
    assert!(said(&refused).contains("none of that name"), "{refused:?}");
    assert!(!said(&refused).contains("data"), "other hosts are told no names: {refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn data_goes_in_and_out_over_http_and_is_counted() {
    let server = Server::start().await;
    server.create("data", 4 * MIB).await;
    let bytes = sample(3 * MIB + 700);
    let whole = put(&server.control, "/v1/volumes/data/data", bytes.clone()).await;
    whole.expect("the data");
    let path = format!("/v1/volumes/data/data?length_bytes={}", bytes.len());
    assert!(server.control.get_bytes(&path).await.expect("the data") == bytes);
    let too_long = put(&server.control, "/v1/volumes/data/data", sample(5 * MIB)).await;
    assert_eq!(too_long.expect_err("too long").kind, ProblemKind::Invalid);
    let beyond = server.control.get_bytes("/v1/volumes/data/data?length_bytes=9999999").await;
    assert_eq!(beyond.expect_err("too long").kind, ProblemKind::Invalid);

    assert_io(&server.qemu_io("data", &["write 0 64k", "read 0 128k", "flush"]));
    let stats: Vec<ExportStats> = server.control.get("/v1/stats").await.expect("figures");
    let stats = stats.iter().find(|s| s.volume.as_str() == "data").expect("its figures").stats;
    assert_eq!((stats.writes, stats.write_bytes), (1, 65536));
    assert!(stats.read_bytes >= 131_072 && stats.flushes >= 1, "{stats:?}");
    assert!(stats.busy_ns > 0 && stats.busy_ns <= stats.read_ns + stats.write_ns + stats.flush_ns);
}

async fn put(client: &Client, path: &str, bytes: Vec<u8>) -> Result<Value, perigee_model::Problem> {
    client.send_body(perigee_http::Method::PUT, path, bytes).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_measures_reads_of_an_export() {
    let server = Server::start().await;
    server.create("data", 4 * MIB).await;
    let mut ask = ProbeBlocks {
        nbd_addr: server.nbd_addr.clone(),
        export: "data".into(),
        requests: 50,
        request_bytes: 16384,
    };
    let probe: BlockProbe = server.control.post("/v1/probe", &ask).await.expect("a probe");
    assert!(probe.latency_median_us <= probe.latency_p95_us && probe.rate_bytes_per_s > 0);
    ask.export = "nothing".into();
    let unknown = server.control.post::<BlockProbe>("/v1/probe", &ask).await;
    assert_eq!(unknown.expect_err("no such export").kind, ProblemKind::NotFound);
    ask.nbd_addr = "127.0.0.1:1".into();
    let gone = server.control.post::<BlockProbe>("/v1/probe", &ask).await;
    assert_eq!(gone.expect_err("no such host").kind, ProblemKind::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_requests_are_answered_with_problems() {
    let server = Server::start().await;
    let control = &server.control;
    let bad_name = control.get::<Value>("/v1/volumes/Data").await.expect_err("no name");
    assert_eq!(bad_name.kind, ProblemKind::Invalid);
    let missing = control.get::<Value>("/v1/volumes/data").await.expect_err("no volume");
    assert_eq!(missing.kind, ProblemKind::NotFound);
    let path = control.get::<Value>("/v1/nothing").await.expect_err("no path");
    assert_eq!(path.kind, ProblemKind::NotFound);
    let method = control.post::<Value>("/v1/pool", &()).await.expect_err("no method");
    assert_eq!(method.kind, ProblemKind::NotFound);
    let body = control.post::<Value>("/v1/volumes", &7).await.expect_err("no request");
    assert_eq!(body.kind, ProblemKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_traced_and_their_stages_measured() {
    let server = Server::start().await;
    server.create("data", 4 * MIB).await;
    let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let control = server.control.clone();
    let following = tokio::spawn(async move {
        let path = "/v1/volumes/data/trace?seconds=20";
        let take = |request: TracedRequest| sender.send(request).expect("the test listens");
        control.get_lines(path, take).await
    });
    // It may begin a little later than asked.
    let mut write = None;
    crate::server::until("a traced write", async || {
        assert_io(&server.qemu_io("data", &["write 64k 4k", "flush", "read 64k 4k"]));
        while let Ok(request) = requests.try_recv() {
            write = write.take().or((request.command == "write").then_some(request));
        }
        write.is_some()
    })
    .await;
    following.abort();
    let write = write.expect("a write");
    assert_eq!((write.offset, write.length_bytes, write.error), (65536, 4096, None));
    assert!(write.stages.iter().any(|stage| stage.stage == "write"), "{:?}", write.stages);
    let page = server.control.get_bytes("/metrics").await.expect("figures");
    let page = String::from_utf8(page.to_vec()).expect("text");
    let flushes = "perigee_volume_stage_seconds_count{volume=\"data\",stage=\"flush\"}";
    assert!(page.contains(flushes), "{page}");
    assert!(page.contains("perigee_volume_requests_total{volume=\"data\",kind=\"write\"} "));
    let unknown = server.control.get_bytes("/v1/volumes/nothing/trace?seconds=1").await;
    assert_eq!(unknown.expect_err("no such volume").kind, ProblemKind::NotFound);
}
