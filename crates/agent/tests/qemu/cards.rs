//! A VM with a card in a user network, with real `passt` and QEMU, in a network namespace of its own.

use std::process::Command;

use nix::sched::CloneFlags;
use nix::unistd::Uid;
use perigee_model::vm::{VmNetwork, VmSpec, VmStatus};

use super::support::{Agent, kill_9, spec, wait_for};
use super::{is_running, scene};

const GIVE_ADDRESS: &str = "ip link add eth0 type veth peer name eth1 && ip link set eth1 up && \
     ip address add 10.8.0.1/24 dev eth0 && ip link set eth0 up && ip route add default via 10.8.0.2";

fn shell(line: &str) {
    let ended = Command::new("sh").args(["-c", line]).status();
    assert!(ended.expect("sh runs").success(), "{line}");
}

/// This thread's namespace, and that of all that it starts. `passt` needs an interface with an address.
fn enter_own_namespace() {
    nix::sched::unshare(CloneFlags::CLONE_NEWNET).expect("root may");
    shell(&format!("ip link set lo up && {GIVE_ADDRESS}"));
}

fn passt_of(agent: &Agent) -> u32 {
    let text = std::fs::read(agent.vm_dir().join("passt.json")).unwrap();
    let process: serde_json::Value = serde_json::from_slice(&text).unwrap();
    process["pid"].as_u64().and_then(|pid| pid.try_into().ok()).expect("a pid")
}

fn wait_for_another_passt(agent: &Agent, old: u32) -> u32 {
    wait_for("another passt", || match passt_of(agent) {
        pid if pid != old && is_running(pid) => Ok(pid),
        pid => Err(format!("{pid}")),
    })
}

/// An agent whose VM has such a card, and its passt.
fn started(agent: &Agent) -> u32 {
    agent.know_the_hosts();
    agent.put(&VmSpec { network: VmNetwork::User, ..spec(1, false) }).unwrap();
    agent.wait_for_status(VmStatus::Running);
    passt_of(agent)
}

#[test]
fn a_passt_that_was_killed_is_started_again_and_qemu_takes_it() {
    if !Uid::effective().is_root() {
        return;
    }
    enter_own_namespace();
    let mut scene = scene(&["a"]);
    let agent = &mut scene.agents[0];
    let first = started(agent);
    kill_9(first);
    let second = wait_for_another_passt(agent, first);

    agent.kill();
    let card = agent.ask_monitor("info network");
    assert!(card.contains("type=stream,unix:"), "{card}");
    agent.run();
    agent.wait_for_status(VmStatus::Running);
    kill_9(second);
    let third = wait_for_another_passt(agent, second);

    // It does not see that its QEMU has ended.
    shell(&format!("kill -STOP {third}"));
    agent.delete().unwrap();
    wait_for("the end of passt", || match is_running(third) {
        true => Err("it runs".to_owned()),
        false => Ok(()),
    });
}

#[test]
fn a_guest_whose_passt_can_not_be_started_again_is_said_to_have_no_network() {
    if !Uid::effective().is_root() {
        return;
    }
    enter_own_namespace();
    let scene = scene(&["a"]);
    let agent = &scene.agents[0];
    let first = started(agent);
    shell("ip link delete eth0");
    kill_9(first);
    wait_for("the reason", || match agent.get().unwrap() {
        vm if vm.status == VmStatus::Running && vm.reason.contains("no network") => Ok(()),
        vm => Err(format!("{vm:?}")),
    });
    shell(GIVE_ADDRESS);
    wait_for_another_passt(agent, first);
    wait_for("no reason", || match agent.get().unwrap().reason {
        reason if reason.is_empty() => Ok(()),
        reason => Err(reason),
    });
}
