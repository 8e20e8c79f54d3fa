//! What a rented host runs when it boots for the first time.

use std::time::Duration;

use perigee_model::enrol::JoinToken;
use perigee_model::kept::PoolDisk;
use perigee_model::rental::Rental;
use perigee_model::units::format_duration;

use super::pool_disk;

/// A script for cloud-init: the host joins with the token, and starts its daemons. Without a token it is a host of a cluster that runs with
/// `--insecure`. Its agent powers it off when it has not heard of its controller for the length of the lease.
///
/// All that is put into the script are names, which have no sign that a shell knows, and the token, which is quoted.
pub fn script(
    rental: &Rental,
    controller_url: &str,
    token: Option<&JoinToken>,
    lease: Duration,
    pool: Option<&PoolDisk>,
) -> String {
    let (host, site) = (&rental.host, &rental.site);
    let url = quoted(controller_url);
    let join = token.map_or_else(
        || "true".to_owned(),
        |token| {
            let token = quoted(&token.to_string());
            format!("printf '%s\\n' {token} | perigee host join --identity-only --address \"$ip\"")
        },
    );
    let insecure = if token.is_some() { "" } else { " --insecure" };
    SCRIPT
        .replace("@POOL@\n", &pool_disk::commands(pool))
        .replace("@HOST@", host.as_str())
        .replace("@SITE@", site.as_str())
        .replace("@CONTROLLER@", &url)
        .replace("@JOIN@", &join)
        .replace("@INSECURE@", insecure)
        .replace("@LEASE@", &format_duration(lease.as_secs()))
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// The agent ends the machine when its lease is over. Until there is an agent, and its lease is kept, a deadline of half an hour does so.
///
/// The daemons are units that start at each boot: a machine that was rebooted goes on with what is left of its lease. A host without systemd, as a
/// lab's is, runs the daemons in sessions of their own.
const SCRIPT: &str = r#"#!/bin/sh
# Makes this machine host @HOST@ of a Perigee cluster. It has a token that is good for one time and less than an hour.
set -eu
umask 022
if [ -d /run/systemd/system ]; then
    systemd-run --quiet --unit=perigee-join-deadline --on-active=30min systemctl poweroff
else
    setsid sh -c 'sleep 1800 && poweroff' >/dev/null 2>&1 </dev/null &
    deadline=$!
fi
controller=@CONTROLLER@
name=${controller#*://}
name=${name%:*}
name=${name#\[}
name=${name%\]}
pool=/var/lib/perigee/pool
install -d -m 0755 /run/perigee
# QEMU runs as another user, and has its files below.
install -d -m 0711 /var/lib/perigee
install -d -m 0700 "$pool"
@POOL@
join() {
    # The address from which this machine reaches the controller.
    to=$(getent ahosts "$name" | awk 'NR == 1 {print $1}')
    ip=$(ip -o route get "$to" | sed -n 's/.* src \([^ ]*\).*/\1/p')
    [ -n "$ip" ] && @JOIN@
}
tries=0
until join; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "host @HOST@ has not joined in 60 tries; it will be powered off" >&2
        exit 1
    fi
    sleep 5
done
case $ip in *:*) at="[$ip]" ;; *) at=$ip ;; esac
run() {
    daemon=$1
    shift
    if [ -d /run/systemd/system ]; then
        unit=/etc/systemd/system/perigee-$daemon.service
        cat >"$unit" <<UNIT
[Unit]
Wants=network-online.target
After=network-online.target
RequiresMountsFor=$pool

[Service]
ExecStartPre=/bin/mkdir -p /run/perigee
ExecStart=$(command -v perigee) $*
# VMs go on while the agent is started again.
KillMode=process
Restart=always
RestartSec=2
# The volume server flushes its volumes.
TimeoutStopSec=120
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
UNIT
        systemctl daemon-reload
        systemctl enable --quiet --now "perigee-$daemon.service"
    else
        setsid perigee "$@" >"/var/lib/perigee/$daemon.log" 2>&1 </dev/null &
    fi
}
tls=$(case $controller in https:*) echo https ;; *) echo http ;; esac)
run volume volume serve --pool "$pool" --nbd unix:/run/perigee/volume.sock --nbd "$at:10809" \
    --control unix:/run/perigee/volume-control.sock --control "unix:$pool/control.sock" --control "$at:7001"@INSECURE@
run agent agent run --host @HOST@ --site @SITE@ --listen "$at:7002" --controller "$controller" \
    --volume-url "$tls://$at:7001" --nbd-addr "$at:10809" --leased @LEASE@@INSECURE@
# The agent keeps its lease in this file. If that never comes, the deadline ends the machine.
until [ -e /var/lib/perigee/agent/lease ]; do sleep 1; done
if [ -d /run/systemd/system ]; then
    systemctl stop perigee-join-deadline.timer
else
    kill -TERM "-$deadline"
