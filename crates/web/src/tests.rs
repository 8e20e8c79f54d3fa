//! What the pages say, that no text of a user becomes HTML, and how large the first page is.

use perigee_model::backup_schedule::BackupSchedule;
use perigee_model::job::{ClusterVolume, Host, Job, Link, Migration, Site, Vm};
use perigee_model::plan::Decision;
use perigee_model::problem::Problem;
use perigee_model::rental::Rental;
use perigee_model::renting::Renting;
use perigee_model::tasks::TaskStatus;
use perigee_model::tenant::{AuditEntry, Role, Tenant};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::known::Known;
use crate::lists::{self, Asked, ROWS};
use crate::parts::{Cell, Log, LoggedLine, Page, Section};
use crate::{Frame, PageText, front, job, money, render, sites, things};

const NOW_MS: u64 = 1_795_450_022_000;
const HOSTILE: &str = r#"<script>alert("x")</script>'"><img src=x onerror=y>&"#;

fn read<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("a value of the API")
}

fn a_host(id: &str) -> Host {
    read(json!({
        "id": id, "state": "up", "cpus": 16, "memory_bytes": 64_u64 << 30, "memory_used_bytes": 20_u64 << 30,
        "addresses": {"site": "home", "agent_url": "https://10.0.0.2:7002", "volume_url": "https://10.0.0.2:7001",
            "nbd_addr": "10.0.0.2:10809", "tunnel": null},
        "memory_available_bytes": 40_u64 << 30, "load_1min": 3.0, "cpus_used_1m": 2.5, "pressure": {},
        "vcpus_1m": {"running_vcpus": 2.0, "waiting_vcpus": 0.1},
        "pool_free_bytes": 500_u64 << 30, "pool_size_bytes": 1000_u64 << 30,
        "accelerator": "kvm", "cpu_model": "a processor", "warnings": [], "waits": [], "last_seen_ms": NOW_MS
    }))
}

fn a_vm(id: &str, host: &str) -> Vm {
    let io = json!(perigee_model::volume::IoStats::default());
    read(json!({
        "id": id, "job": null, "host": host, "status": "running", "reason": "", "cpus": 2,
        "memory_bytes": 4_u64 << 30, "uptime_ms": 1000, "vcpu_ms": 5,
        "load": {"vcpus_1m": {"running_vcpus": 0.4, "waiting_vcpus": 0.0}}, "migration": null, "waits": [], "run": 0,
        "made_ms": NOW_MS, "io": io, "volumes": [{"volume": "data", "home": host, "follows": false, "last_move": null}],
        "addresses": ["10.0.0.9"], "image": "debian", "labels": {"team": "blue"}
    }))
}

fn a_job(id: &str, state: &str) -> Job {
    read(json!({
        "id": id, "state": state, "reason": "no host has 4 CPUs free", "waits": [], "left_out": 3,
        "queue_place": 1, "submitted_ms": NOW_MS - 120_000, "migrations": [a_migration()], "members": [
            {"rank": 0, "vm": "a-0001", "host": "home1", "address": null, "state": "running", "reason": "it runs",
             "exit_code": null, "sent_bytes": []}],
        "progress": {"done": 1, "total": 2, "label": "half"},
        "predicted": {"expected_s": 40.0, "low_s": 30.0, "high_s": 60.0}, "measured_s": 42.0,
        "outputs": {"at": "repo://default/jobs/a-0001", "files": 2, "bytes": 1000, "kept_until_ms": null},
        "spec": {"name": "a", "image": "debian", "command": ["run"], "env": {"KEY": "value"}, "cpus": 4,
            "memory_bytes": 1 << 30, "output_bytes": 1 << 30, "volumes": [], "outputs": ["/output"],
            "start": "anywhere", "may_migrate": true, "owner": "ann"}
    }))
}

fn a_migration() -> Value {
    let [from, to] = ["home1", "home2"].map(|id| perigee_model::HostId::new(id).expect("a name"));
    let id = perigee_model::MigrationId::new("a-0001-m1").expect("a name");
    let vm = perigee_model::VmId::new("a-0001").expect("a name");
    let mut one = Migration::new(id, vm, [from, to], "somebody asked".to_owned(), NOW_MS);
    one.error = "it goes slowly".to_owned();
    json!(one)
}

