//! The guests of all hosts. Each boots for a fixed time, runs its command and ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use perigee_model::VmId;
use perigee_model::guest::GuestBody;

use crate::fake::FakeHost;

/// The time from the start of a VM to the end of its command.
pub const BOOT: Duration = Duration::from_millis(500);

pub const LOOK: Duration = Duration::from_millis(20);

/// The SHA-256 of no bytes: the jobs have no outputs.
pub const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// Simulates the guests until the task is aborted.
pub async fn live(hosts: Arc<Vec<FakeHost>>) {
    let mut begun: BTreeMap<VmId, Option<Instant>> = BTreeMap::new();
    loop {
        for host in hosts.iter() {
            let vms: Vec<VmId> = host.inside().vms.keys().cloned().collect();
            for vm in vms {
                match begun.get(&vm) {
                    None => drop(begun.insert(vm, Some(Instant::now()))),
                    Some(Some(at)) if at.elapsed() >= BOOT => {
                        host.say(&vm, GuestBody::Started);
                        host.say(&vm, GuestBody::exited(0));
                        let output_sha256 = EMPTY.to_owned();
                        host.say(
                            &vm,
                            GuestBody::Finished { output_bytes: 0, output_sha256, lacks: None },
                        );
                        begun.insert(vm, None);
                    }
                    Some(_) => {}
                }
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}
