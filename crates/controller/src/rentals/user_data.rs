//! What a rented host runs when it boots for the first time.

use perigee_model::enrol::JoinToken;
use perigee_model::rental::Rental;

/// How long a rented host goes on without its controller. Its agent then powers it off.
const LEASE: &str = "10m";

/// A script for cloud-init: the host joins with the token, and starts its daemons. Without a token it is a host of a cluster that runs with
/// `--insecure`.
///
/// All that is put into the script are names, which have no sign that a shell knows, and the token, which is quoted.
pub fn script(rental: &Rental, controller_url: &str, token: Option<&JoinToken>) -> String {
    let (host, site) = (&rental.host, &rental.site);
    let url = quoted(controller_url);
    let join = token.map_or_else(String::new, |token| {
        format!(
            "printf '%s\\n' {} | perigee host join --address \"$ip\"\n",
            quoted(&token.to_string())
        )
    });
    let insecure = if token.is_some() { "" } else { " --insecure" };
    SCRIPT
        .replace("@HOST@", host.as_str())
        .replace("@SITE@", site.as_str())
        .replace("@CONTROLLER@", &url)
        .replace("@JOIN@", &join)
        .replace("@INSECURE@", insecure)
        .replace("@LEASE@", LEASE)
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// A host without systemd, as a lab's is, runs the daemons in sessions of their own.
const SCRIPT: &str = r#"#!/bin/sh
# Makes this machine host @HOST@ of a Perigee cluster. It has a token that is good for one time and less than an hour.
set -eu
umask 022
controller=@CONTROLLER@
name=${controller#*://}
name=${name%:*}
name=${name#\[}
name=${name%\]}
# The address from which this machine reaches the controller.
to=$(getent ahosts "$name" | awk 'NR == 1 {print $1}')
ip=$(ip -o route get "$to" | sed -n 's/.* src \([^ ]*\).*/\1/p')
case $ip in *:*) at="[$ip]" ;; *) at=$ip ;; esac
pool=/var/lib/perigee/pool
install -d -m 0755 /run/perigee
# QEMU runs as another user, and has its files below.
install -d -m 0711 /var/lib/perigee
install -d -m 0700 "$pool"
@JOIN@run() {
    daemon=$1
    shift
    if [ -d /run/systemd/system ]; then
        systemd-run --quiet --unit="perigee-$daemon" -p Restart=always -p RestartSec=2 -p KillMode=process \
            -p LimitNOFILE=65536 perigee "$@"
    else
        setsid perigee "$@" >"/var/lib/perigee/$daemon.log" 2>&1 </dev/null &
    fi
}
tls=$(case $controller in https:*) echo https ;; *) echo http ;; esac)
run volume volume serve --pool "$pool" --nbd unix:/run/perigee/volume.sock --nbd "$at:10809" \
    --control unix:/run/perigee/volume-control.sock --control "unix:$pool/control.sock" --control "$at:7001"@INSECURE@
run agent agent run --host @HOST@ --site @SITE@ --listen "$at:7002" --controller "$controller" \
    --volume-url "$tls://$at:7001" --nbd-addr "$at:10809" --leased @LEASE@@INSECURE@
"#;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use perigee_model::HostId;

    use super::*;

    #[test]
    fn what_is_put_into_the_script_stays_one_word_of_the_shell() {
        assert_eq!(quoted("a'b $(c)"), r"'a'\''b $(c)'");
    }

    /// A program that writes down what it was called with, and what it reads.
    fn program(dir: &Path, name: &str, says: &str) {
        let file = dir.join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{says}\n")).expect("a program");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    #[test]
    fn a_shell_that_runs_the_script_has_the_host_join_and_starts_its_daemons() {
        let dir = tempfile::tempdir().expect("a directory");
        let (at, called) = (dir.path(), dir.path().join("called"));
        let log = called.display();
        program(
            at,
            "perigee",
            &format!("case $1 in host) read -r t ;; esac; echo \"$* $t\" >>{log}"),
        );
        program(at, "systemd-run", "while [ \"$1\" != perigee ]; do shift; done; exec \"$@\"");
        program(at, "ip", "echo \"$4 via 10.0.0.1 dev eth0 src 10.0.0.7 uid 0\"");
        program(at, "getent", "echo \"10.1.0.1 STREAM $2\"");
        let host = HostId::new("rent-1").expect("a name");
        let (secret, fingerprint) = ("5e".to_owned(), "f1".to_owned());
        let controller_url = "https://controller:7000".to_owned();
        let token = JoinToken { host, secret, fingerprint, controller_url };
        let rental = crate::tests::rental("rent-1");
        let script = script(&rental, &token.controller_url, Some(&token));
        let script = ["/run/perigee", "/var/lib/perigee"]
            .iter()
            .fold(script, |text, path| text.replace(path, &format!("{}{path}", at.display())));
        let path = format!("{}:{}", at.display(), std::env::var("PATH").expect("a path"));
        let run = Command::new("/bin/sh").arg("-c").arg(&script).env("PATH", path).output();
        let run = run.expect("a shell");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let begun = Instant::now();
        let calls = loop {
            let calls = std::fs::read_to_string(&called).unwrap_or_default();
            if calls.lines().count() == 3 {
                break calls;
            }
            assert!(begun.elapsed() < crate::tests::PATIENCE, "waited for three calls: {calls}");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut calls: Vec<&str> = calls.lines().collect();
        calls.sort_unstable();
        assert!(
            calls[0].starts_with("agent run --host rent-1 --site lab --listen 10.0.0.7:7002 "),
            "{calls:?}"
        );
        assert!(calls[0].contains("--leased 10m") && !calls[0].contains("insecure"), "{calls:?}");
        let join = "host join --address 10.0.0.7 rent-1,5e,f1,https://controller:7000";
        assert_eq!(calls[1], join);
        assert!(calls[2].contains("--control 10.0.0.7:7001"), "{calls:?}");
    }
}