fn a_volume(name: &str, home: &str) -> ClusterVolume {
    read(json!({
        "name": name, "home": home, "size_bytes": 10_u64 << 30, "allocated_bytes": 1 << 30, "epoch": 3,
        "used_by": null, "leave_site": "allowed", "waits": [],
        "moving": {"volume": name, "from": home, "to": "home2", "state": "taking", "cause": "asked", "started_ms": NOW_MS,
            "problem": "home2 is slow"},
        "replicas": [{"volume": name, "site": "cloud", "host": "cloud1", "every_s": 60, "keep": 2,
            "complete_ms": NOW_MS, "points": 1, "behind_bytes": 0, "missing_bytes": null, "stopping": false,
            "problem": "no room there"}]
    }))
}

fn a_schedule(volume: &str, problem: &str, ended: &str) -> BackupSchedule {
    read(json!({
        "name": volume, "volume": volume, "vm": null, "to": {"address": "/srv/backups"}, "every_s": 3600, "keep": [], "made_ms": NOW_MS,
        "next_ms": NOW_MS, "under_way": null, "last_success_ms": NOW_MS, "last_failure": null, "kept": 1, "ended": ended,
        "problem": problem
    }))
}

fn a_decision() -> Decision {
    let seconds = json!({"boot_s": 1.0, "cpu_s": 2.0, "local_io_s": 3.0, "network_s": 4.0, "other_s": 5.0,
        "migration_s": 6.0, "total_s": 21.0});
    let range = json!({"expected_s": 21.0, "low_s": 20.0, "high_s": 22.0});
    read(json!({
        "job": "a-0001", "at_ms": NOW_MS, "trigger": "submitted", "summary": "it starts beside its data",
        "outcome": "it was done", "measured_s": 21.0, "measured": seconds,
        "plan": {"basis": "history", "figures": ["RTT home1-cloud1 16.2 ms"], "moves": false, "options": [
            {"way": "beside", "start": "home1", "end": "home1", "predicted": seconds, "total": range,
             "shipped_bytes": 5, "unknown": [{"part": "cpu", "why": "it never ran"}], "longer": null, "chosen": true,
             "reason": "it is the soonest"}]}
    }))
}

fn a_rental() -> Rental {
    read(json!({
        "id": "r1", "provider": "aws", "image": "ami", "disk_bytes": 50_u64 << 30, "site": "cloud", "host": "rent-r1",
        "offer": {"kind": "c8i.2xlarge", "zone": "eu-1a", "spot": true, "cpus": 8, "memory_bytes": 16_u64 << 30,
            "kvm": null, "price": {"per_hour_micros": 1000, "minimum_s": 60, "egress_per_gib_micros": null,
                "disk_per_gib_month_micros": null, "source": "a list", "as_of_unix_s": 1}},
        "by": "an operator", "state": "wanted", "steps": [{"state": "wanted", "at_ms": NOW_MS, "why": "asked for"}],
        "why": "the provider has no such machine", "ends_because": "it came too late", "until_ms": null,
        "instance": "i-1", "address": "10.0.0.7", "requested": "nothing", "asks": 1, "asked_ms": null,
        "refused": {"kind": "k", "zone": "z", "spot": false, "why": "no capacity", "at_ms": 1},
        "notice_ms": null, "joined_ms": null, "predicted": null, "reserved": 0, "reserved_until_ms": null,
        "left_bytes": 0, "spent": 5
    }))
}

fn known() -> Known {
    Known {
        now_ms: NOW_MS,
        hosts: Some(vec![a_host("home1")]),
        vms: Some(vec![a_vm("web", "home1")]),
        jobs: Some(Vec::new()),
        volumes: Some(Vec::new()),
        tasks: Some(Vec::new()),
        rentals: Some(Vec::new()),
        audit: Some(Vec::new()),
        ..Known::default()
    }
}

