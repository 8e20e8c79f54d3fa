//! One file a noun; the verbs are its enum.

pub mod agent;
pub mod controller;
pub mod host;
pub mod image;
pub mod job;
pub mod lab;
pub mod pool;
pub mod vm;
pub mod volume;

use std::path::Path;
use std::time::Duration;

use perigee_http::Client;
use perigee_model::Problem;

use crate::Context;

/// A client of the controller; its errors say how to name another one.
pub fn controller_client(context: &Context) -> Result<Client, Problem> {
    if let Some(path) = context.api.strip_prefix("unix:")
        && !Path::new(path).exists()
    {
        return Err(Problem::unavailable(
            "reach the controller",
            format!("there is no socket {path}"),
        )
        .next(NO_CONTROLLER));
    }
    Ok(Client::new(&context.api, Duration::from_secs(120))?.hint(NO_CONTROLLER))
}

const NO_CONTROLLER: &str =
    "start one (perigee controller run, or perigee lab up), or name it with --api or PERIGEE_API";

/// A client of the volume server that has a pool open, without any controller.
pub fn pool_client(pool: &Path) -> Result<Client, Problem> {
    let socket = pool.join(CONTROL_SOCKET);
    let next = format!(
        "start it: perigee volume serve --pool {} --nbd unix:/run/perigee.sock",
        pool.display()
    );
    if !socket.exists() {
        return Err(Problem::unavailable(
            format!("reach the volume server of {}", pool.display()),
            format!("there is no socket {}", socket.display()),
        )
        .next(next));
    }
    Ok(Client::new(&format!("unix:{}", socket.display()), Duration::from_secs(3600))?.hint(next))
}

/// Where a volume server listens for its control API when it is not told otherwise, in its pool.
pub const CONTROL_SOCKET: &str = "control.sock";
