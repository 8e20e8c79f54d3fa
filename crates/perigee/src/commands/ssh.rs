//! `perigee vm ssh`: runs the program `ssh`, whose connection goes through the controller to the guest's port 22.
//!
//! `ssh` itself encrypts, and checks the guest's key: neither the controller nor a host reads what passes. It starts `perigee vm
//! ssh-tunnel`, which carries the bytes.

use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use perigee_http::Client;
use perigee_model::{Problem, VmId};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::commands::console;
use crate::context::Context;
use crate::kept_login;

/// What `perigee vm ssh` takes: its own VM, and words that `ssh` gets unchanged.
#[derive(Debug, clap::Args)]
pub struct Ssh {
    /// The guest's user [default: that of `ssh`]
    #[arg(short, long, value_name = "USER")]
    login: Option<String>,
    /// The private key that `ssh` uses
    #[arg(short, long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// The VM's name, or `USER@VM`
    vm: String,
    /// A command, instead of a shell
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Becomes `ssh`.
pub fn run(ask: Ssh, context: &Context) -> Result<std::convert::Infallible, Problem> {
    let (user, vm) = match ask.vm.split_once('@') {
        Some((user, vm)) => (Some(user.to_owned()), vm),
        None => (ask.login.clone(), ask.vm.as_str()),
    };
    let what = || format!("can't log in to {vm}");
    let vm: VmId = vm.parse().map_err(|why| Problem::invalid(what(), why))?;
    let own = std::env::current_exe().map_err(|error| Problem::internal(what(), error))?;
    let directory = kept_login::directory()?;
    // ssh makes no directory, and would keep no key.
    make(&directory).map_err(|error| {
        Problem::unavailable(what(), format!("can't make {}: {error}", directory.display()))
    })?;
    let known = directory.join("known_hosts");
    let mut ssh = Command::new("ssh");
    ssh.args(options(&own, &vm, &known));
    for (option, value) in [("-l", user.map(PathBuf::from)), ("-i", ask.identity.clone())] {
        ssh.args(value.iter().flat_map(|value| [Path::new(option), value.as_path()]));
    }
    // The name is only shown: where the connection goes, the tunnel says.
    ssh.arg(vm.as_str()).args(&ask.command);
    if let Some(api) = &context.api {
        ssh.env("PERIGEE_API", api);
    }
    ssh.env("PERIGEE_OPERATOR", &context.operator);
    let error = ssh.exec();
    Err(Problem::unavailable(what(), format!("can't run ssh: {error}"))
        .next("install an SSH client (package openssh-client)"))
}

/// Only for this user.
fn make(directory: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

fn options(own: &Path, vm: &VmId, known: &Path) -> Vec<String> {
    let own = quoted(&own.display().to_string());
    let known = known.display().to_string().replace('"', "");
    // `%` begins a word of ssh's own.
    let tunnel = format!("{own} vm ssh-tunnel {vm}").replace('%', "%%");
    let of = |option: &str, value: String| ["-o".to_owned(), format!("{option}={value}")];
    [
        of("ProxyCommand", tunnel),
        of("HostKeyAlias", format!("perigee-{vm}")),
        of("UserKnownHostsFile", format!("\"{}\"", known.replace('%', "%%"))),
        // The first key that a VM shows is kept, and another one later is refused.
        of("StrictHostKeyChecking", "accept-new".to_owned()),
        of("CheckHostIP", "no".to_owned()),
    ]
    .concat()
}

/// As one word of a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Carries bytes between this program's input and output, and the guest's port 22.
pub async fn tunnel(client: &Client, vm: &VmId) -> Result<(), Problem> {
    let socket = client.websocket(&format!("/v1/vms/{vm}/ssh")).await?;
    let (mut from, mut to) = tokio::io::split(socket);
    let mut input = console::keys();
    let sends = async {
        while let Some(part) = input.recv().await {
            if to.write_all(&part).await.is_err() || to.flush().await.is_err() {
                return;
            }
        }
        // What came before the other side has heard that is still passed on.
        let _ = to.shutdown().await;
        std::future::pending().await
    };
    let receives = async {
        let mut buffer = [0; 16 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            let mut output = std::io::stdout();
            if output.write_all(&buffer[..length]).and_then(|()| output.flush()).is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = sends => {}
        () = receives => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_of_guests_are_kept_also_for_who_has_never_logged_in() {
        use std::os::unix::fs::PermissionsExt as _;
        let home = tempfile::tempdir().expect("a directory");
        let directory = home.path().join(".config/perigee");
        for _ in 0..2 {
            make(&directory).expect("it can be made");
        }
        let mode = std::fs::metadata(&directory).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_path_with_spaces_and_quotes_is_one_word() {
        let vm: VmId = "web".parse().expect("a name");
        let options = options(Path::new("/a b/it's 100%/perigee"), &vm, Path::new("/c d/known"));
        assert_eq!(options[1], "ProxyCommand='/a b/it'\\''s 100%%/perigee' vm ssh-tunnel web");
        assert_eq!(options[5], "UserKnownHostsFile=\"/c d/known\"");
    }
}
