use proptest::prelude::*;

use super::*;
use crate::vm::Firmware;

const SMALLEST: &str = "image: debian\ncommand: hostname\n";

fn problem(extra: &str) -> String {
    let text = format!("{SMALLEST}{extra}");
    let problem = parse(&text, "jobs/scan.yaml").expect_err(extra);
    assert_eq!(problem.kind, crate::ProblemKind::Invalid);
    problem.to_string()
}

#[test]
fn image_and_command_are_enough() {
    let job = parse(SMALLEST, "jobs/scan.yaml").unwrap();
    assert_eq!(job.spec.name, "scan");
    assert_eq!(job.spec.command, ["/bin/sh", "-c", "hostname"]);
    assert_eq!((job.spec.cpus, job.spec.memory_bytes), (1, 512 << 20));
    assert_eq!((job.spec.output_bytes, job.spec.root_bytes), (1 << 30, None));
    assert!(!job.spec.has_output_room);
    assert_eq!(job.spec.outputs, ["/output"]);
    assert_eq!((job.spec.start, job.spec.may_migrate), (Start::Anywhere, true));
    assert!(job.inputs.is_empty() && job.spec.timeout_s.is_none());
    assert_eq!((job.spec.stop_grace_s, job.spec.oom_kill), (10, OomKill::Fail));
}