fn frame(path: &str) -> Frame {
    Frame {
        who: "default/ann".to_owned(),
        role: Some(Role::Admin),
        can_log_out: true,
        path: path.to_owned(),
        is_live: true,
        ..Frame::default()
    }
}

fn html(page: &Page) -> String {
    render(page, &frame("/"))
}

/// The value with each text in it hostile that may be any text at all.
fn hostile<T: Serialize + DeserializeOwned>(value: T) -> T {
    fn texts(value: &Value, at: &str, found: &mut Vec<String>) {
        match value {
            Value::String(_) => found.push(at.to_owned()),
            Value::Array(all) => {
                all.iter().enumerate().for_each(|(n, one)| texts(one, &format!("{at}/{n}"), found));
            }
            Value::Object(all) => {
                all.iter().for_each(|(key, one)| texts(one, &format!("{at}/{key}"), found));
            }
            _ => {}
        }
    }
    let mut whole = serde_json::to_value(value).expect("JSON");
    let mut found = Vec::new();
    texts(&whole, "", &mut found);
    let mut count = 0;
    for at in found {
        let mut tried = whole.clone();
        *tried.pointer_mut(&at).expect("it was there") = Value::String(HOSTILE.to_owned());
        if serde_json::from_value::<T>(tried.clone()).is_ok() {
            (whole, count) = (tried, count + 1);
        }
    }
    assert!(count > 0, "no text of it may be any text: {whole}");
    read(whole)
}

fn assert_harmless(html: &str) {
    assert!(!html.contains("<img") && !html.contains("alert(\""), "a text became HTML: {html}");
    assert_eq!(html.matches("<script").count(), 1, "the page's own: {html}");
    assert!(html.contains("&#60;script&#62;alert(&#34;x&#34;)"), "it is shown as it is: {html}");
}

#[test]
fn no_text_of_a_user_or_a_guest_becomes_html_on_any_page() {
    let job: Job = hostile(a_job("a-0001", "running"));
    let mut told = a_host("home1");
    told.warnings = vec!["a warning".to_owned()];
    let host: Host = hostile(told);
    let mut still = a_vm("web", "home1");
    still.reason = "it waits".to_owned();
    let vm: Vm = hostile(still);
    let volume: ClusterVolume = hostile(a_volume("data", "home1"));
    let rental: Rental = hostile(a_rental());
    let task: TaskStatus = hostile(TaskStatus { problem: "x".to_owned(), ..TaskStatus::default() });
    let entry: AuditEntry = hostile(AuditEntry {
        at_ms: NOW_MS,
        who: "a client".to_owned(),
        request: "GET /".to_owned(),
        thing: "a thing".to_owned(),
        status: 401,
    });
    let migration: Migration = hostile(read(a_migration()));
    let mut all = known();
    all.problems = vec![hostile(Problem::internal("list VMs", "it failed").next("try again"))];
    all.hosts = Some(vec![host.clone()]);
    all.vms = Some(vec![vm.clone()]);
    all.jobs = Some(vec![job.clone()]);
    all.volumes = Some(vec![volume.clone()]);
    all.migrations = vec![migration.clone()];
    all.tasks = Some(vec![task]);
    all.rentals = Some(vec![rental.clone()]);
    all.audit = Some(vec![entry.clone()]);
    let log = Log {
        label: HOSTILE.to_owned(),
        command: HOSTILE.to_owned(),
        live: HOSTILE.to_owned(),
        note: HOSTILE.to_owned(),
        lines: vec![LoggedLine { text: HOSTILE.to_owned(), is_error: true }],
    };
    let of_job = job::page(&job, &[hostile(a_decision())], &[], NOW_MS);
    assert_harmless(&PageText::of(&of_job).document(Some(&log), &frame("/")));
    let held = front::Held::of([&vm], [&volume]);
    let pages = [
        front::page(&all),
        front::queue(&[hostile(a_job("a-0002", "queued"))], &Asked::default(), NOW_MS),
        things::vm(&vm, std::slice::from_ref(&migration), &[], NOW_MS),
        things::volume(&volume, NOW_MS),
        things::host(&host, &held, std::slice::from_ref(&vm), NOW_MS),
        money::rental(&rental, NOW_MS),
        Page::new("Changes", "", vec![front::changes(&[entry], 9, NOW_MS)]),
        Page::new(HOSTILE, HOSTILE, Vec::new()),
    ];
    for page in pages {
        assert_harmless(&html(&page));
    }
    let found = Asked { find: HOSTILE.to_owned(), page: 0 };
    let rows = |shown: Vec<&Vm>| front::vms("vms", shown.into_iter());
    assert_harmless(&html(&lists::page("VMs", "/vms", "", &[vm], &found, |_, _| true, rows)));
    assert_harmless(&crate::login(HOSTILE, HOSTILE, HOSTILE));
    let noted = Page { notice: HOSTILE.to_owned(), ..Page::new("x", "", Vec::new()) };
    assert_harmless(&html(&noted));
    let frame = Frame { who: HOSTILE.to_owned(), ..frame(HOSTILE) };
    assert_harmless(&render(&Page::new("x", "", Vec::new()), &frame));
}

