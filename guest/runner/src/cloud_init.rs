//! cloud-init has started the runner in the middle of its work, where the image has no runner of its own.
//!
//! No init orders the two, because inits differ, and so do the names of cloud-init's services. cloud-init itself writes down how far
//! it is.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::console;
use crate::error::Error;

/// It is there from cloud-init's first step of this boot on.
const STATUS: &str = "/run/cloud-init/status.json";
/// The host gives a guest that has a CPU less time to start its job.
const DEADLINE: Duration = Duration::from_secs(900);
const POLL_DELAY: Duration = Duration::from_millis(200);

/// Whether cloud-init configures this guest. The golden image has none.
pub fn is_there() -> bool {
    Path::new(STATUS).exists()
}

/// Waits until cloud-init has configured the guest's disks, network and users. What people want to be done later, as installing
/// packages, goes on beside the job.
pub fn wait() -> Result<(), Error> {
    let deadline = Instant::now() + DEADLINE;
    let waits = || std::fs::read_to_string(STATUS).is_ok_and(|status| is_at_work(&status));
    if waits() {
        console("the job waits until cloud-init has configured this guest");
    }
    while waits() {
        if Instant::now() >= deadline {
            return Err(Error::CloudInit(DEADLINE.as_secs()));
        }
        std::thread::sleep(POLL_DELAY);
    }
    Ok(())
}

/// Whether cloud-init is in its network stage, which is called `init`.
fn is_at_work(status: &str) -> bool {
    let status: Option<Value> = serde_json::from_str(status).ok();
    let init = status.as_ref().and_then(|status| status.pointer("/v1/init"));
    init.is_some_and(|init| !init["start"].is_null() && init["finished"].is_null())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cloud_init_is_at_work_until_its_network_stage_has_finished() {
        let status = |init: &str| {
            format!(
                r#"{{"v1": {{"init-local": {{"start": 1.5, "finished": 2}}, "init": {init}}}}}"#
            )
        };
        assert!(is_at_work(&status(r#"{"errors": [], "start": 3.5, "finished": null}"#)));
        assert!(!is_at_work(&status(r#"{"errors": [], "start": 3.5, "finished": 9.5}"#)));
        assert!(!is_at_work(&status(r#"{"errors": [], "start": null, "finished": null}"#)));
        assert!(!is_at_work("{}") && !is_at_work(""));
    }
}