#[test]
fn every_field_is_read() {
    let text = r#"
name: tpch
image: postgres
command: [/opt/run, 1, true]
env: {SCALE: 0.10, EMPTY: , QUOTED: "yes"}
cpus: 2
memory: 384MiB
root: 4 GiB
output: 100MiB
volumes:
  - {volume: tables, access: read}
  - {volume: scratch, ranks: [0]}
  - volume: more
    mount: /mnt/more/
    access: clone
inputs: [sql/q6.sql, {from: /tmp/x, to: bin/run}, repo://physics/in/x]
outputs: [/job/answers]
placement: {start: {site: home}, move: never}
timeout: 1h30m
stop-grace: 2m
oom-kill: ignore
firmware: uefi-secure
tpm: true
together: web
apart: db
"#;
    let JobFile { spec, inputs } = parse(text, "-").unwrap();
    assert_eq!(spec.command, ["/opt/run", "1", "true"]);
    assert_eq!(spec.rules.to_string(), "together web, apart db");
    assert_eq!(spec.env["SCALE"], "0.10");
    assert_eq!((spec.env["EMPTY"].as_str(), spec.env["QUOTED"].as_str()), ("", "yes"));
    assert_eq!((spec.cpus, spec.memory_bytes), (2, 384 << 20));
    assert_eq!((spec.root_bytes, spec.output_bytes), (Some(4 << 30), 100 << 20));
    assert!(spec.has_output_room);
    assert_eq!((spec.firmware, spec.tpm), (Firmware::UefiSecure, true));
    let mounts: Vec<_> = spec.volumes.iter().map(|v| (v.mount.as_str(), v.access)).collect();
    let expected =
        [("/data", Access::Read), ("/data1", Access::Write), ("/mnt/more", Access::Clone)];
    assert_eq!(mounts, expected);
    let ranks: Vec<_> = spec.volumes.iter().map(|volume| volume.ranks.as_slice()).collect();
    assert_eq!(ranks, [&[][..], &[0], &[]]);
    let local = |path: &str| InputSource::Local(path.to_owned());
    let in_repository = InputSource::Repository("repo://physics/in/x".parse().unwrap());
    let names: Vec<_> = inputs.into_iter().map(|i| (i.from, i.to)).collect();
    let expected =
        [(local("sql/q6.sql"), "q6.sql"), (local("/tmp/x"), "bin/run"), (in_repository, "x")];
    assert_eq!(names, expected.map(|(from, to)| (from, to.to_owned())));
    assert_eq!(spec.start, Start::Site(SiteId::new("home").unwrap()));
    assert_eq!((spec.may_migrate, spec.timeout_s), (false, Some(5400)));
    assert_eq!((spec.stop_grace_s, spec.oom_kill), (120, OomKill::Ignore));
}

#[test]
fn the_start_can_be_written_in_three_ways() {
    let expected = Start::Host(HostId::new("cloud1").unwrap());
    for placement in ["host: cloud1", "start: host cloud1", "start: {host: cloud1}"] {
        let text = format!("{SMALLEST}placement: {{{placement}}}\n");
        assert_eq!(parse(&text, "a.yaml").unwrap().spec.start, expected, "{placement}");
    }
}

#[test]
fn a_wrong_unit_names_line_field_and_the_right_units() {
    assert_eq!(
        problem("memory: \"512MB\"\n"),
        "jobs/scan.yaml:3: memory: \"512MB\" may be powers of 1000 or of 1024: \
         write 512MiB for 1024, or the number of bytes with B"
    );
    assert!(problem("memory: 512\n").starts_with("jobs/scan.yaml:3: memory: \"512\" has no unit"));
    assert!(problem("timeout: 10\n").contains("timeout: \"10\" has no unit"));
    assert!(problem("timeout: 1x\n").contains("timeout: \"1x\" is not a duration"));
}

#[test]
fn sizes_and_times_may_be_written_as_for_slurm() {
    let text = format!("{SMALLEST}memory: 2G\noutput: 512M\ntimeout: 1:30:00\n");
    let spec = parse(&text, "a.yaml").expect("a job file").spec;
    assert_eq!((spec.memory_bytes, spec.output_bytes), (2 << 30, 512 << 20));
    assert_eq!(spec.timeout_s, Some(5400));
}

#[test]
fn memory_may_be_a_range_whose_ends_are_within_the_limits() {
    let range = |memory: &str| {
        let text = format!("{SMALLEST}memory: {memory}\n");
        let spec = parse(&text, "a.yaml").expect("a job file").spec;
        (spec.memory_bytes, spec.memory_max_bytes)
    };
    assert_eq!(range("1GiB..4GiB"), (1 << 30, Some(4 << 30)));
    assert_eq!(range("1GiB"), (1 << 30, None));
    assert_eq!(range("1GiB..1GiB"), (1 << 30, None));
    assert!(problem("memory: 4GiB..1GiB\n").contains("3: memory: \"4GiB..1GiB\" ends below"));
    assert!(problem("memory: 1MiB..1GiB\n").contains("possible is 64 MiB to 512 GiB"));
    assert!(problem("memory: 1GiB..1TiB\n").contains("possible is 64 MiB to 512 GiB"));
}

#[test]
fn what_is_beyond_a_limit_names_line_field_and_limit() {
    let text = problem("cpus: 256\n");
    let expected = "3: cpus: a VM's number of CPUs is 256; possible is 1 to 255";
    assert_eq!(text, format!("jobs/scan.yaml:{expected}"));
    for (extra, expected) in [
        ("memory: 1KiB\n", "memory is 1 KiB; possible is 64 MiB to 512 GiB"),
        ("root: 1KiB\n", "disk is 1 KiB; possible is 1 MiB to "),
        ("output: 16TiB\n", "disk is 16 TiB; possible is 1 MiB to "),
        ("timeout: 0s\n", "timeout is 0s; possible is 1s to 365d"),
        ("priority: -101\n", "priority is -101; possible is -100 to 100"),
        ("name: a b\n", "is not a job's name: 1 to 45 bytes"),
    ] {
        let text = problem(extra);
        assert!(text.starts_with("jobs/scan.yaml:3: ") && text.contains(expected), "{text}");
    }
    let volumes: Vec<_> = (0..18).map(|n| format!("{{volume: v{n}}}")).collect();
    let text = problem(&format!("volumes: [{}]\n", volumes.join(", ")));
    assert!(text.contains("volumes is 18; possible is 0 to 17"), "{text}");
}

#[test]
fn an_unknown_field_is_named_with_its_line_and_the_known_ones() {
    let text = problem("cpus: 1\nmemroy: 1GiB\n");
    assert!(text.starts_with("jobs/scan.yaml:4: memroy: there is no such field"), "{text}");
    assert!(text.contains("cpus, memory,"), "{text}");
    let text = problem("volumes:\n  - volume: a\n    mout: /a\n");
    assert!(text.starts_with("jobs/scan.yaml:5: volumes[0].mout: "), "{text}");
}

#[test]
fn a_wrong_type_names_line_and_field() {
    for (extra, expected) in [
        ("memory: [1]\n", "3: memory: one value is wanted, not a list"),
        ("cpus: two\n", "3: cpus: \"two\" is not a whole number of 1 to 255"),
        ("volumes: a\n", "3: volumes: a list is wanted"),
        ("env: [a]\n", "3: env: fields are wanted"),
        ("volumes: [{volume: a, mount: //proc/1}]\n", "3: volumes[0].mount: /proc belongs"),
        ("outputs: [../out]\n", "3: outputs[0]: \"../out\" is not an absolute path"),
        ("outputs-to: repo://a/../b\n", "3: outputs-to: \"repo://a/../b\" is not a directory"),
        ("keep-outputs: 1s\n", "3: keep-outputs: "),
        ("inputs: [{from: a, to: ../b}]\n", "3: inputs[0].to: \"../b\" is not a path below"),
        ("inputs: [repo://physics]\n", "3: inputs[0]: \"repo://physics\" has no file name"),
        ("inputs: [repo://PHYSICS/x]\n", "3: inputs[0]: "),
        ("placement:\n  move: no\n", "4: placement.move: \"no\" is not known"),
        ("placement: {site: a, host: b}\n", "3: placement: only one of"),
    ] {
        let text = problem(extra);
        assert!(text.contains(&format!("scan.yaml:{expected}")), "{extra}: {text}");
    }
}

#[test]
fn a_missing_field_says_what_to_add() {
    let text = parse("image: a\ncommand: ' '\n", "a.yaml").unwrap_err().to_string();
    assert_eq!(text, "a.yaml:2: command: it is empty");
    let text = parse("command: x\n", "a.yaml").unwrap_err().to_string();
    assert_eq!(text, "a.yaml:1: the field \"image\" is missing\n  add a line `image: debian`");
}

#[test]
fn what_is_not_yaml_is_reported_with_its_line() {
    let problem = parse("image: debian\ncommand: [a\nb: }\n", "a.yaml").unwrap_err();
    assert!(problem.what.starts_with("a.yaml:"), "{problem}");
    assert!(!problem.why.contains('\n'), "one line: {problem}");
    assert!(parse("", "a.yaml").is_err());
    assert!(parse("image: a\nimage: b\ncommand: c\n", "a.yaml").is_err());
}

#[test]
fn priority_and_restart_have_defaults_and_bounds() {
    let spec = |more: &str| {
        parse(&format!("image: debian\ncommand: x\n{more}"), "j.yaml").map(|file| file.spec)
    };
    let plain = spec("").unwrap();
    assert_eq!((plain.priority, plain.restart), (0, Restart::Never));
    let set = spec("priority: -3\nrestart: on-host-failure\n").unwrap();
    assert_eq!((set.priority, set.restart), (-3, Restart::OnHostFailure));
    for wrong in ["priority: 101", "priority: soon", "restart: always"] {
        assert!(spec(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn vms_of_a_job_are_at_the_site_of_confined_data_unless_its_file_lets_them_go() {
    let ranks = |extra: &str| parse(&format!("{SMALLEST}{extra}"), "scan.yaml").unwrap().spec.ranks;
    assert_eq!(ranks("count: 2\n"), LeaveSite::Never);
    assert_eq!(ranks("count: 2\nranks: {leave-site: allowed}\n"), LeaveSite::Allowed);
    assert!(problem("ranks: {leave-site: allowed}\n").contains("count"));
}

#[test]
fn what_a_job_writes_is_confined_unless_its_file_lets_it_go() {
    let writes =
        |extra: &str| parse(&format!("{SMALLEST}{extra}"), "scan.yaml").unwrap().spec.writes;
    assert_eq!(writes(""), LeaveSite::Never);
    assert_eq!(writes("writes: {leave-site: allowed}\n"), LeaveSite::Allowed);
    assert!(problem("writes: {leave-site: often}\n").contains("use allowed or never"));
    assert!(problem("writes: {}\n").contains("leave-site"));
}

#[test]
fn outputs_may_be_patterns_and_go_where_the_file_says() {
    let spec = parse(
        &format!("{SMALLEST}outputs: [/output/*.csv, results/**]\noutputs-to: runs/today\n"),
        "a.yaml",
    );
    let spec = spec.expect("a job").spec;
    assert_eq!(spec.outputs, ["/output/*.csv", "results/**"]);
    assert_eq!((spec.outputs_to.as_deref(), spec.keep_outputs_s), (Some("runs/today"), None));
    let kept = parse(&format!("{SMALLEST}keep-outputs: 30d\n"), "a.yaml").expect("a job").spec;
    assert_eq!(kept.keep_outputs_s, Some(30 * 24 * 3600));
    assert!(problem("outputs-to: a\nkeep-outputs: 30d\n").contains("only one of the two"));
}

#[test]
fn one_volume_or_mount_cannot_be_named_twice() {
    assert!(problem("volumes: [{volume: a}, {volume: a}]\n").contains("named twice"));
    assert!(problem("volumes: [{volume: a}, {volume: b, mount: /data}]\n").contains("both"));
}

#[test]
fn a_volume_that_is_written_is_in_one_vm_of_a_job_with_several_ones() {
    let many = |volume: &str| format!("count: 2\nvolumes: [{{volume: a{volume}}}]\n");
    assert!(parse(&format!("{SMALLEST}{}", many(", ranks: [1]")), "a.yaml").is_ok());
    let read_by_both = many(", access: read, ranks: [0, 1]");
    assert!(parse(&format!("{SMALLEST}{read_by_both}"), "a.yaml").is_ok());
    for (volume, why) in [
        ("", "several VMs can't write volume a"),
        (", ranks: [0, 1]", "several VMs can't write volume a"),
        (", ranks: [2]", "for rank 2: a job with 2 VMs has the ranks 0 to 1"),
        (", access: read, ranks: [1, 1]", "each is named once"),
    ] {
        let said = problem(&many(volume));
        assert!(said.contains(why), "{volume}: {said}");
    }
    let single = problem("volumes: [{volume: a, ranks: [1]}]\n");
    assert!(single.contains("has the ranks 0 to 0"), "{single}");
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC*") {
        let _ = parse(&text, "a.yaml");
    }

    #[test]
    fn no_value_makes_the_parser_panic(
        field in "name|env|cpus|memory|volumes|inputs|outputs|placement|timeout",
        value in "[\\[\\]{}:,\"'&*!|>\\-? a-c0-9./~\n]{0,40}",
    ) {
        let _ = parse(&format!("{SMALLEST}{field}: {value}\n"), "a.yaml");
    }
}

#[test]
fn rules_about_other_vms_that_can_not_be_kept_are_refused() {
    let same = problem("apart: db\ntogether: db\n");
    assert!(same.contains("together and apart can't both name db"), "{same}");
    let many = problem("count: 2\napart: db\ntogether: web\n");
    assert!(many.contains("several VMs"), "{many}");
    let name = problem("apart: Data~Base\n");
    assert!(name.contains("is not a name") && name.contains("apart"), "{name}");
}

#[test]
fn a_file_says_what_the_job_may_cost_and_by_when_it_is_to_end() {
    let spec = parse(
        &format!("{SMALLEST}budget: $1\ndeadline: 18:00\nwaiting-costs: $0.25/h\n"),
        "a.yaml",
    );
    let money = spec.expect("a job").spec.money;
    let micros = |of: Option<crate::money::Money>| of.map(|money| money.micros);
    assert_eq!(
        (micros(money.budget), micros(money.waiting_costs_per_hour)),
        (Some(1_000_000), Some(250_000))
    );
    assert_eq!(money.deadline.map(|at| at.to_string()).as_deref(), Some("18:00 UTC"));
    let soon = parse(&format!("{SMALLEST}deadline: in 2h\n"), "a.yaml").expect("a job").spec.money;
    assert_eq!(soon.deadline.map(|at| at.to_string()).as_deref(), Some("in 2h"));
    let json = serde_json::to_value(soon).expect("JSON");
    assert_eq!(json, serde_json::json!({"deadline": "in 2h"}));
    assert_eq!(
        parse(SMALLEST, "a.yaml").expect("a job").spec.money,
        crate::budget::MoneyRules::default()
    );
    for (wrong, why) in [
        ("budget: one dollar\n", "not an amount of money"),
        ("deadline: soon\n", "18:00, or in 2h"),
        ("deadline: in 2\n", "no unit"),
        ("waiting-costs: $1\n", "$0.25/h"),
    ] {
        let said = problem(wrong);
        assert!(
            said.contains(why) && said.contains(wrong.split(':').next().unwrap_or_default()),
            "{said}"
        );
    }
}