#[test]
fn the_first_page_of_20_hosts_and_500_vms_has_at_most_100_kb() {
    let name = |of: &str, number: usize| format!("research-team~{of}-with-a-long-name-{number:04}");
    let mut all = known();
    all.hosts = Some((0..20).map(|n| a_host(&format!("a-host-with-a-long-name-{n:02}"))).collect());
    let vms = (0..500).map(|n| {
        let mut vm = a_vm(&name("vm", n), &format!("a-host-with-a-long-name-{:02}", n % 20));
        vm.reason = "x".repeat(300);
        vm.waits = read(json!([{"for": "qemu", "since_ms": NOW_MS}]));
        vm
    });
    all.vms = Some(vms.collect());
    let jobs = (0..1000).map(|n| {
        let mut job = a_job(&name("job", n), if n % 2 == 0 { "queued" } else { "running" });
        job.reason = "x".repeat(500);
        job
    });
    all.jobs = Some(jobs.collect());
    all.volumes = Some((0..1000).map(|n| a_volume(&name("disk", n), "home1")).collect());
    all.migrations = (0..100).map(|_| read(a_migration())).collect();
    all.more_migrations = 7;
    all.problems = (0..20).map(|_| Problem::unavailable("can't list", "it is busy")).collect();
    let entry = AuditEntry {
        at_ms: NOW_MS,
        who: "research-team/ann".to_owned(),
        request: format!("POST /v1/jobs/{}", "x".repeat(200)),
        thing: "x".repeat(60),
        status: 200,
    };
    all.audit = Some(vec![entry; 1000]);
    let html = html(&front::page(&all));
    assert!(html.len() <= 100_000, "{} bytes", html.len());
    assert!(html.contains("500 VMs") && html.contains("href=\"/vms\""), "the rest is a link away");
    assert!(html.contains("492 more VMs"), "what has trouble is counted");
    assert!(html.contains("12 more parts of this page"), "and so is what was not answered");
    assert!(html.contains("25 of 1107 are shown"), "and so are moves that were not asked for");
}