fi
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

    /// A machine with fakes of all that the script calls for more than files and texts. What they were called with is in `called`. The first try to
    /// join fails.
    fn machine(at: &Path, has_systemd: bool) {
        let (log, dir) = (at.join("called"), at.display());
        let (log, units) = (log.display(), at.join("etc/systemd/system"));
        std::fs::create_dir_all(&units).expect("a directory");
        if has_systemd {
            std::fs::create_dir_all(at.join("run/systemd/system")).expect("a directory");
        }
        program(
            at,
            "perigee",
            &format!(
                "case $1 in host) read -r t ;; esac; echo \"$* $t\" >>{log}
case $1 in
host) [ -e {dir}/tried ] || {{ : >{dir}/tried; exit 1; }} ;;
agent) mkdir -p {dir}/var/lib/perigee/agent; : >{dir}/var/lib/perigee/agent/lease ;;
esac"
            ),
        );
        program(at, "systemd-run", &format!("echo \"systemd-run $*\" >>{log}"));
        let starts = format!("sed -n s/^ExecStart=//p {}/\"$unit\" | sh", units.display());
        let enables = format!("case $1 in enable) for unit; do :; done; {starts} ;; esac");
        program(at, "systemctl", &format!("echo \"systemctl $*\" >>{log}\n{enables}"));
        // The deadline never powers off the machine of this test, whatever becomes of the script.
        program(at, "sleep", "case $1 in 1800) /bin/sleep 60; exit 1 ;; esac");
        program(at, "poweroff", &format!("echo poweroff >>{log}"));
        program(at, "ip", "echo \"$4 via 10.0.0.1 dev eth0 src 10.0.0.7 uid 0\"");
        program(at, "getent", "echo \"10.1.0.1 STREAM $2\"");
    }

    /// What was called by the script's end, and by what it has started.
    fn calls_of_a_run(at: &Path) -> Vec<String> {
        let host = HostId::new("rent-1").expect("a name");
        let (secret, fingerprint) = ("5e".to_owned(), "f1".to_owned());
        let controller_url = "https://controller:7000".to_owned();
        let token = JoinToken { host, secret, fingerprint, controller_url };
        let rental = crate::tests::rental("rent-1");
        let lease = Duration::from_secs(600);
        let script = script(&rental, &token.controller_url, Some(&token), lease, None);
        let paths = ["/run/perigee", "/var/lib/perigee", "/run/systemd", "/etc/systemd"];
        let own =
            |text: String, path: &&str| text.replace(path, &format!("{}{path}", at.display()));
        let script = paths.iter().fold(script, own);
        let path = format!("{}:{}", at.display(), std::env::var("PATH").expect("a path"));
        let run = Command::new("/bin/sh").arg("-c").arg(&script).env("PATH", path).output();
        let run = run.expect("a shell");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let begun = Instant::now();
        loop {
            let calls = std::fs::read_to_string(at.join("called")).unwrap_or_default();
            if calls.lines().any(|call| call.starts_with("volume serve")) {
                return calls.lines().map(str::to_owned).collect();
            }
            let waited = crate::tests::PATIENCE;
            assert!(begun.elapsed() < waited, "waited {waited:?} for a volume server: {calls}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn joins_and_starts_its_daemons(calls: &[String]) {
        let of = |begin: &str| {
            let of = calls.iter().filter(|call| call.starts_with(begin)).map(String::as_str);
            of.collect::<Vec<&str>>()
        };
        let join =
            "host join --identity-only --address 10.0.0.7 rent-1,5e,f1,https://controller:7000";
        assert_eq!(of("host"), [join, join], "the first try has failed: {calls:?}");
        let agent = of("agent run --host rent-1 --site lab --listen 10.0.0.7:7002 ");
        assert_eq!(agent.len(), 1, "{calls:?}");
        assert!(agent[0].contains("--leased 10m") && !agent[0].contains("insecure"), "{calls:?}");
        let volume = of("volume serve");
        assert!(volume.len() == 1 && volume[0].contains("--control 10.0.0.7:7001"), "{calls:?}");
    }

    #[test]
    fn a_shell_that_runs_the_script_has_the_host_join_and_starts_its_daemons() {
        let dir = tempfile::tempdir().expect("a directory");
        machine(dir.path(), false);
        // The script succeeds only if it has ended its deadline.
        joins_and_starts_its_daemons(&calls_of_a_run(dir.path()));
    }

    #[test]
    fn with_systemd_a_timer_ends_a_host_that_does_not_join_and_the_daemons_start_at_each_boot() {
        let dir = tempfile::tempdir().expect("a directory");
        machine(dir.path(), true);
        let calls = calls_of_a_run(dir.path());
        joins_and_starts_its_daemons(&calls);
        let (first, last) = (calls.first().expect("a call"), calls.last().expect("a call"));
        let timer = "--unit=perigee-join-deadline --on-active=30min systemctl poweroff";
        assert!(first.starts_with("systemd-run") && first.ends_with(timer), "{calls:?}");
        assert_eq!(last, "systemctl stop perigee-join-deadline.timer");
        for daemon in ["volume", "agent"] {
            let enabled = format!("systemctl enable --quiet --now perigee-{daemon}.service");
            assert!(calls.contains(&enabled), "{calls:?}");
        }
    }
}
