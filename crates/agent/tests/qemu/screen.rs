//! A VM with a screen, at real QEMUs.

use perigee_model::ProblemKind;
use perigee_model::vm::{Hardware, Machine, MigrationPhase, VmSpec, VmStatus};

use super::scene;
use super::support::spec;

fn with_screen(spec: VmSpec) -> VmSpec {
    let hardware = Hardware { vnc: true, ..Hardware::default() };
    VmSpec { machine: Machine { persistent: true, hardware, ..Machine::default() }, ..spec }
}

/// The ports at which this process listens.
fn listens_at(pid: u32) -> Vec<String> {
    const LISTENS: &str = "0A";
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = fds.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let own: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let tables = ["tcp", "tcp6"].map(|table| {
        std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default()
    });
    let lines = tables.iter().flat_map(|table| table.lines());
    let listening = lines.filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let socket = format!("socket:[{}]", words.get(9)?);
        (words.get(3) == Some(&LISTENS) && own.contains(&socket)).then(|| words[1].to_owned())
    });
    listening.collect()
}

#[test]
fn a_screen_is_seen_through_the_agent_before_and_after_a_move_and_at_no_port() {
    let scene = scene(&["a", "b"]);
    let (here, there) = (&scene.agents[0], &scene.agents[1]);
    let pid = here.put(&with_screen(spec(1, false))).unwrap().qemu_pid;
    here.wait_for_status(VmStatus::Running);
    assert_eq!(here.first_bytes("vnc", 12).unwrap(), b"RFB 003.008\n");
    assert_eq!(listens_at(pid), Vec::<String>::new());

    let waiting = there.put(&with_screen(spec(2, true))).unwrap();
    let uri = waiting.incoming_uri.expect("it waits for the migration");
    here.order("m-1", 1, uri, there, &scene.home);
    here.wait_for_phase(MigrationPhase::Completed);
    there.wait_for_status(VmStatus::Running);
    assert_eq!(there.first_bytes("vnc", 12).unwrap(), b"RFB 003.008\n");
}

#[test]
fn a_vm_without_a_screen_and_one_whose_data_stay_at_their_site_show_none() {
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    agent.put(&spec(1, false)).unwrap();
    let none = agent.first_bytes("vnc", 1).unwrap_err();
    assert_eq!(none.kind, ProblemKind::Unsupported, "{none}");
    assert!(none.next.contains("--vnc"), "{none}");
    agent.delete().unwrap();

    let hidden = VmSpec { hides_output: true, ..with_screen(spec(1, false)) };
    let start = super::support::start(1);
    agent.put(&VmSpec { start, ..hidden }).unwrap();
    let refused = agent.first_bytes("vnc", 1).unwrap_err();
    assert!(refused.why.contains("may not leave their site"), "{refused}");
}