#[test]
fn a_page_without_trouble_says_so_and_each_kind_of_trouble_says_what_to_do() {
    let mut well = known();
    well.schedules = Some(vec![a_schedule("well", "", "")]);
    let fine = html(&front::page(&well));
    assert!(fine.contains("Nothing is wrong"), "{fine}");
    let mut all = known();
    let mut silent = a_host("home2");
    silent.state = perigee_model::job::HostState::Unreachable;
    silent.warnings = vec!["host home2 has not answered for 60 s".to_owned()];
    let mut stuck = a_host("home3");
    stuck.drain = read(
        json!({"asked": null, "left": [{"kind": "vm", "name": "web", "fate": "stays", "to": [],
        "why": "no other host", "takes_s": null, "bytes": null}]}),
    );
    let mut full = a_host("home4");
    full.pool_free_bytes = Some(1 << 30);
    all.hosts = Some(vec![silent, stuck, full]);
    let mut lost = a_volume("data", "home2");
    lost.waits = read(json!([{"for": "volume_server", "host": "home2", "since_ms": NOW_MS}]));
    all.volumes = Some(vec![lost]);
    all.tasks = Some(vec![TaskStatus {
        name: "the cleaner".to_owned(),
        problem: "the disk is full".to_owned(),
        ..TaskStatus::default()
    }]);
    let late = BackupSchedule { last_success_ms: Some(0), ..a_schedule("late", "", "") };
    let ahead_ms = Some(NOW_MS + 86_400_000);
    let ahead = BackupSchedule { last_success_ms: ahead_ms, ..a_schedule("ahead", "", "") };
    all.schedules = Some(vec![
        a_schedule("docs", "the target is full", ""),
        a_schedule("gone", "", "volume gone was deleted"),
        late,
        ahead,
        a_schedule("well", "", ""),
    ]);
    all.rentals = Some(vec![a_rental()]);
    let mut failed = a_job("a-0001", "failed");
    failed.ended_ms = Some(NOW_MS - 1000);
    let mut old = a_job("a-0002", "failed");
    old.ended_ms = Some(NOW_MS - 3 * 86_400_000);
    all.jobs = Some(vec![failed, old]);
    all.problems = vec![Problem::unavailable("can't list the images", "the store is busy")];
    let html = html(&front::page(&all));
    for told in [
        "host home2 does not answer",
        "perigee host remove home2",
        "the drain of host home3 is stuck",
        "no other host",
        "the pool of host home4 is full",
        "1 volume without a home that answers",
        "perigee volume promote",
        "the replica of volume data at cloud is behind",
        "the cleaner fails",
        "the backups of volume docs to /srv/backups are behind",
        "the target is full",
        "the backups of volume late to /srv/backups are behind",
        "the backups of volume ahead to /srv/backups are behind",
        "a clock was ahead",
        "the schedule gone of backups has ended",
        "rental r1 does not come forward",
        "job a-0001 failed",
        "perigee job explain a-0001",
        "can&#39;t list the images",
    ] {
        assert!(html.contains(told), "{told:?} is not in {html}");
    }
    assert!(!html.contains("Nothing is wrong") && !html.contains("job a-0002 failed"), "{html}");
    assert!(!html.contains("volume well"), "{html}");
}

#[test]
fn what_a_caller_may_not_ask_for_is_not_on_the_page() {
    let all = Known { hosts: None, tasks: None, rentals: None, audit: None, ..known() };
    let frame = Frame { role: Some(Role::Member), ..frame("/") };
    let html = render(&front::page(&all), &frame);
    for hidden in ["href=\"/hosts\"", "Last changes", "href=\"/rentals\"", "href=\"/audit\""] {
        assert!(!html.contains(hidden), "{hidden}");
    }
    assert!(html.contains("href=\"/jobs\"") && html.contains("perigee vm list"), "{html}");
}

#[test]
fn a_state_is_the_same_while_a_page_shows_the_same_and_its_log_does_not_count() {
    let job = a_job("a-0001", "running");
    let page = PageText::of(&job::page(&job, &[], &[], NOW_MS));
    let state = |page: &Page| PageText::of(page).state;
    let first = page.state.clone();
    let log = Log { lines: vec![LoggedLine::default()], ..Log::default() };
    for log in [None, Some(&log)] {
        let html = page.document(log, &frame("/"));
        assert!(html.contains(&format!("data-state=\"{first}\"")), "{html}");
    }
    assert_eq!(state(&job::page(&job, &[], &[], NOW_MS)), first);
    let later = job::page(&Job { reason: "another".to_owned(), ..job }, &[], &[], NOW_MS);
    assert_ne!(state(&later), first);
}

/// Who hears or copies a page reads text, without the lines of a cell.
#[test]
fn a_note_is_not_written_to_the_last_word_of_its_cell() {
    let facts = vec![("memory", Cell::number("252 GiB").note("198 GiB used"))];
    let page = Page::new("x", "", vec![Section::new("facts", "Facts", "").facts(facts)]);
    let html = html(&page);
    assert!(html.contains("252 GiB <small>198 GiB used</small>"), "{html}");
}

#[test]
fn a_job_has_its_prediction_beside_the_truth_and_its_decisions() {
    let html = html(&job::page(&a_job("a-0001", "succeeded"), &[a_decision()], &[], NOW_MS));
    for told in [
        "40 s (30..60)",
        "42 s",
        "as predicted",
        "it starts beside its data",
        "it is the soonest",
        "RTT home1-cloud1 16.2 ms",
        "a guess",
        "/jobs/a-0001/output.tar",
        "repo://default/jobs/a-0001",
        "perigee job explain a-0001",
    ] {
        assert!(html.contains(told), "{told:?} is not in {html}");
    }
    assert!(!html.contains("/jobs/a-0001/cancel"), "it has ended");
}

#[test]
fn a_long_list_is_shown_in_pages_and_looked_through_by_name() {
    let all: Vec<Vm> = (0..ROWS + 3).map(|n| a_vm(&format!("vm-{n:04}"), "home1")).collect();
    let list = |find: &str, page| {
        let asked = Asked { find: find.to_owned(), page };
        let has = |vm: &Vm, text: &str| vm.id.as_str().contains(text);
        let rows = |shown: Vec<&Vm>| front::vms("vms", shown.into_iter());
        html(&lists::page("VMs", "/vms", "perigee vm list", &all, &asked, has, rows))
    };
    let first = list("", 0);
    assert!(first.contains("1 to 500 of 503") && first.contains("page=2\">Next"), "{first}");
    let second = list("", 2);
    assert!(second.contains("vm-0502") && second.contains("page=1\">Previous"), "{second}");
    assert!(!second.contains("vm-0499") && !second.contains("Next"), "{second}");
    let found = list("0502", 0);
    assert!(found.contains("vm-0502") && !found.contains("vm-0001"), "{found}");
    for beyond in [3, 99, usize::MAX] {
        assert_eq!(list("", beyond), second, "the last page");
        assert!(list("0502", beyond).contains("1 in all with"), "the only page");
        assert!(list("nothing", beyond).contains("0 in all with"), "the only page");
    }
}

#[test]
fn a_long_queue_is_shown_in_pages_with_short_reasons() {
    let job = |n: usize| {
        let mut job = a_job(&format!("a-{n:04}"), if n < ROWS + 3 { "queued" } else { "staging" });
        (job.queue_place, job.reason) = (u32::try_from(n).ok(), "x".repeat(500));
        job
    };
    let all: Vec<Job> = (0..ROWS + 103).map(job).collect();
    let queue = |page| html(&front::queue(&all, &Asked { find: String::new(), page }, NOW_MS));
    let first = queue(0);
    assert!(first.contains("1 to 500 of 503") && !first.contains("a-0500"), "{first}");
    assert!(first.contains("25 of 100 are shown") && !first.contains(&"x".repeat(200)), "{first}");
    assert!(queue(2).contains("a-0502"));
}

/// An open page learns it: the notice is in the part that is fetched anew.
#[test]
fn a_notice_is_in_the_part_of_a_page_that_is_kept_fresh() {
    let plain = Page::new("x", "", Vec::new());
    let noted = Page { notice: "it was restored".to_owned(), ..plain.clone() };
    assert_ne!(crate::PageText::of(&noted).state, crate::PageText::of(&plain).state);
    let html = html(&noted);
    let main = html.split("<main").nth(1).expect("the main part");
    assert!(main.contains("it was restored"), "{html}");
}

#[test]
fn sites_have_a_map_of_the_best_that_was_measured_between_them() {
    let site = |id: &str, host: &str| json!({"id": id, "hosts": [host], "place": "spread"});
    let all: Vec<Site> = read(json!([site("home", "home1"), site("cloud", "cloud1")]));
    let link = |from: &str, to: &str, rtt_ms: f64| {
        json!({"from": from, "to": to, "measured_ms": NOW_MS, "blocks": null,
            "probe": {"rtt_ms": rtt_ms, "rate_bytes_per_s": 10 << 20}})
    };
    let links: Vec<Link> =
        read(json!([link("home1", "cloud1", 16.2), link("cloud1", "home1", 17.0)]));
    let html = html(&sites::page(&all, Some(&links), NOW_MS));
    assert!(
        html.contains("cloud and home: 16.2 ms, 10 MiB/s") && html.contains("<circle"),
        "{html}"
    );
    let between = html.split("id=\"between\"").nth(1).expect("a table");
    let there = between.find("16.2 ms").expect("from home to cloud");
    assert!(there < between.find("17.0 ms").expect("from cloud to home"), "{between}");
    let member = render(&sites::page(&all, None, NOW_MS), &frame("/sites"));
    assert!(!member.contains("16.2"), "links are told to admins only");
}

/// All words of 66 links lay over each other.
#[test]
fn a_map_of_many_links_has_their_words_where_somebody_points() {
    let id = |number: u64| format!("site{number:02}");
    let site = |number| json!({"id": id(number), "hosts": [id(number)], "place": "spread"});
    let link = |from: u64, to: u64| {
        json!({"from": id(from), "to": id(to), "measured_ms": NOW_MS, "blocks": null,
            "probe": {"rtt_ms": 5.0, "rate_bytes_per_s": from << 27}})
    };
    let pairs = (0..12).flat_map(|from| (0..from).map(move |to| (from, to)));
    let links: Vec<Link> = read(Value::Array(pairs.map(|(from, to)| link(from, to)).collect()));
    let all: Vec<Site> = read(Value::Array((0..12).map(site).collect()));
    let html = html(&sites::page(&all, Some(&links), NOW_MS));
    assert_eq!(html.matches("<title>site").count(), 66, "{html}");
    assert!(!html.contains("class=\"rtt\""), "{html}");
}

#[test]
fn money_and_quotas_are_said_with_their_limits() {
    let tenant: Tenant = read(json!({
        "name": "acme", "quota": {"vms": 4, "memory_bytes": 1_u64 << 30}, "running": {"vms": 1, "cpus": 2, "memory_bytes": 1 << 28},
        "volume_bytes": 5, "file_bytes": 0, "files": 0, "users": 2
    }));
    let html_of_tenant = html(&money::tenant(&tenant));
    for told in ["1 of 4", "256 MiB of 1 GiB", "no limit"] {
        assert!(html_of_tenant.contains(told), "{told}: {html_of_tenant}");
    }
    let renting: Renting = read(
        json!({"settings": {"mode": "off", "waiting_costs_per_hour": null, "most": 4},
        "looked_ms": null, "budget_left": null, "decisions": [], "nothing_because": "it is off", "not_known": [],
        "starts": [], "last": []}),
    );
    let prices = read(json!({"file": null, "problem": "line 3", "prices": []}));
    let html = html(&money::rentals(&[a_rental()], &[], &renting, &prices, NOW_MS));
    for told in ["c8i.2xlarge", "it is off", "line 3", "/rentals/r1"] {
        assert!(html.contains(told), "{told}: {html}");
    }
}

#[test]
fn a_page_can_be_used_by_keyboard_and_read_aloud() {
    let html = html(&front::page(&known()));
    for part in [
        "<html lang=\"en\">",
        "class=\"skip\" href=\"#main\"",
        "<main id=\"main\" tabindex=\"-1\"",
        "<nav aria-label=\"Pages\">",
        "aria-current=\"page\"",
        "<caption",
        "scope=\"col\"",
        "scope=\"row\"",
        "role=\"status\"",
        "name=\"viewport\"",
    ] {
        assert!(html.contains(part), "{part} is not in {html}");
    }
    for forbidden in [" style=", "<style", " onclick", "javascript:"] {
        assert!(!html.contains(forbidden), "{forbidden}: the policy of the pages forbids it");
    }
    let ids: Vec<&str> =
        html.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    let unique: std::collections::BTreeSet<_> = ids.iter().collect();
    assert_eq!(unique.len(), ids.len(), "{ids:?}");
}
